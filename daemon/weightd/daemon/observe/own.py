"""The status as whoever may not see what concerns others is told: the models there are for it, and its own figures."""

from __future__ import annotations

from weightd.daemon.models.model import Model
from weightd.daemon.observe.tenants import Queued, told, waiting
from weightd.daemon.tenants.accounts import Accounts
from weightd.daemon.tenants.tenant import Tenant
from weightd.protocol.messages.status import ModelStatus, StatusResponse
from weightd.protocol.version import VERSION


def own_report(
    request_id: str, state: str, uptime: float, tenant: Tenant, models: list[Model], accounts: Accounts
) -> StatusResponse:
    """Return the answer to its question: no processes, no paths, no memory, nobody else; `models`: all there are."""
    seen = [model for model in models if tenant.sees(model.name)]
    queued = waiting(seen)
    return StatusResponse(
        id=request_id,
        version=VERSION,
        state=state,
        pid=0,
        uptime_s=uptime,
        pss_bytes=0,
        models=tuple(_model(model, tenant, accounts, queued) for model in seen),
        tenants=told([tenant], accounts, queued, {model.name for model in seen}),
    )


def _model(model: Model, tenant: Tenant, accounts: Accounts, queued: Queued) -> ModelStatus:
    account = accounts.of(tenant.name, model.name)
    return ModelStatus(
        name=model.name,
        engine=model.config.engine,
        path="",
        state=model.state.display_name,
        queued=queued.get((tenant.name, model.name), 0),
        served=account.served,
        failed=account.failed,
        generations=(),
    )
