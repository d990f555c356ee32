"""Messages between the daemon and its child processes.

Only the daemon's user can connect to the socket. Yet these messages are decoded as strictly as clients' messages,
because a crashing engine may send anything.
"""

from __future__ import annotations

from dataclasses import field
from typing import Dict, Optional, Tuple, Type, Union

from weightd_protocol import limits
from weightd_protocol.errors import ERRORS
from weightd_protocol.frozen import dataclass
from weightd_protocol.messages.channels import (
    AddChannel,
    AllowRequests,
    AnswerDropped,
    ChannelReleased,
    ReleaseChannel,
    RequestHandedOver,
    SetChannelRows,
    WatchWeights,
)
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSignature
from weightd_protocol.messages.ranks import JoinedGroup, JoinGroup, PredictDone, RankSlice, RunSelfTest, SelfTestDone
from weightd_protocol.messages.regions import POSITIONS, MappedRegions, MapRegion, UnmapRegion
from weightd_protocol.messages.worker_common import (
    BATCH_SIZES,
    BYTES,
    DIGEST,
    ORIGINS,
    ROW_COUNT,
    SELFTEST_CASE,
    SELFTEST_CASES,
    AllowAttach,
    AttachAllowed,
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

CHILD_PROTOCOL_VERSION = 4
"""Version of these messages. A daemon takes over an earlier daemon's children only if their versions are equal."""

_REQUEST = integer(0, limits.MAX_COUNT)
_STEP = integer(0, limits.MAX_COUNT)
_PRINCIPAL_ID = integer(0, limits.MAX_COUNT)
_GEARS = list_of(list_of(integer(1, limits.MAX_GEAR_SIZE), limits.MAX_GEAR_DIMS), limits.MAX_GEARS)
_FAILED_CASES = list_of(SELFTEST_CASE, limits.MAX_SELFTEST_UNFIT_CASES)
_ARGUMENTS = list_of(text(limits.MAX_ARGUMENT_BYTES, empty=True), limits.MAX_ARGUMENTS)


@dataclass(frozen=True)
class Hello:
    """child → daemon: the process is running. The message has its identity, versions and capabilities.

    `engine_pid` is the pid by which the engine knows this process; on Ascend, in a container, it differs from
    `os.getpid()`. `sha256` is the digest of the model, or of a rank's slice, that this process will load
    (`weightd_common.modelfiles.files`). `origin` tells how the process was created, and `origin_note` why it was not
    forked, "" if it was. `concurrency` is the number of predicts that it can run at once. `slice` describes a rank's
    slice; None for other processes. `versions` has the versions of `weightd` (which must be the daemon's), `python`,
    `numpy` and the engine. `sharing_traits` says how the engine shares weights.
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

    `arguments` are the arguments of ``python -m weightd_worker`` without `--parent`: the forking process adds it, with
    the pid of its parent. The new process connects to the daemon as `name` and writes its log to the file `log`.
    """

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    arguments: Tuple[str, ...] = field(metadata=_ARGUMENTS)
    log: str = field(metadata=text(limits.MAX_PATH_BYTES))


@dataclass(frozen=True)
class Forked:
    """fork server or template → daemon: the new process starts now, or the fork failed with `error`."""

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    pid: int = field(default=0, metadata=integer(0, limits.MAX_PID))
    """Pid of the new process; 0 if the fork failed."""
    error: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))


@dataclass(frozen=True)
class Reconnected:
    """child → daemon: this process has connected again after it had lost the connection, usually to a new daemon.

    `step` is the step of the last `Predict` that a rank has run; 0 before the first.
    """

    step: int = field(default=0, metadata=omit_default(_STEP))


@dataclass(frozen=True)
class Build:
    """daemon → holder: build the model and share its weights with the processes in `engine_pids`.

    With `search_selftest`, the holder searches for self-test inputs: it tries `selftest_cases` first, which worked
    before, and skips `failed_cases`. Otherwise `selftest_cases` are the configured inputs; empty for no self-test.
    `max_rows` is the maximum number of rows in a predict of several requests; with 1, requests are not batched.
    `allowed_batch_sizes` are the only numbers of rows that the model accepts; empty for any. With `exact`, batched
    results must equal single results bit for bit. If the answers have the digest `selftest_digest`, which an earlier
    holder has reported ("" if unknown), the holder runs the self-test only once.
    """

    engine_pids: Tuple[str, ...] = field(metadata=list_of(text(limits.MAX_PID_BYTES), limits.MAX_PIDS))
    """`Hello.engine_pid` of each process that will attach to the weights."""
    search_selftest: bool = field(default=True, metadata=boolean())
    selftest_cases: SelfTestCases = field(default=(), metadata=SELFTEST_CASES)
    failed_cases: SelfTestCases = field(default=(), metadata=_FAILED_CASES)
    max_rows: int = field(default=1, metadata=ROW_COUNT)
    allowed_batch_sizes: Tuple[int, ...] = field(default=(), metadata=BATCH_SIZES)
    exact: bool = field(default=True, metadata=boolean())
    selftest_digest: str = field(default="", metadata=DIGEST)


