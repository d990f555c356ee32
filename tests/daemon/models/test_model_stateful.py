"""Stateful test of a complete model: devices, clients and processes that work, fail, hang and exit in any order."""

from __future__ import annotations

import itertools
import json
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from testkit.examples import examples
from testkit.model_factory import model_factory
from weightd_common.safe_open import OPERATOR
from weightd_daemon.config.model import ModelConfig, ReplacementPolicy
from weightd_daemon.engines.ranktable import card_bytes
from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.persisted import SealRecord
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.generations.states import ACTIVE, USABLE, ChildState
from weightd_daemon.models.deployment import Deployment
from weightd_daemon.models.persisted import ModelRecord
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.models.versions import IdSequence
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_daemon.platform.memory import MIB
from weightd_daemon.processes.events import ProcessEventHandler, Snapshot, SnapshotEventHandler
from weightd_daemon.processes.spec import WorkerProgram
from weightd_daemon.scheduling.fault_isolation.isolator import MAX_LOST_SLOTS
from weightd_daemon.scheduling.fault_isolation.offenders import MAX_PEER_DEATHS
from weightd_daemon.scheduling.request import ClientOrigin, Request
from weightd_daemon.scheduling.signature import MetadataRequest
from weightd_daemon.scheduling.tensor_location import SharedRegion
from weightd_protocol.errors import RequestError
from weightd_protocol.messages.control import ModelMetadataResponse, UpdateResponse
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSignature, TensorSpec
from weightd_protocol.messages.worker import (
    Attach,
    Attached,
    Build,
    Built,
    ChildMessage,
    ChildOrder,
    Hello,
    Ping,
    Pong,
    Predict,
    PredictFailed,
    PredictResult,
    ProcessFailed,
    Reconnected,
    Stop,
)
from weightd_protocol.messages.worker_common import AllowAttach, AttachAllowed, DeviceMemory, SharingTraits
from weightd_protocol.schema import decode, plain
from weightd_protocol.version import VERSION

FOREVER = float("inf")

# A running daemon learns of exits at once. A daemon that was stopped learns of them later, with all other events.
EXIT_DELAY_S = 1.0
WEIGHTS = 100 * MIB
PROCESS_BYTES = 10 * MIB
CARD = 1_000_000 * MIB
X = TensorSignature("x", "FP32", (4,))
Z = TensorSignature("z", "FP32", (4,))
SPEC = TensorSpec("x", "FP32", (4,))

ANN, BOB, BEN = ClientOrigin("ann 1", "ann"), ClientOrigin("bob 2", "bob"), ClientOrigin("bob 3", "bob")
CLIENTS = [ANN, BOB, BEN]
# The contents differ only outside of the sampled bytes.
LARGE = [bytes(10_000), bytes(300) + b"1" + bytes(9_699)]

# The name of the file decides what happens to it.
GOOD, UNREADABLE, UNBUILDABLE, OTHER_INPUTS = "/good.onnx", "/unreadable.onnx", "/unbuildable.onnx", "/other.onnx"


class Process:
    """State of a child process in the simulation. Its device memory is free as soon as it has exited."""

    def __init__(self, name: str, role: Role, generation: GenerationBase) -> None:
        self.name = name
        self.role = role
        self.generation = generation
        self.orders: list[ChildOrder] = []
        self.hello_accepted = False
        self.weights = False  # it has built or attached, or is doing so
        self.killed = False
        self.dead = False  # exited; the model may not have received the event
        self.crashes = False  # by itself instead of by a signal
        self.must_reconnect = False

    @property
    def shares(self) -> bool:
        return self.generation.spec.is_sharing

    @property
    def holder(self) -> str:
        return f"{self.generation.label}.holder"


