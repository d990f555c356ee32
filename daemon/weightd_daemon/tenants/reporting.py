"""Reports the usage of tenants to clients and to the log, and maintains the usage table."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from weightd_common.log_text import plural
from weightd_daemon.platform.event_loop import Timer
from weightd_daemon.tenants.tenant import Tenant, TenantResolver
from weightd_daemon.tenants.usage import OTHER_MODELS, Usage, UsageTable
from weightd_protocol import limits
from weightd_protocol.messages.accounts import AccountStatus, TenantStatus
from weightd_protocol.schema import label

# Seconds between two samples of the slot seconds; reported shares of tenants cover the last six samples.
_SAMPLE_INTERVAL_S = 10.0

# Maximum number of models in a log line; the models with the most slot seconds are listed.
_MAX_MODELS = 8


# The number of queued requests by tenant and model.
QueuedCounts = Mapping[tuple[str, str], int]

_log = logging.getLogger("weightd.usage")


class UsageReporter:
    """Maintains the usage table and logs the usage of tenants.

    Args:
        tenants: the configured tenants.
        usage_table: the usage of all tenants.
        model_names: returns the names of the existing models.

    Attributes:
        timers: the timers that the event loop has to run.
    """

    def __init__(
        self, tenants: TenantResolver, usage_table: UsageTable, model_names: Callable[[], Collection[str]]
    ) -> None:
        self._tenants = tenants
        self._usage_table = usage_table
        self._model_names = model_names
        self._intervals = UsageIntervals(usage_table)
        self._log_interval_s = 0.0
        self._sample_timer = Timer(self._on_sample_timer)
        self._log_timer = Timer(self._on_log_timer)
        self.timers = (self._sample_timer, self._log_timer)

    def configure(self, interval_s: float, now: float) -> None:
        """Apply a new configuration; `interval_s` is the interval between log lines in seconds, 0 for no log."""
        if not self._tenants.has_tenants:
            # With configured tenants, the sample timer drops the usage of removed tenants and merges the usage of
            # removed models. Without tenants, this timer does not run, so do it here.
            self._usage_table.keep_only(self._tenant_names(), self._model_names())
            self._log_interval_s = 0.0
            return
        self._on_sample_timer(now)
        if interval_s != self._log_interval_s:
            self._log_interval_s = interval_s
            self._intervals.start(self._tenant_names())
            self._log_timer.set(now + interval_s)

    def _tenant_names(self) -> list[str]:
        return [tenant.name for tenant in self._tenants.all_tenants]

    def _on_sample_timer(self, now: float) -> None:
        if self._tenants.has_tenants:
            self._usage_table.keep_only(self._tenant_names(), self._model_names())
            self._usage_table.sample()
            self._sample_timer.set(now + _SAMPLE_INTERVAL_S)

    def _on_log_timer(self, now: float) -> None:
        if self._log_interval_s:
            for line in self._intervals.lines(self._tenant_names(), self._log_interval_s):
                _log.info("%s", line)
            self._log_timer.set(now + self._log_interval_s)


class TenantTotals(NamedTuple):
    """The total usage of a tenant, including usage of removed models, and the slot seconds of each model."""

    total: Usage
    seconds_by_model: Mapping[str, float]


class UsageIntervals:
    """Computes the usage of each tenant since the last log line.

    Args:
        usage_table: the usage of all tenants.
    """

    def __init__(self, usage_table: UsageTable) -> None:
        self._usage_table = usage_table
        self._last_totals: dict[str, TenantTotals] = {}

    def start(self, tenants: Iterable[str]) -> None:
        """Start a new interval without reporting the usage so far."""
        self._last_totals = {name: self._totals_of(name) for name in tenants}

    def lines(self, tenants: Iterable[str], seconds: float) -> Iterator[str]:
        """Yield a log line for each tenant with any usage in the last `seconds`, and start a new interval."""
        previous, self._last_totals = self._last_totals, {name: self._totals_of(name) for name in tenants}
        differences = {
            name: _totals_since(previous.get(name, _NO_TOTALS), now) for name, now in self._last_totals.items()
        }
        all_seconds = sum(each.total.slot_seconds for each in differences.values())
        for name, each in differences.items():
            if not each.total.is_empty:
                yield (
                    f"tenant {label(name)}:"
                    f" {_usage_text(each.total, seconds, all_seconds)}{_models_text(each.seconds_by_model)}"
                )

    def _totals_of(self, name: str) -> TenantTotals:
        models = {model: each.slot_seconds for model, each in self._usage_table.items(name)}
        return TenantTotals(self._usage_table.total(name), models)


_NO_TOTALS = TenantTotals(Usage(), {})


def _totals_since(before: TenantTotals, now: TenantTotals) -> TenantTotals:
    """Return the difference between two totals of a tenant; `now` if the counters were reset between them."""
    if now.total.requests < before.total.requests:
        return now
    models = {
        model: seconds - before.seconds_by_model.get(model, 0.0) for model, seconds in now.seconds_by_model.items()
    }
    return TenantTotals(_usage_difference(now.total, before.total), models)


def _usage_difference(now: Usage, before: Usage) -> Usage:
    since = Usage()
    for field in (
        "requests",
        "served",
        "rows",
        "slot_seconds",
        "queue_seconds",
        "bytes_in",
        "bytes_out",
        "unexpected_exits",
    ):
        setattr(since, field, max(0, getattr(now, field) - getattr(before, field)))
    refused = {reason: count - before.refused.get(reason, 0) for reason, count in now.refused.items()}
    since.refused = {reason: count for reason, count in refused.items() if count > 0}
    return since


def _usage_text(usage: Usage, seconds: float, total_seconds: float) -> str:
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(usage.refused.items()))
    refused = f"{usage.refused_total} refused ({reasons})" if reasons else "none refused"
    share = f" ({usage.slot_seconds / total_seconds:.0%} of total)" if total_seconds else ""
    parts = [
        f"{plural(usage.requests, 'request')} in {seconds:.0f} s",
        f"{usage.served} served",
        refused,
        plural(usage.rows, "row"),
        f"{usage.slot_seconds:.3f} slot seconds{share}",
        f"{usage.queue_seconds:.3f} s queued",
        f"{plural(usage.bytes_in, 'byte')} in",
        f"{plural(usage.bytes_out, 'byte')} out",
    ]
    if usage.unexpected_exits:
        parts.append(plural(usage.unexpected_exits, "unexpected exit"))
    return ", ".join(parts)


def _models_text(models: Mapping[str, float]) -> str:
    used = [(seconds, model) for model, seconds in models.items() if model != OTHER_MODELS and seconds > 0]
    largest = sorted(used, reverse=True)[:_MAX_MODELS]
    return f"; {', '.join(f'{model} {seconds:.3f} s' for seconds, model in largest)}" if largest else ""


def tenant_statuses(
    tenants: Iterable[Tenant],
    usage_table: UsageTable,
    queued: QueuedCounts,
    visible_models: Collection[str] | None = None,
) -> tuple[TenantStatus, ...]:
    """Return the status of tenants, with a usage entry for each model.

    If there would be more than `MAX_ACCOUNTS` entries, those with the fewest requests are omitted. For each tenant, all
    omitted and invisible entries are added up in one entry, so that the totals stay correct.

    Args:
        tenants: the tenants to report.
        usage_table: the usage of all tenants.
        queued: the number of queued requests by tenant and model.
        visible_models: the models that may have their own entries; None for all.
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
    # Each tenant needs one further entry, for the sum of its omitted entries.
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
            tenant.config.max_model_bytes,
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
        usage.resident_byte_seconds,
    )
