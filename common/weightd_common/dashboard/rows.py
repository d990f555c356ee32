"""What is shown: the service, its models, processes and tenants, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Optional, Tuple

from weightd_common.dashboard.memory import MemoryUsage


class RatePoint(NamedTuple):
    """What happened between two looks: requests in a second, and the seconds that 99 % of them did not exceed."""

    rate: Optional[float]
    p99_s: Optional[float]


class Throughput(NamedTuple):
    """How fast requests are answered. What is not known, or of which nothing happened, is None.

    Attributes:
        rate: requests in a second, of the last seconds.
        p50_s: half of these took no longer, in seconds.
        p99_s: 99 % of these.
        rate_points: each look, the oldest first.
    """

    rate: Optional[float] = None
    p50_s: Optional[float] = None
    p99_s: Optional[float] = None
    rate_points: Tuple[RatePoint, ...] = ()


@dataclass(frozen=True)
class ModelRow:
    """One model.

    Attributes:
        name: as it is configured.
        engine: which runs it.
        state: of its generation that serves, or is to; `progress` says more while it loads.
        progress: how far that is.
        ready: whether requests are answered.
        generation: its number.
        sha256: of its weights.
        device: where it runs.
        desired_workers: processes that take requests, and are to.
        ready_workers: of these, those that do.
        queued: requests that wait.
        running: requests under way at workers.
        refused_rate: requests that ended in an error, in a second.
        unexpected_exits: processes that ended without being asked to.
        throughput: of its requests.
        memory: of its processes; None where it is not known, and for all of a group but the first, whose it is, too.
        group: of models that share its processes.
    """

    name: str
    engine: str
    state: str
    progress: str
    ready: bool
    generation: int
    sha256: str
    device: str
    desired_workers: int
    ready_workers: int
    queued: int
    running: int
    refused_rate: Optional[float]
    unexpected_exits: int
    throughput: Throughput
    memory: Optional[MemoryUsage]
    group: str


@dataclass(frozen=True)
class ProcessRow:
    """One process of a model; memory in bytes, latency in seconds, as the last status tells."""

    model: str
    name: str
    role: str
    state: str
    device: str
    pid: int
    served: int
    rate: Optional[float]
    in_flight: int
    p50_s: Optional[float]
    p99_s: Optional[float]
    pss_bytes: Optional[int]
    private_bytes: Optional[int]
    shared_bytes: Optional[int]


@dataclass(frozen=True)
class TenantRow:
    """One tenant.

    Attributes:
        name: as it is configured.
        weight: what share it is to have where several wait.
        share: what it had of the seconds of all workers of the last minute.
        rate: requests answered in a second, of the last seconds; `refused_rate`: those refused.
        refused_rate: those that were refused, or ended in an error.
        in_flight: requests that have come and not ended; of these `queued` wait.
        queued: requests that wait.
        wait_s: how long those that were answered had waited, on average, in seconds.
        served: requests answered since the tenant is there.
        refused: requests refused since.
        slot_seconds: seconds of workers since.
    """

    name: str
    weight: float
    share: Optional[float]
    rate: Optional[float]
    refused_rate: Optional[float]
    in_flight: int
    queued: int
    wait_s: Optional[float]
    served: int
    refused: int
    slot_seconds: float


@dataclass(frozen=True)
class Overview:
    """The service.

    Attributes:
        version: the daemon's.
        state: what it is doing.
        uptime_s: since when, in seconds.
        is_complete: whether this client is told what concerns others; if not, it sees its own tenant alone.
        queued: requests that wait.
        running: requests under way at workers.
        throughput: of all requests.
        memory: of all processes; None until a status has come, and where not the whole is told.
        buffered_bytes: what is kept for clients.
        max_buffered_bytes: the bound for that.
        models: in the order of the configuration.
        processes: of all models, as the last status tells.
        tenants: those there are; one where the configuration has none.
        note: what is wrong with the configuration file.
    """

    version: str
    state: str
    uptime_s: float
    is_complete: bool
    queued: int
    running: int
    throughput: Throughput
    memory: Optional[MemoryUsage]
    buffered_bytes: int
    max_buffered_bytes: int
    models: Tuple[ModelRow, ...]
    processes: Tuple[ProcessRow, ...]
    tenants: Tuple[TenantRow, ...]
    note: str
