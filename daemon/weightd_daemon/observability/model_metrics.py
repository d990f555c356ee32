"""Metrics and status of models, for operators and for a single tenant, from data that needs no measurement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from weightd_daemon.counters import CounterRegistry
from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.process import WorkerProcess
from weightd_daemon.generations.states import ChildState
from weightd_daemon.models.model import ServedModel
from weightd_daemon.observability.memory import (
    MemoryFootprint,
)
from weightd_daemon.platform import event_loop
from weightd_daemon.tenants.reporting import QueuedCounts
from weightd_daemon.tenants.tenant import Tenant
from weightd_daemon.tenants.usage import UsageTable
from weightd_protocol import limits
from weightd_protocol.messages.metrics import Histogram, ModelMetrics, ProcessCount
from weightd_protocol.messages.status import (
    ModelStatus,
)

_EMPTY_HISTOGRAM = Histogram((), 0.0)


def model_metrics(
    model: ServedModel,
    counter_registry: CounterRegistry,
    footprint: MemoryFootprint,
    *,
    ready: bool,
    reserved_bytes: int,
) -> ModelMetrics:
    """Return the counters and the state of a model. The counters include the counts of earlier daemons."""
    counters, generation = counter_registry.counters_of(model.name), model.readiness.last_generation
    requests = model.dispatcher.status(event_loop.now())
    return ModelMetrics(
        name=model.name,
        engine=model.config.engine,
        state=model.readiness.state_name,
        ready=ready,
        generation=0 if generation is None else generation.number,
        sha256="" if generation is None else generation.sha256,
        queued=requests.queued,
        running=requests.running,
        processes=process_counts(model.generations),
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
        reserved_bytes=reserved_bytes,
    )


def process_counts(generations: Iterable[GenerationBase]) -> tuple[ProcessCount, ...]:
    """Return how many processes there are of each role and state."""
    counts = Counter(
        (role_of(generation, child), child.state.display_name)
        for generation in generations
        for child in generation.processes.alive()
    )
    items = sorted(counts.items())[: limits.MAX_PROCESS_COUNTS]
    return tuple(ProcessCount(role, state, count) for (role, state), count in items)


def role_of(generation: GenerationBase, child: WorkerProcess) -> str:
    """Return the role of a process; "spare" for a ready worker that does not serve requests yet."""
    is_spare = (
        child.role is Role.WORKER and child.state is ChildState.READY and child.name not in generation.processes.serving
    )
    return "spare" if is_spare else child.role.value


def tenant_model_metrics(model: ServedModel, queued: int, *, ready: bool) -> ModelMetrics:
    """Return the metrics of a model for a tenant that may only see its own requests. All other numbers are 0."""
    return ModelMetrics(
        name=model.name,
        engine=model.config.engine,
        state=model.readiness.state_name,
        ready=ready,
        generation=0,
        sha256="",
        queued=queued,
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


def tenant_model_status(
    model: ServedModel, tenant: Tenant, usage_table: UsageTable, queued: QueuedCounts
) -> ModelStatus:
    """Return the status of a model for a tenant that may only see its own requests, without processes and paths."""
    usage = usage_table.usage_of(tenant.name, model.name)
    return ModelStatus(
        name=model.name,
        engine=model.config.engine,
        path="",
        state=model.readiness.state_name,
        queued=queued.get((tenant.name, model.name), 0),
        served=usage.served,
        failed=usage.refused_total,
        generations=(),
    )


def queued_counts(models: Iterable[ServedModel]) -> QueuedCounts:
    """Return the number of queued requests, by the names of the tenant and the model."""
    queued: dict[tuple[str, str], int] = {}
    for model in models:
        for tenant, count in model.dispatcher.queued_by_tenant.items():
            queued[tenant.name, model.name] = count
    return queued
