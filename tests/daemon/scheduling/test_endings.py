"""Many requests that end at one moment: a few in each turn of the loop, each of them once."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.desks import IgnoringSink
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.scheduling.deadlines import Deadlines
from weightd_daemon.scheduling.dispatcher import Dispatcher
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.scheduler import MAX_ENDED_PER_TURN, Scheduler
from weightd_protocol.errors import RequestError, Unavailable
from weightd_protocol.messages.inference import RequestDescription, TensorSignature, TensorSpec
from weightd_protocol.messages.worker import Built, ChildOrder

COUNT = 5 * MAX_ENDED_PER_TURN + 3
WRONG = RequestDescription("m", (TensorSpec("no_input", "FP32", (1,)),))


def request(number: int, client: bytes = b"client", deadline: float = 100.0, name: str = "same") -> Request:
    return Request(number, client, name, WRONG, (), 0.0, deadline, 10)


# --- the heap -------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "sooner", "take"]), st.integers(0, 20)), max_size=60))
def test_deadlines_are_found_in_their_order_and_only_while_their_requests_are_watched(
    steps: list[tuple[str, int]],
) -> None:
    deadlines, watched, numbers = Deadlines(), dict[int, Request](), itertools.count()
    for step, value in steps:
        if step == "add":
            new = request(next(numbers), deadline=float(value))
            assert deadlines.add(new) or deadlines.next_deadline <= new.deadline
            watched[new.number] = new
        elif step == "take":
            expected = sorted(
                [each for each in watched.values() if each.deadline <= value], key=lambda each: each.deadline
            )
            taken = deadlines.take_due(float(value), 3)
            assert [each.deadline for each in taken] == [each.deadline for each in expected[:3]]
            for each in taken:
                del watched[each.number]
        elif watched:
            each = watched[sorted(watched)[value % len(watched)]]
            if step == "remove":
                deadlines.requests.pop(watched.pop(each.number).number, None)
            else:
                each.deadline = min(each.deadline, float(value))
                deadlines.add(each)
        assert deadlines.next_deadline <= min((each.deadline for each in watched.values()), default=math.inf)


def test_requests_that_have_ended_before_their_deadlines_leave_nothing_behind() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        each = request(number, deadline=1e6 - number)
        assert deadlines.add(each)
        deadlines.requests.pop(each.number, None)
        assert len(deadlines) < 100
    assert not deadlines.add(request(1, deadline=math.inf))
    assert deadlines.take_due(1e9, 10) == []
    assert (len(deadlines), deadlines.next_deadline) == (0, math.inf)


class Compared(float):
    """A deadline that counts how often deadlines are compared."""

    count = 0

    def __lt__(self, other: float) -> bool:
        Compared.count += 1
        return float(self) < float(other)

    def __le__(self, other: float) -> bool:
        Compared.count += 1
        return float(self) <= float(other)


def test_a_deadline_passes_without_a_look_at_the_other_requests() -> None:
    scheduler, deadlines = Scheduler(10_000, 10**9), [Compared(1000 + number) for number in range(2000)]
    for number, deadline in enumerate(deadlines):
        scheduler.submit(request(number, deadline=deadline), 0.0)
    Compared.count = 0
    assert [each.number for each, _ in scheduler.expire(1000.5)] == [0]
    assert Compared.count < 100
    assert scheduler.next_event_at == 1001


# --- the dispatcher -------------------------------------------------------------------------------------------------


class Clients(IgnoringSink):
    """A dispatcher without a worker, whose queue has requests of a client and two of another one; counts the errors."""

    def __init__(self) -> None:
        config = ModelConfig(path="/m.onnx", engine="onnxruntime", max_queue=10_000)
        self.due = math.inf
        self.desk = Dispatcher("m", config, self, self.send_order, self.due_by)
        self.errors: dict[int, str] = {}
        for number in range(COUNT):
            self.desk.infer(request(number, deadline=50.0), 0.0)
        self.others = [
            request(COUNT, b"other", name="same"),
            request(COUNT + 1, b"other", name="another"),
        ]
        for each in self.others:
            self.desk.infer(each, 0.0)

    def due_by(self, latest: float) -> None:
        self.due = min(self.due, latest)

    def send_order(self, process: str, order: ChildOrder, frames: Sequence[object], memories: object) -> None:
        raise AssertionError(order)

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        assert request.number not in self.errors
        self.errors[request.number] = f"{error.code} {error}"

    def turn(self, now: float) -> None:
        self.due = math.inf
        self.desk.expire(now, lambda error: error)
        self.desk.dispatch_gathered(now)


ENDINGS: dict[str, Callable[[Dispatcher], object]] = {
    "CANCELLED the client disconnected": lambda desk: desk.on_disconnect(b"client", 1.0),
    "CANCELLED cancelled by the client": lambda desk: desk.cancel(b"client", "same", 1.0),
    "DEADLINE_EXCEEDED was waiting in the queue at its deadline": lambda desk: desk.expire(60.0, lambda error: error),
    "UNAVAILABLE no more": lambda desk: desk.set_unavailable(lambda: Unavailable("no more"), fails_waiting=True),
    "INVALID_ARGUMENT": lambda desk: desk.on_built(Built("", (TensorSignature("x", "FP32", (1,)),), (), (), "", 0)),
}


@pytest.mark.parametrize("words", ENDINGS)
def test_many_requests_end_a_few_in_each_turn(words: str) -> None:
    clients = Clients()
    ENDINGS[words](clients.desk)
    takes_all = clients.desk._scheduler.queue.count == 0
    turns, had = 1, len(clients.errors)
    assert 0 < had <= MAX_ENDED_PER_TURN
    while clients.desk.next_event_at <= 60.0:
        assert not clients.desk.is_idle
        clients.turn(60.0)
        assert len(clients.errors) <= had + MAX_ENDED_PER_TURN
        turns, had = turns + 1, len(clients.errors)
    assert turns == math.ceil((COUNT + 2 * takes_all) / MAX_ENDED_PER_TURN)
    assert sorted(clients.errors) == list(range(COUNT + 2 * takes_all))
    assert clients.desk._replies.failed_count == len(clients.errors)
    assert all(text.startswith(words) for text in clients.errors.values()), Counter(clients.errors.values())
    assert clients.desk.is_idle == takes_all


def test_a_request_that_is_being_ended_is_not_ended_again() -> None:
    clients = Clients()
    clients.desk.on_disconnect(b"client", 1.0)
    assert clients.due == 0.0
    clients.desk.cancel(b"client", "same", 1.0)
    clients.desk.on_disconnect(b"client", 1.0)
    clients.desk.fail_waiting(Unavailable("stopping"))
    while clients.desk.next_event_at <= 1000.0:
        clients.turn(1000.0)
    texts = Counter(clients.errors.values())
    assert texts == {"CANCELLED the client disconnected": COUNT, "UNAVAILABLE stopping": 2}
    assert clients.desk.is_idle


def test_all_have_ended_when_the_daemon_leaves_or_their_memory_is_needed() -> None:
    clients = Clients()
    clients.desk.on_disconnect(b"client", 1.0)
    clients.desk.shed(lambda each: each.client == b"client", Unavailable("full"), 1.0)
    assert set(clients.errors) == set(range(COUNT))
    clients.desk.hand_over()
    assert set(clients.errors) == set(range(COUNT + 2))
    clients = Clients()
    clients.desk.hand_over()
    assert set(clients.errors) == set(range(COUNT + 2))


def test_late_requests_at_the_head_of_the_queue_take_several_turns() -> None:
    clients = Clients()
    clients.desk.on_disconnect(b"other", 1.0)
    clients.errors.clear()
    clients.desk.processes.add("worker")
    clients.due = math.inf
    clients.desk.dispatch(60.0)
    # Those that were found late have still to be refused.
    assert clients.desk._scheduler.queue.count == COUNT - MAX_ENDED_PER_TURN
    assert (clients.due, clients.errors) == (0.0, {})
    while clients.desk.next_event_at <= 60.0:
        clients.turn(60.0)
    assert set(clients.errors) == set(range(COUNT))
    assert clients.desk.is_idle
