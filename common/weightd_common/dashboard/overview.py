"""Overview shown by `weightctl top` and the status page: service, models, processes and tenants; also as JSON.

A row has the daemon's data on its subject, and values derived from several responses, such as rates.
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
    """Overview of the service.

    Attributes:
        metrics: the last metrics response.
        status: the last status response; None before the first.
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
        """Whether this client may see all data. Otherwise it sees only its own tenant."""
        return self.status is None or self.status.pid != 0

    @property
    def queued(self) -> int:
        """Number of requests in the queues."""
        return sum(each.queued for each in self.metrics.models)

    @property
    def running(self) -> int:
        """Number of requests that workers are running."""
        return sum(each.running for each in self.metrics.models)


class RatePoint(NamedTuple):
    """Rate and p99 duration of requests between two samples."""

    rate: Optional[float]
    p99_s: Optional[float]


class Throughput(NamedTuple):
    """Throughput of requests. A value is None if it is unknown or there were no requests.

    Attributes:
        rate: requests per second in the last seconds.
        p50_s: their median duration in seconds.
        p99_s: the 99th percentile in seconds.
        rate_points: one point for each sample, oldest first.
    """

    rate: Optional[float] = None
    p50_s: Optional[float] = None
    p99_s: Optional[float] = None
    rate_points: Tuple[RatePoint, ...] = ()


@dataclass(frozen=True)
class ModelRow:
    """A model.

    Attributes:
        metrics: the model's part of the last metrics response.
        serving: its serving or loading generation in the last status; None before the first status.
        throughput: the throughput of its requests.
        refused_rate: rejected or failed requests per second.
        memory: the memory use of its processes; None if unknown. In a model group, only the first model has a value.
        group: the model group with which it shares processes, or "".
    """

    metrics: ModelMetrics
    serving: Optional[GenerationStatus]
    throughput: Throughput
    refused_rate: Optional[float]
    memory: Optional[MemoryUsage]
    group: str

    @property
    def progress(self) -> str:
        """The progress text of the generation, which is more detailed than the state while the model loads."""
        return "" if self.serving is None else self.serving.progress

    @property
    def desired_workers(self) -> int:
        """Number of processes that serve requests or will do so."""
        return sum(each.count for each in self.metrics.processes if each.role in SERVING_ROLES)

    @property
    def ready_workers(self) -> int:
        """Number of these processes that are ready."""
        processes = self.metrics.processes
        return sum(each.count for each in processes if each.role in SERVING_ROLES and each.state == "ready")


@dataclass(frozen=True)
class ProcessRow:
    """A process of a model in the last status. `rate` is its served requests per second since the status before."""

    model: str
    status: ProcessStatus
    device: str
    rate: Optional[float]


@dataclass(frozen=True)
class TenantRow:
    """A tenant.

    Attributes:
        status: the tenant's part of the last metrics response.
        total: the sum of its accounts.
        rate: served requests per second in the last seconds.
        refused_rate: rejected or failed requests per second.
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
    """Rate points become two lists, which are half as long as a list of named values."""
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