@dataclass(frozen=True)
class AnnounceSelfTest:
    """holder → daemon: the holder is about to run the self-test on `cases`, which may crash the process.

    The holder waits for `ContinueSelfTest`, so that the daemon knows the inputs that caused a crash. `failed_cases` are
    inputs that did not work. If `cases` is empty, the search has ended.
    """

    cases: SelfTestCases = field(metadata=SELFTEST_CASES)
    failed_cases: SelfTestCases = field(metadata=_FAILED_CASES)


@dataclass(frozen=True)
class ContinueSelfTest:
    """daemon → holder: the daemon has recorded the cases; continue the self-test."""


@dataclass(frozen=True)
class Built:
    """holder → daemon: the model is built and its weights are exported.

    Workers attach to `handle`. If nothing is shared, `handle` is "", `note` says why, and `has_sharing_failed` says
    whether an attempt to share failed. If `is_template`, workers are forked from this holder, with everything that it
    has built. `selftest_cases` are the inputs of the self-test; empty for a model without a self-test. `selftest_note`
    says why there is no self-test, or names the limits of the self-test. `selftest_digest` is the digest of the
    answers to the self-test, "" if the model does not repeat its answers.
    """

    handle: str = field(metadata=text(limits.MAX_PATH_BYTES, empty=True))
    inputs: Tuple[TensorSignature, ...] = field(metadata=list_of(record(TensorSignature), limits.MAX_TENSORS))
    outputs: Tuple[TensorSignature, ...] = field(metadata=list_of(record(TensorSignature), limits.MAX_TENSORS))
    selftest_cases: SelfTestCases = field(metadata=SELFTEST_CASES)
    selftest_digest: str = field(metadata=DIGEST)
    shared_bytes: int = field(metadata=BYTES)
    """Size of the part of the model that the holder shares."""
    note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    device: Optional[DeviceMemory] = field(default=None, metadata=record(DeviceMemory))
    """The card's memory after the build; None on the CPU."""
    gears: Tuple[Tuple[int, ...], ...] = field(default=(), metadata=_GEARS)
    """Gears: the only allowed sizes of the free dimensions of `inputs`, in their order. Empty: any, or unknown."""
    selftest_note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    has_sharing_failed: bool = field(default=False, metadata=boolean())
    is_template: bool = field(default=False, metadata=boolean())
    row_support: Optional[RowSupport] = field(default=None, metadata=record(RowSupport))
    """Results of the tests with several rows; None if `Build.max_rows` was 1."""
    rebuilds_per_shape: bool = field(default=False, metadata=boolean())
    """Whether each change of shapes needs a new build, because the engine's answers depend on earlier shapes."""
    first_shapes: Optional[SelfTestCase] = field(default=None, metadata=SELFTEST_CASE)
    """The input shapes that a worker must compute first; None if the order of shapes does not matter."""


@dataclass(frozen=True)
class Attach:
    """daemon → worker: build the model on the weights at `handle` ("" for a private copy), then run the self-test.

    `max_rows`, `allowed_batch_sizes` and `exact` are as in `Build`, all other fields as in `Built`.
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
    """worker → daemon: the model is built. `selftest_digest` is as in `Built`; `note` says why nothing is shared."""

    selftest_digest: str = field(metadata=DIGEST)
    shared_bytes: int = field(metadata=BYTES)
    note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    device: Optional[DeviceMemory] = field(default=None, metadata=record(DeviceMemory))
    """The card's memory after the build; None on the CPU."""


