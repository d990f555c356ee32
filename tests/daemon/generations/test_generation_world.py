"""A generation in a world that obeys, crashes, hangs and talks nonsense, in any order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from testkit.examples import examples
from weightd_daemon.generations.actions import AddSlot, DeleteFiles, Kill, RemoveSlot, Role, Send, Spawn, TakeSnapshot
from weightd_daemon.generations.base import GenerationSetup
from weightd_daemon.generations.process import WorkerProcess
from weightd_daemon.generations.progress import FailureReason
from weightd_daemon.generations.selftest_search import MAX_HOLDER_DEATHS
from weightd_daemon.generations.shared_weights import Generation
from weightd_daemon.generations.spec import GenerationSpec
from weightd_daemon.generations.states import ACTIVE, LOADING, USABLE, ChildState, GenerationState
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_protocol.messages.worker import (
    AllowAttach,
    AnnounceSelfTest,
    Attach,
    AttachAllowed,
    Attached,
    Build,
    Built,
    ChildOrder,
    ContinueSelfTest,
    Hello,
    ProcessFailed,
    Stop,
)
from weightd_protocol.messages.worker_common import SelfTestCases, SharingTraits
from weightd_protocol.version import VERSION

from .life import BUILT, FOREVER, SHA, pid

TRIED: SelfTestCases = ({"x": (4,)},)

Message = Hello | AnnounceSelfTest | Built | Attached | ProcessFailed | None
"""What a child says; None is that a predict has spoilt its model."""


class Process:
    """A child as the world knows it."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.hello_taken = False
        self.killed = False
        self.aborted = False
        self.said_broken = False
        self.orders: list[ChildOrder] = []

    @property
    def told_to_stop(self) -> bool:
        return any(isinstance(order, Stop) for order in self.orders)


