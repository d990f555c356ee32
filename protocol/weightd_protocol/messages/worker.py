"""Messages between the daemon and its child processes.

They travel over a private socket of the daemon's user, but are decoded as strictly as messages of clients: a crashing
engine may send anything before it dies.
"""

from __future__ import annotations

from dataclasses import field
from typing import Dict, Optional, Tuple, Type, Union

from weightd_protocol import limits
from weightd_protocol.errors import ERRORS
from weightd_protocol.frozen import dataclass
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSignature
from weightd_protocol.messages.ranks import JoinedGroup, JoinGroup, PredictDone, RankSlice, RunSelfTest, SelfTestDone
from weightd_protocol.messages.regions import POSITIONS, MappedRegions
from weightd_protocol.messages.worker_common import (
    BATCH_SIZES,
    BYTES,
    DIGEST,
    ORIGINS,
    ROW_COUNT,
    SELFTEST_CASE,
    SELFTEST_CASES,
    DeviceMemory,
    RowSupport,
    SelfTestCase,
    SelfTestCases,
    SharingTraits,
)
from weightd_protocol.schema import (
    boolean,
    in_own_frame,
    integer,
    list_of,
    mapping,
    omit_default,
    one_of,
    record,
    text,
)

CHILD_PROTOCOL_VERSION = 3
"""Version of this protocol. A daemon takes over the children of its predecessor only if both have the same version."""

_REQUEST = integer(0, limits.MAX_COUNT)
_STEP = integer(0, limits.MAX_COUNT)
_PRINCIPAL_ID = integer(0, limits.MAX_COUNT)
_GEARS = list_of(list_of(integer(1, limits.MAX_GEAR_SIZE), limits.MAX_GEAR_DIMS), limits.MAX_GEARS)
_FAILED_CASES = list_of(SELFTEST_CASE, limits.MAX_SELFTEST_UNFIT_CASES)
_ARGUMENTS = list_of(text(limits.MAX_ARGUMENT_BYTES, empty=True), limits.MAX_ARGUMENTS)


@dataclass(frozen=True)
class Hello:
    """child → daemon: the process is running; its identity, versions and capabilities.

    `engine_pid` is the engine's number for this process, which on Ascend differs from `os.getpid()` in a container.
    `sha256` is the digest of the model that this process would load (`weightd_common.modelfiles.files`), or of a rank's
    slice. `origin` tells how the process was created, one of `ORIGINS`; `origin_note` gives the reason why it was not
    forked, and is "" otherwise. The process can run `concurrency` predicts at once. `slice` describes the slice of a
    rank; None for other processes. `versions` are the versions of `weightd`, `python`, `numpy` and the engine;
    `versions["weightd"]` must be the daemon's. `sharing_traits` describes the engine's way of sharing weights.
    """

    engine_pid: str = field(metadata=text(limits.MAX_PID_BYTES))
    sha256: str = field(metadata=text(limits.MAX_DIGEST_BYTES))
    versions: Dict[str, str] = field(metadata=mapping(text(limits.MAX_NAME_BYTES, empty=True), limits.MAX_VERSIONS))
    sharing_traits: SharingTraits = field(metadata=record(SharingTraits))
    origin: str = field(default="spawned", metadata=one_of(ORIGINS))
    origin_note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    concurrency: int = field(default=1, metadata=integer(1, limits.MAX_CONCURRENCY))
    slice: Optional[RankSlice] = field(default=None, metadata=record(RankSlice))


@dataclass(frozen=True)
class Fork:
    """daemon → fork server or template: fork a process with these arguments.

    `arguments` are the arguments of ``python -m weightd_worker`` except `--parent`, which is the parent of the forking
    process. The new process connects with `name` and writes to the file `log`.
    """

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    arguments: Tuple[str, ...] = field(metadata=_ARGUMENTS)
    log: str = field(metadata=text(limits.MAX_PATH_BYTES))


@dataclass(frozen=True)
class Forked:
    """fork server or template → daemon: the process was forked and starts now, or forking failed with `error`."""

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    pid: int = field(default=0, metadata=integer(0, limits.MAX_PID))
    """Pid of the new process; 0 if there is an `error`."""
    error: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))


@dataclass(frozen=True)
class Reconnected:
    """child → daemon: reconnected after a lost connection. The present daemon may continue to use the process.

    `step` is the step of the last `Predict` that a rank has run, 0 before the first.
    """

    step: int = field(default=0, metadata=omit_default(_STEP))


