"""Status of the daemon, as shown by `weightctl status`."""

from __future__ import annotations

from dataclasses import field
from typing import Optional, Tuple

from weightd_protocol import limits
from weightd_protocol.frozen import dataclass
from weightd_protocol.messages.accounts import TenantStatus
from weightd_protocol.messages.worker_common import ORIGINS
from weightd_protocol.schema import integer, list_of, number, omit_default, one_of, record, text

_COUNT = integer(0, limits.MAX_COUNT)

# Roles of processes.
ROLES = ("holder", "worker", "spare", "rank", "broker")

# Roles that serve requests. A spare serves requests after one of these processes has exited.
SERVING_ROLES = ("worker", "rank")

# Created here, because a field `number` hides the function in the body of a class.
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

    `private_bytes` is memory that no other process has mapped. `anonymous_bytes` is memory without a file behind it,
    also if it is shared after a fork. `shared_bytes` is the part of the model that the process shares. `origin` tells
    how the process was created, and is absent before its first message: `spawned` with a new interpreter, `forked` from
    a fork server, or from the `template` that has built its model. `origin_note` gives the reason why it was not
    forked. `device` is the device of its generation, or one of the sets of cores that share this copy of the weights.
    The process runs `concurrency` predicts at once. `sha256` is the digest of a rank's slice.
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
    """One copy of the weights and the processes that use it. Memory is in bytes.

    `saved_bytes` is the memory that the workers share, minus the size of the copy: it would be needed additionally if
    each worker had its own copy. `copy_bytes` and `saved_bytes` are absent if the kernel does not report them. `note`
    is the holder's reason for not sharing weights. `selftest` names the inputs of the known answer, or the reason why
    there is no self-test. `batching_note` tells how rows of requests are batched and split, and why not more; it is
    empty if the configuration does not ask for that. `max_rows` is the largest number of rows of several requests in
    one execution: 0 if the configuration does not ask for batching, 1 if it does but batching is impossible, for the
    reason in `batching_note`. While the generation loads, `load_fraction` is the completed part and `remaining_s` the
    remaining seconds, as far as they can be estimated from the copied bytes and from the duration of the previous load.
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
    """Number of executions with at most `max_rows` rows and more than half of that."""

    max_rows: int = field(metadata=integer(1, limits.MAX_COUNT))
    count: int = field(metadata=_COUNT)


@dataclass(frozen=True)
class ExecutionsStatus:
    """Executions that served requests of one model. `served` divided by `count` gives the requests per execution.

    `rows` is present if rows of requests are batched or split. `padded` counts rows added because the model supports
    only certain numbers of rows. `split` counts requests that ran in parts. `retried` counts requests, or parts of
    them, that ran again because a process exited or another request of their batch failed.
    """

    count: int = field(metadata=_COUNT)
    rows: Tuple[RowsCount, ...] = field(default=(), metadata=list_of(record(RowsCount), 64))
    padded: int = field(default=0, metadata=_COUNT)
    split: int = field(default=0, metadata=_COUNT)
    retried: int = field(default=0, metadata=_COUNT)


@dataclass(frozen=True)
class WorkersStatus:
    """The number of workers of a model on each device, if it follows the load.

    `target` is the number that is wanted now, from `min` to `max`; `reason` says why.
    """

    target: int = field(metadata=_COUNT)
    min: int = field(metadata=_COUNT)
    max: int = field(metadata=_COUNT)
    reason: str = field(metadata=text(limits.MAX_TEXT_BYTES, empty=True))


@dataclass(frozen=True)
class ModelStatus:
    """A model of the configuration. Latency is in microseconds, from arrival to response in the daemon.

    A client that may not see other tenants' data receives the name, the engine, the state, and in `queued`, `served`
    and `failed` the numbers of the client's requests.

    `path` and `weights` are the files that serve or are loading; after an update they differ from the configuration.
    `unexpected_exits` counts processes that exited without being stopped. `quarantined` counts request contents that
    are rejected because they crashed workers. `note` describes the last failed change of the model. `group` is the
    model group with which it shares processes. `retry_s` is the time in seconds until the daemon loads a failed model
    again; absent if it does not. `attempts` counts the loads that have failed since the model last served.

    `load` tells when the model is loaded: "start", "on_demand" or "manual". `reserved_bytes` is the memory that is
    reserved for it in the budget for models, and `owner` the tenant to which this memory is charged; "" for none.
    `workers` is absent if the number of workers is fixed.
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
class DeviceStatus:
    """Use of a card by weightd. Memory is in bytes.

    `capacity_bytes` is the memory that weightd may use, absent if unknown. `weights_bytes` counts each copy of weights
    once. `process_bytes` is the memory of the processes beside the weights. `saved_bytes` would be needed additionally
    if each process held its own weights. `buffer_bytes` is used for communication between ranks. These values are sums
    of the models' requirements. `free_bytes` is the value last reported by the card, absent before the first report.
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
    """Memory use and limits of the control group in which the daemon runs. In bytes.

    `limit_bytes` and `high_bytes` are the smallest values of the group and the groups above it. Beyond the first the
    kernel kills processes; beyond the second it throttles them and reclaims memory. `usage_bytes` includes cached
    files. `oom_kills` counts the processes killed for lack of memory. `pressure_percent` is the share of the last ten
    seconds in which a process waited for memory. An absent value is not limited or not known.
    """

    usage_bytes: int = field(metadata=_COUNT)
    limit_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    high_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    oom_kills: Optional[int] = field(default=None, metadata=_COUNT)
    pressure_percent: Optional[float] = field(default=None, metadata=number())


@dataclass(frozen=True)
class ProxyStatus:
    """A listener and its ZeroMQ proxy. `pid` is 0 if the proxy does not run.

    `peers` counts the connected clients that have sent a message. `restarts` counts the proxies of this listener that
    died.
    """

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    address: str = field(metadata=text(limits.MAX_PATH_BYTES))
    pid: int = field(metadata=_COUNT)
    peers: int = field(metadata=_COUNT)
    restarts: int = field(metadata=_COUNT)
    pss_bytes: Optional[int] = field(default=None, metadata=_COUNT)


@dataclass(frozen=True)
class ForkServerStatus:
    """A process that has loaded an engine and forks other processes. `pid` is 0 if it does not run.

    `forked` counts the processes that it and its predecessors have forked. `note` gives the reason why it does not run.
    Memory is in bytes.
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
    its budget (0: no limit). `tenants` is empty if the configuration has no tenants. A client that may not see
    other tenants' data receives the models that it may use and its own tenant; all other values are 0 or empty.
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
