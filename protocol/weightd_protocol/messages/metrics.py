"""The metrics: what has been counted, and how things stand. Integers and sums only, so that it costs little to ask."""

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
    """client → daemon: what have you counted?"""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    tenant: Optional[str] = field(default=None, metadata=text(limits.MAX_NAME_BYTES))
    """For whom a gateway asks (`acts_for`); the sender itself for none."""


@dataclass(frozen=True)
class Histogram:
    """How often there were values of each size; empty where nothing of it is told.

    `counts` has one for each bound, of the values up to that and beyond the one before, and one for those beyond the
    last; `sum` is that of all values.
    """

    counts: Tuple[int, ...] = field(metadata=list_of(_COUNT, limits.MAX_BUCKETS + 1))
    sum: float = field(metadata=number())


@dataclass(frozen=True)
class ProcessCount:
    """How many processes of a model have this role and are in this state."""

    role: str = field(metadata=one_of(ROLES))
    state: str = field(metadata=text(limits.MAX_NAME_BYTES))
    count: int = field(metadata=_COUNT)


@dataclass(frozen=True)
class ModelMetrics:
    """One model of the configuration. Memory in bytes.

    `generation` and `sha256` are of the one that tells how it stands. Counters, and all histograms, go on over
    restarts of the daemon, reloads and updates. `unexpected_exits` are processes that ended without being asked to,
    `restarts` those that were started in the place of lost ones; `selftest_failures` are workers that did not reproduce
    the known answer, `batch_mismatches` generations of which rows together were found not to be what each is alone.
    `request_seconds` are from the arrival of each answered request to its answer, `queue_seconds` until a worker was
    given it; `compute_seconds` are those of executions, `batch_rows` their rows, as far as those are known. `max_queue`
    is how many may wait. Memory is what was measured when somebody asked before, once a minute at most; it is absent
    before that, and where the kernel does not tell.
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


@dataclass(frozen=True)
class ReloadCounts:
    """How often the configuration was read again: with which success."""

    succeeded: int = field(metadata=_COUNT)
    refused: int = field(metadata=_COUNT)


@dataclass(frozen=True)
class MetricsResponse:
    """daemon → client: what was counted. Whoever may not see what concerns others is told its own.

    That is the names, states and readiness of the models that there are for it, and its own account; all else is 0 or
    empty. `tenants` has one named `default` where the configuration has none. `seconds_bounds` and `rows_bounds` are
    those of the histograms. `pss_bytes` is of the daemon, its proxies and its shim, as the memory of models.
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
