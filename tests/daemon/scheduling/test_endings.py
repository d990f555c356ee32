"""Many requests that end at the same moment: a few in each turn of the loop, each of them once."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.dispatching import IgnoringSink
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.scheduling.dispatcher import Dispatcher
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.scheduler import MAX_ENDED_PER_TURN, Deadlines, Scheduler
from weightd_protocol.errors import RequestError, Unavailable
from weightd_protocol.messages.inference import RequestDescription, TensorSignature, TensorSpec
from weightd_protocol.messages.worker import Built, ChildOrder

COUNT = 5 * MAX_ENDED_PER_TURN + 3
WRONG = RequestDescription("m", (TensorSpec("no_input", "FP32", (1,)),))


def request(number: int, client: bytes = b"client", deadline: float = 100.0, name: str = "same") -> Request:
    return Request(number, client, name, WRONG, (), 0.0, deadline, 10)


# --- deadlines ------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "sooner", "take"]), st.integers(0, 20)), max_size=60))
def test_deadlines_are_taken_in_order(
    steps: list[tuple[str, int]],
) -> None:
    calls: list[float] = []
    deadlines, watched, numbers = Deadlines(calls.append), dict[int, Request](), itertools.count()
    for step, value in steps:
        if step == "add":
            new = request(next(numbers), deadline=float(value))
            calls.clear()
            deadlines.add(new)
            assert calls == [new.deadline] or deadlines.next_deadline <= new.deadline
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


def test_ended_requests_leave_no_deadlines() -> None:
    calls: list[float] = []
    deadlines = Deadlines(calls.append)
    for number in range(10_000):
        each = request(number, deadline=1e6 - number)
        deadlines.add(each)
        assert calls.pop() == each.deadline
        deadlines.requests.pop(each.number, None)
        assert len(deadlines) < 100
    deadlines.add(request(1, deadline=math.inf))
    assert not calls
    assert deadlines.take_due(1e9, 10) == []
    assert (len(deadlines), deadlines.next_deadline) == (0, math.inf)


class Compared(float):
    """A deadline that counts its comparisons."""

    count = 0

    def __lt__(self, other: float) -> bool:
        Compared.count += 1
        return float(self) < float(other)

    def __le__(self, other: float) -> bool:
        Compared.count += 1
        return float(self) <= float(other)


def test_expiry_does_not_scan_other_requests() -> None:
    scheduler, deadlines = Scheduler(10_000, 10**9), [Compared(1000 + number) for number in range(2000)]
    for number, deadline in enumerate(deadlines):
        scheduler.submit(request(number, deadline=deadline), 0.0)
    Compared.count = 0
    assert [each.number for each, _ in scheduler.expire(1000.5)] == [0]
    assert Compared.count < 100
    assert scheduler.next_event_at == 1001


# --- the dispatcher -------------------------------------------------------------------------------------------------


class DispatcherHarness(IgnoringSink):
    """A dispatcher without workers whose queue holds many requests of one client and two of another; records errors."""

    def __init__(self) -> None:
        config = ModelConfig(path="/m.onnx", engine="onnxruntime", max_queue=10_000)
        self.due = math.inf
        self.dispatcher = Dispatcher("m", config, self, self.send_order, self.due_by)
        self.errors: dict[int, str] = {}
        for number in range(COUNT):
            self.dispatcher.infer(request(number, deadline=50.0), 0.0)
        self.others = [
            request(COUNT, b"other", name="same"),
            request(COUNT + 1, b"other", name="another"),
        ]
        for each in self.others:
            self.dispatcher.infer(each, 0.0)

    def due_by(self, latest: float) -> None:
        self.due = min(self.due, latest)

    def send_order(self, process: str, order: ChildOrder, frames: Sequence[object], memories: object) -> None:
        raise AssertionError(order)

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        assert request.number not in self.errors
        self.errors[request.number] = f"{error.code} {error}"

    def turn(self, now: float) -> None:
        self.due = math.inf
        self.dispatcher.expire(now, lambda error: error)
        self.dispatcher.dispatch_gathered(now)


ENDINGS: dict[str, Callable[[Dispatcher], object]] = {
    "CANCELLED the client disconnected": lambda dispatcher: dispatcher.on_disconnect(b"client", 1.0),
    "CANCELLED cancelled by the client": lambda dispatcher: dispatcher.cancel(b"client", "same", 1.0),
    "DEADLINE_EXCEEDED was waiting in the queue at its deadline": lambda dispatcher: dispatcher.expire(
        60.0, lambda error: error
    ),
    "UNAVAILABLE no more": lambda dispatcher: dispatcher.set_unavailable(
        lambda: Unavailable("no more"), fails_waiting=True
    ),
    "INVALID_ARGUMENT": lambda dispatcher: dispatcher.on_built(
        Built("", (TensorSignature("x", "FP32", (1,)),), (), (), "", 0)
    ),
}


@pytest.mark.parametrize("error_text", ENDINGS)
def test_ends_a_few_requests_per_turn(error_text: str) -> None:
    harness = DispatcherHarness()
    ENDINGS[error_text](harness.dispatcher)
    ends_all = harness.dispatcher._scheduler.queue.count == 0
    turns, count = 1, len(harness.errors)
    assert 0 < count <= MAX_ENDED_PER_TURN
    while harness.dispatcher.next_event_at <= 60.0:
        assert not harness.dispatcher.is_idle
        harness.turn(60.0)
        assert len(harness.errors) <= count + MAX_ENDED_PER_TURN
        turns, count = turns + 1, len(harness.errors)
    assert turns == math.ceil((COUNT + 2 * ends_all) / MAX_ENDED_PER_TURN)
    assert sorted(harness.errors) == list(range(COUNT + 2 * ends_all))
    assert harness.dispatcher._replies.failed_count == len(harness.errors)
    assert all(text.startswith(error_text) for text in harness.errors.values()), Counter(harness.errors.values())
    assert harness.dispatcher.is_idle == ends_all


def test_request_that_is_ending_does_not_end_again() -> None:
    harness = DispatcherHarness()
    harness.dispatcher.on_disconnect(b"client", 1.0)
    assert harness.due == 0.0
    harness.dispatcher.cancel(b"client", "same", 1.0)
    harness.dispatcher.on_disconnect(b"client", 1.0)
    harness.dispatcher.fail_waiting(Unavailable("stopping"))
    while harness.dispatcher.next_event_at <= 1000.0:
        harness.turn(1000.0)
    texts = Counter(harness.errors.values())
    assert texts == {"CANCELLED the client disconnected": COUNT, "UNAVAILABLE stopping": 2}
    assert harness.dispatcher.is_idle


def test_shedding_and_handover_end_all_at_once() -> None:
    harness = DispatcherHarness()
    harness.dispatcher.on_disconnect(b"client", 1.0)
    harness.dispatcher.shed(lambda each: each.client == b"client", Unavailable("full"), 1.0)
    assert set(harness.errors) == set(range(COUNT))
    harness.dispatcher.hand_over()
    assert set(harness.errors) == set(range(COUNT + 2))
    harness = DispatcherHarness()
    harness.dispatcher.hand_over()
    assert set(harness.errors) == set(range(COUNT + 2))


def test_late_requests_at_the_head_take_several_turns() -> None:
    harness = DispatcherHarness()
    harness.dispatcher.on_disconnect(b"other", 1.0)
    harness.errors.clear()
    harness.dispatcher.processes.add("worker")
    harness.due = math.inf
    harness.dispatcher.dispatch(60.0)
    # The late requests have left the queue but have not been answered.
    assert harness.dispatcher._scheduler.queue.count == COUNT - MAX_ENDED_PER_TURN
    assert (harness.due, harness.errors) == (0.0, {})
    while harness.dispatcher.next_event_at <= 60.0:
        harness.turn(60.0)
    assert set(harness.errors) == set(range(COUNT))
    assert harness.dispatcher.is_idle
