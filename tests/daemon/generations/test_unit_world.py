"""A unit in a world whose processes obey, crash, hang, talk nonsense and come late, in any order."""

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
from weightd_protocol.messages.worker import AttachAllowed, ProcessFailed, Reconnected

from .group import BROKER, CASES, SEAT, SHA, X, Y, digest, hello_of, rank_of

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
# What may only follow from another one's loss, of a rank and of a broker whose ranks have met.
SYMPTOMS = {"sigterm", "words"}


# So many are taken by the longest way to serving, and a few are left.
_STEPS = st.sampled_from([0, 2, 5, 8, 14, 14])


class Process:
    """A child as the world knows it."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.phase = "spawned"
        self.killed = False
        self.stopping = False
        self.slice = ""
        self.loaded = ""
        self.proven = False
        self.step = -1


class World(RuleBasedStateMachine):
    """Does what the unit wants, and lets its processes do anything at all."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    @initialize(size=st.integers(2, 3), has_broker=st.booleans(), concat=st.booleans(), steps=_STEPS)
    def begin(self, size: int, steps: int, *, has_broker: bool, concat: bool) -> None:
        self.size = size
        self.answering = [*range(size)] if concat else [size - 1]
        ranks = RankGroupSpec(size, ("cpu",) * size, 120.0, CONCAT if concat else size - 1, has_broker)
        self.terms = GenerationSpec(1, 500.0, is_sharing=False, rank_group=ranks)
        self.expected = [*([BROKER] if has_broker else []), *(f"{SEAT}.rank{rank}" for rank in range(size))]
        self.another_unit(steps)

    @precondition(lambda self: self.unit.is_ended)
    @rule(steps=_STEPS)
    def another_unit(self, steps: int) -> None:
        self.processes: dict[str, Process] = {}
        self.spawned: list[str] = []
        self.enlisted = False
        self.have_met = False
        # Whose loss it was, and whether that may have followed from another one.
        self.first: str | None = None
        self.is_doubtful = False
        self.unit = RankGroup(GenerationSetup(SEAT, self.terms, number=7))
        self.unit.start()
        assert self.unit.take_actions() == [TakeSnapshot()]
        # Whoever says something out of turn ends all: so it begins somewhere on the way.
        for _ in range(steps):
            self.obey(0)

    @property
    def ranks(self) -> list[Process]:
        return [each for each in self.processes.values() if each.role is Role.RANK]

    def all_are(self, phase: str) -> bool:
        return len(self.ranks) == self.size and all(each.phase == phase for each in self.ranks)

    # --- the daemon's part: what is wanted is done ---

    def perform(self) -> None:
        for action in self.unit.take_actions():
            match action:
                case TakeSnapshot() | DeleteFiles():
                    raise AssertionError(f"{action}: pinned twice, or what only a deployment wants")
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
                    assert name == SEAT
                    assert not self.enlisted
                    # Never of fewer than all, and of none that has not shown what it computes.
                    assert self.all_are("warm")
                    assert not any(each.killed or each.stopping for each in self.processes.values())
                    self.enlisted = True
                case RemoveSlot(name):
                    assert name == SEAT
                    assert self.enlisted
                    self.enlisted = False

    def send(self, process: Process, order: object) -> None:
        assert not process.killed
        assert not process.stopping
        match order:
            case JoinGroup():
                # All are there, or nobody waits for anybody.
                assert [*self.processes] == self.expected
                assert all(each.phase in ("greeted", "entering", "holding") for each in self.processes.values())
                process.phase = "entering" if process.role is Role.RANK else "holding"
            case RunSelfTest():
                assert all(each.phase in ("entered", "warming") for each in self.ranks)
                assert len(self.ranks) == self.size
                process.phase = "warming"
            case _:
                process.stopping = True

    def happens(self, name: str, event: Callable[[], None], *, is_loss: bool, is_doubtful: bool = False) -> None:
        """Something happens to a process; if that is a loss, all others are killed in the same step, else nobody."""
        was_active, killed = self.unit.state in ACTIVE, self.killed
        event()
        self.perform()
        if is_loss:
            assert all(each.killed for each in self.processes.values())
            if was_active:
                self.first, self.is_doubtful = name, is_doubtful
                assert self.unit.state is GenerationState.FAILED
        else:
            assert self.killed <= killed

    @property
    def killed(self) -> set[str]:
        return {name for name, each in self.processes.items() if each.killed}

    def counts(self, name: str) -> bool:
        """Whether what it says out of turn ends all."""
        process = self.processes.get(name)
        return process is not None and not process.killed and not process.stopping

    def present(self, name: str) -> bool:
        return name in self.processes and not self.processes[name].killed

    # --- what happens ---

    @rule(chosen=st.integers(0, 3), times=st.sampled_from([1, 1, 2, 12]))
    def obey(self, chosen: int, times: int = 1) -> None:
        """Some of the processes do the next thing that they should."""
        if not self.spawned:
            self.pin()
        for _ in range(times):
            ready = [name for name, each in self.processes.items() if each.stopping and not each.killed]
            ready += [name for name, each in self.processes.items() if each.phase in _DUE and self.counts(name)]
            if ready:
                name = ready[chosen % len(ready)]
                process = self.processes[name]
                if process.stopping:
                    self.end(name, "clean")
                else:
                    _DUE[process.phase](self, name)

    @rule(chosen=st.integers(0, 3), how=st.sampled_from(["version", "digest", "rank", "none", "other"]))
    def obey_wrongly(self, chosen: int, how: str) -> None:
        """One of the processes says at the right time what it should not."""
        ready = [name for name, each in self.processes.items() if each.phase in _DUE and self.counts(name)]
        if ready:
            name = ready[chosen % len(ready)]
            match self.processes[name].phase:
                case "spawned":
                    self.say_hello(name, how)
                case "entering":
                    self.say_entered(name, "other")
                case "warming":
                    self.say_warmed(name, proven=False)
                case _:
                    self.say_back(name, 8)

    @rule()
    def pin(self) -> None:
        self.unit.on_snapshot_taken(SHA, self.now, slice_digests=tuple(map(digest, range(self.size))))
        self.perform()

    @rule(
        chosen=st.integers(0, 3),
        what=st.sampled_from(["hello", "entered", "warmed", "back", "astray", "broken", "symptom", "leaving", "hung"]),
    )
    def talk(self, chosen: int, what: str) -> None:
        """Somebody says anything, also one that was killed and is not dead yet, or one of which nothing was heard."""
        name = self.expected[chosen % len(self.expected)]
        broken = ProcessFailed("no such file" if what == "broken" else "Launch kernel failed")
        said: dict[str, tuple[Callable[[], None], bool]] = {
            "astray": (lambda: self.unit.on_message(name, AttachAllowed(""), self.now), self.counts(name)),
            "broken": (lambda: self.unit.on_message(name, broken, self.now), self.present(name)),
            "symptom": (lambda: self.unit.on_message(name, broken, self.now), self.present(name)),
            "leaving": (lambda: self.unit.on_leaving(name, self.now), self.present(name)),
            "hung": (lambda: self.unit.on_hung(name, "silence", self.now), self.present(name)),
        }
        if what in said:
            event, is_loss = said[what]
            self.happens(name, event, is_loss=is_loss, is_doubtful=what in ("symptom", "leaving", "hung"))
        else:
            _SAY[what](self, name)

    def say_hello(self, name: str, how: str = "good") -> None:
        said = hello_of(name)
        process = self.processes.get(name)
        is_due = process is not None and process.phase == "spawned" and self.counts(name)
        if how == "version":
            said = replace(said, versions={})
        elif name != BROKER and how != "good":
            rank = rank_of(name)
            wrong = {
                "digest": replace(said, sha256=SHA),
                "rank": replace(said, slice=RankSlice((rank + 1) % self.size, (X,), (Y,))),
                "none": replace(said, slice=None),
                "other": replace(said, slice=RankSlice(rank, (OTHER,), (Y,))),
            }
            said = wrong[how]
        is_good = how in ("good", "other") or (name == BROKER and how != "version")
        is_last = False
        if process is not None and is_due and is_good:
            process.phase, process.slice = "greeted", how
            is_last = {*self.processes} == {*self.expected} and self.all_greeted
        disagree = is_last and len({each.slice == "other" for each in self.ranks}) > 1
        is_loss = disagree or (self.counts(name) and not (is_due and is_good))
        self.happens("" if disagree else name, lambda: self.unit.on_message(name, said, self.now), is_loss=is_loss)

    @property
    def all_greeted(self) -> bool:
        return all(each.phase == "greeted" for each in self.processes.values())

    def say_entered(self, name: str, how: str = "good") -> None:
        process = self.processes.get(name)
        is_due = process is not None and process.phase == "entering" and self.counts(name)
        disagree = False
        if process is not None and is_due:
            process.phase, process.loaded = "entered", how
            disagree = self.all_are("entered") and len({each.loaded for each in self.ranks}) > 1
            self.have_met = self.have_met or (self.all_are("entered") and not disagree)
        said = JoinedGroup((X,) if how == "good" else (OTHER,), (Y,))
        is_loss = disagree or (self.counts(name) and not is_due)
        self.happens("" if disagree else name, lambda: self.unit.on_message(name, said, self.now), is_loss=is_loss)

    def say_warmed(self, name: str, *, proven: bool = True) -> None:
        process = self.processes.get(name)
        is_due = process is not None and process.phase == "warming" and self.counts(name)
        wrong = False
        if process is not None and is_due:
            process.phase, process.proven = "warm", proven
            named = [self.processes.get(f"{SEAT}.rank{rank}") for rank in self.answering]
            wrong = self.all_are("warm") and not all(each is not None and each.proven for each in named)
        said = SelfTestDone("canary" if proven else "", CASES)
        is_loss = wrong or (self.counts(name) and not is_due)
        self.happens("" if wrong else name, lambda: self.unit.on_message(name, said, self.now), is_loss=is_loss)

    def say_back(self, name: str, step: int = 7) -> None:
        process = self.processes.get(name)
        is_due = process is not None and process.phase == "awaited" and self.counts(name)
        uneven = False
        if process is not None and is_due:
            process.phase, process.step = "warm", step
            uneven = self.all_are("warm") and len({each.step for each in self.ranks}) > 1
        is_loss = uneven or (self.counts(name) and not is_due)
        self.happens(
            "" if uneven else name, lambda: self.unit.on_message(name, Reconnected(step), self.now), is_loss=is_loss
        )

    @precondition(lambda self: self.processes)
    @rule(chosen=st.integers(0, 3), how=st.sampled_from([*ENDS]))
    def exit(self, chosen: int, how: str) -> None:
        self.end([*self.processes][chosen % len(self.processes)], how)

    def end(self, name: str, how: str) -> None:
        process, end = self.processes[name], ENDS[how]
        if process.killed and end.status is not None and end.status < 0:
            end = replace(end, initiator=ExitInitiator.DAEMON)
        draining = self.unit.state is GenerationState.DRAINING
        is_loss = not process.killed and not ((draining or process.stopping) and end.status == 0)
        broker_follows = self.have_met and end.status in (0, 1)
        is_symptom = broker_follows if process.role is Role.BROKER else how in SYMPTOMS
        # It had ended before it was killed: so it was what the others have died of.
        had_ended = process.killed and how in ("clean", "status", "crash", "words", "sigterm") and not is_symptom
        if had_ended and self.is_doubtful and name != self.first:
            self.first, self.is_doubtful = name, False
        del self.processes[name]
        event = lambda: self.unit.on_exit(name, end, self.now)  # noqa: E731
        self.happens(name, event, is_loss=is_loss, is_doubtful=is_symptom)

    @precondition(lambda self: any(each.killed for each in self.processes.values()))
    @rule()
    def all_that_were_killed_end(self) -> None:
        for name in sorted(self.killed):
            self.end(name, "killed")

    @rule(seconds=st.sampled_from([0.0, 5.0, 11.0, 70.0, 130.0, 600.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        was_active, killed, due = self.unit.state in ACTIVE, self.killed, self.unit.next_tick_at <= self.now
        self.unit.tick(self.now)
        self.perform()
        if due:
            assert all(each.killed for each in self.processes.values())
            if was_active:
                self.first, self.is_doubtful = None, True
                found = [name for name in self.expected if self.unit.cause.startswith(f"{name}: ")]
                [self.first] = found
        else:
            assert self.killed == killed

    @rule()
    def drain(self) -> None:
        was_serving = self.unit.state is GenerationState.SERVING
        was_active, killed = self.unit.state in ACTIVE, self.killed
        self.unit.drain(self.now)
        self.perform()
        if was_active and not was_serving:
            assert all(each.killed for each in self.processes.values())
        else:
            assert self.killed == killed
        if was_serving:
            assert all(each.stopping for each in self.ranks)

    @rule()
    def fail(self) -> None:
        was_active = self.unit.state in ACTIVE
        self.unit.fail(FailureReason("the daemon says so"), self.now)
        self.perform()
        if was_active:
            self.first, self.is_doubtful = "", False
            assert all(each.killed for each in self.processes.values())

    @precondition(lambda self: self.unit.state in (GenerationState.SERVING, GenerationState.RESUMING))
    @rule()
    def another_daemon_comes(self) -> None:
        written = record_generation(self.unit, None)
        assert written is not None
        self.enlisted = False
        self.now += 1.0
        unit = resume_generation(GenerationSetup(SEAT, self.terms, number=7), written, self.now)
        assert isinstance(unit, RankGroup)
        self.unit = unit
        for each in self.ranks:
            each.phase, each.step = "awaited", -1
        self.perform()

    # --- what always holds ---

    @invariant()
    def a_seat_has_all_ranks_or_there_is_none(self) -> None:
        if not hasattr(self, "unit"):
            return
        assert bool(self.unit.processes.slots) == self.enlisted
        if self.enlisted:
            assert self.unit.state is GenerationState.SERVING
            assert self.unit.processes.slots == {SEAT: tuple(name for name in self.expected if name != BROKER)}
            assert {*self.processes} == {*self.expected}
            assert not any(each.killed or each.stopping for each in self.processes.values())
        assert self.unit.is_complete == self.unit.has_all_workers == self.enlisted

    @invariant()
    def nobody_is_started_for_another_one(self) -> None:
        assert self.spawned in ([], getattr(self, "expected", []))

    @invariant()
    def what_has_failed_is_killed_and_its_cause_is_the_first(self) -> None:
        if not hasattr(self, "unit"):
            return
        assert {*self.unit.children} == {*self.processes}
        assert self.unit.processes.deaths <= 1
        if self.unit.state is GenerationState.FAILED:
            assert all(each.killed for each in self.processes.values())
            told = [name for name in self.expected if self.unit.cause.startswith(f"{name}: ")]
            assert told == ([self.first] if self.first else [])
            assert self.unit.cause
        if self.unit.state is GenerationState.GONE:
            assert not self.processes
        if self.unit.state not in (GenerationState.SERVING, GenerationState.RESUMING):
            assert record_generation(self.unit, None) is None

    def teardown(self) -> None:
        if not hasattr(self, "unit"):
            return
        self.unit.drain(self.now)
        self.perform()
        for _ in range(2 * len(self.expected)):
            for name in [name for name, each in self.processes.items() if each.killed or each.stopping]:
                del self.processes[name]
                self.unit.on_exit(name, ExitCause(0), self.now)
                self.perform()
        assert self.unit.is_ended
        assert self.unit.state in (GenerationState.GONE, GenerationState.FAILED)
        assert self.unit.next_tick_at == float("inf")


_SAY: dict[str, Callable[[World, str], None]] = {
    "hello": World.say_hello,
    "entered": World.say_entered,
    "warmed": World.say_warmed,
    "back": World.say_back,
}

# By what it has come to: what a process that obeys says next.
_DUE: dict[str, Callable[[World, str], None]] = {
    "spawned": _SAY["hello"],
    "entering": _SAY["entered"],
    "warming": _SAY["warmed"],
    "awaited": _SAY["back"],
}

TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