@dataclass(frozen=True)
class Build:
    """daemon → holder: build the model and share its weights with these processes.

    With `search_selftest`, the holder searches for a self-test: `selftest_cases` worked before and are tried first,
    `failed_cases` failed and are skipped. Without it, `selftest_cases` are configured and must work; without cases, the
    model has no self-test unless the process was given a sample. `max_rows` is the largest number of rows in a predict
    of several requests; 1: requests are not batched, and rows are not tested. `allowed_batch_sizes` are the only
    numbers of rows of a predict; empty for any. `exact` tells whether batched results must equal single ones exactly.
    """

    engine_pids: Tuple[str, ...] = field(metadata=list_of(text(limits.MAX_PID_BYTES), limits.MAX_PIDS))
    """`Hello.engine_pid` of each process that will attach."""
    search_selftest: bool = field(default=True, metadata=boolean())
    selftest_cases: SelfTestCases = field(default=(), metadata=SELFTEST_CASES)
    failed_cases: SelfTestCases = field(default=(), metadata=_FAILED_CASES)
    max_rows: int = field(default=1, metadata=ROW_COUNT)
    allowed_batch_sizes: Tuple[int, ...] = field(default=(), metadata=BATCH_SIZES)
    exact: bool = field(default=True, metadata=boolean())


@dataclass(frozen=True)
class AnnounceSelfTest:
    """holder → daemon: about to run the self-test on `cases`, which may crash the process.

    `failed_cases` are known not to work. The holder waits for `ContinueSelfTest`, so that the daemon knows on which
    inputs it crashed. If `cases` is empty, the search has ended.
    """

    cases: SelfTestCases = field(metadata=SELFTEST_CASES)
    failed_cases: SelfTestCases = field(metadata=_FAILED_CASES)


@dataclass(frozen=True)
class ContinueSelfTest:
    """daemon → holder: the cases are recorded; continue."""


@dataclass(frozen=True)
class Built:
    """holder → daemon: the model is built and its weights are exported.

    `handle` is the handle to which workers attach, "" if nothing is shared. In that case `note` gives the reason, and
    `has_sharing_failed` tells whether an attempt to share failed. If `is_template`, workers are forked from this holder
    with everything it has built. `selftest_cases` are the inputs of the self-test, empty for a model without a
    self-test. `selftest_digest` is the digest of its answers, "" for a model that does not repeat its answers.
    `selftest_note` tells why there is no self-test or what limits its value.
    """

    handle: str = field(metadata=text(limits.MAX_PATH_BYTES, empty=True))
    inputs: Tuple[TensorSignature, ...] = field(metadata=list_of(record(TensorSignature), limits.MAX_TENSORS))
    outputs: Tuple[TensorSignature, ...] = field(metadata=list_of(record(TensorSignature), limits.MAX_TENSORS))
    selftest_cases: SelfTestCases = field(metadata=SELFTEST_CASES)
    selftest_digest: str = field(metadata=DIGEST)
    shared_bytes: int = field(metadata=BYTES)
    """Bytes of the model that the holder shares."""
    note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    device: Optional[DeviceMemory] = field(default=None, metadata=record(DeviceMemory))
    """The card's memory after the build; None on the CPU."""
    gears: Tuple[Tuple[int, ...], ...] = field(default=(), metadata=_GEARS)
    """The only sizes of the free dimensions of `inputs`, in their order; empty if all are allowed or unknown."""
    selftest_note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    has_sharing_failed: bool = field(default=False, metadata=boolean())
    is_template: bool = field(default=False, metadata=boolean())
    row_support: Optional[RowSupport] = field(default=None, metadata=record(RowSupport))
    """None if `Build.max_rows` was 1."""
    rebuilds_per_shape: bool = field(default=False, metadata=boolean())
    """Whether the engine has to build the model again at each change of shape, because its answers depend on the shapes
    that it has computed before."""
    first_shapes: Optional[SelfTestCase] = field(default=None, metadata=SELFTEST_CASE)
    """The shape of each input that every worker computes first: the largest that it computes without another build.
    None if the order of shapes does not matter."""


@dataclass(frozen=True)
class AllowAttach:
    """daemon → holder: allow these processes to attach, although they did not exist at the build."""

    engine_pids: Tuple[str, ...] = field(metadata=list_of(text(limits.MAX_PID_BYTES), limits.MAX_PIDS))


