"""Stateful test of a generation whose processes reply, crash, hang and send invalid messages in any order."""

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
    AnnounceSelfTest,
    Attach,
    Attached,
    Build,
    Built,
    ChildOrder,
    ContinueSelfTest,
    Hello,
    ProcessFailed,
    Stop,
)
from weightd_protocol.messages.worker_common import AllowAttach, AttachAllowed, SelfTestCases, SharingTraits
from weightd_protocol.version import VERSION

from .generation_harness import BUILT, FOREVER, SHA, pid

TRIED: SelfTestCases = ({"x": (4,)},)

Message = Hello | AnnounceSelfTest | Built | Attached | ProcessFailed | None
"""A message of a child process; None stands for a failed predict that damaged its model."""


class Process:
    """State of a child process in the simulation."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.hello_accepted = False
        self.killed = False
        self.aborted = False
        self.has_failed = False
        self.orders: list[ChildOrder] = []

    @property
    def is_stopping(self) -> bool:
        return any(isinstance(order, Stop) for order in self.orders)


class GenerationMachine(RuleBasedStateMachine):
    """State machine that executes the actions of a generation and lets its processes do anything."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.attach_limit, self.attaching = 1, 0
        self.processes: dict[str, Process] = {}
        self.names: set[str] = set()
        self.slots: set[str] = set()

    @initialize(
        attached=st.tuples(st.integers(1, 3), st.integers(0, 2)),
        traits=st.builds(SharingTraits, st.booleans(), st.booleans(), st.booleans()),
        handle=st.sampled_from(["/store", ""]),
        selftest=st.sampled_from(["digest", ""]),
        frozen=st.booleans(),
        forks=st.tuples(st.booleans(), st.booleans()),
        devices=st.sampled_from([(), ("cpu:0", "cpu:1")]),
    )
    def begin(
        self,
        attached: tuple[int, int],
        traits: SharingTraits,
        handle: str,
        selftest: str,
        forks: tuple[bool, bool],
        devices: tuple[str, ...],
        *,
        frozen: bool,
    ) -> None:
        self.workers, self.spares = workers, spares = attached
        self.traits = traits
        may_fork, template = forks
        # Processes on a card cannot be forked.
        self.forks = may_fork and not traits.pids_fixed_at_build
        self.built = replace(BUILT, handle="" if template else handle, selftest_digest=selftest, is_template=template)
        self.devices = devices or ("cpu",)
        terms = GenerationSpec(
            workers, 500.0, spares, can_outlive_holder=frozen, can_fork_from_holder=self.forks, devices=devices
        )
        self.generation = Generation(GenerationSetup("m.1", terms, attach_limit=lambda _: self.attach_limit))
        self.generation.start()
        assert self.generation.take_actions() == [TakeSnapshot()]

    # --- execution of the actions ---

    def perform(self) -> None:
        for action in self.generation.take_actions():
            match action:
                case TakeSnapshot() | DeleteFiles():
                    raise AssertionError(f"{action}: unexpected action of a generation")
                case Spawn(name, role, template):
                    self.spawn(name, role, template)
                case Send(name, order):
                    self.send(name, order)
                case Kill(name, abort):
                    process = self.processes[name]
                    assert not process.killed
                    assert not (abort and process.aborted)
                    # A process that hangs may survive an abort.
                    process.aborted, process.killed = process.aborted or abort, not abort
                case AddSlot(name):
                    assert name not in self.slots
                    self.slots.add(name)
                case RemoveSlot(name):
                    assert name in self.slots or self.spares
                    self.slots.discard(name)

    def spawn(self, name: str, role: Role, template: str) -> None:
        assert self.generation.state in ACTIVE
        if self.forks and role is Role.WORKER:
            # Workers are forked only after the build, and from the holder if it is a template.
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
        assert process.hello_accepted
        assert not process.is_stopping
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
            case Stop() if process.role is Role.HOLDER and not process.has_failed and self.is_shared:
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

    def deliver(self, name: str, message: Message) -> None:
        match message:
            case Hello():
                self.generation.on_message(name, message, self.now)
                child = self.generation.children.get(name)
                if child is not None and child.hello is not None:
                    self.processes[name].hello_accepted = True
            case Built():
                if name in self.processes:
                    # Without a self-test the weights cannot be shared, because an attach rewrites them.
                    self.processes[name].has_failed |= (
                        self.traits.attach_rewrites_weights and not message.selftest_digest
                    )
                    self.processes[name].has_failed |= message.is_template and not self.forks
                self.generation.on_message(name, message, self.now)
            case AnnounceSelfTest() | Attached():
                self.generation.on_message(name, message, self.now)
            case ProcessFailed():
                if name in self.processes:
                    self.processes[name].has_failed = True
                self.generation.on_message(name, message, self.now)
            case None:
                self.generation.on_leaving(name, self.now)
        self.perform()

    def hello(self, name: str) -> Hello:
        return Hello(pid(name), SHA, {"weightd": VERSION}, self.traits)

    def exit(self, name: str) -> None:
        del self.processes[name]
        self.slots.discard(name)
        self.generation.on_exit(name, ExitCause(3), self.now)
        self.perform()

    def behave(self, name: str) -> None:
        """Do the next thing that a correct process does."""
        process = self.processes[name]
        if process.killed or process.is_stopping:
            self.exit(name)
        elif not process.hello_accepted:
            self.deliver(name, self.hello(name))
        elif process.orders:
            match process.orders.pop(0):
                case Build(search_selftest=True):
                    self.deliver(name, AnnounceSelfTest(TRIED, ()))
                case Build() | ContinueSelfTest():
                    self.deliver(name, self.built)
                case Attach():
                    self.deliver(name, Attached("digest", 4000))
                case AllowAttach():
                    self.reply_allowed(name, "")
                case _:
                    pass

    def reply_allowed(self, name: str, error: str) -> None:
        self.generation.on_message(name, AttachAllowed(error), self.now)
        self.perform()

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(list(self.processes)))

    def advance_to(self, then: float) -> None:
        self.now = then
        self.generation.tick(then)
        self.perform()
        assert self.generation.next_tick_at > then, "the next tick is not in the future"

    # --- events ---

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
    def all_behave_once(self) -> None:
        for name in list(self.processes):
            if name in self.processes:
                self.behave(name)

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def one_behaves(self, data: st.DataObject) -> None:
        self.behave(self.pick(data))

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def one_exits(self, data: st.DataObject) -> None:
        self.exit(self.pick(data))

    @rule(data=st.data())
    def one_sends_anything(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([*sorted(self.names), "unknown"]))
        wrong = Hello("1", "6" * 64, {"weightd": VERSION}, self.traits)
        messages: list[Message] = [
            self.hello(name),
            wrong,
            AnnounceSelfTest(TRIED, TRIED),
            AnnounceSelfTest((), TRIED),
            self.built,
            Attached("digest", 1),
            Attached("wrong", 1),
            ProcessFailed("cannot"),
            ProcessFailed("no room", is_out_of_memory=True),
            None,
        ]
        self.deliver(name, data.draw(st.sampled_from(messages)))

    @rule(data=st.data(), error=st.sampled_from(["", "not supported"]))
    def one_replies_allowed(self, data: st.DataObject, error: str) -> None:
        self.reply_allowed(data.draw(st.sampled_from([*sorted(self.names), "unknown"])), error)

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), useful=st.booleans())
    def one_hangs(self, data: st.DataObject, useful: bool) -> None:
        self.generation.on_hung(self.pick(data), "silence", self.now, has_answered=useful)
        self.perform()

    @rule(really=st.sampled_from([True, *[False] * 5]))
    def store_is_lost(self, really: bool) -> None:
        if really:
            self.generation.on_store_lost("truncated", self.now)
            self.perform()

    @rule(seconds=st.sampled_from([0.0, 0.05, 1.0, 11.0, 61.0, 600.0]))
    def time_passes(self, seconds: float) -> None:
        self.advance_to(self.now + seconds)

    @precondition(lambda self: self.generation.next_tick_at < FOREVER)
    @rule()
    def next_tick_is_due(self) -> None:
        self.advance_to(max(self.now, self.generation.next_tick_at))

    @rule(attach_limit=st.integers(1, 4))
    def attach_limit_changes(self, attach_limit: int) -> None:
        self.attach_limit = attach_limit
        self.advance_to(self.now)

    @precondition(lambda self: self.names)
    @rule(kind=st.sampled_from(["drain", *[""] * 5]))
    def drain_is_requested(self, kind: str) -> None:
        if kind:
            self.generation.drain(self.now)
            self.perform()

    # --- invariants ---

    @invariant()
    def children_are_the_processes(self) -> None:
        assert set(self.generation.children) == set(self.processes)
        assert self.generation.take_actions() == []

    @invariant()
    def attach_limit_holds(self) -> None:
        attaching = self.count(ChildState.ATTACHING)
        # If the limit falls, processes that are already attaching continue.
        assert attaching <= max(self.attach_limit, self.attaching)
        self.attaching = attaching

    @invariant()
    def attach_limit_is_used(self) -> None:
        built = self.generation.built
        if built is None or self.generation.state not in ACTIVE:
            return
        is_waiting = self.count(ChildState.ADMITTED) and not self.count(ChildState.AWAITED)
        if is_waiting and (built.handle or not self.generation.processes.has(Role.HOLDER)):
            assert self.count(ChildState.ATTACHING) >= self.attach_limit

    @invariant()
    def process_counts_are_limited(self) -> None:
        assert max(self.generation.processes.workers_by_device().values(), default=0) <= self.workers + self.spares
        assert len(self.counted(Role.HOLDER)) <= 1
        assert sum(process.role is Role.HOLDER for process in self.processes.values()) <= 1
        assert sum(".holder" in name for name in self.names) <= 1 + MAX_HOLDER_DEATHS

    @invariant()
    def ready_workers_have_slots(self) -> None:
        for device in self.devices:
            on_device = [child for child in self.generation.children.values() if child.device == device]
            ready = {child.name for child in on_device if child.state is ChildState.READY}
            slots = self.slots & {child.name for child in on_device}
            assert slots <= ready
            if self.generation.state in ACTIVE:
                assert len(slots) == min(self.workers, len(ready))

    @invariant()
    def rewritten_weights_have_selftest(self) -> None:
        built = self.generation.built
        assert built is None or built.selftest_digest or not self.traits.attach_rewrites_weights

    @invariant()
    def lost_weights_stop_workers(self) -> None:
        holders = {name for name, process in self.processes.items() if process.role is Role.HOLDER}
        if not self.generation.attach_control.can_trust_answers(holders.__contains__):
            assert self.generation.state not in ACTIVE
            assert all(process.killed for process in self.processes.values() if process.role is Role.WORKER)

    @invariant()
    def failure_has_cause(self) -> None:
        assert self.generation.state is not GenerationState.FAILED or self.generation.cause

    @invariant()
    def waits_only_for_possible_events(self) -> None:
        state, is_waiting = self.generation.state, self.generation.next_tick_at < FOREVER
        if state in LOADING - {GenerationState.SNAPSHOTTING}:
            assert is_waiting or any(process.killed for process in self.processes.values())
        if state is GenerationState.SERVING:
            assert is_waiting or self.slots
        if state not in ACTIVE:
            assert is_waiting or not self.processes or any(process.killed for process in self.processes.values())

    def teardown(self) -> None:
        """Check that any generation ends after a drain, even if all its processes hang until they are killed."""
        self.generation.drain(self.now)
        self.perform()
        for _ in range(4 * len(self.processes) + 4):
            for name in [name for name, process in self.processes.items() if process.killed]:
                self.exit(name)
            if self.generation.next_tick_at < FOREVER:
                self.advance_to(max(self.now, self.generation.next_tick_at))
        assert self.generation.is_ended
        assert not self.processes


TestGeneration = GenerationMachine.TestCase
TestGeneration.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
