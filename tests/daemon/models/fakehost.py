"""Fake process manager and responder that record all calls, and a test harness for a model on top of them."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from testkit.model_factory import model_factory
from weightd_common.safe_open import OPERATOR
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.persisted import SealRecord
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.models.versions import IdSequence
from weightd_daemon.platform.exit_cause import ExitCause, ExitInitiator
from weightd_daemon.processes.events import ProcessEventHandler, Snapshot, SnapshotEventHandler
from weightd_daemon.processes.spec import WorkerProgram
from weightd_daemon.scheduling.dispatcher import SharedScheduling
from weightd_daemon.scheduling.request import UNKNOWN_ORIGIN, ClientOrigin, Request
from weightd_daemon.scheduling.tensor_location import SharedRegion
from weightd_protocol.errors import RequestError
from weightd_protocol.messages.control import ModelMetadataResponse, UpdateResponse
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSignature, TensorSpec
from weightd_protocol.messages.worker import (
    Attached,
    Built,
    ChildMessage,
    ChildOrder,
    Hello,
    Predict,
    PredictResult,
)
from weightd_protocol.messages.worker_common import SharingTraits
from weightd_protocol.version import VERSION

SHA = "5" * 64
SEAL = SealRecord(8192, 10**18)
CPU = SharingTraits(pids_fixed_at_build=False, holder_must_outlive=False, attach_rewrites_weights=False)
# A card fixes the pids at the build, so only the next generation can replace a lost holder.
CARD = SharingTraits(pids_fixed_at_build=True, holder_must_outlive=True, attach_rewrites_weights=True)
X = TensorSignature("x", "FP32", (-1, 2))
Y = TensorSignature("y", "FP32", (-1, 3))
GOOD = TensorSpec("x", "FP32", (5, 2))
BAD = TensorSpec("z", "FP32", (5, 2))
OUT = TensorSpec("y", "FP32", (5, 3))
BUILT = Built("/store", (X,), (Y,), ({"x": (2,)},), "digest", 4096)
ATTACHED = Attached("digest", 4000)
HOLDER, W1, W2, W3, W4 = "digits.1.holder", "digits.1.w1", "digits.1.w2", "digits.1.w3", "digits.1.w4"

_numbers = itertools.count(1)


def request(
    spec: TensorSpec = GOOD, content: bytes = b"", *, deadline: float = 1e9, origin: ClientOrigin = UNKNOWN_ORIGIN
) -> Request:
    """Return a request with this content, by default with a unique one."""
    number = next(_numbers)
    content = content or f"content {number}".encode()
    client = origin.peer.encode() or b"client"
    return Request(
        number,
        client,
        f"id{number}",
        RequestDescription("digits", (spec,)),
        (content,),
        0.0,
        deadline,
        len(content),
        origin,
    )


class FakeHost:
    """Fake child processes and clients of models; one FakeHost can outlive several daemons of a test."""

    def __init__(self) -> None:
        self.requested_snapshots: list[ModelSource] = []
        self.expected = ""
        self.removed_snapshots: list[ModelSource] = []
        self.names: set[str] = set()
        self.spawned: list[str] = []
        self.placements: dict[str, tuple[str, str]] = {}
        self.programs: dict[str, WorkerProgram] = {}
        self.resumed: list[str] = []
        self.seals: dict[str, SealRecord] = {}
        self.damaged: set[str] = set()
        self.dead: set[str] = set()
        self.unwatchable: set[str] = set()
        self.killed: list[str] = []
        self.aborted: list[str] = []
        self.orders: list[tuple[str, ChildOrder]] = []
        self.frames: list[Any] = []
        self.answers: list[int] = []
        self.response_contents: list[tuple[Sequence[TensorSpec], Sequence[Any]]] = []
        self.refusals: list[tuple[int, str, str]] = []
        self.releases: list[int] = []
        self.memories: list[SharedRegion] = []
        self.metadata: list[tuple[bytes, ModelMetadataResponse]] = []
        self.updated: list[UpdateResponse] = []
        self.errors: list[tuple[str, str, str]] = []
        # This object stands for all parts of a ProcessManager.
        self.snapshots = self.storage = self.messenger = self

    def take_snapshot(
        self, owner: SnapshotEventHandler, model: str, config: ModelConfig, source: ModelSource, expected: str = ""
    ) -> None:
        self.requested_snapshots.append(source)
        self.expected = expected

    def remove_snapshot(self, model: str, source: ModelSource) -> None:
        self.removed_snapshots.append(source)

    def spawn(
        self,
        owner: ProcessEventHandler,
        generation: GenerationBase,
        program: WorkerProgram,
        name: str,
        role: Role,
        template: str = "",
    ) -> None:
        assert name not in self.names, "process names must be unique"
        if program.rendezvous is None and not program.members_json:
            assert (program.model, program.weights) == (f"/snapshots/{generation.source.number}", "")
        assert (role is Role.HOLDER) == name.endswith(".holder")
        self.names.add(name)
        self.placements[name] = program.device, program.cores
        self.programs[name] = program
        self.spawned.append(name)

    def resume(self, owner: ProcessEventHandler, generation: GenerationBase, seal: SealRecord | None) -> bool:
        self.resumed.append(generation.label)
        return self.seal_record(generation) == seal

    def mark_changed(self) -> None:
        pass

    def seal_record(self, generation: GenerationBase) -> SealRecord | None:
        return self.seals.get(generation.label)

    def on_exported(self, generation: GenerationBase) -> None:
        self.seals[generation.label] = SEAL

    @property
    def fingerprints(self) -> Mapping[str, object]:
        return self.seals

    def is_store_intact(self, generation: GenerationBase) -> bool:
        return generation.label not in self.damaged

    def watch_weights(self, worker: str, generation: GenerationBase) -> bool:
        return worker not in self.unwatchable

    def is_alive(self, name: str) -> bool:
        return name not in self.dead

    def kill(self, name: str, *, abort: bool = False) -> None:
        (self.aborted if abort else self.killed).append(name)

    def send_order(
        self, name: str, order: ChildOrder, frames: Sequence[Any] = (), memories: Sequence[SharedRegion] = ()
    ) -> None:
        self.orders.append((name, order))
        self.frames += frames
        self.memories += memories

    def remove_files(self, generation: GenerationBase) -> None:
        self.seals.pop(generation.label, None)

    def reply_result(self, request: Request, result: PredictResult, frames: Sequence[Any]) -> None:
        self.answers.append(request.number)
        self.response_contents.append((result.description.outputs, frames))

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        self.refusals.append((request.number, error.code, str(error)))

    def reserve_partial_result(self, request: Request, nbytes: int) -> None:
        """Accept any partial result."""

    def notify_released(self, request: Request) -> None:
        self.releases.append(request.number)

    def reply(self, client: bytes, message: ModelMetadataResponse) -> None:
        self.metadata.append((client, message))

    def reply_updated(self, client: bytes, response: UpdateResponse) -> None:
        self.updated.append(response)

    def reply_failed(self, client: bytes, request_id: str, error: RequestError) -> None:
        self.reply_error(client, request_id, error)

    def reply_error(self, client: bytes, request_id: str, error: RequestError) -> None:
        self.errors.append((request_id, error.code, str(error)))

    # --- queries of tests ---

    def orders_of(self, kind: type[ChildOrder]) -> list[tuple[str, ChildOrder]]:
        """Return the orders of this type, each with the name of its process."""
        return [each for each in self.orders if isinstance(each[1], kind)]

    def predicts(self) -> list[tuple[str, int]]:
        """Return process and request of each predict since the last call."""
        given = [(name, order.request) for name, order in self.orders if isinstance(order, Predict)]
        self.orders = [each for each in self.orders if not isinstance(each[1], Predict)]
        return given

    def refused(self) -> list[tuple[int, str]]:
        """Return request and error code of each rejected request since the last call."""
        refusals, self.refusals = self.refusals, []
        return [(number, code) for number, code, _ in refusals]


class ModelHarness:
    """A model with fake processes; the test sends their messages.

    Args:
        traits: traits of the engine.
        workers: number of workers.
        shared: state that dispatchers share.
        config: further configuration keys.
    """

    def __init__(
        self, traits: SharingTraits = CPU, workers: int = 2, shared: SharedScheduling | None = None, **config: Any
    ) -> None:
        self.host = FakeHost()
        self.now = 1000.0
        self.traits = traits
        config.setdefault("start", "spawn")
        model_config = ModelConfig(path="/models/digits.onnx", engine="onnxruntime", workers=workers, **config)
        devices = {name: DeviceBudget(name) for name in model_config.devices_by_weight_copy}
        self.model = model_factory(devices, self.host, self.host, shared).make("digits", model_config, IdSequence())
        self.model.start(self.now)

    def snapshot_taken(self) -> ModelHarness:
        """Report that the last requested snapshot exists."""
        source = self.host.requested_snapshots[-1]
        self.model.on_snapshot_taken(source, Snapshot(f"/snapshots/{source.number}", "", SHA, 100), self.now)
        return self

    def deliver(self, child: str, message: ChildMessage, frames: Sequence[Any] = ()) -> ModelHarness:
        self.model.deployments.process_events.on_message(child, message, frames, self.now)
        return self

    def processes_of(self, generation: int) -> list[str]:
        """Return the processes of a generation, its holder first."""
        return [name for name in self.host.spawned if name.startswith(f"digits.{generation}.")]

    def builds(self, generation: int = 1, built: Built = BUILT) -> ModelHarness:
        """Connect all processes of a generation, and let its holder build the model."""
        for name in self.processes_of(generation):
            self.deliver(name, Hello("1", SHA, {"weightd": VERSION}, self.traits))
        return self.deliver(f"digits.{generation}.holder", built)

    def loads(self, generation: int = 1, built: Built = BUILT) -> ModelHarness:
        """Do the same as `builds`, and let the workers attach."""
        self.builds(generation, built)
        for name in self.processes_of(generation)[1:]:
            self.deliver(name, ATTACHED)
        return self

    def serving(self) -> ModelHarness:
        self.snapshot_taken().loads()
        self.host.orders.clear()
        return self

    def exit_process(
        self, child: str, end: int = signal.SIGSEGV, by: ExitInitiator = ExitInitiator.UNKNOWN
    ) -> ModelHarness:
        self.model.deployments.process_events.on_exit(child, ExitCause(-end, initiator=by), self.now)
        return self

    def exit_all(self, generation: int) -> ModelHarness:
        """Let every process of a generation exit, workers first."""
        for name in [*self.processes_of(generation)[1:], f"digits.{generation}.holder"]:
            self.model.deployments.process_events.on_exit(name, ExitCause(0), self.now)
        return self

    def update(self, path: str = "/models/new.onnx", *, weights: str = "", rollback: bool = False) -> ModelHarness:
        """Request an update, as an operator does."""
        self.model.update(b"operator", "u", self.now, path=path, weights=weights, rollback=rollback, grant=OPERATOR)
        return self

    def rollback(self) -> ModelHarness:
        return self.update("", rollback=True)

    def updated(self, generation: int, path: str = "/models/new.onnx") -> ModelHarness:
        """Request an update, and let it succeed."""
        self.update(path).snapshot_taken().loads(generation)
        for leaving in list(next(iter(self.model.deployments)).draining):
            self.exit_all(leaving.number)
        return self

    def submit(self, *requests: Request) -> list[int]:
        for each in requests:
            each.arrived_at = self.now
            self.model.dispatcher.infer(each, self.now)
        return [each.number for each in requests]

    def submit_new(self, count: int) -> list[int]:
        """Submit requests of different contents."""
        return self.submit(*(request() for _ in range(count)))

    def answers(self, worker: str, *numbers: int) -> ModelHarness:
        for number in numbers:
            self.deliver(worker, PredictResult(number, ResponseDescription("m", (OUT,))))
        return self

    def advance(self, seconds: float) -> ModelHarness:
        self.now += seconds
        self.model.tick(self.now)
        return self