@dataclass(frozen=True)
class AttachAllowed:
    """holder → daemon: the processes may attach, or `error` is the reason why the library does not allow it."""

    error: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))


@dataclass(frozen=True)
class Attach:
    """daemon → worker: build the model on the weights behind `handle` ("" for a private copy), then run the self-test.

    `max_rows`, `allowed_batch_sizes` and `exact` are as in `Build`; the other fields are as in `Built`.
    """

    handle: str = field(metadata=text(limits.MAX_PATH_BYTES, empty=True))
    selftest_cases: SelfTestCases = field(metadata=SELFTEST_CASES)
    max_rows: int = field(default=1, metadata=ROW_COUNT)
    allowed_batch_sizes: Tuple[int, ...] = field(default=(), metadata=BATCH_SIZES)
    exact: bool = field(default=True, metadata=boolean())
    row_support: Optional[RowSupport] = field(default=None, metadata=record(RowSupport))
    rebuilds_per_shape: bool = field(default=False, metadata=boolean())
    first_shapes: Optional[SelfTestCase] = field(default=None, metadata=SELFTEST_CASE)
    selftest_digest: str = field(default="", metadata=DIGEST)


@dataclass(frozen=True)
class Attached:
    """worker → daemon: the model is built. `selftest_digest` is as in `Built`; `note` tells why nothing is shared."""

    selftest_digest: str = field(metadata=DIGEST)
    shared_bytes: int = field(metadata=BYTES)
    note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    device: Optional[DeviceMemory] = field(default=None, metadata=record(DeviceMemory))
    """The card's memory after the build; None on the CPU."""


