"""Tenants: a row for each model that they have asked, and why what they asked was refused."""

from __future__ import annotations

from typing import Dict, Iterator, List, Sequence

from weightctl.text import clean, count, megabytes, paragraph, table
from weightd_protocol.messages.accounts import AccountStatus, TenantStatus

_HEADING = (
    "TENANT",
    "MODEL",
    "REQUESTS",
    "SERVED",
    "REFUSED",
    "NOW",
    "QUEUED",
    "ROWS",
    "SLOT s",
    "WAIT ms",
    "IN MB",
    "OUT MB",
)
_LEFT_COLUMNS = 2

# Of a column: names of models are up to 64 characters.
_MAX_CHARACTERS = 24


def format_tenants(tenants: Sequence[TenantStatus], models: Sequence[str]) -> Iterator[str]:
    """Yield what is shown of tenants; of `models` alone, and of what is no model's."""
    found = [(tenant, _shown_accounts(tenant, models)) for tenant in tenants]
    rows = [row for tenant, accounts in found for row in _rows(tenant, accounts)]
    if rows:
        yield from table([_HEADING, *rows], _LEFT_COLUMNS, "")
    for tenant, accounts in found:
        if accounts:
            yield from paragraph(clean(tenant.name), "; ".join(_notes(tenant, accounts)), "")
    idle = [clean(tenant.name) for tenant, accounts in found if not accounts]
    if idle:
        yield from paragraph("no requests of", ", ".join(idle), "")
    if tenants:
        yield ""


def _shown_accounts(tenant: TenantStatus, models: Sequence[str]) -> List[AccountStatus]:
    return [each for each in tenant.accounts if each.model in models or not each.model]


def _rows(tenant: TenantStatus, accounts: Sequence[AccountStatus]) -> Iterator[List[str]]:
    name = _shorten(tenant.name)
    for account in accounts:
        yield [name, _shorten(account.model) or "(other)", *_account_cells(account)]
        # It stands once.
        name = ""


def _account_cells(account: AccountStatus) -> List[str]:
    return [
        f"{account.requests:,}",
        f"{account.served:,}",
        f"{sum(account.failed.values()):,}",
        f"{account.in_flight:,}",
        f"{account.queued:,}",
        f"{account.rows:,}",
        f"{account.slot_seconds:,.1f}",
        f"{1000 * account.queue_seconds / account.served:,.1f}" if account.served else "-",
        megabytes(account.bytes_in),
        megabytes(account.bytes_out),
    ]


def _notes(tenant: TenantStatus, accounts: Sequence[AccountStatus]) -> Iterator[str]:
    yield f"weight {tenant.weight:g}"
    if tenant.share is not None:
        yield f"{tenant.share:.0%} of the seconds of the last minute"
    reasons: Dict[str, int] = {}
    for account in accounts:
        for reason, number in account.failed.items():
            reasons[reason] = reasons.get(reason, 0) + number
    if reasons:
        yield "refused: " + ", ".join(f"{reason} {number:,}" for reason, number in sorted(reasons.items()))
    deaths = sum(each.unexpected_exits for each in accounts)
    if deaths:
        yield f"{count(deaths, 'worker')} lost to its requests"
    if tenant.merged_accounts:
        yield f"(other) has {count(tenant.merged_accounts, 'model')} for which there is no room"


def _shorten(name: str) -> str:
    name = clean(name)
    return name if len(name) <= _MAX_CHARACTERS else f"{name[: _MAX_CHARACTERS - 3]}..."