class ModelMachine(RuleBasedStateMachine):
    """State machine that executes the actions of a model, injects faults, and checks the invariants."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.processes: dict[str, Process] = {}
        self.names: set[str] = set()
        self.pending_snapshots: list[ModelSource] = []
        self.existing_snapshots: set[ModelSource] = set()
        # The object stands for all parts of a ProcessManager.
        self.snapshots = self.storage = self.messenger = self
        self.cancelled_snapshots: list[ModelSource] = []
        self.requests: dict[int, Request] = {}
        self.ended: Counter[int] = Counter()
        self.blamed: Counter[int] = Counter()
        self.lost: Counter[int] = Counter()
        self.hung = False
        # Numbers of workers that crashed on a content or on requests of a client.
        self.killers: Counter[Any] = Counter()
        self.control_requests: Counter[str] = Counter()
        self.replies: Counter[str] = Counter()
        self.numbers = itertools.count(1)
        self.current_sender: Process | None = None
        self.stopped = False
        # Devices that have, or had, two generations because of an update.
        self.updated: set[str] = set()

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        draw = data.draw
        self.traits = SharingTraits(draw(st.booleans()), draw(st.booleans()), attach_rewrites_weights=False)
        self.strict = draw(st.booleans())
        self.policy = draw(st.sampled_from(list(ReplacementPolicy)))
        self.can_share = draw(st.sampled_from([True, True, True, True, False]))
        self.reports_memory = draw(st.booleans())
        self.knows_process_bytes = draw(st.booleans())
        names = draw(st.sampled_from([("ascend:0",), ("ascend:0", "ascend:1"), ("cpu:0", "cpu:1")]))
        workers, spares = draw(st.integers(1, 3)), draw(st.integers(0, 2))
        # The product keeps no budget for core sets. In this test they have one, and it must be correct.
        many = 1 + (workers + spares) * (2 if "cpu:0" in names else 1)
        one = card_bytes(WEIGHTS) + many * PROCESS_BYTES
        capacity = draw(st.sampled_from([None, None, 2 * one, one, 0]))
        processes = draw(st.sampled_from([63, 2 * many, many]))
        self.workers = workers
        self.config = ModelConfig(
            path=GOOD,
            engine="mindspore_lite",
            workers=workers,
            spares=spares,
            devices=names,
            sharing=draw(st.sampled_from(["on", "on", "auto", "off"])),
            process_mib=PROCESS_BYTES // MIB if self.knows_process_bytes else 0,
            policy=self.policy.value,
            holder_loss="strict" if self.strict else "frozen",
            load_timeout=500.0,
            max_queue=8,
        )
        self.devices = {name: DeviceBudget(name, capacity, processes) for name in self.config.devices_by_weight_copy}
        self.model = model_factory(self.devices, self, self).make("m", self.config, IdSequence())
        self.model.start(self.now)
        # Most interesting events happen after the model serves.
        if draw(st.sampled_from([True, True, True, False])):
            self.behave_all()
            self.now += 100.0

    # --- calls of the model to its processes ----------------------------------------------------------------------

    def take_snapshot(
        self, owner: SnapshotEventHandler, model: str, config: ModelConfig, source: ModelSource, expected: str = ""
    ) -> None:
        assert source not in self.pending_snapshots
        assert source not in self.existing_snapshots
        self.pending_snapshots.append(source)

    def remove_snapshot(self, model: str, source: ModelSource) -> None:
        if source in self.pending_snapshots:
            self.pending_snapshots.remove(source)
            self.cancelled_snapshots.append(source)
        else:
            self.existing_snapshots.remove(source)
            used = [
                each.name for each in self.running() if each.generation.source == source and not self.is_leaving(each)
            ]
            assert not used, "running processes have lost their snapshot"

    def spawn(
        self,
        owner: ProcessEventHandler,
        generation: GenerationBase,
        program: WorkerProgram,
        name: str,
        role: Role,
        template: str = "",
    ) -> None:
        assert not self.stopped
        assert name not in self.names
        assert generation.source in self.existing_snapshots
        assert generation.label in self.devices[generation.device].reserved
        self.names.add(name)
        self.processes[name] = Process(name, role, generation)

    def resume(self, owner: ProcessEventHandler, generation: GenerationBase, seal: SealRecord | None) -> bool:
        for name in generation.children:
            process = self.processes[name]
            process.generation = generation
            # Pending orders stay, except those that the next daemon sends again.
            process.orders = [each for each in process.orders if not isinstance(each, AllowAttach)]
            process.must_reconnect = process.role is Role.WORKER
        return True

    def mark_changed(self) -> None:
        pass

    def seal_record(self, generation: GenerationBase) -> SealRecord | None:
        return None

    def watch_weights(self, worker: str, generation: GenerationBase) -> bool:
        return True

    def is_alive(self, name: str) -> bool:
        return name in self.processes and not self.processes[name].dead

    def on_exported(self, generation: GenerationBase) -> None:
        pass

    @property
    def fingerprints(self) -> Mapping[str, object]:
        return {}

    def is_store_intact(self, generation: GenerationBase) -> bool:
        return True

    def kill(self, name: str, *, abort: bool = False) -> None:
        assert not self.processes[name].killed
        if not abort:  # an abort may fail
            self.processes[name].killed = True

    def send_order(
        self, name: str, order: ChildOrder, frames: Sequence[Any] = (), memories: Sequence[SharedRegion] = ()
    ) -> None:
        process = self.processes[name]
        assert process.hello_accepted
        match order:
            case Build():
                assert process.role is Role.HOLDER
            case Attach(handle, _):
                assert handle == ("/store" if process.shares else "")
            case AllowAttach():
                assert process.role is Role.HOLDER
                assert not any(isinstance(each, AllowAttach) for each in process.orders)
            case Predict():
                serving = self.deployment(process).serving
                assert serving is process.generation, "request sent to a generation that does not serve"
                assert process.generation.children[name].state is ChildState.READY
            case _:
                pass
        process.orders.append(order)

    def remove_files(self, generation: GenerationBase) -> None:
        assert not any(each.generation is generation for each in self.processes.values())

    # --- replies to clients ---------------------------------------------------------------------------------------

    def reply_result(self, request: Request, result: PredictResult, frames: Sequence[Any]) -> None:
        assert self.current_sender is not None
        assert self.is_sound(self.current_sender), "result computed on invalid weights was sent"
        self.ended[request.number] += 1

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        self.ended[request.number] += 1
        self.check_error(request, str(error))

    def reserve_partial_result(self, request: Request, nbytes: int) -> None:
        """Accept any partial result."""

    def notify_released(self, request: Request) -> None:
        raise AssertionError("no request has an output region")

    def check_error(self, request: Request, error: str) -> None:
        if "workers when they died" in error:
            assert self.blamed[request.number] >= 2, "request blamed for crashes of other requests"
        elif "workers when they exited" in error:
            assert self.lost[request.number] >= MAX_LOST_SLOTS
        elif self.hung:
            pass  # requests that hang are blamed as well
        elif "this content crashed or hung workers" in error:
            assert self.killers[request.frames] >= 2
        elif "other requests of its client" in error:
            assert self.blamed[request.number] >= 1
            assert max(self.killers[name] for name in request.origin) >= MAX_PEER_DEATHS
        elif "workers: they are rejected for" in error:
            assert max(self.killers[name] for name in request.origin) > MAX_PEER_DEATHS

    def reply(self, client: bytes, message: ModelMetadataResponse) -> None:
        assert message.inputs == (X,)
        self.replies[message.id] += 1

    def reply_updated(self, client: bytes, response: UpdateResponse) -> None:
        serving = [each.serving for each in self.model.deployments]
        assert [each.number for each in serving if each is not None] == list(response.generations)
        self.replies[response.id] += 1

    def reply_failed(self, client: bytes, request_id: str, error: RequestError) -> None:
        self.reply_error(client, request_id, error)

    def reply_error(self, client: bytes, request_id: str, error: RequestError) -> None:
        assert str(error).strip().rstrip(":") == str(error).strip(), "the error has no cause"
        self.replies[request_id] += 1

    # --- state ----------------------------------------------------------------------------------------------------

    def running(self) -> list[Process]:
        return [each for each in self.processes.values() if not each.dead]

    def is_leaving(self, process: Process) -> bool:
        child = process.generation.children.get(process.name)
        return process.generation.state not in ACTIVE or child is None or child.state not in USABLE

    def deployment(self, process: Process) -> Deployment:
        return next(each for each in self.model.deployments if each.placement.name == process.generation.device)

    def is_sound(self, process: Process) -> bool:
        """Return whether the process computes on the weights that its holder built."""
        guarded = self.traits.holder_must_outlive and self.strict and process.shares
        return not guarded or self.is_alive(process.holder)

    def memory(self, name: str) -> DeviceMemory | None:
        here = [each for each in self.running() if each.generation.device == name]
        return DeviceMemory(CARD, CARD - self.allocated(here)) if self.reports_memory else None

    def allocated(self, processes: Sequence[Process]) -> int:
        return len(processes) * PROCESS_BYTES + self.copies(processes) * card_bytes(WEIGHTS)

    def copies(self, processes: Sequence[Process]) -> int:
        shared = {each.generation.label for each in processes if each.weights and each.shares}
        return len(shared) + sum(each.weights and not each.shares for each in processes)

    def exit_process(self, process: Process) -> None:
        process.dead = True
        had = [each.request for each in process.orders if isinstance(each, Predict)]
        if had and self.is_sound(process):
            self.lost[had[0]] += 1
            for number in had if process.crashes else []:
                if number in self.requests:
                    self.blamed[number] += 1
                    self.killers.update([self.requests[number].frames, *self.requests[number].origin])
        del self.processes[process.name]
        self.model.deployments.process_events.on_exit(
            process.name, ExitCause(-(signal.SIGSEGV if process.crashes else signal.SIGKILL)), self.now
        )

    def deliver(self, process: Process, message: ChildMessage) -> None:
        self.current_sender = process
        self.model.deployments.process_events.on_message(process.name, message, (), self.now)
        self.current_sender = None

    def behave(self, process: Process) -> None:
        """Do the next thing that a correct process does."""
        if process.dead or process.killed:
            self.exit_process(process)
        elif not process.hello_accepted:
            process.hello_accepted = True
            generation = process.generation
            self.deliver(process, Hello(process.name, generation.sha256, {"weightd": VERSION}, self.traits))
        elif process.orders:
            self.execute_order(process, process.orders[0])
        elif process.must_reconnect:
            process.must_reconnect = False
            self.deliver(process, Reconnected())

    def execute_order(self, process: Process, order: ChildOrder) -> None:
        loads = isinstance(order, Build | Attach) and not process.weights
        if loads:
            process.weights = True  # the order completes at the next call
            return
        process.orders.pop(0)
        match order:
            case Build():
                self.deliver(process, self.built(process))
            case Attach():
                device = process.generation.device
                self.deliver(process, Attached("digest", 4000, "", self.memory(device)))
            case AllowAttach():
                self.deliver(process, AttachAllowed())
            case Predict(number, _):
                self.deliver(process, PredictResult(number, ResponseDescription("m", (SPEC,))))
            case Stop():
                self.exit_process(process)
            case Ping(run_selftest):
                self.deliver(process, Pong("digest" if run_selftest else ""))
            case _:
                pass

    def built(self, process: Process) -> Built | ProcessFailed:
        path = process.generation.source.path
        if path == UNBUILDABLE or (process.shares and not self.can_share):
            return ProcessFailed("cannot")
        inputs = (Z,) if path == OTHER_INPUTS else (X,)
        handle = "/store" if process.shares else ""
        return Built(handle, inputs, (X,), (), "digest", 4096, "", self.memory(process.generation.device))

    def complete_snapshot(self, source: ModelSource) -> None:
        self.pending_snapshots.remove(source)
        if source.path == UNREADABLE:
            self.model.on_snapshot_failed(source, "no such file", self.now)
        else:
            self.existing_snapshots.add(source)
            self.model.on_snapshot_taken(source, Snapshot("/snapshot", "", f"{source.number:064d}", WEIGHTS), self.now)

    def next_event_at(self) -> float:
        """Return the next time at which the model must act."""
        retry_delay_s = self.model.loading.retry_delay_s(self.now)
        return min(
            self.due(),
            self.model.versions.snapshots.next_event_at,
            self.model.dispatcher.next_event_at,
            FOREVER if retry_delay_s is None else self.now + retry_delay_s,
        )

    def due(self) -> float:
        """Return the next time at which a deployment must act. The watchdog is always due, so it does not count."""
        return min(each.next_tick_at for each in self.model.deployments)

    def advance_to(self, then: float) -> None:
        if then > self.now + EXIT_DELAY_S:
            for process in [each for each in self.processes.values() if each.dead]:
                self.exit_process(process)
        self.hung = self.hung or any(self.has_work(each) for each in self.running())
        self.now = then
        while then >= self.model.timer.due_at:
            self.model.tick(then)
            if not self.model.dispatcher.isolator.contents.has_work:
                break
        assert self.model.timer.due_at > then, "the next tick is not in the future"

    def behave_all(self) -> None:
        for _ in range(12):
            for source in list(self.pending_snapshots):
                self.complete_snapshot(source)
            for process in list(self.processes.values()):
                if process.name in self.processes:
                    self.behave(process)

    def pick(self, data: st.DataObject, processes: Sequence[Process]) -> Process:
        return data.draw(st.sampled_from(processes))

    # --- events ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.pending_snapshots)
    @rule()
    def snapshot_completes(self) -> None:
        self.complete_snapshot(self.pending_snapshots[0])

    @precondition(lambda self: self.pending_snapshots)
    @rule()
    def snapshot_fails(self) -> None:
        self.model.on_snapshot_failed(self.pending_snapshots.pop(0), "the disk is full", self.now)

    @precondition(lambda self: self.cancelled_snapshots)
    @rule(late=st.booleans())
    def cancelled_snapshot_ends(self, late: bool) -> None:
        source = self.cancelled_snapshots.pop()
        if late:
            self.model.on_snapshot_taken(source, Snapshot("/removed", "", "6" * 64, WEIGHTS), self.now)
        else:
            self.model.on_snapshot_failed(source, "killed by SIGKILL", self.now)

    @precondition(lambda self: self.processes)
    @rule()
    def all_behave_once(self) -> None:
        for process in list(self.processes.values()):
            if process.name in self.processes:
                self.behave(process)

    @precondition(lambda self: self.processes or self.pending_snapshots)
    @rule()
    def all_behave_several_times(self) -> None:
        self.behave_all()

    @precondition(lambda self: any(each.role is Role.WORKER for each in self.running()))
    @rule()
    def workers_act_before_exit_event(self) -> None:
        for process in self.running():
            if process.role is Role.WORKER and process.orders and not process.killed:
                self.behave(process)

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def one_behaves(self, data: st.DataObject) -> None:
        self.behave(self.pick(data, list(self.processes.values())))

    @precondition(lambda self: self.running())
    @rule(data=st.data(), is_reported=st.booleans(), crashes=st.booleans())
    def one_exits(self, data: st.DataObject, is_reported: bool, crashes: bool) -> None:
        process = self.pick(data, self.running())
        process.crashes = crashes
        if is_reported:
            self.exit_process(process)
        else:
            process.dead = True

    @precondition(lambda self: any(self.has_work(each) for each in self.running()))
    @rule(data=st.data(), count=st.integers(1, 6))
    def workers_crash_at_work(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            busy = [each for each in self.running() if self.has_work(each)]
            if busy:
                process = self.pick(data, busy)
                process.crashes = True
                self.exit_process(process)

    def has_work(self, process: Process) -> bool:
        return any(isinstance(each, Predict) for each in process.orders)

    @precondition(lambda self: any(each.role is Role.HOLDER and each.weights for each in self.running()))
    @rule(data=st.data(), is_reported=st.booleans())
    def holder_exits(self, data: st.DataObject, is_reported: bool) -> None:
        holder = self.pick(data, [each for each in self.running() if each.role is Role.HOLDER and each.weights])
        self.client_sends_requests(1e9, 2, ANN, b"small")
        if is_reported:
            self.exit_process(holder)
        else:
            holder.dead = True
            self.workers_act_before_exit_event()

    @precondition(lambda self: any(each.orders for each in self.running()))
    @rule(data=st.data())
    def order_fails(self, data: st.DataObject) -> None:
        process = self.pick(data, [each for each in self.running() if each.orders])
        order = process.orders.pop(0)
        match order:
            case Build():
                self.deliver(process, ProcessFailed("no memory"))
            case Attach():
                process.weights = True
                answers: list[ChildMessage] = [ProcessFailed("no memory"), Attached("another", 1)]
                self.deliver(process, data.draw(st.sampled_from(answers)))
            case AllowAttach():
                if data.draw(st.booleans()):
                    self.deliver(process, AttachAllowed("no pids after the build"))
            case Predict(number, _):
                is_exiting = data.draw(st.booleans())
                if is_exiting:  # a worker that leaves counts like one that exited
                    self.killers.update(self.requests[number].origin)
                self.deliver(process, PredictFailed(number, "INTERNAL", "spoilt", is_exiting=is_exiting))
            case _:
                process.orders.insert(0, order)

    @rule(seconds=st.sampled_from([0.0, 0.05, 1.0, 11.0, 61.0, 600.0]))
    def time_passes(self, seconds: float) -> None:
        self.advance_to(self.now + seconds)

    @precondition(lambda self: self.model.timer.due_at < FOREVER)
    @rule()
    def next_tick_is_due(self) -> None:
        self.advance_to(max(self.now, self.model.timer.due_at))

    @rule(
        seconds=st.sampled_from([0.5, 20.0, 1e9, 1e9]),
        count=st.integers(1, 3),
        origin=st.sampled_from(CLIENTS),
        content=st.sampled_from([b"small", b"", *LARGE]),
    )
    def client_sends_requests(self, seconds: float, count: int, origin: ClientOrigin, content: bytes) -> None:
        for _ in range(count):
            number = next(self.numbers)
            frame = content or str(number).encode()
            until, client = self.now + seconds, origin.peer.encode()
            request = Request(
                number,
                client,
                str(number),
                RequestDescription("m", (SPEC,)),
                (frame,),
                self.now,
                until,
                len(frame),
                origin,
            )
            try:
                self.model.dispatcher.infer(request, self.now)
            except RequestError as error:
                assert not self.ended[number]
                self.check_error(request, str(error))
            else:
                self.requests[number] = request

    @rule()
    def client_requests_metadata(self) -> None:
        name = f"q{next(self.numbers)}"
        self.control_requests[name] += 1
        try:
            self.model.dispatcher.metadata.request(MetadataRequest(b"c", name))
        except RequestError:
            assert not self.replies[name]
            del self.control_requests[name]

    @rule(path=st.sampled_from([GOOD, GOOD, GOOD, UNREADABLE, UNBUILDABLE, OTHER_INPUTS, "back"]))
    def operator_updates(self, path: str) -> None:
        name = f"q{next(self.numbers)}"
        self.control_requests[name] += 1
        is_rollback = path == "back"
        try:
            self.model.update(
                b"o", name, self.now, path="" if is_rollback else path, weights="", rollback=is_rollback, grant=OPERATOR
            )
        except RequestError:
            assert not self.replies[name]
            del self.control_requests[name]
        else:
            self.updated |= set(self.devices)

    @precondition(lambda self: not self.stopped and self.model.record() is not None)
    @rule()
    def daemon_restarts(self) -> None:
        record = self.model.record()
        assert record is not None
        record = decode(ModelRecord, json.loads(json.dumps(plain(record))))
        # Clients with pending requests see the end of the connection.
        self.ended.update(set(self.requests) - set(self.ended))
        self.replies.update(set(self.control_requests) - set(self.replies))
        # Processes that take snapshots exit with the daemon; processes that the next daemon does not resume are killed.
        self.pending_snapshots, self.cancelled_snapshots = [], []
        self.existing_snapshots = {ModelSource(each.path, each.weights, each.number) for each in record.sources}
        kept = {child.name for generation in record.generations for child in generation.children}
        self.processes = {name: process for name, process in self.processes.items() if name in kept}
        self.devices = {
            name: DeviceBudget(name, each.capacity_bytes, each.max_processes) for name, each in self.devices.items()
        }
        self.model = model_factory(self.devices, self, self).make("m", self.config, IdSequence(record.last_ids))
        self.model.resume(record, self.now)

    @precondition(lambda self: len(self.names) > 12)
    @rule(really=st.sampled_from([True, *[False] * 7]))
    def drain_is_requested(self, really: bool) -> None:
        if really:
            self.stopped = True
            self.model.drain(self.now)

    # --- invariants -----------------------------------------------------------------------------------------------

    @invariant()
    def weight_copies_are_limited(self) -> None:
        for deployment in self.model.deployments:
            name = deployment.placement.name
            if len(deployment.generations) < 2:
                self.updated.discard(name)
            here = [each for each in self.running() if each.generation.device == name and each.weights]
            generations = {each.generation.label for each in here}
            most = 1 if self.policy is ReplacementPolicy.REPLACE and name not in self.updated else 2
            assert len(generations) <= most, f"{generations} have weights"

    @invariant()
    def usage_is_within_reservations(self) -> None:
        for name, device in self.devices.items():
            # A stopped process may still exist when its replacement starts.
            here = [each for each in self.running() if each.generation.device == name and not self.is_leaving(each)]
            assert len(here) <= device.process_count <= (device.max_processes or 0)
            assert self.copies(here) <= sum(need.copy_count for need in device.reserved.values())
            if self.knows_process_bytes:
                assert self.allocated(here) <= device.reserved_bytes
            if not self.reports_memory and device.capacity_bytes is not None:
                assert device.reserved_bytes <= device.capacity_bytes

    @invariant()
    def timer_is_due_in_time(self) -> None:
        assert self.model.timer.due_at <= self.next_event_at()

    @invariant()
    def no_request_waits_for_free_worker(self) -> None:
        assert not list(self.model.dispatcher._scheduler.assign(self.now))

    @invariant()
    def children_are_the_processes(self) -> None:
        known = [name for each in self.model.deployments for one in each.generations for name in one.children]
        assert sorted(known) == sorted(self.processes)

    @invariant()
    def only_serving_generation_accepts_requests(self) -> None:
        expected = set(self.model.dispatcher.results.latencies_by_process) & {
            name
            for each in self.model.deployments
            if each.serving is not None
            for name, child in each.serving.children.items()
            if child.state is ChildState.READY and name in each.serving.processes.serving
        }
        accepting = set(self.model.dispatcher._scheduler.slots.accepting)
        assert accepting == expected, f"{accepting} accept requests, expected {expected}"

    @invariant()
    def each_request_ends_once(self) -> None:
        assert all(count == 1 for count in self.ended.values())
        assert set(self.ended) <= set(self.requests)
        assert all(count == 1 for count in self.replies.values())
        assert set(self.replies) <= set(self.control_requests)

    @invariant()
    def failure_has_cause(self) -> None:
        assert all(each.cause for each in self.model.deployments if each.has_failed)

    # --- end ------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Check that without further faults all requests end, and each device serves or has failed with a cause."""
        if not hasattr(self, "model"):
            return
        for _ in range(40):
            self.run_until_idle()
            if self.due() == FOREVER:
                break
            self.advance_to(max(self.now, self.due()))
        self.run_until_idle()
        for deployment in self.model.deployments:
            self.check_deployment(deployment)
        self.advance_to(self.now + 2e9)
        self.run_until_idle()
        assert sorted(self.ended) == sorted(self.requests)
        assert dict(self.replies) == dict(self.control_requests)
        self.model.drain(self.now)
        self.stopped = True
        self.run_until_idle()
        assert not self.processes
        assert not any(device.reserved for device in self.devices.values())
        assert self.model.timer.due_at == FOREVER

    def run_until_idle(self) -> None:
        for _ in range(400):
            for source in list(self.pending_snapshots):
                self.complete_snapshot(source)
            for source in list(self.cancelled_snapshots):
                self.cancelled_snapshots.remove(source)
                self.model.on_snapshot_failed(source, "killed by SIGKILL", self.now)
            busy = [each for each in self.processes.values() if self.has_pending_work(each)]
            if not busy and not self.pending_snapshots:
                return
            for process in busy:
                if process.name in self.processes:
                    self.behave(process)
                self.check_invariants_now()
        raise AssertionError("the model does not become idle")

    def has_pending_work(self, process: Process) -> bool:
        return bool(
            process.dead or process.killed or process.orders or process.must_reconnect or not process.hello_accepted
        )

    def check_invariants_now(self) -> None:
        self.weight_copies_are_limited()
        self.usage_is_within_reservations()
        self.only_serving_generation_accepts_requests()

    def check_deployment(self, deployment: Deployment) -> None:
        promised = {each.label for each in deployment.generations if each.children}
        assert isinstance(deployment.placement, DeviceBudget)
        assert set(deployment.placement.reserved) == promised
        if self.stopped:
            assert not deployment.generations
        elif deployment.serving is None:
            assert deployment.has_failed or deployment.is_busy  # an established deployment is retried without limit
            assert deployment.cause
        elif deployment.serving.should_be_replaced:
            assert deployment.is_busy  # the renewal is retried without limit
            assert deployment.cause
        else:
            serving = deployment.serving
            workers_by_device = Counter(serving.children[name].device for name in serving.processes.serving)
            wanted = dict.fromkeys(self.config.devices_by_weight_copy[deployment.placement.name], self.workers)
            assert workers_by_device == wanted or serving.attach_control.is_attach_closed
            assert not deployment.is_busy


TestModel = ModelMachine.TestCase
TestModel.settings = settings(max_examples=examples(250), stateful_step_count=60, deadline=None, print_blob=True)
