"""Requests that make rank groups fail: retried after the first failure, ended after the second."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from testkit.dispatching import IgnoringSink
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


class RankGroupHarness(IgnoringSink):
    """A dispatcher whose only slot at a time is a group of two ranks and a broker."""

    def __init__(self, policy: BatchingPolicy | None = None) -> None:
        config = ModelConfig(path="/m.onnx", engine="onnxruntime", predict_timeout=TIMEOUT_S, selftest_interval=1.0)
        self.dispatcher = Dispatcher("m", config, self, self.send_order, lambda _: None)
        self.answers: dict[int, str] = {}
        self.orders: list[tuple[str, ChildOrder]] = []
        self.now = 0.0
        self.groups = itertools.count(1)
        self.policy = policy or BatchingPolicy()

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
        self.dispatcher.infer(request, self.now)
        self.run_until_idle()
        return request

    def run_until_idle(self) -> None:
        while self.dispatcher.next_event_at == AT_ONCE:
            self.dispatcher.isolator.contents.continue_fingerprint(self.now)
            self.dispatcher.dispatch_gathered(self.now)

    def add_group(self) -> str:
        """Add a rank group, which gets the waiting requests; return its name."""
        name = f"g{next(self.groups)}"
        lockstep = LockstepTracker((f"{name}.rank0", f"{name}.rank1"), f"{name}.rank1")
        self.dispatcher.processes.add_ranks(
            name, lockstep, self.now, support_processes=[f"{name}.broker"], policy=self.policy
        )
        self.dispatcher.dispatch(self.now)
        return name

    def running(self, name: str) -> list[int]:
        """Return the numbers of the requests on a group."""
        slot = self.dispatcher._scheduler.slots.slot_of(name)
        return [] if slot is None else [each.number for batch in slot.batches.values() for each in batch.requests]

    def report_exits(self, name: str, excluding: str = "") -> None:
        """Report the exits of the group's processes, which the daemon has killed."""
        for each in ("rank0", "rank1", "broker"):
            if each != excluding:
                self.dispatcher.results.on_exit(f"{name}.{each}", OURS, self.now)

    def answer(self, name: str, number: int) -> None:
        self.dispatcher.results.on_done(f"{name}.rank0", number, self.now)
        spec = TensorSpec("y", "UINT8", (1, 1))
        self.dispatcher.results.on_result(
            f"{name}.rank1", PredictResult(number, ResponseDescription("m", (spec,))), [b"y"], self.now
        )
        self.run_until_idle()


Cause = Callable[[RankGroupHarness, str], None]


def crash(harness: RankGroupHarness, name: str) -> None:
    harness.dispatcher.results.on_exit(f"{name}.rank0", CRASH, harness.now)
    harness.report_exits(name, excluding="rank0")


def hang(harness: RankGroupHarness, name: str) -> None:
    harness.now += TIMEOUT_S
    ended = [process for process, _ in harness.dispatcher.processes.overdue(harness.now)]
    assert ended == [f"{name}.rank0", f"{name}.rank1"]
    harness.report_exits(name)


def exit_rank(harness: RankGroupHarness, name: str) -> None:
    failed = PredictFailed(harness.running(name)[0], "INTERNAL", "launch failed", is_exiting=True)
    assert (
        harness.dispatcher.results.on_batch_failed(f"{name}.rank0", failed, harness.now)
        == f"{name}.rank0: launch failed"
    )
    harness.report_exits(name)


def fail_rank(harness: RankGroupHarness, name: str) -> None:
    harness.dispatcher.results.on_process_failed(f"{name}.rank1", "step: expected 2, got 3", harness.now)
    harness.report_exits(name)


def report_twice(harness: RankGroupHarness, name: str) -> None:
    [number] = harness.running(name)
    assert harness.dispatcher.results.on_done(f"{name}.rank0", number, harness.now) == ""
    assert "expected one report" in harness.dispatcher.results.on_done(f"{name}.rank0", number, harness.now)
    harness.report_exits(name)


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (
            crash,
            f"INTERNAL: {LOST} g2.rank0 was killed by SIGSEGV",
        ),
        (
            hang,
            f"DEADLINE_EXCEEDED: {LOST} a predict took longer than predict_timeout (60 s)",
        ),
        (exit_rank, f"INTERNAL: {LOST} g2.rank0: launch failed"),
        (fail_rank, f"INTERNAL: {LOST} step: expected 2, got 3"),
        (
            report_twice,
            f"INTERNAL: {LOST} g2.rank0: for 1 expected one report, got done after done",
        ),
    ],
)
def test_ends_request_after_the_second_failed_group(cause: Cause, text: str) -> None:
    harness, first = RankGroupHarness(), None
    harness.ask()
    for _ in range(2):
        assert harness.answers == {}
        assert not any(each.offenders for each in harness.dispatcher.isolator._offenses.tables)
        first = harness.add_group()
        assert harness.running(first) == [1]
        cause(harness, first)
        harness.run_until_idle()
    assert harness.answers == {1: text}
    assert harness.dispatcher.isolator.contents.quarantine.count(harness.now) == 1
    assert any(table.offenders for table in harness.dispatcher.isolator._offenses.tables)


