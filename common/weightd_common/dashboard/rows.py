"""The overview that weightctl top and the status page show: service, models, processes, tenants; also as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, NamedTuple, Optional, Tuple

from weightd_common.dashboard.memory import MemoryUsage


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


def to_json_values(overview: Overview) -> Dict[str, Any]:
    """Return what JSON can hold; seconds and bytes, as the rows have them."""
    return {
        **_field_values(overview),
        "uptime_s": round(overview.uptime_s, 1),
        "throughput": _throughput_values(overview.throughput),
        "memory": _memory_values(overview.memory),
        "models": [_model_values(each) for each in overview.models],
        "processes": [_field_values(each) for each in overview.processes],
        "tenants": [_field_values(each) for each in overview.tenants],
    }


def _model_values(row: ModelRow) -> Dict[str, Any]:
    return {
        **_field_values(row),
        "throughput": _throughput_values(row.throughput),
        "memory": _memory_values(row.memory),
    }


def _throughput_values(throughput: Throughput) -> Dict[str, Any]:
    """Rates and times of moments are two lists: half as long as if each had its name."""
    return {
        "rate": _rounded(throughput.rate),
        "p50_s": _rounded(throughput.p50_s),
        "p99_s": _rounded(throughput.p99_s),
        "rates": [_rounded(each.rate) for each in throughput.rate_points],
        "p99s_s": [_rounded(each.p99_s) for each in throughput.rate_points],
    }


def _memory_values(memory: Optional[MemoryUsage]) -> Optional[Dict[str, int]]:
    return None if memory is None else {**_field_values(memory), "total_bytes": memory.total_bytes}


def _field_values(row: Any) -> Dict[str, Any]:
    found = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    return {name: _rounded(value) if isinstance(value, float) else value for name, value in found.items()}


def _rounded(value: Optional[float]) -> Optional[float]:
    return None if value is None else float(f"{value:.4g}")
