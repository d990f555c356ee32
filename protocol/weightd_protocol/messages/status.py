"""Messages for the status of the daemon, which `weightctl status` shows."""

from __future__ import annotations

from dataclasses import field
from typing import Optional, Tuple

from weightd_protocol import limits
from weightd_protocol.frozen import dataclass
from weightd_protocol.messages.accounts import TenantStatus
from weightd_protocol.messages.worker_common import ORIGINS
from weightd_protocol.schema import boolean, integer, list_of, number, omit_default, one_of, record, text

_COUNT = integer(0, limits.MAX_COUNT)

# Roles of processes.
ROLES = ("holder", "worker", "spare", "rank", "broker")

# Roles of processes that serve requests. A spare serves requests only after one of these processes has exited.
SERVING_ROLES = ("worker", "rank")

# Field types that are created outside the classes, because a field `number` of a class hides the function of this name
# there.
_SHARE = number(1.0)
_SECONDS = number()


@dataclass(frozen=True)
class Status:
    """client → daemon: ask for the status."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    tenant: Optional[str] = field(default=None, metadata=text(limits.MAX_NAME_BYTES))
    """Tenant on whose behalf a gateway sends the request (`acts_for`); None for the sender's tenant."""


@dataclass(frozen=True)
class ProcessStatus:
    """A process of a generation. Memory is in bytes, latency in microseconds.

    `private_bytes` is memory that no other process has mapped. `anonymous_bytes` is memory that is not backed by a
    file, including memory that is shared after a fork. `shared_bytes` is the size of the part of the model that this
    process shares with others.

    `origin` tells how the process was created: `spawned` with a new interpreter, `forked` from a fork server, or forked
    from a `template`, which had built the model. It is absent until the process has sent its first message.
    `origin_note` is the reason why the process was not forked. `device` is the device of the generation or, if several
    sets of cores share one copy of the weights, the set of cores of this process. `concurrency` is the number of
    predicts that the process runs at the same time. `sha256` is the digest of a rank's slice, "" for other processes.
    """

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    role: str = field(metadata=one_of(ROLES))
    state: str = field(metadata=text(limits.MAX_NAME_BYTES))
    pid: int = field(metadata=_COUNT)
    served: int = field(metadata=_COUNT)
    in_flight: int = field(metadata=_COUNT)
    p50_us: Optional[float] = field(default=None, metadata=number())
    p99_us: Optional[float] = field(default=None, metadata=number())
    pss_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    shared_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    private_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    origin: Optional[str] = field(default=None, metadata=one_of(ORIGINS))
    origin_note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    device: str = field(default="", metadata=text(limits.MAX_NAME_BYTES, empty=True))
    concurrency: int = field(default=1, metadata=integer(1, limits.MAX_CONCURRENCY))
    sha256: str = field(default="", metadata=omit_default(text(limits.MAX_DIGEST_BYTES, empty=True)))
    anonymous_bytes: Optional[int] = field(default=None, metadata=_COUNT)


