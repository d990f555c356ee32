"""Makes rows of what the daemon told."""

from __future__ import annotations

import dataclasses
from typing import Callable, Iterator, Optional, Sequence, Set, Tuple

from weightd_common.dashboard import memory
from weightd_common.dashboard.rates import rate
from weightd_common.dashboard.rows import ModelRow, ProcessRow, TenantRow, Throughput
from weightd_common.dashboard.window import CounterWindow
from weightd_protocol.messages.accounts import TenantStatus
from weightd_protocol.messages.metrics import MetricsResponse, ModelMetrics
from weightd_protocol.messages.status import GenerationStatus, ModelStatus, ProcessStatus, StatusResponse

# Who answers requests; a spare does once one of these is lost.
_SERVING_ROLES = ("worker", "rank")


def model_rows(
    now: MetricsResponse,
    status: Optional[StatusResponse],
    windows: Sequence[CounterWindow],
    throughput_of: Callable[[str], Throughput],
) -> Iterator[ModelRow]:
    """Yield a row for each model; `throughput_of` tells that of one by its name."""
    statuses = {} if status is None else {each.name: each for each in status.models}
    groups: Set[str] = set()
    for model in now.models:
        row = _model_row(model, statuses.get(model.name), throughput_of(model.name), _refused_rate(windows, model.name))
        # What a group has is told with the first of it.
        yield dataclasses.replace(row, memory=None) if row.group in groups else row
        groups |= {row.group} - {""}


def _model_row(
    model: ModelMetrics, status: Optional[ModelStatus], throughput: Throughput, refused_rate: Optional[float]
) -> ModelRow:
    generation = None if status is None else _find_generation(status, model.generation)
    return ModelRow(
        name=model.name,
        engine=model.engine,
        state=model.state,
        progress="" if generation is None else generation.progress,
        ready=model.ready,
        generation=model.generation,
        sha256=model.sha256,
        device="" if generation is None else generation.device,
        desired_workers=sum(each.count for each in model.processes if each.role in _SERVING_ROLES),
        ready_workers=sum(
            each.count for each in model.processes if each.role in _SERVING_ROLES and each.state == "ready"
        ),
        queued=model.queued,
        running=model.running,
        refused_rate=refused_rate,
        unexpected_exits=model.unexpected_exits,
        throughput=throughput,
        memory=None if status is None else memory.model_memory(status),
        group="" if status is None else status.group,
    )


def _find_generation(status: ModelStatus, number: int) -> Optional[GenerationStatus]:
    return next((each for each in status.generations if each.number == number), None)


def _refused_rate(windows: Sequence[CounterWindow], model: str) -> Optional[float]:
    for window in windows:
        found = window.rate(window.before.refused(model=model), window.now.refused(model=model))
        if found is not None:
            return found
    return None


def process_rows(statuses: Sequence[StatusResponse]) -> Iterator[ProcessRow]:
    """Yield a row for each process of the last status; the one before, if any, tells what it has done since."""
    if not statuses:
        return
    *earlier, last = statuses
    before = {process.name: process.served for status in earlier for _, _, process in _iterate_processes(status)}
    seconds = last.uptime_s - earlier[-1].uptime_s if earlier else 0.0
    for model, generation, process in _iterate_processes(last):
        served = before.get(process.name)
        pace = None if served is None else rate(served, process.served, seconds)
        yield _process_row(model, generation, process, pace)


def _iterate_processes(status: StatusResponse) -> Iterator[Tuple[str, GenerationStatus, ProcessStatus]]:
    for model in status.models:
        for generation in model.generations:
            for process in generation.processes:
                yield model.name, generation, process


def _process_row(model: str, generation: GenerationStatus, process: ProcessStatus, rate: Optional[float]) -> ProcessRow:
    return ProcessRow(
        model=model,
        name=process.name,
        role=process.role,
        state=process.state,
        device=process.device or generation.device,
        pid=process.pid,
        served=process.served,
        rate=rate,
        in_flight=process.in_flight,
        p50_s=_seconds(process.p50_us),
        p99_s=_seconds(process.p99_us),
        pss_bytes=process.pss_bytes,
        private_bytes=process.private_bytes,
        shared_bytes=process.shared_bytes,
    )


def _seconds(microseconds: Optional[float]) -> Optional[float]:
    return None if microseconds is None else microseconds / 1e6


def tenant_row(status: TenantStatus, windows: Sequence[CounterWindow]) -> TenantRow:
    """Return the row of a tenant."""
    served = sum(each.served for each in status.accounts)
    served_rate, refused_rate = _find_tenant_rates(status.name, windows)
    return TenantRow(
        name=status.name,
        weight=status.weight,
        share=status.share,
        rate=served_rate,
        refused_rate=refused_rate,
        in_flight=sum(each.in_flight for each in status.accounts),
        queued=sum(each.queued for each in status.accounts),
        wait_s=sum(each.queue_seconds for each in status.accounts) / served if served else None,
        served=served,
        refused=sum(sum(each.failed.values()) for each in status.accounts),
        slot_seconds=sum(each.slot_seconds for each in status.accounts),
    )


def _find_tenant_rates(name: str, windows: Sequence[CounterWindow]) -> Tuple[Optional[float], Optional[float]]:
    for window in windows:
        served = window.rate(window.before.served(name), window.now.served(name))
        refused = window.rate(window.before.refused(name), window.now.refused(name))
        if served is not None and refused is not None:
            return served, refused
    return None, None
