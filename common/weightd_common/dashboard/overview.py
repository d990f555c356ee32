"""The overview that weightctl top and the status page show: service, models, processes, tenants; also as JSON.

A row has what the daemon tells of its subject, and beside it what only several answers tell, such as rates.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, NamedTuple, Optional, Tuple

from weightd_common.dashboard.memory import MemoryUsage
from weightd_protocol.messages.accounts import AccountStatus, TenantStatus
from weightd_protocol.messages.metrics import MetricsResponse, ModelMetrics
from weightd_protocol.messages.status import SERVING_ROLES, GenerationStatus, ProcessStatus, StatusResponse


@dataclass(frozen=True)
class Overview:
    """The service.

    Attributes:
        metrics: what the daemon has counted.
        status: what it told last of itself; None until it has.
        throughput: of all requests.
        memory: of all processes; None until a status has come, and where not the whole is told.
        models: in the order of the configuration.
        processes: of all models, as the last status tells.
        tenants: those there are; one where the configuration has none.
    """

    metrics: MetricsResponse
    status: Optional[StatusResponse]
    throughput: Throughput
    memory: Optional[MemoryUsage]
    models: Tuple[ModelRow, ...]
    processes: Tuple[ProcessRow, ...]
    tenants: Tuple[TenantRow, ...]

    @property
    def is_complete(self) -> bool:
        """Whether this client is told what concerns others; if not, it sees its own tenant alone."""
        return self.status is None or self.status.pid != 0

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return sum(each.queued for each in self.metrics.models)

    @property
    def running(self) -> int:
        """Requests under way at workers."""
        return sum(each.running for each in self.metrics.models)


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
        metrics: what the daemon has counted of it.
        serving: what it tells of the generation that serves, or is to; None until it has.
        throughput: of its requests.
        refused_rate: requests that ended in an error, in a second.
        memory: of its processes; None where it is not known, and for all of a group but the first, whose it is, too.
        group: of models that share its processes.
    """

    metrics: ModelMetrics
    serving: Optional[GenerationStatus]
    throughput: Throughput
    refused_rate: Optional[float]
    memory: Optional[MemoryUsage]
    group: str

    @property
    def progress(self) -> str:
        """What it is doing, which says more than the state while it loads."""
        return "" if self.serving is None else self.serving.progress

    @property
    def desired_workers(self) -> int:
        """Processes that take requests, and are to."""
        return sum(each.count for each in self.metrics.processes if each.role in SERVING_ROLES)

    @property
    def ready_workers(self) -> int:
        """Of these, those that do."""
        processes = self.metrics.processes
        return sum(each.count for each in processes if each.role in SERVING_ROLES and each.state == "ready")


@dataclass(frozen=True)
class ProcessRow:
    """One process of a model, as the last status tells; `rate`: what it has served in a second since the one before."""

    model: str
    status: ProcessStatus
    device: str
    rate: Optional[float]


@dataclass(frozen=True)
class TenantRow:
    """One tenant.

    Attributes:
        status: what the daemon tells of it.
        total: the sum of its accounts.
        rate: requests answered in a second, of the last seconds; `refused_rate`: those refused.
        refused_rate: those that were refused, or ended in an error.
    """

    status: TenantStatus
    total: AccountStatus
    rate: Optional[float]
    refused_rate: Optional[float]


def to_json_values(overview: Overview) -> Dict[str, Any]:
    """Return what JSON can hold; times are in seconds, sizes in bytes."""
    metrics, status = overview.metrics, overview.status
    return {
        "version": metrics.version,
        "state": metrics.state,
        "uptime_s": round(metrics.uptime_s, 1),
        "is_complete": overview.is_complete,
        "queued": overview.queued,
        "running": overview.running,
        "throughput": _throughput_values(overview.throughput),
        "memory": _memory_values(overview.memory),
        "buffered_bytes": metrics.buffered_bytes,
        "max_buffered_bytes": metrics.max_memory_bytes,
        "models": [_model_values(each) for each in overview.models],
        "processes": [_process_values(each) for each in overview.processes],
        "tenants": [_tenant_values(each) for each in overview.tenants],
        "note": "" if status is None else status.note,
    }


def _model_values(row: ModelRow) -> Dict[str, Any]:
    return {
        **_fields(row.metrics, "name", "engine", "state", "ready", "generation", "sha256"),
        **_fields(row.metrics, "queued", "running", "unexpected_exits"),
        **_fields(row, "progress", "desired_workers", "ready_workers", "refused_rate", "group"),
        "device": "" if row.serving is None else row.serving.device,
        "throughput": _throughput_values(row.throughput),
        "memory": _memory_values(row.memory),
    }


def _throughput_values(throughput: Throughput) -> Dict[str, Any]:
    """Rates and times of moments are two lists: half as long as if each had its name."""
    return {
        **_fields(throughput, "rate", "p50_s", "p99_s"),
        "rates": [_rounded(each.rate) for each in throughput.rate_points],
        "p99s_s": [_rounded(each.p99_s) for each in throughput.rate_points],
    }


def _memory_values(memory: Optional[MemoryUsage]) -> Optional[Dict[str, int]]:
    return None if memory is None else {**dataclasses.asdict(memory), "total_bytes": memory.total_bytes}


def _process_values(row: ProcessRow) -> Dict[str, Any]:
    p50_us, p99_us = row.status.p50_us, row.status.p99_us
    return {
        **_fields(row, "model", "device", "rate"),
        **_fields(row.status, "name", "role", "state", "pid", "served", "in_flight"),
        **_fields(row.status, "pss_bytes", "private_bytes", "shared_bytes"),
        "p50_s": None if p50_us is None else _rounded(p50_us / 1e6),
        "p99_s": None if p99_us is None else _rounded(p99_us / 1e6),
    }


def _tenant_values(row: TenantRow) -> Dict[str, Any]:
    return {
        **_fields(row.status, "name", "weight", "share"),
        **_fields(row, "rate", "refused_rate"),
        **_fields(row.total, "in_flight", "queued", "served", "refused", "slot_seconds"),
        "wait_s": _rounded(row.total.mean_queue_s),
    }


def _fields(row: Any, *names: str) -> Dict[str, Any]:
    found = {name: getattr(row, name) for name in names}
    return {name: _rounded(value) if isinstance(value, float) else value for name, value in found.items()}


def _rounded(value: Optional[float]) -> Optional[float]:
    return None if value is None else float(f"{value:.4g}")
