"""Stateful test of a rank group whose processes reply, crash, hang and send invalid or late messages in any order."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from testkit.examples import examples
from weightd_daemon.generations.actions import AddSlot, DeleteFiles, Kill, RemoveSlot, Role, Send, Spawn, TakeSnapshot
from weightd_daemon.generations.base import GenerationSetup
from weightd_daemon.generations.persisted import record_generation, resume_generation
from weightd_daemon.generations.progress import FailureReason
from weightd_daemon.generations.rank_group import RankGroup
from weightd_daemon.generations.spec import CONCAT, GenerationSpec, RankGroupSpec
from weightd_daemon.generations.states import ACTIVE, GenerationState
from weightd_daemon.platform.exit_cause import ExitCause, ExitInitiator
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.ranks import JoinedGroup, JoinGroup, RankSlice, RunSelfTest, SelfTestDone
from weightd_protocol.messages.worker import ProcessFailed, Reconnected
from weightd_protocol.messages.worker_common import AttachAllowed

from .rank_group_harness import BROKER, CASES, SHA, SLOT, X, Y, digest, hello_of, rank_of

OTHER = TensorSignature("x", "FP32", (-1, 5))
ENDS = {
    "clean": ExitCause(0),
    "status": ExitCause(3),
    "crash": ExitCause(-signal.SIGSEGV),
    "killed": ExitCause(-signal.SIGKILL),
    "sigterm": ExitCause(143),
    "words": ExitCause(1, "Launch kernel failed"),
    "unseen": ExitCause(None, initiator=ExitInitiator.SHIM),
}
# Failures of a rank that may be the consequence of another failure.
PEER_FAILURES = {"sigterm", "words"}


# 14 steps are enough to serve; fewer steps stop on the way.
_STEPS = st.sampled_from([0, 2, 5, 8, 14, 14])


class Process:
    """State of a process in the simulation."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.phase = "spawned"
        self.killed = False
        self.stopping = False
        self.slice = ""
        self.loaded = ""
        self.proven = False
        self.step = -1


