"""The messages between the daemon and its holders and workers.

They travel over a private socket of the daemon's user, but are decoded as strictly as a client's: an engine
that crashes may send anything before it dies.
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
"""The number of this protocol. A daemon takes over the children of an earlier one only if both speak the same."""

_REQUEST = integer(0, limits.MAX_COUNT)
_STEP = integer(0, limits.MAX_COUNT)
_PRINCIPAL_ID = integer(0, limits.MAX_COUNT)
_GEARS = list_of(list_of(integer(1, limits.MAX_GEAR_SIZE), limits.MAX_GEAR_DIMS), limits.MAX_GEARS)
_FAILED_CASES = list_of(SELFTEST_CASE, limits.MAX_SELFTEST_UNFIT_CASES)
_ARGUMENTS = list_of(text(limits.MAX_ARGUMENT_BYTES, empty=True), limits.MAX_ARGUMENTS)


@dataclass(frozen=True)
class Hello:
    """child → daemon: I am up, and this is what I am.

    `engine_pid` is the engine's number for this process, which on Ascend is not `os.getpid()` in a container.
    `sha256` names the content of the model that this process would load (`weightd_common.modelfiles.files`).
    `origin` is how the process came to be, one of `ORIGINS`; `origin_note` why it was not forked, "" where it was.
    `concurrency`: so many predicts run at once here, if they are there. `slice`: which rank it is, and of what; None
    where it is none. Then `sha256` is that of its slice.
    """

    engine_pid: str = field(metadata=text(limits.MAX_PID_BYTES))
    sha256: str = field(metadata=text(limits.MAX_DIGEST_BYTES))
    versions: Dict[str, str] = field(metadata=mapping(text(limits.MAX_NAME_BYTES, empty=True), limits.MAX_VERSIONS))
    """Versions of `weightd`, `python`, `numpy` and the engine; `weightd` must be the version of the daemon."""
    sharing_traits: SharingTraits = field(metadata=record(SharingTraits))
    """What the engine's way of sharing weights can do."""
    origin: str = field(default="spawned", metadata=one_of(ORIGINS))
    origin_note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    concurrency: int = field(default=1, metadata=integer(1, limits.MAX_CONCURRENCY))
    slice: Optional[RankSlice] = field(default=None, metadata=record(RankSlice))


@dataclass(frozen=True)
class Fork:
    """daemon → fork server or template: make a process of yourself, which is to be what these arguments say.

    `arguments` are those of ``python -m weightd_worker`` but for its parent, which is that of the process that is
    forked from; `log` is where its output goes.
    """

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    """Name of the new process, under which it connects."""
    arguments: Tuple[str, ...] = field(metadata=_ARGUMENTS)
    log: str = field(metadata=text(limits.MAX_PATH_BYTES))


@dataclass(frozen=True)
class Forked:
    """fork server or template → daemon: the process is there, and begins now; or there is none, for this `error`."""

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    """As in `Fork`."""
    pid: int = field(default=0, metadata=integer(0, limits.MAX_PID))
    """Pid of the new process; 0 if there is an `error`."""
    error: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))


@dataclass(frozen=True)
class Reconnected:
    """child → daemon: connected again, after the connection was lost: whoever is there now may have me go on.

    `step` is that of the last `Predict` that it has run, where it is a rank; 0: none.
    """

    step: int = field(default=0, metadata=omit_default(_STEP))


