"""What the daemon answers who asks for its metrics: counters, and how things stand at this moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from weightd_daemon.counters import ROWS_BOUNDS, SECONDS_BOUNDS, CounterRegistry, DaemonCounters
from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.process import WorkerProcess
from weightd_daemon.generations.states import ChildState
from weightd_daemon.models.model import ServedModel
from weightd_daemon.observability.tenant_status import QueuedCounts, queued_counts, tenant_statuses
from weightd_daemon.tenants.tenant import Tenant, Viewer
from weightd_daemon.tenants.usage import UsageTable
from weightd_protocol import limits
from weightd_protocol.messages.metrics import Histogram, MetricsResponse, ModelMetrics, ProcessCount, ReloadCounts
from weightd_protocol.version import VERSION

_EMPTY_HISTOGRAM = Histogram((), 0.0)


class MemoryFootprint(NamedTuple):
    """What the processes of a model took of memory when that was measured last, in bytes; None: nobody tells."""

    pss_bytes: int | None = None
    shared_bytes: int | None = None
    saved_bytes: int | None = None
    copy_bytes: int | None = None


_UNKNOWN_FOOTPRINT = MemoryFootprint()


class MetricsInputs(NamedTuple):
    """What is told of.

    Attributes:
        models: those that are served.
        counter_registry: of all of them.
        daemon_counters: of the daemon.
        tenants: those of the configuration, and who is none of them but asks; or everyone.
        usage_table: of all.
        buffered_bytes: that are kept for clients.
        max_buffered_bytes: that may be.
        footprints: of models, by name, as far as that was measured.
        pss_bytes: of the daemon and what belongs to it, likewise.
    """

    models: Sequence[ServedModel]
    counter_registry: CounterRegistry
    daemon_counters: DaemonCounters
    tenants: Iterable[Tenant]
    usage_table: UsageTable
    buffered_bytes: int
    max_buffered_bytes: int
    footprints: Mapping[str, MemoryFootprint] = {}
    pss_bytes: int | None = None


class MetricsTime(NamedTuple):
    """When it is told: the daemon's state, for how many seconds it has run, and the clock."""

    state: str
    uptime_s: float
    now: float


def build_metrics(request_id: str, metrics_time: MetricsTime, viewer: Viewer, inputs: MetricsInputs) -> MetricsResponse:
    """Return the answer: everything, or what is the viewer's own."""
    return (
        _all_metrics(request_id, metrics_time, inputs)
        if viewer.can_see_all
        else _tenant_metrics(request_id, metrics_time, viewer, inputs)
    )


def _all_metrics(request_id: str, metrics_time: MetricsTime, inputs: MetricsInputs) -> MetricsResponse:
    return MetricsResponse(
        id=request_id,
        version=VERSION,
        state=metrics_time.state,
        uptime_s=metrics_time.uptime_s,
        seconds_bounds=SECONDS_BOUNDS,
        rows_bounds=ROWS_BOUNDS,
        models=tuple(
            _model_metrics(
                model, inputs.counter_registry, inputs.footprints.get(model.name, _UNKNOWN_FOOTPRINT), metrics_time
            )
            for model in inputs.models
        ),
        tenants=tenant_statuses(inputs.tenants, inputs.usage_table, queued_counts(inputs.models)),
        buffered_bytes=inputs.buffered_bytes,
        max_memory_bytes=inputs.max_buffered_bytes,
        dropped_responses=inputs.daemon_counters.dropped_responses,
        reloads=ReloadCounts(inputs.daemon_counters.reloads, inputs.daemon_counters.refused_reloads),
        pss_bytes=inputs.pss_bytes,
    )


def _model_metrics(
    model: ServedModel, counter_registry: CounterRegistry, footprint: MemoryFootprint, metrics_time: MetricsTime
) -> ModelMetrics:
    counters, main_generation = counter_registry.counters_of(model.name), model.main_generation
    requests = model.dispatcher.status(metrics_time.now)
    return ModelMetrics(
        name=model.name,
        engine=model.config.engine,
        state=model.state.display_name,
        ready=_is_ready(model, metrics_time),
        generation=main_generation.number,
        sha256=main_generation.sha256,
        queued=requests.queued,
        running=requests.running,
        processes=_process_counts(model.generations),
        executions=counters.compute.count,
        unexpected_exits=counters.unexpected_exits,
        restarts=counters.restarts,
        selftest_failures=counters.selftest_failures,
        batch_mismatches=counters.batch_mismatches,
        quarantined=requests.quarantined,
        request_seconds=counters.requests.to_histogram(),
        queue_seconds=counters.queue.to_histogram(),
        compute_seconds=counters.compute.to_histogram(),
        batch_rows=counters.rows.to_histogram(),
        pss_bytes=footprint.pss_bytes,
        shared_bytes=footprint.shared_bytes,
        saved_bytes=footprint.saved_bytes,
        copy_bytes=footprint.copy_bytes,
        max_queue=model.config.max_queue,
    )


def _process_counts(generations: Iterable[GenerationBase]) -> tuple[ProcessCount, ...]:
    counts = Counter(
        (role_of(generation, child), child.state.display_name)
        for generation in generations
        for child in generation.processes.alive()
    )
    items = sorted(counts.items())[: limits.MAX_PROCESS_COUNTS]
    return tuple(ProcessCount(role, state, count) for (role, state), count in items)


def role_of(generation: GenerationBase, child: WorkerProcess) -> str:
    """Return what a process is for: a worker that takes no requests yet is a spare."""
    is_spare = (
        child.role is Role.WORKER and child.state is ChildState.READY and child.name not in generation.processes.serving
    )
    return "spare" if is_spare else child.role.value


def _is_ready(model: ServedModel, metrics_time: MetricsTime) -> bool:
    return metrics_time.state == "running" and not model.unready_reason(metrics_time.now)


def _tenant_metrics(
    request_id: str, metrics_time: MetricsTime, viewer: Viewer, inputs: MetricsInputs
) -> MetricsResponse:
    """Nothing of anybody else: the models that there are for a tenant, and its account."""
    tenant = viewer.tenant
    visible_models = [model for model in inputs.models if tenant.can_see(model.name)]
    queued = queued_counts(visible_models)
    return MetricsResponse(
        id=request_id,
        version=VERSION,
        state=metrics_time.state,
        uptime_s=metrics_time.uptime_s,
        seconds_bounds=(),
        rows_bounds=(),
        models=tuple(_tenant_model_metrics(model, tenant, queued, metrics_time) for model in visible_models),
        tenants=tenant_statuses([tenant], inputs.usage_table, queued, {model.name for model in visible_models}),
        buffered_bytes=0,
        max_memory_bytes=0,
        dropped_responses=0,
        reloads=ReloadCounts(0, 0),
    )


def _tenant_model_metrics(
    model: ServedModel, tenant: Tenant, queued: QueuedCounts, metrics_time: MetricsTime
) -> ModelMetrics:
    return ModelMetrics(
        name=model.name,
        engine=model.config.engine,
        state=model.state.display_name,
        ready=_is_ready(model, metrics_time),
        generation=0,
        sha256="",
        queued=queued.get((tenant.name, model.name), 0),
        running=0,
        processes=(),
        executions=0,
        unexpected_exits=0,
        restarts=0,
        selftest_failures=0,
        batch_mismatches=0,
        quarantined=0,
        request_seconds=_EMPTY_HISTOGRAM,
        queue_seconds=_EMPTY_HISTOGRAM,
        compute_seconds=_EMPTY_HISTOGRAM,
        batch_rows=_EMPTY_HISTOGRAM,
    )
