"""The scheduler while workers run requests of direct channels, which the scheduler does not see."""

from __future__ import annotations

import itertools

import pytest

from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.scheduler import Scheduler
from weightd_daemon.scheduling.slots import MAX_DIRECT_S, Slot
from weightd_protocol.messages.inference import RequestDescription

TIMEOUT_S = 5.0
SHORT_S, LONG_S = MAX_DIRECT_S / 2, MAX_DIRECT_S * 2

_numbers = itertools.count(1)


def request() -> Request:
    number = next(_numbers)
    return Request(number, b"client", f"id{number}", RequestDescription("m", ()), (), 0.0, 100.0, 10)


class Workers:
    """A scheduler with a slot for each worker."""

    def __init__(self, *names: str) -> None:
        self.scheduler = Scheduler(100, 10_000, TIMEOUT_S)
        self.slots = {name: Slot(name, (name,)) for name in names}
        for slot in self.slots.values():
            self.scheduler.slots.add(slot)

    def start(self, count: int = 1, now: float = 0.0) -> list[str]:
        """Submit requests; return the slots that get them."""
        names: list[str] = []
        for each in [request() for _ in range(count)]:
            started = self.scheduler.try_start(each, now)
            if started is None:
                self.scheduler.submit(each, now)
            else:
                names.append(started[0].name)
        return names

    def assigned(self, now: float = 0.0) -> list[str]:
        return [slot.name for slot, _ in self.scheduler.assign(now)]

    def direct(self, name: str, seconds: float | None, now: float = 0.0) -> int:
        """Report the request of a channel that a worker runs; return the number of recalled items."""
        items = self.scheduler.running.on_direct(self.slots[name], seconds, now)
        self.scheduler.queue.put_back(items)
        return len(items)

    def overdue(self, now: float) -> list[str]:
        return [slot.name for slot, _ in self.scheduler.take_overdue(now)]


def test_batch_behind_a_channel_request_is_not_hung() -> None:
    workers = Workers("a")
    workers.start()
    workers.scheduler.running.runs_direct = lambda process: process == "a"
    assert workers.overdue(TIMEOUT_S) == []
    workers.scheduler.running.runs_direct = lambda process: False
    assert workers.overdue(2 * TIMEOUT_S - 0.1) == []
    assert workers.overdue(2 * TIMEOUT_S) == ["a"]


def test_time_behind_a_channel_request_does_not_count() -> None:
    workers = Workers("a")
    workers.start()
    workers.direct("a", SHORT_S, 1.0)
    workers.direct("a", LONG_S, 3.0)
    workers.direct("a", None, 3.1)
    assert workers.overdue(TIMEOUT_S + 2.9) == []
    assert workers.overdue(TIMEOUT_S + 3.0) == ["a"]


def test_worker_without_channel_request_is_preferred() -> None:
    workers = Workers("a", "b")
    workers.direct("a", SHORT_S)
    assert workers.start(2) == ["b", "a"]
    # No second batch waits behind a channel request.
    assert workers.start(2) == ["b"]


def test_long_channel_request_blocks_its_worker() -> None:
    workers = Workers("a", "b")
    workers.direct("a", LONG_S)
    assert workers.start(3) == ["b", "b"]
    assert workers.assigned() == []
    assert workers.scheduler.slots.free_slots(0.0) == []
    workers.direct("a", None)
    assert workers.assigned() == ["a"]


def test_worker_with_long_channel_request_gets_batches_if_all_have_one() -> None:
    workers = Workers("a", "b")
    workers.direct("a", LONG_S)
    workers.direct("b", LONG_S)
    assert workers.start(3) == ["a", "b"]


@pytest.mark.parametrize(("seconds", "count"), [(SHORT_S, 0), (LONG_S, 1)])
def test_batch_behind_long_channel_request_moves_to_another_worker(seconds: float, count: int) -> None:
    workers = Workers("a", "b")
    assert workers.start() == ["a"]
    assert workers.direct("a", seconds) == count
    assert workers.assigned() == ["b"][:count]


def test_free_slots_begin_with_workers_without_channel_request() -> None:
    workers = Workers("a", "b")
    workers.direct("a", SHORT_S)
    assert [slot.name for slot in workers.scheduler.slots.free_slots(0.0)] == ["b", "a"]
