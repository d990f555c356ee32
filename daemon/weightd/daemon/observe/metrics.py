"""What the daemon answers who asks for its metrics: counters, and how things stand at this moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from weightd.daemon.generations.actions import Role
from weightd.daemon.generations.child import Child
from weightd.daemon.generations.life import Life
from weightd.daemon.generations.states import ChildState
from weightd.daemon.meters.buckets import ROWS, SECONDS
from weightd.daemon.meters.meters import Meters
from weightd.daemon.meters.totals import Totals
from weightd.daemon.models.model import Model
from weightd.daemon.observe.tenants import Queued, told, waiting
from weightd.daemon.tenants.accounts import Accounts
from weightd.daemon.tenants.tenant import Tenant, Viewer
from weightd.protocol import limits
from weightd.protocol.messages.metrics import Histogram, MetricsResponse, ModelMetrics, ProcessCount, ReloadCounts
from weightd.protocol.version import VERSION

_NOTHING = Histogram((), 0.0)


class Footing(NamedTuple):
    """What the processes of a model took of memory when that was measured last, in bytes; None: nobody tells."""

    pss: int | None = None
    shared: int | None = None
    saved: int | None = None
    copy: int | None = None


_UNKNOWN = Footing()


class Counted(NamedTuple):
    """What is told of.

    Attributes:
        models: those that are served.
        meters: of all of them.
        totals: of the daemon.
        tenants: those of the configuration, and who is none of them but asks; or everyone.
        accounts: of all.
        held_bytes: that are kept for clients.
        max_memory_bytes: that may be.
        footings: of models, by name, as far as that was measured.
        pss_bytes: of the daemon and what belongs to it, likewise.
    """

    models: Sequence[Model]
    meters: Meters
    totals: Totals
    tenants: Iterable[Tenant]
    accounts: Accounts
    held_bytes: int
    max_memory_bytes: int
    footings: Mapping[str, Footing] = {}
    pss_bytes: int | None = None


class Moment(NamedTuple):
    """When it is told: the daemon's state, for how many seconds it has run, and the clock."""

    state: str
    uptime: float
    now: float


def tell(request_id: str, moment: Moment, viewer: Viewer, counted: Counted) -> MetricsResponse:
    """Return the answer: everything, or what is the viewer's own."""
    return _everything(request_id, moment, counted) if viewer.sees_all else _own(request_id, moment, viewer, counted)


def _everything(request_id: str, moment: Moment, counted: Counted) -> MetricsResponse:
    return MetricsResponse(
        id=request_id,
        version=VERSION,
        state=moment.state,
        uptime_s=moment.uptime,
        seconds_bounds=SECONDS,
        rows_bounds=ROWS,
        models=tuple(
            _model(model, counted.meters, counted.footings.get(model.name, _UNKNOWN), moment)
            for model in counted.models
        ),
        tenants=told(counted.tenants, counted.accounts, waiting(counted.models)),
        held_bytes=counted.held_bytes,
        max_memory_bytes=counted.max_memory_bytes,
        dropped=counted.totals.dropped,
        reloads=ReloadCounts(counted.totals.reloads, counted.totals.refused_reloads),
        pss_bytes=counted.pss_bytes,
    )


def _model(model: Model, meters: Meters, footing: Footing, moment: Moment) -> ModelMetrics:
    meter, main, desk = meters.of(model.name), model.main_generation, model.dispatcher
    return ModelMetrics(
        name=model.name,
        engine=model.config.engine,
        state=model.state.display_name,
        ready=_is_ready(model, moment),
        generation=main.number,
        sha256=main.sha256,
        queued=desk.scheduler.line.count,
        running=desk.scheduler.seats.running,
        processes=_processes(model.generations),
        executions=meter.compute.count,
        deaths=meter.deaths,
        restarts=meter.restarts,
        canary_failures=meter.canary_failures,
        mismatches=meter.mismatches,
        quarantined=desk.guard.quarantine.count(moment.now),
        request_seconds=meter.requests.told(),
        queue_seconds=meter.queue.told(),
        compute_seconds=meter.compute.told(),
        job_rows=meter.rows.told(),
        pss_bytes=footing.pss,
        shared_bytes=footing.shared,
        saved_bytes=footing.saved,
        copy_bytes=footing.copy,
        max_queue=model.config.max_queue,
    )


def _processes(generations: Iterable[Life]) -> tuple[ProcessCount, ...]:
    there = Counter(
        (role_of(generation, child), child.state.display_name) for generation in generations for child in generation.alive()
    )
    counted = sorted(there.items())[: limits.MAX_PROCESS_COUNTS]
    return tuple(ProcessCount(role, state, count) for (role, state), count in counted)


def role_of(generation: Life, child: Child) -> str:
    """Return what a process is for: a worker that takes no requests yet is a spare."""
    is_spare = child.role is Role.WORKER and child.state is ChildState.READY and child.name not in generation.serving_processes
    return "spare" if is_spare else child.role.value


def _is_ready(model: Model, moment: Moment) -> bool:
    return moment.state == "running" and not model.unready_reason(moment.now)


def _own(request_id: str, moment: Moment, viewer: Viewer, counted: Counted) -> MetricsResponse:
    """Nothing of anybody else: the models that there are for a tenant, and its account."""
    tenant = viewer.tenant
    seen = [model for model in counted.models if tenant.sees(model.name)]
    queued = waiting(seen)
    return MetricsResponse(
        id=request_id,
        version=VERSION,
        state=moment.state,
        uptime_s=moment.uptime,
        seconds_bounds=(),
        rows_bounds=(),
        models=tuple(_own_model(model, tenant, queued, moment) for model in seen),
        tenants=told([tenant], counted.accounts, queued, {model.name for model in seen}),
        held_bytes=0,
        max_memory_bytes=0,
        dropped=0,
        reloads=ReloadCounts(0, 0),
    )


def _own_model(model: Model, tenant: Tenant, queued: Queued, moment: Moment) -> ModelMetrics:
    return ModelMetrics(
        name=model.name,
        engine=model.config.engine,
        state=model.state.display_name,
        ready=_is_ready(model, moment),
        generation=0,
        sha256="",
        queued=queued.get((tenant.name, model.name), 0),
        running=0,
        processes=(),
        executions=0,
        deaths=0,
        restarts=0,
        canary_failures=0,
        mismatches=0,
        quarantined=0,
        request_seconds=_NOTHING,
        queue_seconds=_NOTHING,
        compute_seconds=_NOTHING,
        job_rows=_NOTHING,
    )