@dataclass(frozen=True)
class Build:
    """daemon → holder: build the model and let these processes share its weights.

    `search_selftest`: look for a self-test; `selftest_cases` worked before and come first, `failed_cases` did not and
    are left out. Without it `selftest_cases` are what was configured and has to work, and where there are none there is
    no self-test, unless the process was given a sample. `max_rows` are the most of one predict of several requests, 1
    where each has its own: then nothing is found out about them; `allowed_batch_sizes` the only ones that a predict may
    have,
    none: any; `exact`, whether it is tested that the answers are bit for bit those of each alone.
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
    """holder → daemon: I am about to run the self-test on `cases`, which may be my end.

    `failed_cases` is known not to work.

    It goes on when it hears `continue_selftest`, so that the daemon knows what it died of. With nothing to try the
    search is over.
    """

    cases: SelfTestCases = field(metadata=SELFTEST_CASES)
    failed_cases: SelfTestCases = field(metadata=_FAILED_CASES)


@dataclass(frozen=True)
class ContinueSelfTest:
    """daemon → holder: it is noted what you are trying; go on."""


@dataclass(frozen=True)
class Built:
    """holder → daemon: the weights are exported.

    `handle` is what a worker attaches to, "" where nothing is shared; `note` then says why, and `has_sharing_failed`
    whether there is something that could have been. Of a holder that `is_template` workers are forked, which have all
    that it has. `selftest_cases` are what the self-test is run on, none where the model has no self-test;
    `selftest_digest` is the digest of its answers, "" for a model that does not repeat itself; `selftest_note` says why
    there is none, or what it is worth.
    """

    handle: str = field(metadata=text(limits.MAX_PATH_BYTES, empty=True))
    inputs: Tuple[TensorSignature, ...] = field(metadata=list_of(record(TensorSignature), limits.MAX_TENSORS))
    """Inputs of the model."""
    outputs: Tuple[TensorSignature, ...] = field(metadata=list_of(record(TensorSignature), limits.MAX_TENSORS))
    """Outputs of the model."""
    selftest_cases: SelfTestCases = field(metadata=SELFTEST_CASES)
    selftest_digest: str = field(metadata=DIGEST)
    shared_bytes: int = field(metadata=BYTES)
    """Bytes of the model that the holder shares."""
    note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    device: Optional[DeviceMemory] = field(default=None, metadata=record(DeviceMemory))
    """The card's memory after the build; None on the CPU."""
    gears: Tuple[Tuple[int, ...], ...] = field(default=(), metadata=_GEARS)
    """The only sizes of the free dimensions of `inputs`, in their order, that the model takes; none where it takes any,
    or where nobody can tell before it is tried."""
    selftest_note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    has_sharing_failed: bool = field(default=False, metadata=boolean())
    is_template: bool = field(default=False, metadata=boolean())
    row_support: Optional[RowSupport] = field(default=None, metadata=record(RowSupport))
    """None where it was not to be found out."""
    rebuilds_per_shape: bool = field(default=False, metadata=boolean())
    """Whether the engine has to build the model again at each change of shape, because its answers depend on the shapes
    that it has computed before."""
    first_shapes: Optional[SelfTestCase] = field(default=None, metadata=SELFTEST_CASE)
    """The shape of each input that every worker computes first, which is the largest that it computes without another
    build; None where that does not matter."""


@dataclass(frozen=True)
class AllowAttach:
    """daemon → holder: let these processes attach too, though they were not there at the build."""

    engine_pids: Tuple[str, ...] = field(metadata=list_of(text(limits.MAX_PID_BYTES), limits.MAX_PIDS))
    """As in `Build`."""


@dataclass(frozen=True)
class AttachAllowed:
    """holder → daemon: they may, or the library offers no way for the reason that `error` gives."""

    error: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))


@dataclass(frozen=True)
class Attach:
    """daemon → worker: build the model on the weights behind the handle ("" = a copy of your own).

    Then run the self-test on these inputs. `max_rows`, `allowed_batch_sizes` and `exact` as in `Build`; `row_support`:
    what `Built` said of them.
    """

    handle: str = field(metadata=text(limits.MAX_PATH_BYTES, empty=True))
    """`Built.handle`; empty to build a private copy."""
    selftest_cases: SelfTestCases = field(metadata=SELFTEST_CASES)
    """As in `Built`."""
    max_rows: int = field(default=1, metadata=ROW_COUNT)
    allowed_batch_sizes: Tuple[int, ...] = field(default=(), metadata=BATCH_SIZES)
    exact: bool = field(default=True, metadata=boolean())
    row_support: Optional[RowSupport] = field(default=None, metadata=record(RowSupport))
    rebuilds_per_shape: bool = field(default=False, metadata=boolean())
    """As in `Built`."""
    first_shapes: Optional[SelfTestCase] = field(default=None, metadata=SELFTEST_CASE)
    """As in `Built`."""


@dataclass(frozen=True)
class Attached:
    """worker → daemon: the model is built; `selftest_digest` as in `Built`, `note` says why nothing is shared."""

    selftest_digest: str = field(metadata=DIGEST)
    shared_bytes: int = field(metadata=BYTES)
    """Bytes of the model that this worker shares."""
    note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    device: Optional[DeviceMemory] = field(default=None, metadata=record(DeviceMemory))
    """The card's memory after the build; None on the CPU."""


