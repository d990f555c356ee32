"""Made-up metrics and status responses, for tests of the programs that display them."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from weightd_protocol.messages.accounts import AccountStatus, TenantStatus
from weightd_protocol.messages.metrics import Histogram, MetricsResponse, ModelMetrics, ProcessCount, ReloadCounts
from weightd_protocol.messages.status import (
    ForkServerStatus,
    GenerationStatus,
    ModelStatus,
    ProcessStatus,
    StatusResponse,
)

MB = 1_000_000
BOUNDS = (0.001, 0.01, 0.1)

_NOTHING = Histogram((0, 0, 0, 0), 0.0)


def counted(name: str, counts: Sequence[int] = (0, 0, 0, 0), workers: int = 2, **more: Any) -> ModelMetrics:
    """Return the metrics of a serving model; `counts` is its latency histogram with the bounds `BOUNDS`."""
    values: Dict[str, Any] = {
        "name": name,
        "engine": "onnxruntime",
        "state": "serving",
        "ready": True,
        "generation": 1,
        "sha256": "ab" * 32,
        "queued": 0,
        "running": 0,
        "processes": (ProcessCount("holder", "holding", 1), ProcessCount("worker", "ready", workers)),
        "executions": sum(counts),
        "unexpected_exits": 0,
        "restarts": 0,
        "selftest_failures": 0,
        "batch_mismatches": 0,
        "quarantined": 0,
        "request_seconds": Histogram(tuple(counts), 0.0),
        "queue_seconds": _NOTHING,
        "compute_seconds": _NOTHING,
        "batch_rows": Histogram((0,), 0.0),
    }
    return ModelMetrics(**{**values, **more})


def metrics(uptime: float, *models: ModelMetrics, tenants: Optional[Sequence[TenantStatus]] = None) -> MetricsResponse:
    """Return the metrics response of a daemon with these models."""
    return MetricsResponse(
        id="id",
        version="0.1.0",
        state="running",
        uptime_s=uptime,
        seconds_bounds=BOUNDS,
        rows_bounds=(),
        models=models,
        tenants=(tenant("default"),) if tenants is None else tuple(tenants),
        buffered_bytes=0,
        max_memory_bytes=64 * MB,
        dropped_responses=0,
        reloads=ReloadCounts(0, 0),
    )


def tenant(name: str, *accounts: AccountStatus, weight: float = 1.0, share: Optional[float] = None) -> TenantStatus:
    """Return a tenant with these accounts."""
    return TenantStatus(name, weight, accounts, share)


def account(model: str, served: int, refused: Optional[Mapping[str, int]] = None, **more: Any) -> AccountStatus:
    """Return the usage of a model by a tenant."""
    lost = dict(refused or {})
    values: Dict[str, Any] = {
        "requests": served + sum(lost.values()),
        "rows": served,
        "slot_seconds": served / 100,
        "queue_seconds": served / 500,
        "bytes_in": 0,
        "bytes_out": 0,
        "in_flight": 0,
        "queued": 0,
    }
    return AccountStatus(model, served=served, failed=lost, **{**values, **more})


def processes(model: str, workers: int, private: int, weights: int, served: int = 0) -> Tuple[ProcessStatus, ...]:
    """Return a holder and its workers, which share its weights; each has `private` bytes of private memory."""
    part = weights // (workers + 1)
    holder = ProcessStatus(f"{model}.1.holder", "holder", "holding", _pid(), 0, 0, pss_bytes=part + private,
                           private_bytes=private)  # fmt: skip
    return (holder, *(
        ProcessStatus(
            f"{model}.1.w{number}", "worker", "ready", _pid(), served, 1, 500.0, 1500.0,
            pss_bytes=part + private, shared_bytes=weights, private_bytes=private,
        )
        for number in range(1, workers + 1)
    ))  # fmt: skip


def model(name: str, there: Sequence[ProcessStatus] = (), copy: Optional[int] = 0, **more: Any) -> ModelStatus:
    """Return the status of a model with one generation of these processes."""
    device = more.pop("device", "cpu")
    progress = more.pop("progress", "serving")
    generation = GenerationStatus(1, device, "serving", progress, "", "ab" * 32, tuple(there), copy, 0)
    return ModelStatus(name, "onnxruntime", f"/models/{name}.onnx", "serving", 0, 0, 0, (generation,), **more)


def status(uptime: float, *models: ModelStatus, **more: Any) -> StatusResponse:
    """Return the status response of a daemon with these models; the daemon has 10 MB, its fork server 20 MB."""
    server = ForkServerStatus("onnxruntime", "python3", 2, 0, 20 * MB)
    values: Dict[str, Any] = {"pid": 1, "pss_bytes": 10 * MB, "fork_servers": (server,), **more}
    return StatusResponse("id", "0.1.0", "running", uptime_s=uptime, models=models, **values)


_last_pid = [1000]


def _pid() -> int:
    _last_pid[0] += 1
    return _last_pid[0]
