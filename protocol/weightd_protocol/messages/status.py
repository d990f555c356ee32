"""The status: what `weightctl status` shows."""

from __future__ import annotations

from dataclasses import field
from typing import Optional, Tuple

from weightd_protocol import limits
from weightd_protocol.frozen import dataclass
from weightd_protocol.messages.accounts import TenantStatus
from weightd_protocol.messages.worker_common import ORIGINS
from weightd_protocol.schema import integer, list_of, number, omit_default, one_of, record, text

_COUNT = integer(0, limits.MAX_COUNT)

# Of a process.
ROLES = ("holder", "worker", "spare", "rank", "broker")

# Of these, those that answer requests; a spare does once one of them is lost.
SERVING_ROLES = ("worker", "rank")

# One of them has a field of the name of this kind.
_SHARE = number(1.0)
_SECONDS = number()


@dataclass(frozen=True)
class Status:
    """client → daemon: what are you doing?"""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    tenant: Optional[str] = field(default=None, metadata=text(limits.MAX_NAME_BYTES))
    """For whom a gateway asks (`acts_for`); the sender itself for none."""


@dataclass(frozen=True)
class ProcessStatus:
    """One process of a generation. Memory in bytes, latency in microseconds.

    `private_bytes` is what no other process has in memory, `anonymous_bytes` what is no file's there, whoever else has
    it after a fork; `shared_bytes` what it shares of the model.
    `origin` is how it came to be, absent while it has said nothing: by an interpreter of its own, `forked` of a fork
    server, or of the `template` that has built its model; `origin_note` why it was not forked. `device` is where it
    runs: that of its generation, or one of the sets of cores that have this copy of the weights in common. It runs
    `concurrency` predicts at once. `sha256` is that of its slice, of a rank.
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
    """One weight copy and the processes around it. Memory in bytes.

    `saved_bytes` is what the workers share less what the one copy takes: what would be needed in addition
    if each worker held its own. Both are absent where the kernel does not tell. `note` is what the holder said of the
    model: why nothing is shared. `selftest` is what its known answer is an answer to, or why it has none.
    `batching_note` is what is done with the rows of requests, and why not more; it is empty where the configuration
    asks for nothing. `max_rows` is how many rows of several requests share an execution at most: 0 where the
    configuration does not ask for it, 1 where it does, and `batching_note` says why none do. While it loads,
    `load_fraction` is the share of that which is over and `remaining_s` how many seconds it still takes, as far as both
    are known: from the bytes that were copied, and from how long it took the last time.
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
    """How many executions had so many rows: `max_rows`, or fewer, and more than half of that."""

    max_rows: int = field(metadata=integer(1, limits.MAX_COUNT))
    count: int = field(metadata=_COUNT)


@dataclass(frozen=True)
class ExecutionsStatus:
    """What was run to answer requests of one model: with `served` they tell how many shared one execution.

    `rows` is there where rows of requests are put together or cut. `padded` are rows that were added because the
    model takes certain numbers of rows alone; `split` are requests that ran in parts; `retried` are those, or their
    parts, that ran once more, because a process was lost or a request beside them failed.
    """

    count: int = field(metadata=_COUNT)
    rows: Tuple[RowsCount, ...] = field(default=(), metadata=list_of(record(RowsCount), 64))
    padded: int = field(default=0, metadata=_COUNT)
    split: int = field(default=0, metadata=_COUNT)
    retried: int = field(default=0, metadata=_COUNT)


@dataclass(frozen=True)
class ModelStatus:
    """One model of the configuration. Latency in microseconds, from arrival to answer, in the daemon.

    Whoever may not see what concerns others is told the name, the engine and the state, and in `queued`, `served` and
    `failed` of its own requests.

    `path` and `weights` are what serves, or is to: after an update not what the configuration names.
    `unexpected_exits` are processes that ended without being asked to; `quarantined` are contents of requests that are
    refused because workers died of them; `note` is what went wrong last with a change of the model. `group` is that of
    the models with which it shares its processes. `retry_s`: seconds until a model that has failed is loaded again by
    itself; absent where it is not.
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


@dataclass(frozen=True)
class DeviceStatus:
    """What weightd has of a card. Memory in bytes.

    `capacity_bytes` is what weightd may use, absent where that is not known; `weights_bytes` is each copy of weights
    once; `process_bytes` is what the processes take beside them; `saved_bytes` is what the processes would take in
    addition if each held its own weights; `buffer_bytes` is what communication between ranks takes. They are sums of
    what models need; `free_bytes` is what the card itself said last, absent where it has said nothing.
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
class ProxyStatus:
    """A listener, and the process that speaks ZeroMQ with its clients; `pid` is 0 while there is none.

    `peers` are the clients that are connected and have spoken, `restarts` the processes that have died there.
    """

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    address: str = field(metadata=text(limits.MAX_PATH_BYTES))
    pid: int = field(metadata=_COUNT)
    peers: int = field(metadata=_COUNT)
    restarts: int = field(metadata=_COUNT)
    pss_bytes: Optional[int] = field(default=None, metadata=_COUNT)


@dataclass(frozen=True)
class ForkServerStatus:
    """A process that has loaded an engine, of which others are forked; `pid` is 0 while there is none.

    `forked` are the processes that it, and those before it, have made; `note` says why there is none. Memory in bytes.
    """

    engine: str = field(metadata=text(limits.MAX_NAME_BYTES))
    python: str = field(metadata=text(limits.MAX_PATH_BYTES))
    pid: int = field(metadata=_COUNT)
    forked: int = field(metadata=_COUNT)
    pss_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    note: str = field(default="", metadata=text(limits.MAX_TEXT_BYTES, empty=True))


@dataclass(frozen=True)
class StatusResponse:
    """daemon → client: the daemon, its models, their processes and their cards. Memory in bytes (PSS).

    `note` says why what is in force is not what the configuration file says. `dropped_responses` are answers that could
    not be sent because their client was gone or did not read. `memory` is absent where the control group is not known.
    `buffered_bytes` is what the daemon keeps for clients, requests and answers that are not read, `max_memory_bytes`
    the bound for it. `tenants` is empty where the configuration has none. Whoever may not see what concerns others is
    told the models that there are for it and its own tenant; all else is 0 or empty.
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