@dataclass(frozen=True)
class ProcessFailed:
    """child → daemon: build or attach failed for `reason`; the process exits.

    `is_out_of_memory`: the card has no memory or no room for this process; the card may free some with a delay after
    another process has exited. `is_transient`: the cause may disappear by itself, like a full disk.
    """

    reason: str = field(metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    is_out_of_memory: bool = field(default=False, metadata=boolean())
    is_transient: bool = field(default=False, metadata=boolean())


@dataclass(frozen=True)
class Predict:
    """daemon → worker: run the model on the tensors that follow.

    `step` counts the predicts of a rank group from 1; each item of a `BeginBatch` counts. It is 0 for a process that is
    not a rank. A rank that misses a step or receives one twice sends `ProcessFailed`. `model_index` is the model's
    index in a model group.
    """

    request: int = field(metadata=_REQUEST)
    """Number that the daemon assigns to the request and never uses twice."""
    description: RequestDescription = field(metadata=in_own_frame(RequestDescription))
    """Description of the tensors as the client sent it, byte for byte."""
    regions: Optional[MappedRegions] = field(default=None, metadata=record(MappedRegions))
    """The tensors in mapped regions; None if all tensors have frames."""
    step: int = field(default=0, metadata=omit_default(_STEP))
    model_index: int = field(default=0, metadata=omit_default(integer(0, limits.MAX_GROUP_MODELS - 1)))

    @property
    def shared_positions(self) -> Tuple[int, ...]:
        """The positions of the tensors without a frame."""
        return () if self.regions is None else tuple([each.tensor_index for each in self.regions.inputs])


@dataclass(frozen=True)
class PredictResult:
    """worker → daemon: the outputs of a `Predict`."""

    request: int = field(metadata=_REQUEST)
    description: ResponseDescription = field(metadata=in_own_frame(ResponseDescription))
    shared_outputs: Optional[Tuple[int, ...]] = field(default=None, metadata=POSITIONS)
    """Positions of the outputs that the worker has written to mapped regions. They have no frame."""

    @property
    def shared_positions(self) -> Tuple[int, ...]:
        """The positions of the tensors without a frame."""
        return self.shared_outputs or ()


@dataclass(frozen=True)
class PredictFailed:
    """worker → daemon: the `Predict` failed with `code` and `error`, which the client receives.

    `is_exiting`: the failure may have corrupted the model, so the process exits and accepts no further request. Without
    it, a rank has rejected the request before it ran anything.
    """

    request: int = field(metadata=_REQUEST)
    code: str = field(metadata=one_of(ERRORS))
    error: str = field(metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    is_exiting: bool = field(metadata=boolean())


@dataclass(frozen=True)
class BeginBatch:
    """daemon → worker: run the next `items` messages `Predict` as one batch.

    They differ only in the first dimension of their inputs. Each is answered, or can be cancelled before the batch
    starts, as if it had been sent alone. If `rows` exceeds the rows of the batch, the worker repeats the last row up to
    this number, because the model supports no other; 0 means no padding. `principal_ids` has a number for the principal
    of each predict, which is the same in every daemon. It is empty if batched results are not compared with single
    results.
    """

    items: int = field(metadata=integer(1, limits.MAX_BATCH_ITEMS))
    rows: int = field(default=0, metadata=integer(0, limits.MAX_ROWS))
    principal_ids: Tuple[int, ...] = field(
        default=(), metadata=omit_default(list_of(_PRINCIPAL_ID, limits.MAX_BATCH_ITEMS))
    )


@dataclass(frozen=True)
class BatchMismatch:
    """worker → daemon: batched results differed from single results, as described in `note`.

    From now on, this worker runs the requests of these `principal_ids` one by one if they are batched with requests of
    others. If empty, this holds for all requests.
    """

    note: str = field(metadata=text(limits.MAX_TEXT_BYTES))
    principal_ids: Tuple[int, ...] = field(
        default=(), metadata=omit_default(list_of(_PRINCIPAL_ID, limits.MAX_TENANTS))
    )


@dataclass(frozen=True)
class CancelPredict:
    """daemon → worker: the result of this `Predict` is no longer needed. Do not run it if it has not started."""

    request: int = field(metadata=_REQUEST)


@dataclass(frozen=True)
class PredictCancelled:
    """worker → daemon: the `Predict` was cancelled in time and not run."""

    request: int = field(metadata=_REQUEST)


@dataclass(frozen=True)
class MapRegion:
    """daemon → worker: map the region whose descriptor is attached. `region` is its number, never used again."""

    region: int = field(metadata=_REQUEST)


@dataclass(frozen=True)
class UnmapRegion:
    """daemon → worker: unmap a region. No further predict uses it."""

    region: int = field(metadata=_REQUEST)


@dataclass(frozen=True)
class Ping:
    """daemon → worker: reply with `Pong`; with `run_selftest`, run the self-test first."""

    run_selftest: bool = field(metadata=boolean())


@dataclass(frozen=True)
class Pong:
    """worker → daemon: the reply to a `Ping`.

    `selftest_digest` is the digest of the self-test's current answers, "" if it was not requested.
    """

    selftest_digest: str = field(default="", metadata=DIGEST)


@dataclass(frozen=True)
class TrimStore:
    """daemon → child: no attach is pending; pages of the page store that no process maps may leave memory."""


@dataclass(frozen=True)
class Stop:
    """daemon → child: finish the current work and exit."""


ChildMessage = Union[
    Hello,
    Forked,
    Reconnected,
    AnnounceSelfTest,
    Built,
    AttachAllowed,
    Attached,
    JoinedGroup,
    SelfTestDone,
    ProcessFailed,
    PredictResult,
    PredictFailed,
    PredictDone,
    PredictCancelled,
    BatchMismatch,
    Pong,
]
ChildOrder = Union[
    Fork,
    Build,
    ContinueSelfTest,
    AllowAttach,
    Attach,
    JoinGroup,
    RunSelfTest,
    BeginBatch,
    Predict,
    CancelPredict,
    MapRegion,
    UnmapRegion,
    Ping,
    TrimStore,
    Stop,
]

FROM_CHILD: Dict[str, Type[ChildMessage]] = {
    "hello": Hello,
    "forked": Forked,
    "reconnected": Reconnected,
    "announce_selftest": AnnounceSelfTest,
    "built": Built,
    "attach_allowed": AttachAllowed,
    "attached": Attached,
    "joined_group": JoinedGroup,
    "selftest_done": SelfTestDone,
    "process_failed": ProcessFailed,
    "predict_result": PredictResult,
    "predict_failed": PredictFailed,
    "predict_done": PredictDone,
    "predict_cancelled": PredictCancelled,
    "batch_mismatch": BatchMismatch,
    "pong": Pong,
}
TO_CHILD: Dict[str, Type[ChildOrder]] = {
    "fork": Fork,
    "build": Build,
    "continue_selftest": ContinueSelfTest,
    "allow_attach": AllowAttach,
    "attach": Attach,
    "join_group": JoinGroup,
    "run_selftest": RunSelfTest,
    "begin_batch": BeginBatch,
    "predict": Predict,
    "cancel_predict": CancelPredict,
    "map_region": MapRegion,
    "unmap_region": UnmapRegion,
    "ping": Ping,
    "trim_store": TrimStore,
    "stop": Stop,
}