@pytest.mark.parametrize("cause", [crash, hang, exit_rank, fail_rank, report_twice])
def test_requeues_request_of_a_failed_group(cause: Cause) -> None:
    harness = RankGroupHarness()
    harness.ask(1)
    lost = harness.add_group()
    harness.ask(2, b"other")
    cause(harness, lost)
    name = harness.add_group()
    assert harness.running(name) == [1]
    harness.answer(name, 1)
    assert harness.running(name) == [2]
    assert harness.answers == {1: "answer"}
    # The answer clears the suspicion.
    assert not harness.dispatcher.isolator.contents.quarantine.suspected


@pytest.mark.parametrize("who", ["rank1", "broker"])
def test_externally_killed_process_is_not_held_against_requests(who: str) -> None:
    harness = RankGroupHarness()
    request = harness.ask()
    for _ in range(4):
        name = harness.add_group()
        # Rank 0 fails because the other process has exited, and its message arrives first.
        assert (
            harness.dispatcher.results.on_batch_failed(
                f"{name}.rank0", PredictFailed(1, "INTERNAL", "lost", is_exiting=True), harness.now
            )
            != ""
        )
        assert request.deaths == 1
        harness.dispatcher.results.on_exit(f"{name}.{who}", KILL, harness.now)
        harness.dispatcher.results.on_exit(f"{name}.rank0", KILL, harness.now)
        assert request.deaths == 0
        assert not harness.dispatcher.isolator.contents.quarantine.suspected
        harness.report_exits(name, excluding=who)
    assert harness.answers == {}


@pytest.mark.parametrize("who", ["rank1", "broker"])
def test_limits_reruns_after_externally_killed_groups(who: str) -> None:
    harness = RankGroupHarness()
    request = harness.ask()
    for _ in range(MAX_LOST_SLOTS):
        assert harness.answers == {}
        name = harness.add_group()
        harness.dispatcher.results.on_exit(f"{name}.{who}", KILL, harness.now)
        harness.report_exits(name, excluding=who)
    assert request.deaths == 0
    assert harness.answers[1].startswith("UNAVAILABLE: request id1: 5 rank groups failed while running it")
    assert (
        harness.dispatcher.isolator.contents.quarantine.count(harness.now),
        any(each.offenders for each in harness.dispatcher.isolator._offenses.tables),
    ) == (0, False)


def test_quarantines_content_after_two_expired_requests() -> None:
    harness = RankGroupHarness()
    for number in (1, 2):
        harness.ask(number, deadline=harness.now + 1.0)
        name = harness.add_group()
        harness.now += 1.0
        harness.dispatcher.expire(harness.now, lambda error: error)
        hang(harness, name)
        harness.run_until_idle()
    with pytest.raises(RequestError, match="this content crashed or hung workers"):
        harness.ask(3)


def test_pings_ranks_without_selftest() -> None:
    harness = RankGroupHarness()
    name = harness.add_group()
    harness.now += 1000.0
    assert list(harness.dispatcher.processes.ping_idle(harness.now)) == []
    assert harness.orders == [(f"{name}.rank{each}", Ping(run_selftest=False)) for each in (0, 1)]
    harness.now += 1000.0
    assert list(harness.dispatcher.processes.ping_idle(harness.now)) == [f"{name}.rank0", f"{name}.rank1"]


def test_removed_group_is_not_pinged() -> None:
    harness = RankGroupHarness()
    harness.dispatcher.processes.remove(harness.add_group())
    harness.now += 1000.0
    assert (list(harness.dispatcher.processes.ping_idle(harness.now)), harness.orders) == ([], [])


def test_reruns_requests_rejected_by_all_ranks_alone() -> None:
    harness = RankGroupHarness(BatchingPolicy(1, frozenset("x"), frozenset("y"), max_rows=8))
    for number in (1, 2):
        harness.ask(number)
    name = harness.add_group()
    assert harness.running(name) == [1, 2]
    for number in (1, 2):
        for rank in (0, 1):
            failed = PredictFailed(number, "INVALID_ARGUMENT", "no", is_exiting=False)
            assert harness.dispatcher.results.on_batch_failed(f"{name}.rank{rank}", failed, harness.now) == ""
    for _ in range(2):
        harness.run_until_idle()
        [number] = harness.running(name)
        harness.answer(name, number)
    assert harness.answers == {1: "answer", 2: "answer"}


def test_splits_rows_over_rank_groups() -> None:
    harness = RankGroupHarness(BatchingPolicy(1, frozenset("x"), frozenset("y"), max_split_rows=4))
    groups = [harness.add_group() for _ in range(2)]
    x = TensorSpec("x", "UINT8", (8, 1))
    request = Request(1, b"ann", "id1", RequestDescription("m", (x,)), [b"abcdefgh"], 0.0, 1e9, 8, ANN)
    harness.dispatcher.infer(request, harness.now)
    predicts = {process: each for process, each in harness.orders if isinstance(each, Predict)}
    assert [*predicts] == [f"{name}.rank{rank}" for name in groups for rank in (0, 1)]
    assert {(each.step, each.description.inputs[0].shape) for each in predicts.values()} == {(1, (4, 1))}
    spec = TensorSpec("y", "UINT8", (4, 1))
    for name in reversed(groups):
        assert harness.answers == {}
        number = predicts[f"{name}.rank0"].request
        assert harness.dispatcher.results.on_done(f"{name}.rank0", number, harness.now) == ""
        result = PredictResult(number, ResponseDescription("m", (spec,)))
        assert harness.dispatcher.results.on_result(f"{name}.rank1", result, [b"1234"], harness.now) == ""
    assert harness.answers == {1: "answer"}
