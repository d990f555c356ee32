"""Overview shown by `weightctl top` and the status page: service, models, processes and tenants; also as JSON.

Each row has the daemon's data about one model, process or tenant, and values computed from several responses, such as
rates.
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
    """State of the daemon, its models, processes and tenants, as `weightctl top` and the status page show it.

    Attributes:
        metrics: the last metrics response.
        status: the last status response; None before the first status response.
        throughput: the throughput of all requests.
        memory: the memory use of all processes; None before the first status, and for a client that may not see it.
        models: the models in the order of the configuration.
        processes: the processes of all models in the last status.
        tenants: the tenants; a single one if the configuration has no tenants.
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
        """Whether this client may see the data of all tenants. Otherwise it sees only its own tenant."""
        return self.status is None or self.status.pid != 0

    @property
    def queued(self) -> int:
        """Number of requests in the queues of all models."""
        return sum(each.queued for each in self.metrics.models)

    @property
    def running(self) -> int:
        """Number of requests that workers are running."""
        return sum(each.running for each in self.metrics.models)


class RatePoint(NamedTuple):
    """A point of a sparkline: the request rate and p99 duration between two metrics responses.

    Attributes:
        rate: served requests per second; None if unknown.
        p99_s: the 99th percentile of their durations in seconds; None if unknown.
    """

    rate: Optional[float]
    p99_s: Optional[float]


class Throughput(NamedTuple):
    """Throughput of requests. A value is None if it is unknown or there were no requests.

    Attributes:
        rate: served requests per second, averaged over the last few seconds.
        p50_s: the median duration of these requests in seconds.
        p99_s: the 99th percentile of their durations in seconds.
        rate_points: one point of the sparkline for each metrics response, oldest first.
    """

    rate: Optional[float] = None
    p50_s: Optional[float] = None
    p99_s: Optional[float] = None
    rate_points: Tuple[RatePoint, ...] = ()


@dataclass(frozen=True)
class ModelRow:
    """The overview's row of one model.

    Attributes:
        metrics: the model's part of the last metrics response.
        serving: the model's serving or loading generation in the last status; None before the first status.
        throughput: the throughput of the model's requests.
        refused_rate: rejected or failed requests of the model per second; None if unknown.
        memory: the memory use of the model's processes; None if unknown. In a model group, only the first model has a
            value.
        group: the model group whose models share processes with this model, or "".
    """

    metrics: ModelMetrics
    serving: Optional[GenerationStatus]
    throughput: Throughput
    refused_rate: Optional[float]
    memory: Optional[MemoryUsage]
    group: str

    @property
    def progress(self) -> str:
        """Text for users on the progress of the generation's load. It is more detailed than the model's state."""
        return "" if self.serving is None else self.serving.progress

    @property
    def desired_workers(self) -> int:
        """Number of the model's processes that serve requests, or will serve requests once they are ready."""
        return sum(each.count for each in self.metrics.processes if each.role in SERVING_ROLES)

    @property
    def ready_workers(self) -> int:
        """Number of the processes counted by `desired_workers` that are ready."""
        processes = self.metrics.processes
        return sum(each.count for each in processes if each.role in SERVING_ROLES and each.state == "ready")


@dataclass(frozen=True)
class ProcessRow:
    """The overview's row of one process in the last status response.

    Attributes:
        model: the name of the model that the process runs.
        status: the status of the process.
        device: the device of the process, or else of its generation.
        rate: requests per second that the process has served since the status response before the last; None if
            unknown.
    """

    model: str
    status: ProcessStatus
    device: str
    rate: Optional[float]


@dataclass(frozen=True)
class TenantRow:
    """The overview's row of one tenant.

    Attributes:
        status: the tenant's part of the last metrics response.
        total: the sum of the tenant's accounts for all models.
        rate: served requests of the tenant per second, averaged over the last few seconds; None if unknown.
        refused_rate: rejected or failed requests of the tenant per second; None if unknown.
    """

    status: TenantStatus
    total: AccountStatus
    rate: Optional[float]
    refused_rate: Optional[float]


def to_json_values(overview: Overview) -> Dict[str, Any]:
    """Return the overview as JSON values. Durations are in seconds, sizes in bytes."""
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
    """Return the throughput as JSON values.

    The rate points become two lists of numbers. As a list of objects, their JSON text would be twice as long.
    """
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
