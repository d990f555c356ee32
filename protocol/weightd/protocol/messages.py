"""The messages between a client and the daemon.

Field names are those of the Open Inference Protocol v2. Tensor bytes are not in these messages: they are
the frames that follow the header, one for each entry of `inputs` or `outputs`, in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Optional, Tuple, Type, Union

from weightd.protocol import limits
from weightd.protocol.datatypes import ITEM_BYTES
from weightd.protocol.errors import ERRORS
from weightd.protocol.schema import boolean, integer, many, nullable, number, one_of, record, text

_COUNT = integer(0, limits.MAX_COUNT)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a request or an answer: its bytes are in the frame of the same position.

    `shape` is the size of each dimension; [] is a scalar. The frame holds the elements in C order,
    little-endian, without padding: its length is the product of the dimensions times the element's size.
    """

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    datatype: str = field(metadata=one_of(ITEM_BYTES))
    shape: Tuple[int, ...] = field(metadata=many(integer(0, limits.MAX_DIM), limits.MAX_RANK))

    @property
    def nbytes(self) -> int:
        """The length of the tensor's frame in bytes."""
        size = ITEM_BYTES[self.datatype]
        for dim in self.shape:
            size *= dim
        return size


@dataclass(frozen=True)
class TensorSignature:
    """One input or output of a model. A dimension of -1 is free: each request chooses it.

    A shape of None is of any rank: each request chooses that, too. One of [] is a scalar.
    """

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    datatype: str = field(metadata=one_of(ITEM_BYTES))
    shape: Optional[Tuple[int, ...]] = field(metadata=nullable(many(integer(-1, limits.MAX_DIM), limits.MAX_RANK)))

    @property
    def form(self) -> str:
        """The shape, for people."""
        return "of any rank" if self.shape is None else str(list(self.shape))


@dataclass(frozen=True)
class Parameters:
    """What a request asks for beside its tensors."""

    timeout: Optional[int] = field(default=None, metadata=integer(1, limits.MAX_TIMEOUT_US))
    """Microseconds until the caller stops waiting; the daemon's default where it is absent."""


NO_PARAMETERS = Parameters()


@dataclass(frozen=True)
class Infer:
    """client → daemon: run the model on the tensors of `inputs`."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    inputs: Tuple[TensorSpec, ...] = field(metadata=many(record(TensorSpec), limits.MAX_TENSORS))
    parameters: Parameters = field(default=NO_PARAMETERS, metadata=record(Parameters))

    @property
    def tensors(self) -> Tuple[TensorSpec, ...]:
        """The tensors whose bytes follow the header."""
        return self.inputs


@dataclass(frozen=True)
class InferResponse:
    """daemon → client: what the model answered."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    outputs: Tuple[TensorSpec, ...] = field(metadata=many(record(TensorSpec), limits.MAX_TENSORS))

    @property
    def tensors(self) -> Tuple[TensorSpec, ...]:
        """The tensors whose bytes follow the header."""
        return self.outputs


@dataclass(frozen=True)
class Error:
    """daemon → client: the request with this id ended in an error.

    `id` is empty when the request was so broken that its id could not be read.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES, empty=True))
    code: str = field(metadata=one_of(ERRORS))
    error: str = field(metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    retry_after: Optional[int] = field(default=None, metadata=integer(0, limits.MAX_TIMEOUT_US))
    """Microseconds after which the same request may succeed; absent where nothing is known of that."""


@dataclass(frozen=True)
class Cancel:
    """client → daemon: the request with this id is not wanted any more.

    If it has not ended, it ends in CANCELLED now. This message itself has no answer.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))


@dataclass(frozen=True)
class ServerReady:
    """client → daemon: is every model ready?"""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))


@dataclass(frozen=True)
class ModelReady:
    """client → daemon: is this model ready?"""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))


@dataclass(frozen=True)
class ReadyResponse:
    """daemon → client: whether a worker of the model, or of each model, has answered within the watchdog's period.

    `reason` says why not; "" where it is ready.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    ready: bool = field(metadata=boolean())
    reason: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))


@dataclass(frozen=True)
class ServerMetadata:
    """client → daemon: who answers here?"""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))


@dataclass(frozen=True)
class ServerMetadataResponse:
    """daemon → client: name and version of the server, and the names of its models."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    version: str = field(metadata=text(limits.MAX_NAME_BYTES))
    models: Tuple[str, ...] = field(metadata=many(text(limits.MAX_NAME_BYTES), limits.MAX_MODELS))


@dataclass(frozen=True)
class ModelMetadata:
    """client → daemon: what does the model take and give?"""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))