@dataclass(frozen=True)
class GenerationStatus:
    """A generation: one copy of the weights on a device, and the processes that use it. Memory is in bytes.

    `copy_bytes` is the size of the copy. `saved_bytes` is the memory that would be needed additionally if each worker
    had its own copy. Both are absent if the kernel does not report them. `note` is the holder's reason for not sharing
    weights. `selftest` describes the inputs of the self-test, or says why there is no self-test.

    `batching_note` says how requests are batched and split, and gives the reason for each limit; it is empty if the
    configuration asks for neither. `max_rows` is the maximum number of rows in an execution of several requests: 0 if
    the configuration does not ask for batching, 1 if batching is impossible, for the reason in `batching_note`. While
    the generation loads, `load_fraction` is the completed part of the load, and `remaining_s` the estimated number of
    seconds until it ends. Both are estimated from the bytes copied so far and the duration of the previous load; either
    may be absent.
    """

    number: int = field(metadata=_COUNT)
    device: str = field(metadata=text(limits.MAX_NAME_BYTES))
    state: str = field(metadata=text(limits.MAX_NAME_BYTES))
    progress: str = field(metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    reason: str = field(metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    sha256: str = field(metadata=text(limits.MAX_DIGEST_BYTES, empty=True))
    processes: Tuple[ProcessStatus, ...] = field(metadata=list_of(record(ProcessStatus), limits.MAX_PROCESSES))
    copy_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    saved_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    selftest: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    batching_note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    load_fraction: Optional[float] = field(default=None, metadata=_SHARE)
    remaining_s: Optional[float] = field(default=None, metadata=_SECONDS)
    max_rows: int = field(default=0, metadata=integer(0, limits.MAX_ROWS))


@dataclass(frozen=True)
class RowsCount:
    """`count` is the number of executions with at most `max_rows` rows and more than half of `max_rows`."""

    max_rows: int = field(metadata=integer(1, limits.MAX_COUNT))
    count: int = field(metadata=_COUNT)


@dataclass(frozen=True)
class ExecutionsStatus:
    """Executions of one model's requests by its workers. `count` is the number of executions.

    The model's `served` divided by `count` is the mean number of requests per execution. `rows` counts executions by
    their number of rows; it is empty unless requests are batched or split. `padded` counts rows that were added because
    the model supports only certain numbers of rows. `split` counts requests that ran in parts. `retried` counts
    requests and parts of requests that ran again, because a process exited or because another request of their batch
    failed.
    """

    count: int = field(metadata=_COUNT)
    rows: Tuple[RowsCount, ...] = field(default=(), metadata=list_of(record(RowsCount), 64))
    padded: int = field(default=0, metadata=_COUNT)
    split: int = field(default=0, metadata=_COUNT)
    retried: int = field(default=0, metadata=_COUNT)


@dataclass(frozen=True)
class WorkersStatus:
    """The number of workers of a model on each device, if the daemon adapts this number to the load.

    `target` is the number of workers that the daemon wants now, from `min` to `max`. `reason` is the reason for this
    number.
    """

    target: int = field(metadata=_COUNT)
    min: int = field(metadata=_COUNT)
    max: int = field(metadata=_COUNT)
    reason: str = field(metadata=text(limits.MAX_TEXT_BYTES, empty=True))


@dataclass(frozen=True)
class ModelStatus:
    """A model of the configuration. Latency is in microseconds, from the arrival of a request to its response.

    A client that may not see other tenants' data receives only the name, the engine and the state. For such a client
    `queued`, `served` and `failed` count its own requests.

    `path` and `weights` are the files of the version that serves or loads; after an update they differ from the
    configuration. `unexpected_exits` counts processes that exited although the daemon had not stopped them.
    `quarantined` counts inputs that are rejected because they crashed workers. `note` describes the last change of the
    model that failed. `group` is the model group with which the model shares processes. `retry_s` is the number of
    seconds until the daemon loads a failed model again; absent if it will not. `attempts` is the number of loads that
    have failed since the model last served.

    `load` tells when the daemon loads the model: at its "start", "on_demand" or by an operator ("manual").
    `reserved_bytes` is the memory reserved for the model in the budget for models. `owner` is the tenant to which this
    memory is charged; "" for none. `workers` is absent if the number of workers is fixed.
    """

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    engine: str = field(metadata=text(limits.MAX_NAME_BYTES))
    path: str = field(metadata=text(limits.MAX_PATH_BYTES, empty=True))
    state: str = field(metadata=text(limits.MAX_NAME_BYTES))
    queued: int = field(metadata=_COUNT)
    served: int = field(metadata=_COUNT)
    failed: int = field(metadata=_COUNT)
    generations: Tuple[GenerationStatus, ...] = field(
        metadata=list_of(record(GenerationStatus), limits.MAX_GENERATIONS)
    )
    p50_us: Optional[float] = field(default=None, metadata=number())
    p99_us: Optional[float] = field(default=None, metadata=number())
    unexpected_exits: int = field(default=0, metadata=_COUNT)
    quarantined: int = field(default=0, metadata=_COUNT)
    note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    weights: str = field(default="", metadata=text(limits.MAX_PATH_BYTES, empty=True))
    executions: Optional[ExecutionsStatus] = field(default=None, metadata=record(ExecutionsStatus))
    group: str = field(default="", metadata=omit_default(text(limits.MAX_NAME_BYTES, empty=True)))
    retry_s: Optional[float] = field(default=None, metadata=number())
    attempts: int = field(default=0, metadata=omit_default(_COUNT))
    load: str = field(default="start", metadata=omit_default(text(limits.MAX_NAME_BYTES)))
    reserved_bytes: int = field(default=0, metadata=omit_default(_COUNT))
    owner: str = field(default="", metadata=omit_default(text(limits.MAX_NAME_BYTES, empty=True)))
    workers: Optional[WorkersStatus] = field(default=None, metadata=record(WorkersStatus))


@dataclass(frozen=True)
class VersionShare:
    """A version of a model. It answers `percent` percent of the requests that name no version."""

    version: int = field(metadata=_COUNT)
    percent: float = field(metadata=number(100.0))


@dataclass(frozen=True)
class VersionSetStatus:
    """A model with several versions. Each version is also in the list of models, as NAME@VERSION.

    `is_rollout` tells that the shares come from a rollout and not from the configuration.
    """

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    shares: Tuple[VersionShare, ...] = field(metadata=list_of(record(VersionShare), limits.MAX_MODEL_VERSIONS))
    is_rollout: bool = field(default=False, metadata=boolean())


@dataclass(frozen=True)
class DeviceStatus:
    """Use of a card by weightd. Memory is in bytes.

    `capacity_bytes` is the memory of the card that weightd may use; absent if unknown. `weights_bytes` is the memory of
    all copies of weights, each counted once. `process_bytes` is the memory of the processes without the weights.
    `saved_bytes` is the memory that would be needed additionally if each process had its own copy of the weights.
    `buffer_bytes` is the memory for communication between ranks. These four values are sums of the models'
    reservations, not measurements. `free_bytes` is the free memory that the card reported last; absent before the
    first report.
    """

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    processes: int = field(metadata=_COUNT)
    max_processes: int = field(metadata=_COUNT)
    weights_bytes: int = field(metadata=_COUNT)
    process_bytes: int = field(metadata=_COUNT)
    saved_bytes: int = field(metadata=_COUNT)
    capacity_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    free_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    buffer_bytes: int = field(default=0, metadata=omit_default(_COUNT))


@dataclass(frozen=True)
class MemoryLimit:
    """Memory use and limits of the control group in which the daemon runs. Memory is in bytes.

    Beyond `limit_bytes` the kernel kills processes of the control group. Beyond `high_bytes` the kernel throttles them
    and reclaims memory. Each limit is the smallest limit of this control group and of the control groups above it.
    `usage_bytes` includes cached files. `oom_kills` counts the processes that the kernel killed for lack of memory.
    `pressure_percent` is the percentage of the last ten seconds in which a process waited for memory. A limit that is
    not set, or a value that is not known, is absent.
    """

    usage_bytes: int = field(metadata=_COUNT)
    limit_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    high_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    oom_kills: Optional[int] = field(default=None, metadata=_COUNT)
    pressure_percent: Optional[float] = field(default=None, metadata=number())


@dataclass(frozen=True)
class ProxyStatus:
    """A listener for ZeroMQ clients, and its ZeroMQ proxy. `pid` is 0 if the proxy does not run.

    `peers` is the number of connected clients that have sent a message. `restarts` counts the proxies of this listener
    that have died.
    """

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    address: str = field(metadata=text(limits.MAX_PATH_BYTES))
    pid: int = field(metadata=_COUNT)
    peers: int = field(metadata=_COUNT)
    restarts: int = field(metadata=_COUNT)
    pss_bytes: Optional[int] = field(default=None, metadata=_COUNT)


@dataclass(frozen=True)
class ForkServerStatus:
    """A fork server: a process that has loaded an engine and forks other processes. `pid` is 0 if it does not run.

    `forked` counts the processes that this fork server and its earlier instances have forked. `note` is the reason why
    the fork server does not run. Memory is in bytes.
    """

    engine: str = field(metadata=text(limits.MAX_NAME_BYTES))
    python: str = field(metadata=text(limits.MAX_PATH_BYTES))
    pid: int = field(metadata=_COUNT)
    forked: int = field(metadata=_COUNT)
    pss_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))


