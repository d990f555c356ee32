from __future__ import annotations

import pytest

from weightd_daemon.tenants.usage import OTHER_MODELS, REASONS, QuotaExceeded, Usage, UsageRecord, UsageTable
from weightd_protocol import limits
from weightd_protocol.errors import Cancelled, NotFound, RequestError
from weightd_protocol.schema import decode, plain


def busy(accounts: UsageTable, tenant: str, model: str, seconds: float = 1.0) -> Usage:
    """An account on which one request was answered."""
    account = accounts.usage_of(tenant, model)
    account.count_accepted(100)
    account.add_queue_time(0.5)
    account.add_run(seconds, 4)
    account.count_served(10)
    return account


def test_a_request_counts_where_it_comes_runs_and_ends() -> None:
    accounts = UsageTable()
    account = busy(accounts, "ann", "m")
    account.count_accepted(7)
    assert account.in_flight == 1
    account.count_failed(Cancelled("taken back"))
    account.count_refused(QuotaExceeded("max_rate", "too many", retry_after=1.0), requests=1)
    told = account.to_record("ann", "m")
    assert (told.requests, told.served, told.rows, told.bytes_in, told.bytes_out) == (3, 1, 4, 107, 10)
    assert (told.slot_seconds, told.queue_seconds, told.unexpected_exits) == (1.0, 0.5, 0)
    assert (told.refused, account.refused_total, account.in_flight) == ({"CANCELLED": 1, "max_rate": 1}, 2, 0)


@pytest.mark.parametrize("error", [NotFound("no"), QuotaExceeded("max_queue", "full")])
def test_reasons_are_those_that_are_known(error: RequestError) -> None:
    account = Usage()
    account.count_refused(error)
    assert {*account.refused} <= {*REASONS}


def test_models_that_are_gone_are_put_together_and_no_sum_changes() -> None:
    accounts = UsageTable()
    for model in ("m", "old", "older"):
        busy(accounts, "ann", model)
    running = accounts.usage_of("ann", "leaving")
    running.count_accepted(5)
    before = accounts.total("ann").to_record("ann", "")
    accounts.keep_only(["ann"], ["m"])
    assert [model for model, _ in accounts.items("ann")] == ["m", "leaving", OTHER_MODELS]
    assert accounts.usage_of("ann", OTHER_MODELS).served == 2
    running.count_served(0)
    accounts.keep_only(["ann"], ["m"])
    assert [model for model, _ in accounts.items("ann")] == ["m", OTHER_MODELS]
    after = accounts.total("ann").to_record("ann", "")
    assert (after.requests, after.served, after.bytes_in) == (before.requests, 4, before.bytes_in)


def test_a_tenant_that_is_gone_is_forgotten_once_nothing_of_it_is_in_flight() -> None:
    accounts = UsageTable()
    busy(accounts, "ann", "m")
    running = busy(accounts, "bob", "m")
    running.count_accepted(5)
    for named, left in ((True, ["ann", "bob"]), (False, ["ann"])):
        accounts.keep_only(["ann"], ["m"])
        assert [each.tenant for each in accounts.records()] == left
        if named:
            running.count_failed(Cancelled(""))


def test_what_was_written_down_is_gone_on_with() -> None:
    before, after = UsageTable(), UsageTable()
    busy(before, "ann", "m").count_refused(Cancelled(""))
    busy(before, "bob", "n").count_accepted(1)
    before.usage_of("eve", "m")
    written = [*before.records()]
    assert [(each.tenant, each.model) for each in written] == [("ann", "m"), ("bob", "n")]
    busy(after, "ann", "m")
    after.restore(written)
    assert after.usage_of("ann", "m").served == 2
    assert after.usage_of("ann", "m").refused == {"CANCELLED": 1}
    assert (after.usage_of("bob", "n").requests, after.usage_of("bob", "n").in_flight) == (2, 0)


def test_whatever_was_written_down_can_be_told_and_written_again() -> None:
    accounts = UsageTable()
    most = limits.MAX_COUNT
    for number in range(5):
        unknown = {f"reason {number} {index}": 1 for index in range(17)}
        refused = {"NOT_FOUND": most, **unknown}
        accounts.restore([UsageRecord("a", "m", most, most, most, 1.0, 1.0, most, most, most, refused)])
    account = accounts.usage_of("a", "m")
    account.count_accepted(1)
    account.add_run(1.0, 1)
    account.count_served(1)
    [figures] = accounts.records()
    assert decode(UsageRecord, plain(figures)) == figures
    assert [*figures.refused] == ["NOT_FOUND"]


def test_shares_are_those_of_late() -> None:
    accounts = UsageTable()
    assert accounts.shares() == {}
    busy(accounts, "ann", "m", 9.0)
    busy(accounts, "bob", "m", 1.0)
    assert accounts.shares() == {"ann": 0.9, "bob": 0.1}
    accounts.sample()
    assert accounts.shares() == {}
    busy(accounts, "bob", "m", 3.0)
    busy(accounts, "eve", "n", 1.0)
    for _ in range(5):
        accounts.sample()
        assert accounts.shares() == {"ann": 0.0, "bob": 0.75, "eve": 0.25}
    accounts.sample()
    assert accounts.shares() == {}