@dataclass(frozen=True)
class ProcessFailed:
    """child → daemon: build or attach failed for this cause; the process exits.

    `is_out_of_memory`: the card has no memory or no place for this process; some may come free late after another one's
    end. `is_transient`: the cause may go away by itself, as a full disk may.
    """

    reason: str = field(metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    """Cause for people; it becomes the `reason` of the generation."""
    is_out_of_memory: bool = field(default=False, metadata=boolean())
    is_transient: bool = field(default=False, metadata=boolean())


@dataclass(frozen=True)
class Predict:
    """daemon → worker: run the model on the tensors that follow.

    `step` counts the predicts of a unit: 1, 2, 3 and so on, each part of a `BeginBatch` by itself; 0 where it is for no
    rank. A rank that misses one, or sees one twice, is `ProcessFailed`. `model_index` is the model, of a process that
    has several.
    """

    request: int = field(metadata=_REQUEST)
    """Number that the daemon assigns to the request and never uses twice."""
    description: RequestDescription = field(metadata=in_own_frame(RequestDescription))
    """Description of the tensors as the client sent it, byte for byte."""
    regions: Optional[MappedRegions] = field(default=None, metadata=record(MappedRegions))
    """Which tensors are in regions that were mapped; none where it is absent."""
    step: int = field(default=0, metadata=omit_default(_STEP))
    model_index: int = field(default=0, metadata=omit_default(integer(0, limits.MAX_GROUP_MODELS - 1)))

    @property
    def shared_positions(self) -> Tuple[int, ...]:
        """The positions of the tensors that have no frame."""
        return () if self.regions is None else tuple([each.tensor_index for each in self.regions.inputs])


@dataclass(frozen=True)
class PredictResult:
    """worker → daemon: the answer to a `Predict`."""

    request: int = field(metadata=_REQUEST)
    """As in `Predict`."""
    description: ResponseDescription = field(metadata=in_own_frame(ResponseDescription))
    """Description of the outputs as the client receives it, byte for byte."""
    shared_outputs: Optional[Tuple[int, ...]] = field(default=None, metadata=POSITIONS)
    """The positions of the outputs that were written where there was room, and have no frame."""

    @property
    def shared_positions(self) -> Tuple[int, ...]:
        """The positions of the tensors that have no frame."""
        return self.shared_outputs or ()


@dataclass(frozen=True)
class PredictFailed:
    """worker → daemon: the `Predict` ended in an error.

    `is_exiting`: the failure may have spoilt the model, so the process exits and takes no further request. Without it a
    rank has refused the request before it ran anything.
    """

    request: int = field(metadata=_REQUEST)
    """As in `Predict`."""
    code: str = field(metadata=one_of(ERRORS))
    """Error code that the client receives."""
    error: str = field(metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    """Error text that the client receives."""
    is_exiting: bool = field(metadata=boolean())


@dataclass(frozen=True)
class BeginBatch:
    """daemon → worker: the next so many `Predict`s are answered by one predict of the model.

    They differ in nothing but the first dimension of their inputs. Each is answered, and skipped before they begin, as
    if it had come alone. `rows`, where that is more than they have together: repeat the last row up to so many, for
    the model takes no other number; 0: run as many as there are. `principal_ids` says for each predict whose it is, by
    a number that stands for a tenant or a user and is the same in each daemon; none where it is not tested whether
    answers are the same.
    """

    items: int = field(metadata=integer(1, limits.MAX_BATCH_ITEMS))
    """Number of `Predict` messages in the batch."""
    rows: int = field(default=0, metadata=integer(0, limits.MAX_ROWS))
    principal_ids: Tuple[int, ...] = field(
        default=(), metadata=omit_default(list_of(_PRINCIPAL_ID, limits.MAX_BATCH_ITEMS))
    )


@dataclass(frozen=True)
class BatchMismatch:
    """worker → daemon: an answer to several requests at once was not what each gets alone, as `note` tells.

    From now on this worker runs the requests of these `principal_ids` one by one, where they come together with others;
    all requests where there are none.
    """

    note: str = field(metadata=text(limits.MAX_TEXT_BYTES))
    principal_ids: Tuple[int, ...] = field(
        default=(), metadata=omit_default(list_of(_PRINCIPAL_ID, limits.MAX_TENANTS))
    )


@dataclass(frozen=True)
class CancelPredict:
    """daemon → worker: nobody waits for this `Predict` any more; if it has not begun, do not run it."""

    request: int = field(metadata=_REQUEST)
    """As in `Predict`."""


@dataclass(frozen=True)
class PredictCancelled:
    """worker → daemon: the answer to a `Predict` that a `CancelPredict` has come in time for: it was not run."""

    request: int = field(metadata=_REQUEST)
    """As in `Predict`."""


@dataclass(frozen=True)
class MapRegion:
    """daemon → worker: from now on this number is the memory whose descriptor comes with the message."""

    region: int = field(metadata=_REQUEST)
    """Number of the region, never used for another one."""


@dataclass(frozen=True)
class UnmapRegion:
    """daemon → worker: no further predict names the region."""

    region: int = field(metadata=_REQUEST)
    """As in `MapRegion`."""


@dataclass(frozen=True)
class Ping:
    """daemon → worker: show that you answer; with `run_selftest`, that you answer rightly."""

    run_selftest: bool = field(metadata=boolean())


@dataclass(frozen=True)
class Pong:
    """worker → daemon: the answer to a `Ping`.

    `selftest_digest` is the digest of what the self-test gives now, else "".
    """

    selftest_digest: str = field(default="", metadata=DIGEST)


@dataclass(frozen=True)
class TrimStore:
    """daemon → child: no attach is due; let pages of the store that nobody maps leave memory."""


@dataclass(frozen=True)
class Stop:
    """daemon → child: finish what you have and exit."""


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
