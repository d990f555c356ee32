"""Metrics: counters and gauges. They consist of integers and sums only, so that a query costs little."""

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
    """Histogram of a quantity; empty if the client may not see it.

    `counts` has one entry for each upper bound, with the number of values above the previous bound, and one entry for
    values above the last bound. `sum` is the sum of all values.
    """

    counts: Tuple[int, ...] = field(metadata=list_of(_COUNT, limits.MAX_BUCKETS + 1))
    sum: float = field(metadata=number())


@dataclass(frozen=True)
class ProcessCount:
    """Number of processes of a model with this role and state."""

    role: str = field(metadata=one_of(ROLES))
    state: str = field(metadata=text(limits.MAX_NAME_BYTES))
    count: int = field(metadata=_COUNT)


@dataclass(frozen=True)
class ModelMetrics:
    """Metrics of one model. Memory is in bytes.

    `generation` and `sha256` belong to the generation that represents the state of the model. Counters and histograms
    continue across restarts of the daemon, reloads and updates. `unexpected_exits` counts processes that exited without
    being stopped, `restarts` their replacements. `selftest_failures` counts workers that did not reproduce the known
    answer. `batch_mismatches` counts generations in which batched rows had other results than single rows.
    `request_seconds` measures from the arrival of a request to its response, for requests that succeeded;
    `queue_seconds` until a worker received it. `compute_seconds` measures executions and `batch_rows` their rows, as
    far as known. `max_queue` is the capacity of the queue. Memory values date from the previous query for metrics and
    are measured at most once a minute. They are absent before the first measurement and if the kernel does not report
    them.
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
    """Number of configuration reloads by result."""

    succeeded: int = field(metadata=_COUNT)
    refused: int = field(metadata=_COUNT)


@dataclass(frozen=True)
class MetricsResponse:
    """daemon → client: the metrics. A client that may not see other tenants' data receives only its own.

    For such a client the response has the names, states and readiness of the models that the client may use, and its
    own account; all other values are 0 or empty. If the configuration has no tenants, `tenants` has one named
    `default`. `seconds_bounds` and `rows_bounds` are the bounds of the histograms. `pss_bytes` is the memory of the
    daemon, its proxies and its shim, measured like the memory of models.
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