@dataclass(frozen=True)
class StatusResponse:
    """daemon → client: status of the daemon, its models, their processes and the cards. Memory is in bytes (PSS).

    `note` gives the reason why the configuration in force is not the one in the file. `dropped_responses` counts
    responses that could not be sent because the client had disconnected or did not read. `memory` is absent if the
    control group is unknown. `buffered_bytes` is the memory for requests and for responses that clients have not read,
    `max_memory_bytes` its limit. `model_bytes` is the memory that is reserved for models on the CPU, `max_model_bytes`
    its budget (0: no limit). `version_sets` are the models with several versions. `tenants` is empty if the
    configuration has no tenants. A client that may not see other tenants' data receives the models that it may use and
    its own tenant; all other values are 0 or empty.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    version: str = field(metadata=text(limits.MAX_NAME_BYTES))
    state: str = field(metadata=text(limits.MAX_NAME_BYTES))
    pid: int = field(metadata=_COUNT)
    uptime_s: float = field(metadata=number())
    pss_bytes: int = field(metadata=_COUNT)
    models: Tuple[ModelStatus, ...] = field(metadata=list_of(record(ModelStatus), limits.MAX_MODELS))
    devices: Tuple[DeviceStatus, ...] = field(default=(), metadata=list_of(record(DeviceStatus), limits.MAX_DEVICES))
    dropped_responses: int = field(default=0, metadata=_COUNT)
    memory: Optional[MemoryLimit] = field(default=None, metadata=record(MemoryLimit))
    note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    buffered_bytes: int = field(default=0, metadata=_COUNT)
    max_memory_bytes: int = field(default=0, metadata=_COUNT)
    zmq_proxies: Tuple[ProxyStatus, ...] = field(
        default=(), metadata=list_of(record(ProxyStatus), limits.MAX_LISTENERS)
    )
    fork_servers: Tuple[ForkServerStatus, ...] = field(
        default=(), metadata=list_of(record(ForkServerStatus), limits.MAX_MODELS)
    )
    tenants: Tuple[TenantStatus, ...] = field(
        default=(), metadata=omit_default(list_of(record(TenantStatus), limits.MAX_TENANTS + 1))
    )
    model_bytes: int = field(default=0, metadata=omit_default(_COUNT))
    max_model_bytes: int = field(default=0, metadata=omit_default(_COUNT))
    version_sets: Tuple[VersionSetStatus, ...] = field(
        default=(), metadata=omit_default(list_of(record(VersionSetStatus), limits.MAX_MODELS))
    )
