"""What is held against requests that groups of ranks are lost to: the first time a note, the second time the end."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from testkit.desks import IgnoringSink
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.platform.exit_cause import ExitCause, ExitInitiator
from weightd_daemon.scheduling.batching.policy import BatchingPolicy
from weightd_daemon.scheduling.dispatcher import Dispatcher
from weightd_daemon.scheduling.fault_isolation.isolator import MAX_LOST_SLOTS
from weightd_daemon.scheduling.lockstep import LockstepTracker
from weightd_daemon.scheduling.request import ClientOrigin, Request
from weightd_daemon.scheduling.scheduler import AT_ONCE
from weightd_protocol.errors import RequestError
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSpec
from weightd_protocol.messages.worker import ChildOrder, Ping, Predict, PredictFailed, PredictResult

CRASH, KILL = ExitCause(-signal.SIGSEGV), ExitCause(-signal.SIGKILL)
OURS = ExitCause(-signal.SIGKILL, initiator=ExitInitiator.DAEMON)
TIMEOUT_S = 60.0
LOST = "request id1: 2 rank groups failed because of it, the last one because"
ANN = ClientOrigin("ann 1", "ann")


class Bench(IgnoringSink):
    """A dispatcher, and a group of two ranks and a broker at a time."""

    def __init__(self, terms: BatchingPolicy | None = None) -> None:
        config = ModelConfig(path="/m.onnx", engine="onnxruntime", predict_timeout=TIMEOUT_S, selftest_interval=1.0)
        self.desk = Dispatcher("m", config, self, self.send_order, lambda _: None)
        self.answers: dict[int, str] = {}
        self.orders: list[tuple[str, ChildOrder]] = []
        self.now = 0.0
        self.groups = itertools.count(1)
        self.terms = terms or BatchingPolicy()

    def reply_result(self, request: Request, result: PredictResult, frames: Sequence[Any]) -> None:
        assert request.number not in self.answers
        self.answers[request.number] = "answer"

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        assert request.number not in self.answers
        self.answers[request.number] = f"{error.code}: {error}"

    def send_order(self, process: str, order: ChildOrder, frames: Sequence[Any], _: object) -> None:
        self.orders.append((process, order))

    def ask(self, number: int = 1, content: bytes = b"content", deadline: float = 1e9) -> Request:
        x = TensorSpec("x", "UINT8", (1, len(content)))
        request = Request(
            *(number, b"ann", f"id{number}", RequestDescription("m", (x,)), [content]),
            *(self.now, deadline, len(content), ANN),
        )
        self.desk.infer(request, self.now)
        self.look()
        return request

    def look(self) -> None:
        while self.desk.next_event_at == AT_ONCE:
            self.desk._isolator.continue_fingerprint(self.now)
            self.desk.dispatch_gathered(self.now)

    def load(self) -> str:
        """Another group comes, and has what waits: return its name."""
        name = f"g{next(self.groups)}"
        lockstep = LockstepTracker((f"{name}.rank0", f"{name}.rank1"), f"{name}.rank1")
        self.desk.processes.add_ranks(name, lockstep, self.now, support_processes=[f"{name}.broker"], policy=self.terms)
        self.desk.dispatch(self.now)
        return name

    def running(self, name: str) -> list[int]:
        """What a group has, by the numbers of the requests."""
        seat = self.desk._scheduler.slots.slot_of(name)
        return [] if seat is None else [each.number for job in seat.batches.values() for each in job.requests]

    def bury(self, name: str, but: str = "") -> None:
        """All its processes are ended, and it is told how."""
        for each in ("rank0", "rank1", "broker"):
            if each != but:
                self.desk.results.on_exit(f"{name}.{each}", OURS, self.now)

    def serve(self, name: str, number: int) -> None:
        self.desk.results.on_done(f"{name}.rank0", number, self.now)
        spec = TensorSpec("y", "UINT8", (1, 1))
        self.desk.results.on_result(
            f"{name}.rank1", PredictResult(number, ResponseDescription("m", (spec,))), [b"y"], self.now
        )
        self.look()


Lose = Callable[[Bench, str], None]


def crash(bench: Bench, name: str) -> None:
    bench.desk.results.on_exit(f"{name}.rank0", CRASH, bench.now)
    bench.bury(name, but="rank0")


def hang(bench: Bench, name: str) -> None:
    bench.now += TIMEOUT_S
    ended = [process for process, _ in bench.desk.processes.overdue(bench.now)]
    assert ended == [f"{name}.rank0", f"{name}.rank1"]
    bench.bury(name)


def leave(bench: Bench, name: str) -> None:
    failed = PredictFailed(bench.running(name)[0], "INTERNAL", "launch failed", is_exiting=True)
    assert bench.desk.results.on_batch_failed(f"{name}.rank0", failed, bench.now) == f"{name}.rank0: launch failed"
    bench.bury(name)


def break_up(bench: Bench, name: str) -> None:
    bench.desk.results.on_process_failed(f"{name}.rank1", "step: expected 2, got 3", bench.now)
    bench.bury(name)


def speak_twice(bench: Bench, name: str) -> None:
    [number] = bench.running(name)
    assert bench.desk.results.on_done(f"{name}.rank0", number, bench.now) == ""
    assert "expected one report" in bench.desk.results.on_done(f"{name}.rank0", number, bench.now)
    bench.bury(name)


@pytest.mark.parametrize(
    ("lose", "words"),
    [
        (
            crash,
            f"INTERNAL: {LOST} g2.rank0 was killed by SIGSEGV",
        ),
        (
            hang,
            f"DEADLINE_EXCEEDED: {LOST} a predict took longer than predict_timeout (60 s)",
        ),
        (leave, f"INTERNAL: {LOST} g2.rank0: launch failed"),
        (break_up, f"INTERNAL: {LOST} step: expected 2, got 3"),
        (
            speak_twice,
            f"INTERNAL: {LOST} g2.rank0: for 1 expected one report, got done after done",
        ),
    ],
)
def test_the_second_group_that_is_lost_to_a_request_ends_it(lose: Lose, words: str) -> None:
    bench, first = Bench(), None
    bench.ask()
    for _ in range(2):
        assert bench.answers == {}
        assert not any(each.offenders for each in bench.desk._isolator._offenses.tables)
        first = bench.load()
        assert bench.running(first) == [1]
        lose(bench, first)
        bench.look()
    assert bench.answers == {1: words}
    assert bench.desk._isolator._contents.quarantine.count(bench.now) == 1
    assert any(table.offenders for table in bench.desk._isolator._offenses.tables)


@pytest.mark.parametrize("lose", [crash, hang, leave, break_up, speak_twice])
def test_what_one_group_is_lost_to_waits_again_and_is_answered_by_the_next(lose: Lose) -> None:
    bench = Bench()
    bench.ask(1)
    lost = bench.load()
    bench.ask(2, b"other")
    lose(bench, lost)
    name = bench.load()
    assert bench.running(name) == [1]
    bench.serve(name, 1)
    assert bench.running(name) == [2]
    assert bench.answers == {1: "answer"}
    # Its content is beyond suspicion again.
    assert not bench.desk._isolator._contents.quarantine.suspected


@pytest.mark.parametrize("who", ["rank1", "broker"])
def test_a_group_is_not_held_against_its_request_where_a_process_was_ended_from_outside(who: str) -> None:
    bench = Bench()
    request = bench.ask()
    for _ in range(4):
        name = bench.load()
        # Rank 0 fails as it has lost the other, and is heard of first.
        assert (
            bench.desk.results.on_batch_failed(
                f"{name}.rank0", PredictFailed(1, "INTERNAL", "lost", is_exiting=True), bench.now
            )
            != ""
        )
        assert request.deaths == 1
        bench.desk.results.on_exit(f"{name}.{who}", KILL, bench.now)
        bench.desk.results.on_exit(f"{name}.rank0", KILL, bench.now)
        assert request.deaths == 0
        assert not bench.desk._isolator._contents.quarantine.suspected
        bench.bury(name, but=who)
    assert bench.answers == {}


@pytest.mark.parametrize("who", ["rank1", "broker"])
def test_what_comes_from_outside_ends_a_request_only_if_it_never_stops(who: str) -> None:
    bench = Bench()
    request = bench.ask()
    for _ in range(MAX_LOST_SLOTS):
        assert bench.answers == {}
        name = bench.load()
        bench.desk.results.on_exit(f"{name}.{who}", KILL, bench.now)
        bench.bury(name, but=who)
    assert request.deaths == 0
    assert bench.answers[1].startswith("UNAVAILABLE: request id1: 5 rank groups failed while running it")
    assert (
        bench.desk._isolator._contents.quarantine.count(bench.now),
        any(each.offenders for each in bench.desk._isolator._offenses.tables),
    ) == (0, False)


def test_a_content_that_two_groups_are_lost_to_is_refused_though_nobody_waits_for_it_the_second_time() -> None:
    bench = Bench()
    for number in (1, 2):
        bench.ask(number, deadline=bench.now + 1.0)
        name = bench.load()
        bench.now += 1.0
        bench.desk.expire(bench.now, lambda error: error)
        hang(bench, name)
        bench.look()
    with pytest.raises(RequestError, match="this content crashed or hung workers"):
        bench.ask(3)


def test_ranks_are_pinged_and_never_with_the_canary() -> None:
    bench = Bench()
    name = bench.load()
    bench.now += 1000.0
    assert list(bench.desk.processes.ping_idle(bench.now)) == []
    assert bench.orders == [(f"{name}.rank{each}", Ping(run_selftest=False)) for each in (0, 1)]
    bench.now += 1000.0
    assert list(bench.desk.processes.ping_idle(bench.now)) == [f"{name}.rank0", f"{name}.rank1"]


def test_a_seat_that_is_dismissed_by_its_name_has_none_of_its_ranks_pinged() -> None:
    bench = Bench()
    bench.desk.processes.remove(bench.load())
    bench.now += 1000.0
    assert (list(bench.desk.processes.ping_idle(bench.now)), bench.orders) == ([], [])


def test_what_all_ranks_refuse_of_several_runs_again_each_alone() -> None:
    bench = Bench(BatchingPolicy(1, frozenset("x"), frozenset("y"), max_rows=8))
    for number in (1, 2):
        bench.ask(number)
    name = bench.load()
    assert bench.running(name) == [1, 2]
    for number in (1, 2):
        for rank in (0, 1):
            failed = PredictFailed(number, "INVALID_ARGUMENT", "no", is_exiting=False)
            assert bench.desk.results.on_batch_failed(f"{name}.rank{rank}", failed, bench.now) == ""
    for _ in range(2):
        bench.look()
        [number] = bench.running(name)
        bench.serve(name, number)
    assert bench.answers == {1: "answer", 2: "answer"}


def test_rows_are_divided_among_groups_as_among_devices() -> None:
    bench = Bench(BatchingPolicy(1, frozenset("x"), frozenset("y"), max_split_rows=4))
    groups = [bench.load() for _ in range(2)]
    x = TensorSpec("x", "UINT8", (8, 1))
    request = Request(1, b"ann", "id1", RequestDescription("m", (x,)), [b"abcdefgh"], 0.0, 1e9, 8, ANN)
    bench.desk.infer(request, bench.now)
    parts = {process: each for process, each in bench.orders if isinstance(each, Predict)}
    assert [*parts] == [f"{name}.rank{rank}" for name in groups for rank in (0, 1)]
    assert {(each.step, each.description.inputs[0].shape) for each in parts.values()} == {(1, (4, 1))}
    spec = TensorSpec("y", "UINT8", (4, 1))
    for name in reversed(groups):
        assert bench.answers == {}
        number = parts[f"{name}.rank0"].request
        assert bench.desk.results.on_done(f"{name}.rank0", number, bench.now) == ""
        result = PredictResult(number, ResponseDescription("m", (spec,)))
        assert bench.desk.results.on_result(f"{name}.rank1", result, [b"1234"], bench.now) == ""
    assert bench.answers == {1: "answer"}
