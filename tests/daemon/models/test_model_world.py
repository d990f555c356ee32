"""A whole model in a world of cards, clients and processes that obey, fail, hang and die, in any order."""

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
    AllowAttach,
    Attach,
    AttachAllowed,
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
from weightd_protocol.messages.worker_common import DeviceMemory, SharingTraits
from weightd_protocol.schema import decode, plain
from weightd_protocol.version import VERSION

FOREVER = float("inf")

# The kernel tells of a death at once; a daemon that was stopped hears of it with all else that has happened.
NEWS_S = 1.0
WEIGHTS = 100 * MIB
EACH = 10 * MIB
CARD = 1_000_000 * MIB
X = TensorSignature("x", "FP32", (4,))
Z = TensorSignature("z", "FP32", (4,))
SPEC = TensorSpec("x", "FP32", (4,))

ANN, BOB, BEN = ClientOrigin("ann 1", "ann"), ClientOrigin("bob 2", "bob"), ClientOrigin("bob 3", "bob")
CLIENTS = [ANN, BOB, BEN]
# They differ where the mark of a content does not look.
LARGE = [bytes(10_000), bytes(300) + b"1" + bytes(9_699)]

# What a file's name says becomes of it.
GOOD, UNREADABLE, UNBUILDABLE, OTHER_INPUTS = "/good.onnx", "/unreadable.onnx", "/unbuildable.onnx", "/other.onnx"


class Process:
    """A child as the world knows it. What it has of its card is free again as soon as it is dead."""

    def __init__(self, name: str, role: Role, generation: GenerationBase) -> None:
        self.name = name
        self.role = role
        self.generation = generation
        self.orders: list[ChildOrder] = []
        self.hello_taken = False
        self.weights = False  # it has built or attached, or is about to
        self.killed = False
        self.dead = False  # and its model may not know yet
        self.crashes = False  # by itself, not by somebody's signal
        self.returns = False  # it has not said yet that it is connected to the next daemon

    @property
    def shares(self) -> bool:
        return self.generation.spec.is_sharing

    @property
    def holder(self) -> str:
        return f"{self.generation.label}.holder"


