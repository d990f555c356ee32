"""What a status tells of tenants, and how much of it each of them is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

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
        for tenant, count in model.dispatcher.scheduler.line.counts.items():
            queued[tenant.name, model.name] = count
    return queued


def told(
    tenants: Iterable[Tenant], accounts: Accounts, queued: Queued, names: Collection[str] | None = None
) -> tuple[TenantStatus, ...]:
    """Return what is told of tenants: all accounts, or those of the models that were asked most where these are many.

    What is left out is in the sum of its tenant, so that nothing is missing. `names`: of no other models anything is
    told but that sum; None for all.
    """
    there = list(tenants)
    found = {tenant.name: dict(accounts.items(tenant.name)) for tenant in there}
    every = [
        (name, model, each)
        for name, models in found.items()
        for model, each in models.items()
        if model != ELSEWHERE and (names is None or model in names)
    ]
    every.sort(key=lambda each: each[2].requests, reverse=True)
    # A tenant has a sum beside them.
    room = limits.MAX_ACCOUNTS - len(there)
    listed = {(name, model) for name, model, _ in every[:room]}
    summed = Counter(name for name, _, _ in every[room:])
    shares = accounts.shares()
    return tuple(
        TenantStatus(
            tenant.name,
            tenant.config.weight,
            _accounts(tenant.name, found[tenant.name], listed, queued),
            shares.get(tenant.name) if shares else None,
            summed[tenant.name],
        )
        for tenant in there
    )


def _accounts(
    name: str, accounts: Mapping[str, Account], listed: Collection[tuple[str, str]], queued: Queued
) -> tuple[AccountStatus, ...]:
    others = Account()
    queued_there = 0
    shown: list[AccountStatus] = []
    for model, usage in accounts.items():
        if (name, model) in listed:
            shown.append(_account(model, usage, queued.get((name, model), 0)))
        else:
            others.add(usage)
            others.in_flight += usage.in_flight
            queued_there += queued.get((name, model), 0)
    if not others.is_blank:
        shown.append(_account(ELSEWHERE, others, queued_there))
    return tuple(shown)


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