@dataclass(frozen=True)
class ModelMetadataResponse:
    """daemon → client: the model's inputs and outputs; `platform` is its engine."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    platform: str = field(metadata=text(limits.MAX_NAME_BYTES))
    inputs: Tuple[TensorSignature, ...] = field(metadata=many(record(TensorSignature), limits.MAX_TENSORS))
    outputs: Tuple[TensorSignature, ...] = field(metadata=many(record(TensorSignature), limits.MAX_TENSORS))


@dataclass(frozen=True)
class Status:
    """client → daemon: what are you doing?"""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))


@dataclass(frozen=True)
class Update:
    """client → daemon: load another model, or other weights, beside what serves, and let it take over.

    Paths are the daemon's. `path` is "" to keep the model's file, `weights` is "" to keep the weights that are in it.
    `rollback`: go back to what served before the last update; paths are then "". Only the daemon's user, and root, may.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    path: str = field(default="", metadata=text(limits.MAX_PATH_BYTES, empty=True))
    weights: str = field(default="", metadata=text(limits.MAX_PATH_BYTES, empty=True))
    rollback: bool = field(default=False, metadata=boolean())


@dataclass(frozen=True)
class UpdateResponse:
    """daemon → client: the generations with these numbers have taken over, one on each device.

    They serve `path`, with `weights` over those in it or "". `configured` is the file that the configuration names: an
    update does not change it, and a daemon that has to load the model anew loads that.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    generations: Tuple[int, ...] = field(metadata=many(_COUNT, limits.MAX_GENERATIONS))
    path: str = field(metadata=text(limits.MAX_PATH_BYTES))
    weights: str = field(metadata=text(limits.MAX_PATH_BYTES, empty=True))
    configured: str = field(metadata=text(limits.MAX_PATH_BYTES))


@dataclass(frozen=True)
class Reload:
    """client → daemon: read the configuration file again, and serve what it says now.

    Only the daemon's user, and root, may.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))


