"""The status as whoever may not see what concerns others is told: the models there are for it, and its own figures."""

from __future__ import annotations

from weightd_daemon.models.model import ServedModel
from weightd_daemon.observability.tenant_status import QueuedCounts, queued_counts, tenant_statuses
from weightd_daemon.tenants.tenant import Tenant
from weightd_daemon.tenants.usage import UsageTable
from weightd_protocol.messages.status import ModelStatus, StatusResponse
from weightd_protocol.version import VERSION


def build_tenant_status(
    request_id: str, state: str, uptime_s: float, tenant: Tenant, models: list[ServedModel], usage_table: UsageTable
) -> StatusResponse:
    """Return the answer to its question: no processes, no paths, no memory, nobody else; `models`: all there are."""
    visible_models = [model for model in models if tenant.can_see(model.name)]
    queued = queued_counts(visible_models)
    return StatusResponse(
        id=request_id,
        version=VERSION,
        state=state,
        pid=0,
        uptime_s=uptime_s,
        pss_bytes=0,
        models=tuple(_model_status(model, tenant, usage_table, queued) for model in visible_models),
        tenants=tenant_statuses([tenant], usage_table, queued, {model.name for model in visible_models}),
    )


def _model_status(model: ServedModel, tenant: Tenant, usage_table: UsageTable, queued: QueuedCounts) -> ModelStatus:
    usage = usage_table.usage_of(tenant.name, model.name)
    return ModelStatus(
        name=model.name,
        engine=model.config.engine,
        path="",
        state=model.state.display_name,
        queued=queued.get((tenant.name, model.name), 0),
        served=usage.served,
        failed=usage.refused_total,
        generations=(),
    )
