from __future__ import annotations

import pytest

from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.tenants.reporting import UsageIntervals, UsageReporter
from weightd_daemon.tenants.tenant import TenantResolver
from weightd_daemon.tenants.usage import OTHER_MODELS, QuotaExceeded, UsageTable
from weightd_protocol.errors import Cancelled, NotFound


def ask(accounts: UsageTable, tenant: str, model: str, seconds: float) -> None:
    account = accounts.usage_of(tenant, model)
    account.count_accepted(100)
    account.add_queue_time(0.25)
    account.add_run(seconds, 4)
    account.count_served(10)


def test_a_line_tells_what_has_come_since_the_last_one() -> None:
    accounts = UsageTable()
    ask(accounts, "ann", "m", 7.0)
    intervals = UsageIntervals(accounts)
    intervals.start(["ann", "bob"])
    assert [*intervals.lines(["ann", "bob"], 60.0)] == []
    ask(accounts, "ann", "m", 1.0)
    ask(accounts, "ann", "n", 2.0)
    accounts.usage_of("ann", "m").unexpected_exits += 1
    for error in (QuotaExceeded("max_rate", "too many"), QuotaExceeded("max_rate", "too many"), Cancelled("gone")):
        accounts.usage_of("ann", "m").count_refused(error, requests=1)
    accounts.usage_of("bob", OTHER_MODELS).count_refused(NotFound("no model"), requests=1)
    ask(accounts, "eve", "m", 1.0)
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


def test_a_tenant_that_comes_again_begins_anew() -> None:
    accounts = UsageTable()
    intervals = UsageIntervals(accounts)
    for _ in range(3):
        ask(accounts, "ann", "m", 1.0)
    assert len([*intervals.lines(["ann"], 1.0)]) == 1
    accounts.keep_only([], ["m"])
    ask(accounts, "ann", "m", 1.0)
    [line] = intervals.lines(["ann"], 1.0)
    assert line.startswith("tenant ann: 1 request in 1 s, 1 served")


class Daemon:
    """The accounting of a daemon with a clock, and what it has logged."""

    def __init__(self, tables: dict[str, TenantConfig], caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", "weightd.usage")
        self.directory = TenantResolver(tables)
        self.accounts = UsageTable()
        self.models = ["m"]
        self.accounting = UsageReporter(self.directory, self.accounts, lambda: self.models)
        self._caplog = caplog

    def run(self, start: float, end: float) -> list[str]:
        """Return what is logged meanwhile, what is due at both ends included."""
        self._caplog.clear()
        while (timer := min(self.accounting.timers, key=lambda each: each.due_at)).due_at <= end:
            assert timer.due_at >= start
            timer.fire(timer.due_at)
        return [record.getMessage() for record in self._caplog.records]


def test_a_line_comes_with_each_interval_and_a_reload_changes_it(caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon({"ann": TenantConfig()}, caplog)
    ask(daemon.accounts, "ann", "m", 1.0)
    daemon.accounting.configure(30.0, 100.0)
    assert daemon.run(100.0, 129.0) == []
    ask(daemon.accounts, "ann", "m", 1.0)
    # One that changes nothing of it puts nothing off.
    daemon.accounting.configure(30.0, 129.0)
    [line] = daemon.run(129.0, 135.0)
    assert line.startswith("tenant ann: 1 request in 30 s, ")
    ask(daemon.accounts, "(operators)", "m", 1.0)
    daemon.accounting.configure(5.0, 140.0)
    assert daemon.run(140.0, 146.0) == []
    ask(daemon.accounts, "(operators)", "m", 1.0)
    [line] = daemon.run(146.0, 150.0)
    assert line.startswith("tenant (operators): 1 request in 5 s, ")
    daemon.accounting.configure(0.0, 151.0)
    ask(daemon.accounts, "ann", "m", 1.0)
    assert daemon.run(151.0, 300.0) == []


def test_shares_are_those_of_the_last_minute(caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon({"ann": TenantConfig(), "bob": TenantConfig()}, caplog)
    daemon.accounting.configure(0.0, 0.0)
    ask(daemon.accounts, "ann", "m", 3.0)
    ask(daemon.accounts, "bob", "m", 1.0)
    daemon.run(0.0, 45.0)
    assert daemon.accounts.shares() == {"ann": 0.75, "bob": 0.25}
    ask(daemon.accounts, "bob", "m", 1.0)
    daemon.run(45.0, 75.0)
    assert daemon.accounts.shares() == {"ann": 0.0, "bob": 1.0}


def test_who_is_gone_is_forgotten_and_without_tables_nothing_is_done(caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon({}, caplog)
    daemon.accounting.configure(1.0, 0.0)
    assert all(timer.due_at == float("inf") for timer in daemon.accounting.timers)
    daemon.directory.configure({"ann": TenantConfig(), "bob": TenantConfig()})
    daemon.accounting.configure(1.0, 0.0)
    for name in ("ann", "bob"):
        ask(daemon.accounts, name, "m", 1.0)
        ask(daemon.accounts, name, "n", 1.0)
    assert len(daemon.run(0.0, 5.0)) == 2
    daemon.directory.configure({"ann": TenantConfig()})
    daemon.accounting.configure(1.0, 5.0)
    assert [model for model, _ in daemon.accounts.items("ann")] == ["m", OTHER_MODELS]
    assert [*daemon.accounts.items("bob")] == []
    daemon.directory.configure({})
    daemon.accounting.configure(1.0, 6.0)
    assert daemon.run(6.0, 100.0) == []
    assert all(timer.due_at == float("inf") for timer in daemon.accounting.timers)


def test_what_was_asked_of_a_model_that_goes_is_not_told_again() -> None:
    accounts = UsageTable()
    intervals = UsageIntervals(accounts)
    for model in ("m", "n"):
        ask(accounts, "ann", model, 1.0)
    assert len([*intervals.lines(["ann"], 1.0)]) == 1
    accounts.keep_only(["ann"], ["n"])
    assert [*intervals.lines(["ann"], 1.0)] == []