class ModelWorld(RuleBasedStateMachine):
    """Does what the model wants, lets everybody else do anything, and knows what must never happen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.processes: dict[str, Process] = {}
        self.names: set[str] = set()
        self.pinning: list[ModelSource] = []
        self.existing_snapshots: set[ModelSource] = set()
        # The parts of a ProcessManager.
        self.snapshots = self.storage = self.messenger = self
        self.unpinned: list[ModelSource] = []
        self.requests: dict[int, Request] = {}
        self.ended: Counter[int] = Counter()
        self.blamed: Counter[int] = Counter()
        self.lost: Counter[int] = Counter()
        self.hung = False
        # How often a worker has died of a content, and of what a client asked.
        self.killers: Counter[Any] = Counter()
        self.questions: Counter[str] = Counter()
        self.replies: Counter[str] = Counter()
        self.numbers = itertools.count(1)
        self.talking: Process | None = None
        self.stopped = False
        # Where there are or were two generations because of an update.
        self.updated: set[str] = set()

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        draw = data.draw
        self.traits = SharingTraits(draw(st.booleans()), draw(st.booleans()), attach_rewrites_weights=False)
        self.strict = draw(st.booleans())
        self.policy = draw(st.sampled_from(list(ReplacementPolicy)))
        self.can_share = draw(st.sampled_from([True, True, True, True, False]))
        self.tells_memory = draw(st.booleans())
        self.knows_each = draw(st.booleans())
        names = draw(st.sampled_from([("ascend:0",), ("ascend:0", "ascend:1"), ("cpu:0", "cpu:1")]))
        workers, spares = draw(st.integers(1, 3)), draw(st.integers(0, 2))
        # No budget is kept of sets of cores; here it is, and then it has to be right.
        many = 1 + (workers + spares) * (2 if "cpu:0" in names else 1)
        one = card_bytes(WEIGHTS) + many * EACH
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
            process_mib=EACH // MIB if self.knows_each else 0,
            policy=self.policy.value,
            holder_loss="strict" if self.strict else "frozen",
            load_timeout=500.0,
            max_queue=8,
        )
        self.devices = {name: DeviceBudget(name, capacity, processes) for name in self.config.devices_by_weight_copy}
        self.model = model_factory(self.devices, self, self).make("m", self.config, IdSequence())
        self.model.start(self.now)
        # Most of what is worth seeing happens later.
        if draw(st.sampled_from([True, True, True, False])):
            self.goes_well()
            self.now += 100.0

    # --- what the model asks of its children ----------------------------------------------------------------------

    def take_snapshot(
        self, owner: SnapshotEventHandler, model: str, config: ModelConfig, source: ModelSource, expected: str = ""
    ) -> None:
        assert source not in self.pinning
        assert source not in self.existing_snapshots
        self.pinning.append(source)

    def remove_snapshot(self, model: str, source: ModelSource) -> None:
        if source in self.pinning:
            self.pinning.remove(source)
            self.unpinned.append(source)
        else:
            self.existing_snapshots.remove(source)
            used = [each.name for each in self.living() if each.generation.source == source and not self.leaves(each)]
            assert not used, "processes that stay have lost their snapshot"

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
            # What it was told before is still to be done, but for what it would do twice.
            process.orders = [each for each in process.orders if not isinstance(each, AllowAttach)]
            process.returns = process.role is Role.WORKER
        return True

    def mark_changed(self) -> None:
        pass

    def seal_record(self, generation: GenerationBase) -> SealRecord | None:
        return None

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
        if not abort:  # which may be in vain
            self.processes[name].killed = True

    def send_order(
        self, name: str, order: ChildOrder, frames: Sequence[Any] = (), memories: Sequence[SharedRegion] = ()
    ) -> None:
        process = self.processes[name]
        assert process.hello_taken
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
                assert serving is process.generation, "a request goes to a generation that does not serve"
                assert process.generation.children[name].state is ChildState.READY
            case _:
                pass
        process.orders.append(order)

    def remove_files(self, generation: GenerationBase) -> None:
        assert not any(each.generation is generation for each in self.processes.values())

    # --- what the model tells clients -----------------------------------------------------------------------------

    def reply_result(self, request: Request, result: PredictResult, frames: Sequence[Any]) -> None:
        assert self.talking is not None
        assert self.is_sound(self.talking), "an answer that may be anything is passed on"
        self.ended[request.number] += 1

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        self.ended[request.number] += 1
        self.is_deserved(request, str(error))

    def reserve_partial_result(self, request: Request, nbytes: int) -> None:
        """There is room for anything."""

    def notify_released(self, request: Request) -> None:
        raise AssertionError("nobody has offered room")

    def is_deserved(self, request: Request, error: str) -> None:
        if "workers when they died" in error:
            assert self.blamed[request.number] >= 2, "blamed for what it has not done"
        elif "workers when they exited" in error:
            assert self.lost[request.number] >= MAX_LOST_SLOTS
        elif self.hung:
            pass  # what hangs is accused, too
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
        assert str(error).strip().rstrip(":") == str(error).strip(), "there is no cause in it"
        self.replies[request_id] += 1

    # --- how the world is -----------------------------------------------------------------------------------------

    def living(self) -> list[Process]:
        return [each for each in self.processes.values() if not each.dead]

    def leaves(self, process: Process) -> bool:
        child = process.generation.children.get(process.name)
        return process.generation.state not in ACTIVE or child is None or child.state not in USABLE

    def deployment(self, process: Process) -> Deployment:
        return next(each for each in self.model.deployments if each.placement.name == process.generation.device)

    def is_sound(self, process: Process) -> bool:
        """Whether what the process computes on is what its holder has built."""
        guarded = self.traits.holder_must_outlive and self.strict and process.shares
        return not guarded or self.is_alive(process.holder)

    def memory(self, name: str) -> DeviceMemory | None:
        here = [each for each in self.living() if each.generation.device == name]
        return DeviceMemory(CARD, CARD - self.allocated(here)) if self.tells_memory else None

    def allocated(self, processes: Sequence[Process]) -> int:
        return len(processes) * EACH + self.copies(processes) * card_bytes(WEIGHTS)

    def copies(self, processes: Sequence[Process]) -> int:
        shared = {each.generation.label for each in processes if each.weights and each.shares}
        return len(shared) + sum(each.weights and not each.shares for each in processes)

    def exits(self, process: Process) -> None:
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

    def says(self, process: Process, message: ChildMessage) -> None:
        self.talking = process
        self.model.deployments.process_events.on_message(process.name, message, (), self.now)
        self.talking = None

    def obeys(self, process: Process) -> None:
        """Do the next thing that a good child does."""
        if process.dead or process.killed:
            self.exits(process)
        elif not process.hello_taken:
            process.hello_taken = True
            generation = process.generation
            self.says(process, Hello(process.name, generation.sha256, {"weightd": VERSION}, self.traits))
        elif process.orders:
            self.follows(process, process.orders[0])
        elif process.returns:
            process.returns = False
            self.says(process, Reconnected())

    def follows(self, process: Process, order: ChildOrder) -> None:
        loads = isinstance(order, Build | Attach) and not process.weights
        if loads:
            process.weights = True  # and the next time it is done
            return
        process.orders.pop(0)
        match order:
            case Build():
                self.says(process, self.built(process))
            case Attach():
                device = process.generation.device
                self.says(process, Attached("canary", 4000, "", self.memory(device)))
            case AllowAttach():
                self.says(process, AttachAllowed())
            case Predict(number, _):
                self.says(process, PredictResult(number, ResponseDescription("m", (SPEC,))))
            case Stop():
                self.exits(process)
            case Ping(canary):
                self.says(process, Pong("canary" if canary else ""))
            case _:
                pass

    def built(self, process: Process) -> Built | ProcessFailed:
        path = process.generation.source.path
        if path == UNBUILDABLE or (process.shares and not self.can_share):
            return ProcessFailed("cannot")
        inputs = (Z,) if path == OTHER_INPUTS else (X,)
        handle = "/store" if process.shares else ""
        return Built(handle, inputs, (X,), (), "canary", 4096, "", self.memory(process.generation.device))

    def ends_pinning(self, source: ModelSource) -> None:
        self.pinning.remove(source)
        if source.path == UNREADABLE:
            self.model.on_snapshot_failed(source, "no such file", self.now)
        else:
            self.existing_snapshots.add(source)
            self.model.on_snapshot_taken(source, Snapshot("/snapshot", "", f"{source.number:064d}", WEIGHTS), self.now)

    def next_event_at(self) -> float:
        """When anything has to be done."""
        retry_delay_s = self.model.retry_delay_s(self.now)
        return min(
            self.due(),
            self.model.versions.snapshots.next_event_at,
            self.model.dispatcher.next_event_at,
            FOREVER if retry_delay_s is None else self.now + retry_delay_s,
        )

    def due(self) -> float:
        """When something has to be done that is not the watchdog's: that never has nothing to do."""
        return min(each.next_tick_at for each in self.model.deployments)

    def passes_time_to(self, then: float) -> None:
        if then > self.now + NEWS_S:
            for process in [each for each in self.processes.values() if each.dead]:
                self.exits(process)
        self.hung = self.hung or any(self.has_work(each) for each in self.living())
        self.now = then
        while then >= self.model.timer.due_at:
            self.model.tick(then)
            if not self.model.dispatcher._isolator.has_work:
                break
        assert self.model.timer.due_at > then, "it would wake up for nothing, again and again"

    def goes_well(self) -> None:
        for _ in range(12):
            for source in list(self.pinning):
                self.ends_pinning(source)
            for process in list(self.processes.values()):
                if process.name in self.processes:
                    self.obeys(process)

    def pick(self, data: st.DataObject, processes: Sequence[Process]) -> Process:
        return data.draw(st.sampled_from(processes))

    # --- what happens ---------------------------------------------------------------------------------------------

    @precondition(lambda self: self.pinning)
    @rule()
    def a_snapshot_ends(self) -> None:
        self.ends_pinning(self.pinning[0])

    @precondition(lambda self: self.pinning)
    @rule()
    def a_snapshot_fails(self) -> None:
        self.model.on_snapshot_failed(self.pinning.pop(0), "the disk is full", self.now)

    @precondition(lambda self: self.unpinned)
    @rule(late=st.booleans())
    def a_snapshot_that_nobody_wants_ends(self, late: bool) -> None:
        source = self.unpinned.pop()
        if late:
            self.model.on_snapshot_taken(source, Snapshot("/removed", "", "6" * 64, WEIGHTS), self.now)
        else:
            self.model.on_snapshot_failed(source, "killed by SIGKILL", self.now)

    @precondition(lambda self: self.processes)
    @rule()
    def all_obey_once(self) -> None:
        for process in list(self.processes.values()):
            if process.name in self.processes:
                self.obeys(process)

    @precondition(lambda self: self.processes or self.pinning)
    @rule()
    def all_goes_well(self) -> None:
        self.goes_well()

    @precondition(lambda self: any(each.role is Role.WORKER for each in self.living()))
    @rule()
    def workers_are_faster_than_the_news(self) -> None:
        for process in self.living():
            if process.role is Role.WORKER and process.orders and not process.killed:
                self.obeys(process)

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def one_obeys(self, data: st.DataObject) -> None:
        self.obeys(self.pick(data, list(self.processes.values())))

    @precondition(lambda self: self.living())
    @rule(data=st.data(), told=st.booleans(), crashes=st.booleans())
    def one_dies(self, data: st.DataObject, told: bool, crashes: bool) -> None:
        process = self.pick(data, self.living())
        process.crashes = crashes
        if told:
            self.exits(process)
        else:
            process.dead = True

    @precondition(lambda self: any(self.has_work(each) for each in self.living()))
    @rule(data=st.data(), count=st.integers(1, 6))
    def workers_crash_at_work(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            busy = [each for each in self.living() if self.has_work(each)]
            if busy:
                process = self.pick(data, busy)
                process.crashes = True
                self.exits(process)

    def has_work(self, process: Process) -> bool:
        return any(isinstance(each, Predict) for each in process.orders)

    @precondition(lambda self: any(each.role is Role.HOLDER and each.weights for each in self.living()))
    @rule(data=st.data(), told=st.booleans())
    def a_holder_dies(self, data: st.DataObject, told: bool) -> None:
        holder = self.pick(data, [each for each in self.living() if each.role is Role.HOLDER and each.weights])
        self.a_client_asks(1e9, 2, ANN, b"small")
        if told:
            self.exits(holder)
        else:
            holder.dead = True
            self.workers_are_faster_than_the_news()

    @precondition(lambda self: any(each.orders for each in self.living()))
    @rule(data=st.data())
    def one_cannot(self, data: st.DataObject) -> None:
        process = self.pick(data, [each for each in self.living() if each.orders])
        order = process.orders.pop(0)
        match order:
            case Build():
                self.says(process, ProcessFailed("no memory"))
            case Attach():
                process.weights = True
                answers: list[ChildMessage] = [ProcessFailed("no memory"), Attached("another", 1)]
                self.says(process, data.draw(st.sampled_from(answers)))
            case AllowAttach():
                if data.draw(st.booleans()):
                    self.says(process, AttachAllowed("no pids after the build"))
            case Predict(number, _):
                is_exiting = data.draw(st.booleans())
                if is_exiting:  # a worker that leaves is as lost as one that died
                    self.killers.update(self.requests[number].origin)
                self.says(process, PredictFailed(number, "INTERNAL", "spoilt", is_exiting=is_exiting))
            case _:
                process.orders.insert(0, order)

    @rule(seconds=st.sampled_from([0.0, 0.05, 1.0, 11.0, 61.0, 600.0]))
    def time_passes(self, seconds: float) -> None:
        self.passes_time_to(self.now + seconds)

    @precondition(lambda self: self.model.timer.due_at < FOREVER)
    @rule()
    def time_comes(self) -> None:
        self.passes_time_to(max(self.now, self.model.timer.due_at))

    @rule(
        seconds=st.sampled_from([0.5, 20.0, 1e9, 1e9]),
        count=st.integers(1, 3),
        origin=st.sampled_from(CLIENTS),
        content=st.sampled_from([b"small", b"", *LARGE]),
    )
    def a_client_asks(self, seconds: float, count: int, origin: ClientOrigin, content: bytes) -> None:
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
                self.is_deserved(request, str(error))
            else:
                self.requests[number] = request

    @rule()
    def a_client_is_curious(self) -> None:
        name = f"q{next(self.numbers)}"
        self.questions[name] += 1
        try:
            self.model.dispatcher.metadata.request(MetadataRequest(b"c", name))
        except RequestError:
            assert not self.replies[name]
            del self.questions[name]

    @rule(path=st.sampled_from([GOOD, GOOD, GOOD, UNREADABLE, UNBUILDABLE, OTHER_INPUTS, "back"]))
    def an_operator_updates(self, path: str) -> None:
        name = f"q{next(self.numbers)}"
        self.questions[name] += 1
        back = path == "back"
        try:
            self.model.update(
                b"o", name, self.now, path="" if back else path, weights="", rollback=back, grant=OPERATOR
            )
        except RequestError:
            assert not self.replies[name]
            del self.questions[name]
        else:
            self.updated |= set(self.devices)

    @precondition(lambda self: not self.stopped and self.model.record() is not None)
    @rule()
    def the_daemon_is_replaced(self) -> None:
        record = self.model.record()
        assert record is not None
        record = decode(ModelRecord, json.loads(json.dumps(plain(record))))
        # Whoever waits is told by the end of the connection.
        self.ended.update(set(self.requests) - set(self.ended))
        self.replies.update(set(self.questions) - set(self.replies))
        # The processes that take snapshots die with it, and the others that nobody takes over are killed.
        self.pinning, self.unpinned = [], []
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
    def it_is_told_to_stop(self, really: bool) -> None:
        if really:
            self.stopped = True
            self.model.drain(self.now)

    # --- what always holds ----------------------------------------------------------------------------------------

    @invariant()
    def there_are_never_too_many_copies(self) -> None:
        for deployment in self.model.deployments:
            name = deployment.placement.name
            if len(deployment.generations) < 2:
                self.updated.discard(name)
            here = [each for each in self.living() if each.generation.device == name and each.weights]
            generations = {each.generation.label for each in here}
            most = 1 if self.policy is ReplacementPolicy.REPLACE and name not in self.updated else 2
            assert len(generations) <= most, f"{generations} have weights"

    @invariant()
    def what_there_is_was_promised(self) -> None:
        for name, device in self.devices.items():
            # One that has been told to go is still there for a moment when the one in its place starts.
            here = [each for each in self.living() if each.generation.device == name and not self.leaves(each)]
            assert len(here) <= device.process_count <= (device.max_processes or 0)
            assert self.copies(here) <= sum(need.copy_count for need in device.reserved.values())
            if self.knows_each:
                assert self.allocated(here) <= device.reserved_bytes
            if not self.tells_memory and device.capacity_bytes is not None:
                assert device.reserved_bytes <= device.capacity_bytes

    @invariant()
    def the_loop_will_look_when_something_is_due(self) -> None:
        assert self.model.timer.due_at <= self.next_event_at()

    @invariant()
    def nobody_waits_who_could_run(self) -> None:
        assert not list(self.model.dispatcher._scheduler.assign(self.now))

    @invariant()
    def children_are_the_processes(self) -> None:
        known = [name for each in self.model.deployments for one in each.generations for name in one.children]
        assert sorted(known) == sorted(self.processes)

    @invariant()
    def one_generation_of_a_device_takes_requests(self) -> None:
        enlisted = set(self.model.dispatcher.results.latencies_by_process) & {
            name
            for each in self.model.deployments
            if each.serving is not None
            for name, child in each.serving.children.items()
            if child.state is ChildState.READY and name in each.serving.processes.serving
        }
        takes = set(self.model.dispatcher._scheduler.slots.accepting)
        assert takes == enlisted, f"{takes} take requests, {enlisted} should"

    @invariant()
    def a_request_ends_once(self) -> None:
        assert all(count == 1 for count in self.ended.values())
        assert set(self.ended) <= set(self.requests)
        assert all(count == 1 for count in self.replies.values())
        assert set(self.replies) <= set(self.questions)

    @invariant()
    def a_failure_has_a_cause(self) -> None:
        assert all(each.cause for each in self.model.deployments if each.has_failed)

    # --- the end --------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Without further faults everybody who asked is told, and every device serves, or says why not."""
        if not hasattr(self, "model"):
            return
        for _ in range(40):
            self.lets_all_finish()
            if self.due() == FOREVER:
                break
            self.passes_time_to(max(self.now, self.due()))
        self.lets_all_finish()
        for deployment in self.model.deployments:
            self.is_well(deployment)
        self.passes_time_to(self.now + 2e9)
        self.lets_all_finish()
        assert sorted(self.ended) == sorted(self.requests)
        assert dict(self.replies) == dict(self.questions)
        self.model.drain(self.now)
        self.stopped = True
        self.lets_all_finish()
        assert not self.processes
        assert not any(device.reserved for device in self.devices.values())
        assert self.model.timer.due_at == FOREVER

    def lets_all_finish(self) -> None:
        for _ in range(400):
            for source in list(self.pinning):
                self.ends_pinning(source)
            for source in list(self.unpinned):
                self.unpinned.remove(source)
                self.model.on_snapshot_failed(source, "killed by SIGKILL", self.now)
            busy = [each for each in self.processes.values() if self.has_something_to_do(each)]
            if not busy and not self.pinning:
                return
            for process in busy:
                if process.name in self.processes:
                    self.obeys(process)
                self.check_invariants_now()
        raise AssertionError("it never comes to rest")

    def has_something_to_do(self, process: Process) -> bool:
        return bool(process.dead or process.killed or process.orders or process.returns or not process.hello_taken)

    def check_invariants_now(self) -> None:
        self.there_are_never_too_many_copies()
        self.what_there_is_was_promised()
        self.one_generation_of_a_device_takes_requests()

    def is_well(self, deployment: Deployment) -> None:
        promised = {each.label for each in deployment.generations if each.children}
        assert isinstance(deployment.placement, DeviceBudget)
        assert set(deployment.placement.reserved) == promised
        if self.stopped:
            assert not deployment.generations
        elif deployment.serving is None:
            assert deployment.has_failed or deployment.is_busy  # what has served is tried again and again
            assert deployment.cause
        elif deployment.serving.should_be_replaced:
            assert deployment.is_busy  # it is tried again and again
            assert deployment.cause
        else:
            serving = deployment.serving
            places = Counter(serving.children[name].device for name in serving.processes.serving)
            wanted = dict.fromkeys(self.config.devices_by_weight_copy[deployment.placement.name], self.workers)
            assert places == wanted or serving.attach_control.is_attach_closed
            assert not deployment.is_busy


TestModelWorld = ModelWorld.TestCase
TestModelWorld.settings = settings(max_examples=examples(250), stateful_step_count=60, deadline=None, print_blob=True)
