from __future__ import annotations

import pytest

from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.tenants.reporting import UsageIntervals, UsageReporter
from weightd_daemon.tenants.tenant import TenantResolver
from weightd_daemon.tenants.usage import OTHER_MODELS, QuotaExceeded, UsageTable
from weightd_protocol.errors import Cancelled, NotFound


def add_usage(accounts: UsageTable, tenant: str, model: str, seconds: float) -> None:
    account = accounts.usage_of(tenant, model)
    account.count_accepted(100)
    account.add_queue_time(0.25)
    account.add_run(seconds, 4)
    account.count_served(10)


def test_line_covers_the_usage_since_the_last_one() -> None:
    accounts = UsageTable()
    add_usage(accounts, "ann", "m", 7.0)
    intervals = UsageIntervals(accounts)
    intervals.start(["ann", "bob"])
    assert [*intervals.lines(["ann", "bob"], 60.0)] == []
    add_usage(accounts, "ann", "m", 1.0)
    add_usage(accounts, "ann", "n", 2.0)
    accounts.usage_of("ann", "m").unexpected_exits += 1
    for error in (QuotaExceeded("max_rate", "too many"), QuotaExceeded("max_rate", "too many"), Cancelled("gone")):
        accounts.usage_of("ann", "m").count_refused(error, requests=1)
    accounts.usage_of("bob", OTHER_MODELS).count_refused(NotFound("no model"), requests=1)
    add_usage(accounts, "eve", "m", 1.0)
    assert [*intervals.lines(["ann", "bob", "eve"], 60.0)] == [
        (
            "tenant ann: 5 requests in 60 s, 2 served, 3 refused (CANCELLED 1, max_rate 2), 8 rows, "
            "3.000 slot seconds (75% of total), 0.500 s queued, 200 bytes in, 20 bytes out, 1 unexpected exit; "
            "n 2.000 s, m 1.000 s"
        ),
        (
            "tenant bob: 1 request in 60 s, 0 served, 1 refused (NOT_FOUND 1), 0 rows, "
            "0.000 slot seconds (0% of total), 0.000 s queued, 0 bytes in, 0 bytes out"
        ),
        (
            "tenant eve: 1 request in 60 s, 1 served, none refused, 4 rows, 1.000 slot seconds (25% of total), "
            "0.250 s queued, 100 bytes in, 10 bytes out; m 1.000 s"
        ),
    ]
    assert [*intervals.lines(["ann", "bob", "eve"], 60.0)] == []


def test_returning_tenant_starts_from_zero() -> None:
    accounts = UsageTable()
    intervals = UsageIntervals(accounts)
    for _ in range(3):
        add_usage(accounts, "ann", "m", 1.0)
    assert len([*intervals.lines(["ann"], 1.0)]) == 1
    accounts.keep_only([], ["m"])
    add_usage(accounts, "ann", "m", 1.0)
    [line] = intervals.lines(["ann"], 1.0)
    assert line.startswith("tenant ann: 1 request in 1 s, 1 served")


class ReporterHarness:
    """A UsageReporter with its tables and the lines that it logs."""

    def __init__(self, tables: dict[str, TenantConfig], caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", "weightd.usage")
        self.tenants = TenantResolver(tables)
        self.accounts = UsageTable()
        self.models = ["m"]
        self.reporter = UsageReporter(self.tenants, self.accounts, lambda: self.models)
        self._caplog = caplog

    def run(self, start: float, end: float) -> list[str]:
        """Run the timers due from `start` to `end`, both included, and return the lines logged."""
        self._caplog.clear()
        while (timer := min(self.reporter.timers, key=lambda each: each.due_at)).due_at <= end:
            assert timer.due_at >= start
            timer.fire(timer.due_at)
        return [record.getMessage() for record in self._caplog.records]


def test_logs_at_each_interval_until_reconfigured(caplog: pytest.LogCaptureFixture) -> None:
    harness = ReporterHarness({"ann": TenantConfig()}, caplog)
    add_usage(harness.accounts, "ann", "m", 1.0)
    harness.reporter.configure(30.0, 100.0)
    assert harness.run(100.0, 129.0) == []
    add_usage(harness.accounts, "ann", "m", 1.0)
    # An unchanged interval does not restart the timer.
    harness.reporter.configure(30.0, 129.0)
    [line] = harness.run(129.0, 135.0)
    assert line.startswith("tenant ann: 1 request in 30 s, ")
    add_usage(harness.accounts, "(operators)", "m", 1.0)
    harness.reporter.configure(5.0, 140.0)
    assert harness.run(140.0, 146.0) == []
    add_usage(harness.accounts, "(operators)", "m", 1.0)
    [line] = harness.run(146.0, 150.0)
    assert line.startswith("tenant (operators): 1 request in 5 s, ")
    harness.reporter.configure(0.0, 151.0)
    add_usage(harness.accounts, "ann", "m", 1.0)
    assert harness.run(151.0, 300.0) == []


def test_shares_cover_the_last_minute(caplog: pytest.LogCaptureFixture) -> None:
    harness = ReporterHarness({"ann": TenantConfig(), "bob": TenantConfig()}, caplog)
    harness.reporter.configure(0.0, 0.0)
    add_usage(harness.accounts, "ann", "m", 3.0)
    add_usage(harness.accounts, "bob", "m", 1.0)
    harness.run(0.0, 45.0)
    assert harness.accounts.shares() == {"ann": 0.75, "bob": 0.25}
    add_usage(harness.accounts, "bob", "m", 1.0)
    harness.run(45.0, 75.0)
    assert harness.accounts.shares() == {"ann": 0.0, "bob": 1.0}


def test_forgets_removed_tenants_and_stops_without_tenants(caplog: pytest.LogCaptureFixture) -> None:
    harness = ReporterHarness({}, caplog)
    harness.reporter.configure(1.0, 0.0)
    assert all(timer.due_at == float("inf") for timer in harness.reporter.timers)
    harness.tenants.configure({"ann": TenantConfig(), "bob": TenantConfig()})
    harness.reporter.configure(1.0, 0.0)
    for name in ("ann", "bob"):
        add_usage(harness.accounts, name, "m", 1.0)
        add_usage(harness.accounts, name, "n", 1.0)
    assert len(harness.run(0.0, 5.0)) == 2
    harness.tenants.configure({"ann": TenantConfig()})
    harness.reporter.configure(1.0, 5.0)
    assert [model for model, _ in harness.accounts.items("ann")] == ["m", OTHER_MODELS]
    assert [*harness.accounts.items("bob")] == []
    harness.tenants.configure({})
    harness.reporter.configure(1.0, 6.0)
    assert harness.run(6.0, 100.0) == []
    assert all(timer.due_at == float("inf") for timer in harness.reporter.timers)


def test_usage_of_a_removed_model_is_not_reported_again() -> None:
    accounts = UsageTable()
    intervals = UsageIntervals(accounts)
    for model in ("m", "n"):
        add_usage(accounts, "ann", model, 1.0)
    assert len([*intervals.lines(["ann"], 1.0)]) == 1
    accounts.keep_only(["ann"], ["n"])
    assert [*intervals.lines(["ann"], 1.0)] == []
