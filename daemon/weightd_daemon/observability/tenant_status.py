"""What a status tells of tenants, and how much of it each of them is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from weightd_daemon.models.model import ServedModel
from weightd_daemon.tenants.tenant import Tenant
from weightd_daemon.tenants.usage import OTHER_MODELS, Usage, UsageTable
from weightd_protocol import limits
from weightd_protocol.messages.accounts import AccountStatus, TenantStatus

# Requests that wait, by tenant and model.
QueuedCounts = Mapping[tuple[str, str], int]


def queued_counts(models: Iterable[ServedModel]) -> QueuedCounts:
    """Return how many requests wait, by tenant and model."""
    queued: dict[tuple[str, str], int] = {}
    for model in models:
        for tenant, count in model.dispatcher.queued_by_tenant.items():
            queued[tenant.name, model.name] = count
    return queued


def tenant_statuses(
    tenants: Iterable[Tenant],
    usage_table: UsageTable,
    queued: QueuedCounts,
    visible_models: Collection[str] | None = None,
) -> tuple[TenantStatus, ...]:
    """Return what is told of tenants: all accounts, or those of the models that were asked most where these are many.

    What is left out is in the sum of its tenant, so that nothing is missing. `visible_models`: of no other models
    anything is told but that sum; None for all.
    """
    tenant_list = list(tenants)
    usages = {tenant.name: dict(usage_table.items(tenant.name)) for tenant in tenant_list}
    candidates = [
        (name, model, each)
        for name, models in usages.items()
        for model, each in models.items()
        if model != OTHER_MODELS and (visible_models is None or model in visible_models)
    ]
    candidates.sort(key=lambda each: each[2].requests, reverse=True)
    # A tenant has a sum beside them.
    max_listed = limits.MAX_ACCOUNTS - len(tenant_list)
    listed = {(name, model) for name, model, _ in candidates[:max_listed]}
    merged_counts = Counter(name for name, _, _ in candidates[max_listed:])
    shares = usage_table.shares()
    return tuple(
        TenantStatus(
            tenant.name,
            tenant.config.weight,
            _account_statuses(tenant.name, usages[tenant.name], listed, queued),
            shares.get(tenant.name) if shares else None,
            merged_counts[tenant.name],
        )
        for tenant in tenant_list
    )


def _account_statuses(
    name: str, usages: Mapping[str, Usage], listed: Collection[tuple[str, str]], queued: QueuedCounts
) -> tuple[AccountStatus, ...]:
    merged = Usage()
    merged_queued = 0
    statuses: list[AccountStatus] = []
    for model, usage in usages.items():
        if (name, model) in listed:
            statuses.append(_account_status(model, usage, queued.get((name, model), 0)))
        else:
            merged.add(usage)
            merged.in_flight += usage.in_flight
            merged_queued += queued.get((name, model), 0)
    if not merged.is_empty:
        statuses.append(_account_status(OTHER_MODELS, merged, merged_queued))
    return tuple(statuses)


def _account_status(model: str, usage: Usage, queued: int) -> AccountStatus:
    return AccountStatus(
        model,
        usage.requests,
        usage.served,
        usage.rows,
        usage.slot_seconds,
        usage.queue_seconds,
        usage.bytes_in,
        usage.bytes_out,
        usage.in_flight,
        queued,
        dict(usage.refused),
        usage.unexpected_exits,
    )
