"""What a status tells of tenants, and how much of it each of them is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from weightd.daemon.models.model import Model
from weightd.daemon.tenants.accounts import ELSEWHERE, Account, Accounts
from weightd.daemon.tenants.tenant import Tenant
from weightd.protocol import limits
from weightd.protocol.messages.accounts import AccountStatus, TenantStatus

# Requests that wait, by tenant and model.
Queued = Mapping[tuple[str, str], int]


def waiting(models: Iterable[Model]) -> Queued:
    """Return how many requests wait, by tenant and model."""
    queued: dict[tuple[str, str], int] = {}
    for model in models:
        for tenant, count in model.desk.scheduler.line.counts.items():
            queued[tenant.name, model.name] = count
    return queued


def told(tenants: Iterable[Tenant], accounts: Accounts, queued: Queued) -> tuple[TenantStatus, ...]:
    """Return what is told of tenants: all accounts, or those of the models that were asked most where these are many.

    What is left out is in the sum of its tenant, so that nothing is missing.
    """
    there = list(tenants)
    found = {tenant.name: dict(accounts.items(tenant.name)) for tenant in there}
    every = [(name, model, each) for name, models in found.items() for model, each in models.items() if model]
    every.sort(key=lambda each: each[2].requests, reverse=True)
    # A tenant has a sum beside them.
    listed = {(name, model) for name, model, _ in every[: limits.MAX_ACCOUNTS - len(there)]}
    shares = accounts.shares()
    return tuple(
        _tenant(tenant, found[tenant.name], listed, queued, shares.get(tenant.name) if shares else None)
        for tenant in there
    )


def _tenant(
    tenant: Tenant,
    accounts: Mapping[str, Account],
    listed: set[tuple[str, str]],
    queued: Queued,
    share: float | None,
) -> TenantStatus:
    name = tenant.name
    others = Account()
    summed = queued_there = 0
    shown: list[AccountStatus] = []
    for model, account in accounts.items():
        if (name, model) in listed:
            shown.append(_account(model, account, queued.get((name, model), 0)))
        else:
            others.add(account)
            others.in_flight += account.in_flight
            queued_there += queued.get((name, model), 0)
            summed += model != ELSEWHERE
    if not others.is_blank:
        shown.append(_account(ELSEWHERE, others, queued_there))
    return TenantStatus(name, tenant.config.weight, tuple(shown), share, summed)


def _account(model: str, account: Account, queued: int) -> AccountStatus:
    return AccountStatus(
        model,
        account.requests,
        account.served,
        account.rows,
        account.seat_seconds,
        account.waited_seconds,
        account.bytes_in,
        account.bytes_out,
        account.in_flight,
        queued,
        dict(account.refused),
        account.deaths,
    )
