"""Metrics: counters and gauges of the daemon. The daemon keeps each value up to date, so a query only copies them."""

from __future__ import annotations

from dataclasses import field
from typing import Optional, Tuple

from weightd_protocol import limits
from weightd_protocol.frozen import dataclass
from weightd_protocol.messages.accounts import TenantStatus
from weightd_protocol.messages.status import ROLES
from weightd_protocol.schema import boolean, integer, list_of, number, omit_default, one_of, record, text

_COUNT = integer(0, limits.MAX_COUNT)


@dataclass(frozen=True)
class Metrics:
    """client → daemon: ask for the metrics."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    tenant: Optional[str] = field(default=None, metadata=text(limits.MAX_NAME_BYTES))
    """Tenant on whose behalf a gateway sends the request (`acts_for`); None for the sender's tenant."""


@dataclass(frozen=True)
class Histogram:
    """Histogram of a quantity. It is empty if the client may not see it.

    The response lists the upper bounds of the buckets. `counts` has one entry for each bound: the number of values
    above the previous bound and up to this one. A further entry counts the values above the last bound. `sum` is the
    sum of all values.
    """

    counts: Tuple[int, ...] = field(metadata=list_of(_COUNT, limits.MAX_BUCKETS + 1))
    sum: float = field(metadata=number())


@dataclass(frozen=True)
class ProcessCount:
    """Number of processes of a model that have this role and this state."""

    role: str = field(metadata=one_of(ROLES))
    state: str = field(metadata=text(limits.MAX_NAME_BYTES))
    count: int = field(metadata=_COUNT)


@dataclass(frozen=True)
class ModelMetrics:
    """Metrics of one model. Memory is in bytes.

    `generation` and `sha256` describe the same generation as `state`. Counters and histograms continue across restarts
    of the daemon, reloads and updates. `unexpected_exits` counts processes that exited although the daemon had not
    stopped them; `restarts` counts their replacements. `selftest_failures` counts workers that did not reproduce the
    known answers of the self-test. `batch_mismatches` counts generations in which batched rows had other results than
    rows that ran alone.

    `request_seconds` covers requests that succeeded, from arrival to response. `queue_seconds` covers requests from
    arrival until a worker received them. `compute_seconds` covers executions by workers, and `batch_rows` the rows of
    each execution, if the number is known. `max_queue` is the capacity of the queue in requests.

    Memory is measured at most once a minute, after a query for metrics, and reported in the response to the next query.
    Memory values are absent before the first measurement, and if the kernel does not report them.
    """

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    engine: str = field(metadata=text(limits.MAX_NAME_BYTES))
    state: str = field(metadata=text(limits.MAX_NAME_BYTES))
    ready: bool = field(metadata=boolean())
    generation: int = field(metadata=_COUNT)
    sha256: str = field(metadata=text(limits.MAX_DIGEST_BYTES, empty=True))
    queued: int = field(metadata=_COUNT)
    running: int = field(metadata=_COUNT)
    processes: Tuple[ProcessCount, ...] = field(metadata=list_of(record(ProcessCount), limits.MAX_PROCESS_COUNTS))
    executions: int = field(metadata=_COUNT)
    unexpected_exits: int = field(metadata=_COUNT)
    restarts: int = field(metadata=_COUNT)
    selftest_failures: int = field(metadata=_COUNT)
    batch_mismatches: int = field(metadata=_COUNT)
    quarantined: int = field(metadata=_COUNT)
    request_seconds: Histogram = field(metadata=record(Histogram))
    queue_seconds: Histogram = field(metadata=record(Histogram))
    compute_seconds: Histogram = field(metadata=record(Histogram))
    batch_rows: Histogram = field(metadata=record(Histogram))
    pss_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    shared_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    saved_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    copy_bytes: Optional[int] = field(default=None, metadata=_COUNT)
    max_queue: int = field(default=0, metadata=omit_default(_COUNT))
    reserved_bytes: int = field(default=0, metadata=omit_default(_COUNT))


@dataclass(frozen=True)
class ReloadCounts:
    """Number of reloads of the configuration, by result."""

    succeeded: int = field(metadata=_COUNT)
    refused: int = field(metadata=_COUNT)


@dataclass(frozen=True)
class MetricsResponse:
    """daemon → client: metrics of the daemon.

    A client that may not see other tenants' data receives only its own metrics.

    For such a client the response has the names, states and readiness of the models that the client may use, and the
    client's account; all other values are 0 or empty. If the configuration has no tenants, `tenants` has one entry,
    named `default`. `seconds_bounds` and `rows_bounds` are the upper bounds of the buckets of all histograms.
    `pss_bytes` is the memory of the daemon, its ZeroMQ proxies and its shim, measured in the same way as the memory of
    models.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    version: str = field(metadata=text(limits.MAX_NAME_BYTES))
    state: str = field(metadata=text(limits.MAX_NAME_BYTES))
    uptime_s: float = field(metadata=number())
    seconds_bounds: Tuple[float, ...] = field(metadata=list_of(number(), limits.MAX_BUCKETS))
    rows_bounds: Tuple[int, ...] = field(metadata=list_of(_COUNT, limits.MAX_BUCKETS))
    models: Tuple[ModelMetrics, ...] = field(metadata=list_of(record(ModelMetrics), limits.MAX_MODELS))
    tenants: Tuple[TenantStatus, ...] = field(metadata=list_of(record(TenantStatus), limits.MAX_TENANTS + 1))
    buffered_bytes: int = field(metadata=_COUNT)
    max_memory_bytes: int = field(metadata=_COUNT)
    dropped_responses: int = field(metadata=_COUNT)
    reloads: ReloadCounts = field(metadata=record(ReloadCounts))
    pss_bytes: Optional[int] = field(default=None, metadata=_COUNT)