@dataclass(frozen=True)
class ReloadResponse:
    """daemon → client: the file is good and in force; these models load, roll to what it says now, or drain."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    added: Tuple[str, ...] = field(metadata=many(text(limits.MAX_MODEL_NAME_BYTES), limits.MAX_MODELS))
    changed: Tuple[str, ...] = field(metadata=many(text(limits.MAX_MODEL_NAME_BYTES), limits.MAX_MODELS))
    removed: Tuple[str, ...] = field(metadata=many(text(limits.MAX_MODEL_NAME_BYTES), limits.MAX_MODELS))


@dataclass(frozen=True)
class ProcessStatus:
    """One process of a generation. Memory in bytes, latency in microseconds."""

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    role: str = field(metadata=one_of(["holder", "worker", "spare"]))
    state: str = field(metadata=text(limits.MAX_NAME_BYTES))
    pid: int = field(metadata=_COUNT)
    served: int = field(metadata=_COUNT)
    in_flight: int = field(metadata=_COUNT)
    p50_us: Optional[float] = field(default=None, metadata=number())
    p99_us: Optional[float] = field(default=None, metadata=number())
    pss_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    shared_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))


@dataclass(frozen=True)
class GenerationStatus:
    """One weight copy and the processes around it. Memory in bytes.

    `saved_bytes` is what the workers share less what the one copy takes: what would be needed in addition
    if each worker held its own. Both are absent where the kernel does not tell. `note` is what the holder said of the
    model: why nothing is shared. `canary` is what its known answer is an answer to, or why it has none.
    """

    number: int = field(metadata=_COUNT)
    device: str = field(metadata=text(limits.MAX_NAME_BYTES))
    state: str = field(metadata=text(limits.MAX_NAME_BYTES))
    progress: str = field(metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    cause: str = field(metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    sha256: str = field(metadata=text(limits.MAX_DIGEST_BYTES, empty=True))
    processes: Tuple[ProcessStatus, ...] = field(metadata=many(record(ProcessStatus), limits.MAX_PROCESSES))
    copy_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    saved_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    canary: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))


@dataclass(frozen=True)
class ModelStatus:
    """One model of the configuration. Latency in microseconds, from arrival to answer, in the daemon.

    `path` and `weights` are what serves, or is to: after an update not what the configuration names.
    `deaths` are processes that ended without being asked to; `quarantined` are contents of requests that are refused
    because workers died of them; `note` is what went wrong last with a change of the model.
    """

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    engine: str = field(metadata=text(limits.MAX_NAME_BYTES))
    path: str = field(metadata=text(limits.MAX_PATH_BYTES))
    state: str = field(metadata=text(limits.MAX_NAME_BYTES))
    queued: int = field(metadata=_COUNT)
    served: int = field(metadata=_COUNT)
    failed: int = field(metadata=_COUNT)
    generations: Tuple[GenerationStatus, ...] = field(metadata=many(record(GenerationStatus), limits.MAX_GENERATIONS))
    p50_us: Optional[float] = field(default=None, metadata=number())
    p99_us: Optional[float] = field(default=None, metadata=number())
    deaths: int = field(default=0, metadata=_COUNT)
    quarantined: int = field(default=0, metadata=_COUNT)
    note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    weights: str = field(default="", metadata=text(limits.MAX_PATH_BYTES, empty=True))


@dataclass(frozen=True)
class DeviceStatus:
    """What weightd has of a card. Memory in bytes.

    `capacity_bytes` is what weightd may use, absent where that is not known; `weights_bytes` is each copy of weights
    once; `process_bytes` is what the processes take beside them; `saved_bytes` is what the processes would take in
    addition if each held its own weights. They are sums of what models need; `free_bytes` is what the card itself said
    last, absent where it has said nothing.
    """

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    processes: int = field(metadata=_COUNT)
    max_processes: int = field(metadata=_COUNT)
    weights_bytes: int = field(metadata=_COUNT)
    process_bytes: int = field(metadata=_COUNT)
    saved_bytes: int = field(metadata=_COUNT)
    capacity_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    free_bytes: Optional[int] = field(default=None, metadata=_COUNT)


@dataclass(frozen=True)
class MemoryLimit:
    """What the control group that the daemon lives in takes of memory, and what it may take. In bytes.

    `limit_bytes` and `high_bytes` are the smallest of the group and those above it; beyond the first the kernel kills,
    beyond the second it slows down and reclaims. `usage_bytes` contains cached files. `oom_kills` are the processes
    that it has killed; `pressure_percent` is the share of the last ten seconds in which some process waited for memory.
    What is absent is not limited, or not known.
    """

    usage_bytes: int = field(metadata=_COUNT)
    limit_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    high_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    oom_kills: Optional[int] = field(default=None, metadata=_COUNT)
    pressure_percent: Optional[float] = field(default=None, metadata=number())


@dataclass(frozen=True)
class StatusResponse:
    """daemon → client: the daemon, its models, their processes and their cards. Memory in bytes (PSS).

    `note` says why what is in force is not what the configuration file says. `dropped` are answers that could not be
    sent because their client was gone or did not read. `memory` is absent where the control group is not known.
    `held_bytes` is what the daemon keeps for clients, requests and answers that are not read, `max_memory_bytes` the
    bound for it.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    version: str = field(metadata=text(limits.MAX_NAME_BYTES))
    state: str = field(metadata=text(limits.MAX_NAME_BYTES))
    pid: int = field(metadata=_COUNT)
    uptime_s: float = field(metadata=number())
    pss_bytes: int = field(metadata=_COUNT)
    models: Tuple[ModelStatus, ...] = field(metadata=many(record(ModelStatus), limits.MAX_MODELS))
    devices: Tuple[DeviceStatus, ...] = field(default=(), metadata=many(record(DeviceStatus), limits.MAX_DEVICES))
    dropped: int = field(default=0, metadata=_COUNT)
    memory: Optional[MemoryLimit] = field(default=None, metadata=record(MemoryLimit))
    note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    held_bytes: int = field(default=0, metadata=_COUNT)
    max_memory_bytes: int = field(default=0, metadata=_COUNT)


ClientMessage = Union[Infer, Cancel, ServerReady, ModelReady, ServerMetadata, ModelMetadata, Status, Update, Reload]
DaemonMessage = Union[
    InferResponse,
    Error,
    ReadyResponse,
    ServerMetadataResponse,
    ModelMetadataResponse,
    StatusResponse,
    UpdateResponse,
    ReloadResponse,
]

FROM_CLIENT: Dict[str, Type[ClientMessage]] = {
    "infer": Infer,
    "cancel": Cancel,
    "server_ready": ServerReady,
    "model_ready": ModelReady,
    "server_metadata": ServerMetadata,
    "model_metadata": ModelMetadata,
    "status": Status,
    "update": Update,
    "reload": Reload,
}
TO_CLIENT: Dict[str, Type[DaemonMessage]] = {
    "infer_response": InferResponse,
    "error": Error,
    "ready_response": ReadyResponse,
    "server_metadata_response": ServerMetadataResponse,
    "model_metadata_response": ModelMetadataResponse,
    "status_response": StatusResponse,
    "update_response": UpdateResponse,
    "reload_response": ReloadResponse,
}