class World(RuleBasedStateMachine):
    """Does what the generation wants, and lets its children do anything at all."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.at_once, self.attaching = 1, 0
        self.processes: dict[str, Process] = {}
        self.names: set[str] = set()
        self.enlisted: set[str] = set()

    @initialize(
        attached=st.tuples(st.integers(1, 3), st.integers(0, 2)),
        traits=st.builds(SharingTraits, st.booleans(), st.booleans(), st.booleans()),
        handle=st.sampled_from(["/store", ""]),
        canary=st.sampled_from(["canary", ""]),
        frozen=st.booleans(),
        forks=st.tuples(st.booleans(), st.booleans()),
        devices=st.sampled_from([(), ("cpu:0", "cpu:1")]),
    )
    def begin(
        self,
        attached: tuple[int, int],
        traits: SharingTraits,
        handle: str,
        canary: str,
        forks: tuple[bool, bool],
        devices: tuple[str, ...],
        *,
        frozen: bool,
    ) -> None:
        self.workers, self.spares = workers, spares = attached
        self.traits = traits
        may_fork, template = forks
        # On a card nothing is forked.
        self.forks = may_fork and not traits.pids_fixed_at_build
        self.built = replace(BUILT, handle="" if template else handle, selftest_digest=canary, is_template=template)
        self.devices = devices or ("cpu",)
        terms = GenerationSpec(
            workers, 500.0, spares, can_outlive_holder=frozen, can_fork_from_holder=self.forks, devices=devices
        )
        self.generation = Generation(GenerationSetup("m.1", terms, attach_limit=lambda _: self.at_once))
        self.generation.start()
        assert self.generation.take_actions() == [TakeSnapshot()]

    # --- the daemon's part: what is wanted is done ---

    def perform(self) -> None:
        for action in self.generation.take_actions():
            match action:
                case TakeSnapshot() | DeleteFiles():
                    raise AssertionError(f"{action}: pinned twice, or what only a deployment wants")
                case Spawn(name, role, template):
                    self.spawn(name, role, template)
                case Send(name, order):
                    self.send(name, order)
                case Kill(name, abort):
                    process = self.processes[name]
                    assert not process.killed
                    assert not (abort and process.aborted)
                    # One that hangs may survive it.
                    process.aborted, process.killed = process.aborted or abort, not abort
                case AddSlot(name):
                    assert name not in self.enlisted
                    self.enlisted.add(name)
                case RemoveSlot(name):
                    assert name in self.enlisted or self.spares
                    self.enlisted.discard(name)

    def spawn(self, name: str, role: Role, template: str) -> None:
        assert self.generation.state in ACTIVE
        if self.forks and role is Role.WORKER:
            # None before the holder has built; and of a template that is counted on, if it is one.
            assert self.generation.built is not None
            assert bool(template) == self.built.is_template
        if template:
            assert self.generation.children[template].state is ChildState.HOLDING
        assert name not in self.names
        device = self.generation.children[name].device
        assert device in self.devices if role is Role.WORKER else device == "cpu"
        self.names.add(name)
        self.processes[name] = Process(role)

    def send(self, name: str, order: ChildOrder) -> None:
        process = self.processes[name]
        assert process.hello_taken
        assert not process.told_to_stop
        match order:
            case Build(pids):
                assert process.role is Role.HOLDER
                workers = {pid(each.name) for each in self.counted(Role.WORKER)}
                assert set(pids) == workers if self.traits.pids_fixed_at_build else set(pids) <= workers
            case Attach(handle, _):
                assert not self.generation.attach_control.is_frozen
                assert process.role is Role.WORKER
                assert handle == self.built.handle
                is_shared = handle or self.built.is_template
                assert is_shared or Role.HOLDER not in {each.role for each in self.processes.values()}
            case Stop() if process.role is Role.HOLDER and not process.said_broken and self.is_shared:
                assert not any(each.role is Role.WORKER for each in self.processes.values())
            case _:
                pass
        process.orders.append(order)

    @property
    def is_shared(self) -> bool:
        return bool(self.built.handle) or self.built.is_template

    def counted(self, role: Role) -> list[WorkerProcess]:
        return [each for each in self.generation.children.values() if each.role is role and each.state in USABLE]

    def count(self, state: ChildState) -> int:
        return sum(each.state is state for each in self.generation.children.values())

    def say(self, name: str, message: Message) -> None:
        match message:
            case Hello():
                self.generation.on_message(name, message, self.now)
                child = self.generation.children.get(name)
                if child is not None and child.hello is not None:
                    self.processes[name].hello_taken = True
            case Built():
                if name in self.processes:
                    # Nobody attaches to weights without one, where that would write them.
                    self.processes[name].said_broken |= (
                        self.traits.attach_rewrites_weights and not message.selftest_digest
                    )
                    self.processes[name].said_broken |= message.is_template and not self.forks
                self.generation.on_message(name, message, self.now)
            case AnnounceSelfTest() | Attached():
                self.generation.on_message(name, message, self.now)
            case ProcessFailed():
                if name in self.processes:
                    self.processes[name].said_broken = True
                self.generation.on_message(name, message, self.now)
            case None:
                self.generation.on_leaving(name, self.now)
        self.perform()

    def hello(self, name: str) -> Hello:
        return Hello(pid(name), SHA, {"weightd": VERSION}, self.traits)

    def exit(self, name: str) -> None:
        del self.processes[name]
        self.enlisted.discard(name)
        self.generation.on_exit(name, ExitCause(3), self.now)
        self.perform()

    def obey(self, name: str) -> None:
        """Do the next thing that a good child does."""
        process = self.processes[name]
        if process.killed or process.told_to_stop:
            self.exit(name)
        elif not process.hello_taken:
            self.say(name, self.hello(name))
        elif process.orders:
            match process.orders.pop(0):
                case Build(search_selftest=True):
                    self.say(name, AnnounceSelfTest(TRIED, ()))
                case Build() | ContinueSelfTest():
                    self.say(name, self.built)
                case Attach():
                    self.say(name, Attached("canary", 4000))
                case AllowAttach():
                    self.let_in(name, "")
                case _:
                    pass

    def let_in(self, name: str, error: str) -> None:
        self.generation.on_message(name, AttachAllowed(error), self.now)
        self.perform()

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(list(self.processes)))

    def pass_time_to(self, then: float) -> None:
        self.now = then
        self.generation.tick(then)
        self.perform()
        assert self.generation.next_tick_at > then, "it would wake up for nothing, again and again"

    # --- what happens ---

    @precondition(lambda self: self.generation.state is GenerationState.SNAPSHOTTING)
    @rule(good=st.sampled_from([True, True, True, False]))
    def snapshot_ends(self, good: bool) -> None:
        if good:
            self.generation.on_snapshot_taken(SHA, self.now)
        else:
            self.generation.fail(FailureReason("no such file"), self.now)
        self.perform()

    @precondition(lambda self: self.processes)
    @rule()
    def all_obey_once(self) -> None:
        for name in list(self.processes):
            if name in self.processes:
                self.obey(name)

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def one_obeys(self, data: st.DataObject) -> None:
        self.obey(self.pick(data))

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def one_dies(self, data: st.DataObject) -> None:
        self.exit(self.pick(data))

    @rule(data=st.data())
    def one_says_anything(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([*sorted(self.names), "stranger"]))
        wrong = Hello("1", "6" * 64, {"weightd": VERSION}, self.traits)
        says: list[Message] = [
            self.hello(name),
            wrong,
            AnnounceSelfTest(TRIED, TRIED),
            AnnounceSelfTest((), TRIED),
            self.built,
            Attached("canary", 1),
            Attached("wrong", 1),
            ProcessFailed("cannot"),
            ProcessFailed("no room", is_out_of_memory=True),
            None,
        ]
        self.say(name, data.draw(st.sampled_from(says)))

    @rule(data=st.data(), error=st.sampled_from(["", "nobody else"]))
    def one_lets_another_in(self, data: st.DataObject, error: str) -> None:
        self.let_in(data.draw(st.sampled_from([*sorted(self.names), "stranger"])), error)

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), useful=st.booleans())
    def one_hangs(self, data: st.DataObject, useful: bool) -> None:
        self.generation.on_hung(self.pick(data), "silence", self.now, has_answered=useful)
        self.perform()

    @rule(really=st.sampled_from([True, *[False] * 5]))
    def the_store_is_lost(self, really: bool) -> None:
        if really:
            self.generation.on_store_lost("truncated", self.now)
            self.perform()

    @rule(seconds=st.sampled_from([0.0, 0.05, 1.0, 11.0, 61.0, 600.0]))
    def time_passes(self, seconds: float) -> None:
        self.pass_time_to(self.now + seconds)

    @precondition(lambda self: self.generation.next_tick_at < FOREVER)
    @rule()
    def time_comes(self) -> None:
        self.pass_time_to(max(self.now, self.generation.next_tick_at))

    @rule(at_once=st.integers(1, 4))
    def there_is_other_room(self, at_once: int) -> None:
        self.at_once = at_once
        self.pass_time_to(self.now)

    @precondition(lambda self: self.names)
    @rule(kind=st.sampled_from(["drain", *[""] * 5]))
    def it_is_told_to_stop(self, kind: str) -> None:
        if kind:
            self.generation.drain(self.now)
            self.perform()

    # --- what always holds ---

    @invariant()
    def children_are_the_processes(self) -> None:
        assert set(self.generation.children) == set(self.processes)
        assert self.generation.take_actions() == []

    @invariant()
    def no_more_attach_at_once_than_have_room(self) -> None:
        attaching = self.count(ChildState.ATTACHING)
        # Where there is less room than there was, those that have begun go on.
        assert attaching <= max(self.at_once, self.attaching)
        self.attaching = attaching

    @invariant()
    def nobody_waits_while_there_is_room(self) -> None:
        built = self.generation.built
        if built is None or self.generation.state not in ACTIVE:
            return
        waits = self.count(ChildState.ADMITTED) and not self.count(ChildState.AWAITED)
        if waits and (built.handle or not self.generation.processes.has(Role.HOLDER)):
            assert self.count(ChildState.ATTACHING) >= self.at_once

    @invariant()
    def workers_are_never_too_many(self) -> None:
        assert max(self.generation.processes.workers_by_device().values(), default=0) <= self.workers + self.spares
        assert len(self.counted(Role.HOLDER)) <= 1
        assert sum(process.role is Role.HOLDER for process in self.processes.values()) <= 1
        assert sum(".holder" in name for name in self.names) <= 1 + MAX_HOLDER_DEATHS

    @invariant()
    def as_many_are_enlisted_as_are_wanted_and_ready(self) -> None:
        for device in self.devices:
            there = [child for child in self.generation.children.values() if child.device == device]
            ready = {child.name for child in there if child.state is ChildState.READY}
            enlisted = self.enlisted & {child.name for child in there}
            assert enlisted <= ready
            if self.generation.state in ACTIVE:
                assert len(enlisted) == min(self.workers, len(ready))

    @invariant()
    def nobody_attaches_unproved_to_weights_that_an_attach_rewrites(self) -> None:
        built = self.generation.built
        assert built is None or built.selftest_digest or not self.traits.attach_rewrites_weights

    @invariant()
    def nobody_answers_from_weights_that_are_gone(self) -> None:
        holders = {name for name, process in self.processes.items() if process.role is Role.HOLDER}
        if not self.generation.attach_control.can_trust_answers(holders.__contains__):
            assert self.generation.state not in ACTIVE
            assert all(process.killed for process in self.processes.values() if process.role is Role.WORKER)

    @invariant()
    def a_failure_has_a_cause(self) -> None:
        assert self.generation.state is not GenerationState.FAILED or self.generation.cause

    @invariant()
    def it_never_waits_for_what_cannot_come(self) -> None:
        state, waits = self.generation.state, self.generation.next_tick_at < FOREVER
        if state in LOADING - {GenerationState.SNAPSHOTTING}:
            assert waits or any(process.killed for process in self.processes.values())
        if state is GenerationState.SERVING:
            assert waits or self.enlisted
        if state not in ACTIVE:
            assert waits or not self.processes or any(process.killed for process in self.processes.values())

    def teardown(self) -> None:
        """However it was left: once it is told to stop, it ends, even if every child hangs until it is killed."""
        self.generation.drain(self.now)
        self.perform()
        for _ in range(4 * len(self.processes) + 4):
            for name in [name for name, process in self.processes.items() if process.killed]:
                self.exit(name)
            if self.generation.next_tick_at < FOREVER:
                self.pass_time_to(max(self.now, self.generation.next_tick_at))
        assert self.generation.is_ended
        assert not self.processes


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