class RankGroupMachine(RuleBasedStateMachine):
    """State machine that executes the actions of a rank group and lets its processes do anything."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    @initialize(size=st.integers(2, 3), has_broker=st.booleans(), concat=st.booleans(), steps=_STEPS)
    def begin(self, size: int, steps: int, *, has_broker: bool, concat: bool) -> None:
        self.size = size
        self.answering = [*range(size)] if concat else [size - 1]
        ranks = RankGroupSpec(size, ("cpu",) * size, 120.0, CONCAT if concat else size - 1, has_broker)
        self.terms = GenerationSpec(1, 500.0, is_sharing=False, rank_group=ranks)
        self.expected = [*([BROKER] if has_broker else []), *(f"{SLOT}.rank{rank}" for rank in range(size))]
        self.start_group(steps)

    @precondition(lambda self: self.rank_group.is_ended)
    @rule(steps=_STEPS)
    def start_group(self, steps: int) -> None:
        self.processes: dict[str, Process] = {}
        self.spawned: list[str] = []
        self.has_slot = False
        self.has_connected = False
        # The process that failed first, and whether its failure may be the consequence of another one.
        self.first: str | None = None
        self.is_doubtful = False
        self.rank_group = RankGroup(GenerationSetup(SLOT, self.terms, number=7))
        self.rank_group.start()
        assert self.rank_group.take_actions() == [TakeSnapshot()]
        # Any message out of order ends the group. To test later stages, the run starts after some correct steps.
        for _ in range(steps):
            self.behave(0)

    @property
    def ranks(self) -> list[Process]:
        return [each for each in self.processes.values() if each.role is Role.RANK]

    def all_are(self, phase: str) -> bool:
        return len(self.ranks) == self.size and all(each.phase == phase for each in self.ranks)

    # --- execution of the actions ---

    def perform(self) -> None:
        for action in self.rank_group.take_actions():
            match action:
                case TakeSnapshot() | DeleteFiles():
                    raise AssertionError(f"{action}: unexpected action of a rank group")
                case Spawn(name, role):
                    assert name not in self.spawned
                    self.spawned.append(name)
                    self.processes[name] = Process(role)
                case Send(name, order):
                    self.send(self.processes[name], order)
                case Kill(name, abort):
                    assert not abort
                    assert not self.processes[name].killed
                    self.processes[name].killed = True
                case AddSlot(name):
                    assert name == SLOT
                    assert not self.has_slot
                    # The slot needs all ranks, each with a completed self-test.
                    assert self.all_are("warm")
                    assert not any(each.killed or each.stopping for each in self.processes.values())
                    self.has_slot = True
                case RemoveSlot(name):
                    assert name == SLOT
                    assert self.has_slot
                    self.has_slot = False

    def send(self, process: Process, order: object) -> None:
        assert not process.killed
        assert not process.stopping
        match order:
            case JoinGroup():
                # All processes are connected, so that none waits for a missing one.
                assert [*self.processes] == self.expected
                assert all(each.phase in ("greeted", "entering", "holding") for each in self.processes.values())
                process.phase = "entering" if process.role is Role.RANK else "holding"
            case RunSelfTest():
                assert all(each.phase in ("entered", "warming") for each in self.ranks)
                assert len(self.ranks) == self.size
                process.phase = "warming"
            case _:
                process.stopping = True

    def deliver(self, name: str, event: Callable[[], None], *, is_loss: bool, is_doubtful: bool = False) -> None:
        """Deliver an event. After a loss all other processes must be killed at once, otherwise none."""
        was_active, killed = self.rank_group.state in ACTIVE, self.killed
        event()
        self.perform()
        if is_loss:
            assert all(each.killed for each in self.processes.values())
            if was_active:
                self.first, self.is_doubtful = name, is_doubtful
                assert self.rank_group.state is GenerationState.FAILED
        else:
            assert self.killed <= killed

    @property
    def killed(self) -> set[str]:
        return {name for name, each in self.processes.items() if each.killed}

    def is_active(self, name: str) -> bool:
        """Return whether an unexpected message of this process ends the group."""
        process = self.processes.get(name)
        return process is not None and not process.killed and not process.stopping

    def is_running(self, name: str) -> bool:
        return name in self.processes and not self.processes[name].killed

    # --- events ---

    @rule(chosen=st.integers(0, 3), times=st.sampled_from([1, 1, 2, 12]))
    def behave(self, chosen: int, times: int = 1) -> None:
        """Some processes do the next thing that a correct process does."""
        if not self.spawned:
            self.snapshot_completes()
        for _ in range(times):
            ready = [name for name, each in self.processes.items() if each.stopping and not each.killed]
            ready += [name for name, each in self.processes.items() if each.phase in _NEXT and self.is_active(name)]
            if ready:
                name = ready[chosen % len(ready)]
                process = self.processes[name]
                if process.stopping:
                    self.end(name, "clean")
                else:
                    _NEXT[process.phase](self, name)

    @rule(chosen=st.integers(0, 3), how=st.sampled_from(["version", "digest", "rank", "none", "other"]))
    def behave_wrongly(self, chosen: int, how: str) -> None:
        """One process sends a wrong message at the right time."""
        ready = [name for name, each in self.processes.items() if each.phase in _NEXT and self.is_active(name)]
        if ready:
            name = ready[chosen % len(ready)]
            match self.processes[name].phase:
                case "spawned":
                    self.send_hello(name, how)
                case "entering":
                    self.send_joined(name, "other")
                case "warming":
                    self.send_selftest_done(name, proven=False)
                case _:
                    self.send_reconnected(name, 8)

    @rule()
    def snapshot_completes(self) -> None:
        self.rank_group.on_snapshot_taken(SHA, self.now, slice_digests=tuple(map(digest, range(self.size))))
        self.perform()

    @rule(
        chosen=st.integers(0, 3),
        what=st.sampled_from(["hello", "entered", "warmed", "back", "astray", "broken", "symptom", "leaving", "hung"]),
    )
    def send_anything(self, chosen: int, what: str) -> None:
        """Any process sends any message, even one that was killed or has not connected."""
        name = self.expected[chosen % len(self.expected)]
        reports_failure = ProcessFailed("no such file" if what == "broken" else "Launch kernel failed")
        message: dict[str, tuple[Callable[[], None], bool]] = {
            "astray": (lambda: self.rank_group.on_message(name, AttachAllowed(""), self.now), self.is_active(name)),
            "broken": (lambda: self.rank_group.on_message(name, reports_failure, self.now), self.is_running(name)),
            "symptom": (lambda: self.rank_group.on_message(name, reports_failure, self.now), self.is_running(name)),
            "leaving": (lambda: self.rank_group.on_leaving(name, self.now), self.is_running(name)),
            "hung": (lambda: self.rank_group.on_hung(name, "silence", self.now), self.is_running(name)),
        }
        if what in message:
            event, is_loss = message[what]
            self.deliver(name, event, is_loss=is_loss, is_doubtful=what in ("symptom", "leaving", "hung"))
        else:
            _SENDERS[what](self, name)

    def send_hello(self, name: str, how: str = "good") -> None:
        message = hello_of(name)
        process = self.processes.get(name)
        is_due = process is not None and process.phase == "spawned" and self.is_active(name)
        if how == "version":
            message = replace(message, versions={})
        elif name != BROKER and how != "good":
            rank = rank_of(name)
            wrong = {
                "digest": replace(message, sha256=SHA),
                "rank": replace(message, slice=RankSlice((rank + 1) % self.size, (X,), (Y,))),
                "none": replace(message, slice=None),
                "other": replace(message, slice=RankSlice(rank, (OTHER,), (Y,))),
            }
            message = wrong[how]
        is_good = how in ("good", "other") or (name == BROKER and how != "version")
        is_last = False
        if process is not None and is_due and is_good:
            process.phase, process.slice = "greeted", how
            is_last = {*self.processes} == {*self.expected} and self.all_greeted
        disagree = is_last and len({each.slice == "other" for each in self.ranks}) > 1
        is_loss = disagree or (self.is_active(name) and not (is_due and is_good))
        self.deliver(
            "" if disagree else name, lambda: self.rank_group.on_message(name, message, self.now), is_loss=is_loss
        )

    @property
    def all_greeted(self) -> bool:
        return all(each.phase == "greeted" for each in self.processes.values())

    def send_joined(self, name: str, how: str = "good") -> None:
        process = self.processes.get(name)
        is_due = process is not None and process.phase == "entering" and self.is_active(name)
        disagree = False
        if process is not None and is_due:
            process.phase, process.loaded = "entered", how
            disagree = self.all_are("entered") and len({each.loaded for each in self.ranks}) > 1
            self.has_connected = self.has_connected or (self.all_are("entered") and not disagree)
        message = JoinedGroup((X,) if how == "good" else (OTHER,), (Y,))
        is_loss = disagree or (self.is_active(name) and not is_due)
        self.deliver(
            "" if disagree else name, lambda: self.rank_group.on_message(name, message, self.now), is_loss=is_loss
        )

    def send_selftest_done(self, name: str, *, proven: bool = True) -> None:
        process = self.processes.get(name)
        is_due = process is not None and process.phase == "warming" and self.is_active(name)
        wrong = False
        if process is not None and is_due:
            process.phase, process.proven = "warm", proven
            named = [self.processes.get(f"{SLOT}.rank{rank}") for rank in self.answering]
            wrong = self.all_are("warm") and not all(each is not None and each.proven for each in named)
        message = SelfTestDone("digest" if proven else "", CASES)
        is_loss = wrong or (self.is_active(name) and not is_due)
        self.deliver(
            "" if wrong else name, lambda: self.rank_group.on_message(name, message, self.now), is_loss=is_loss
        )

    def send_reconnected(self, name: str, step: int = 7) -> None:
        process = self.processes.get(name)
        is_due = process is not None and process.phase == "awaited" and self.is_active(name)
        uneven = False
        if process is not None and is_due:
            process.phase, process.step = "warm", step
            uneven = self.all_are("warm") and len({each.step for each in self.ranks}) > 1
        is_loss = uneven or (self.is_active(name) and not is_due)
        self.deliver(
            "" if uneven else name,
            lambda: self.rank_group.on_message(name, Reconnected(step), self.now),
            is_loss=is_loss,
        )

    @precondition(lambda self: self.processes)
    @rule(chosen=st.integers(0, 3), how=st.sampled_from([*ENDS]))
    def exit(self, chosen: int, how: str) -> None:
        self.end([*self.processes][chosen % len(self.processes)], how)

    def end(self, name: str, how: str) -> None:
        process, end = self.processes[name], ENDS[how]
        if process.killed and end.status is not None and end.status < 0:
            end = replace(end, initiator=ExitInitiator.DAEMON)
        draining = self.rank_group.state is GenerationState.DRAINING
        is_loss = not process.killed and not ((draining or process.stopping) and end.status == 0)
        broker_follows = self.has_connected and end.status in (0, 1)
        is_symptom = broker_follows if process.role is Role.BROKER else how in PEER_FAILURES
        # The process had exited before the daemon killed it, so it caused the other failures.
        had_ended = process.killed and how in ("clean", "status", "crash", "words", "sigterm") and not is_symptom
        if had_ended and self.is_doubtful and name != self.first:
            self.first, self.is_doubtful = name, False
        del self.processes[name]
        event = lambda: self.rank_group.on_exit(name, end, self.now)  # noqa: E731
        self.deliver(name, event, is_loss=is_loss, is_doubtful=is_symptom)

    @precondition(lambda self: any(each.killed for each in self.processes.values()))
    @rule()
    def all_killed_exit(self) -> None:
        for name in sorted(self.killed):
            self.end(name, "killed")

    @rule(seconds=st.sampled_from([0.0, 5.0, 11.0, 70.0, 130.0, 600.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        was_active, killed, due = self.rank_group.state in ACTIVE, self.killed, self.rank_group.next_tick_at <= self.now
        self.rank_group.tick(self.now)
        self.perform()
        if due:
            assert all(each.killed for each in self.processes.values())
            if was_active:
                self.first, self.is_doubtful = None, True
                found = [name for name in self.expected if self.rank_group.cause.startswith(f"{name}: ")]
                [self.first] = found
        else:
            assert self.killed == killed

    @rule()
    def drain(self) -> None:
        was_serving = self.rank_group.state is GenerationState.SERVING
        was_active, killed = self.rank_group.state in ACTIVE, self.killed
        self.rank_group.drain(self.now)
        self.perform()
        if was_active and not was_serving:
            assert all(each.killed for each in self.processes.values())
        else:
            assert self.killed == killed
        if was_serving:
            assert all(each.stopping for each in self.ranks)

    @rule()
    def fail(self) -> None:
        was_active = self.rank_group.state in ACTIVE
        self.rank_group.fail(FailureReason("the daemon says so"), self.now)
        self.perform()
        if was_active:
            self.first, self.is_doubtful = "", False
            assert all(each.killed for each in self.processes.values())

    @precondition(lambda self: self.rank_group.state in (GenerationState.SERVING, GenerationState.RESUMING))
    @rule()
    def daemon_restarts(self) -> None:
        written = record_generation(self.rank_group, None)
        assert written is not None
        self.has_slot = False
        self.now += 1.0
        rank_group = resume_generation(GenerationSetup(SLOT, self.terms, number=7), written, self.now)
        assert isinstance(rank_group, RankGroup)
        self.rank_group = rank_group
        for each in self.ranks:
            each.phase, each.step = "awaited", -1
        self.perform()

    # --- invariants ---

    @invariant()
    def slot_has_all_ranks(self) -> None:
        if not hasattr(self, "rank_group"):
            return
        assert bool(self.rank_group.processes.slots) == self.has_slot
        if self.has_slot:
            assert self.rank_group.state is GenerationState.SERVING
            assert self.rank_group.processes.slots == {SLOT: tuple(name for name in self.expected if name != BROKER)}
            assert {*self.processes} == {*self.expected}
            assert not any(each.killed or each.stopping for each in self.processes.values())
        assert self.rank_group.is_complete == self.rank_group.has_all_workers == self.has_slot

    @invariant()
    def no_rank_is_replaced(self) -> None:
        assert self.spawned in ([], getattr(self, "expected", []))

    @invariant()
    def failure_kills_all_and_keeps_first_cause(self) -> None:
        if not hasattr(self, "rank_group"):
            return
        assert {*self.rank_group.children} == {*self.processes}
        assert self.rank_group.processes.deaths <= 1
        if self.rank_group.state is GenerationState.FAILED:
            assert all(each.killed for each in self.processes.values())
            told = [name for name in self.expected if self.rank_group.cause.startswith(f"{name}: ")]
            assert told == ([self.first] if self.first else [])
            assert self.rank_group.cause
        if self.rank_group.state is GenerationState.GONE:
            assert not self.processes
        if self.rank_group.state not in (GenerationState.SERVING, GenerationState.RESUMING):
            assert record_generation(self.rank_group, None) is None

    def teardown(self) -> None:
        if not hasattr(self, "rank_group"):
            return
        self.rank_group.drain(self.now)
        self.perform()
        for _ in range(2 * len(self.expected)):
            for name in [name for name, each in self.processes.items() if each.killed or each.stopping]:
                del self.processes[name]
                self.rank_group.on_exit(name, ExitCause(0), self.now)
                self.perform()
        assert self.rank_group.is_ended
        assert self.rank_group.state in (GenerationState.GONE, GenerationState.FAILED)
        assert self.rank_group.next_tick_at == float("inf")


_SENDERS: dict[str, Callable[[RankGroupMachine, str], None]] = {
    "hello": RankGroupMachine.send_hello,
    "entered": RankGroupMachine.send_joined,
    "warmed": RankGroupMachine.send_selftest_done,
    "back": RankGroupMachine.send_reconnected,
}

# The next message of a correct process, by its phase.
_NEXT: dict[str, Callable[[RankGroupMachine, str], None]] = {
    "spawned": _SENDERS["hello"],
    "entering": _SENDERS["entered"],
    "warming": _SENDERS["warmed"],
    "awaited": _SENDERS["back"],
}

TestRankGroup = RankGroupMachine.TestCase
TestRankGroup.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