@dataclass(frozen=True)
class ProcessFailed:
    """child → daemon: build, attach or another order failed for `reason`. The process waits for `Stop` and exits.

    `is_out_of_memory`: the card has no free memory, or it cannot serve another process now. A card may free memory
    some time after another process has exited. `is_transient`: the cause may disappear by itself, like a full disk.
    """

    reason: str = field(metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    is_out_of_memory: bool = field(default=False, metadata=boolean())
    is_transient: bool = field(default=False, metadata=boolean())


@dataclass(frozen=True)
class Predict:
    """daemon → worker: run the model on the inputs in the frames that follow, and in shared memory.

    `step` is the number of the predict in its rank group, from 1; each item of a `BeginBatch` has its own number. It is
    0 for a process that is not a rank. A rank that misses a step or gets one twice sends `ProcessFailed`. `model_index`
    is the position of the model in its model group.
    """

    request: int = field(metadata=_REQUEST)
    """Number that identifies the request. The daemon gives this number to no other request."""
    description: RequestDescription = field(metadata=in_own_frame(RequestDescription))
    """Description of the tensors, in the same bytes as in the client's request."""
    regions: Optional[MappedRegions] = field(default=None, metadata=record(MappedRegions))
    """Locations of the tensors that are in shared memory; None if all tensors are in frames."""
    step: int = field(default=0, metadata=omit_default(_STEP))
    model_index: int = field(default=0, metadata=omit_default(integer(0, limits.MAX_GROUP_MODELS - 1)))

    @property
    def shared_positions(self) -> Tuple[int, ...]:
        """The positions of the inputs that are in shared memory and so have no frame."""
        return () if self.regions is None else tuple([each.tensor_index for each in self.regions.inputs])


@dataclass(frozen=True)
class PredictResult:
    """worker → daemon: the outputs of a `Predict`, in the frames that follow and in shared memory."""

    request: int = field(metadata=_REQUEST)
    description: ResponseDescription = field(metadata=in_own_frame(ResponseDescription))
    shared_outputs: Optional[Tuple[int, ...]] = field(default=None, metadata=POSITIONS)
    """Positions of the outputs that the worker has written to shared memory. They have no frame."""

    @property
    def shared_positions(self) -> Tuple[int, ...]:
        """The positions of the outputs that are in shared memory and so have no frame."""
        return self.shared_outputs or ()


@dataclass(frozen=True)
class PredictFailed:
    """worker → daemon: the `Predict` failed. The client receives `code` and `error`.

    If `is_exiting`, the failure may have corrupted the model, so the process exits and accepts no further request. A
    rank that does not exit has rejected the request before it ran anything.
    """

    request: int = field(metadata=_REQUEST)
    code: str = field(metadata=one_of(ERRORS))
    error: str = field(metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    is_exiting: bool = field(metadata=boolean())


@dataclass(frozen=True)
class BeginBatch:
    """daemon → worker: run the next `items` messages `Predict` as one batch.

    The predicts differ only in the first dimension of their inputs. Each of them is answered, and can be cancelled
    until the batch starts, as if it had been sent alone. If `rows` exceeds the rows of the batch, the worker repeats
    the last row up to this number, because the model accepts no smaller number; 0 means no padding. `principal_ids` has
    the number of the principal of each predict. The number of a principal stays the same after a restart of the
    daemon. The list is empty if batched results are not compared with results of single requests.
    """

    items: int = field(metadata=integer(1, limits.MAX_BATCH_ITEMS))
    rows: int = field(default=0, metadata=integer(0, limits.MAX_ROWS))
    principal_ids: Tuple[int, ...] = field(
        default=(), metadata=omit_default(list_of(_PRINCIPAL_ID, limits.MAX_BATCH_ITEMS))
    )


@dataclass(frozen=True)
class BatchMismatch:
    """worker → daemon: results of a batch differed from results of single requests. `note` says how.

    From now on, this worker runs requests of the principals in `principal_ids` alone, not together with requests of
    others. If the list is empty, it runs all requests alone.
    """

    note: str = field(metadata=text(limits.MAX_TEXT_BYTES))
    principal_ids: Tuple[int, ...] = field(
        default=(), metadata=omit_default(list_of(_PRINCIPAL_ID, limits.MAX_TENANTS))
    )


@dataclass(frozen=True)
class CancelPredict:
    """daemon → worker: the result of this `Predict` is not needed any more. Do not run it if it has not started."""

    request: int = field(metadata=_REQUEST)


@dataclass(frozen=True)
class PredictCancelled:
    """worker → daemon: the `Predict` was cancelled before it started."""

    request: int = field(metadata=_REQUEST)


@dataclass(frozen=True)
class Ping:
    """daemon → worker: reply with `Pong`; with `run_selftest`, run the self-test first."""

    run_selftest: bool = field(metadata=boolean())


@dataclass(frozen=True)
class Pong:
    """worker → daemon: the reply to a `Ping`.

    `selftest_digest` is the digest of the answers to the self-test that was just run, "" if none was requested.
    """

    selftest_digest: str = field(default="", metadata=DIGEST)


@dataclass(frozen=True)
class TrimStore:
    """daemon → child: no process is attaching; pages of the page store that no process maps may leave the memory."""


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
    ChannelReleased,
    RequestHandedOver,
    AnswerDropped,
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
    WatchWeights,
    SetChannelRows,
    AddChannel,
    AllowRequests,
    ReleaseChannel,
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
    "channel_released": ChannelReleased,
    "request_handed_over": RequestHandedOver,
    "answer_dropped": AnswerDropped,
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
    "watch_weights": WatchWeights,
    "set_channel_rows": SetChannelRows,
    "add_channel": AddChannel,
    "allow_requests": AllowRequests,
    "release_channel": ReleaseChannel,
    "ping": Ping,
    "trim_store": TrimStore,
    "stop": Stop,
}
