from __future__ import annotations

import pytest

from weightd_daemon.tenants.usage import OTHER_MODELS, REASONS, QuotaExceeded, Usage, UsageRecord, UsageTable
from weightd_protocol import limits
from weightd_protocol.errors import Cancelled, NotFound, RequestError
from weightd_protocol.schema import decode, plain


def add_usage(accounts: UsageTable, tenant: str, model: str, seconds: float = 1.0) -> Usage:
    """Account for one answered request."""
    account = accounts.usage_of(tenant, model)
    account.count_accepted(100)
    account.add_queue_time(0.5)
    account.add_run(seconds, 4)
    account.count_served(10)
    return account


def test_counts_acceptance_run_and_end() -> None:
    accounts = UsageTable()
    account = add_usage(accounts, "ann", "m")
    account.count_accepted(7)
    assert account.in_flight == 1
    account.count_failed(Cancelled("taken back"))
    account.count_refused(QuotaExceeded("max_rate", "too many", retry_after=1.0), requests=1)
    usage_record = account.to_record("ann", "m")
    assert (
        usage_record.requests,
        usage_record.served,
        usage_record.rows,
        usage_record.bytes_in,
        usage_record.bytes_out,
    ) == (3, 1, 4, 107, 10)
    assert (usage_record.slot_seconds, usage_record.queue_seconds, usage_record.unexpected_exits) == (1.0, 0.5, 0)
    assert (usage_record.refused, account.refused_total, account.in_flight) == ({"CANCELLED": 1, "max_rate": 1}, 2, 0)


@pytest.mark.parametrize("error", [NotFound("no"), QuotaExceeded("max_queue", "full")])
def test_reasons_are_known_ones(error: RequestError) -> None:
    account = Usage()
    account.count_refused(error)
    assert {*account.refused} <= {*REASONS}


def test_merges_usage_of_removed_models() -> None:
    accounts = UsageTable()
    for model in ("m", "old", "older"):
        add_usage(accounts, "ann", model)
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


def test_removed_tenant_is_forgotten_after_its_last_request() -> None:
    accounts = UsageTable()
    add_usage(accounts, "ann", "m")
    running = add_usage(accounts, "bob", "m")
    running.count_accepted(5)
    for named, left in ((True, ["ann", "bob"]), (False, ["ann"])):
        accounts.keep_only(["ann"], ["m"])
        assert [each.tenant for each in accounts.records()] == left
        if named:
            running.count_failed(Cancelled(""))


def test_restores_saved_usage() -> None:
    before, after = UsageTable(), UsageTable()
    add_usage(before, "ann", "m").count_refused(Cancelled(""))
    add_usage(before, "bob", "n").count_accepted(1)
    before.usage_of("eve", "m")
    records = [*before.records()]
    assert [(each.tenant, each.model) for each in records] == [("ann", "m"), ("bob", "n")]
    add_usage(after, "ann", "m")
    after.restore(records)
    assert after.usage_of("ann", "m").served == 2
    assert after.usage_of("ann", "m").refused == {"CANCELLED": 1}
    assert (after.usage_of("bob", "n").requests, after.usage_of("bob", "n").in_flight) == (2, 0)


def test_restored_usage_never_exceeds_the_limits() -> None:
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
    [saved] = accounts.records()
    assert decode(UsageRecord, plain(saved)) == saved
    assert [*saved.refused] == ["NOT_FOUND"]


def test_shares_cover_the_last_minute() -> None:
    accounts = UsageTable()
    assert accounts.shares() == {}
    add_usage(accounts, "ann", "m", 9.0)
    add_usage(accounts, "bob", "m", 1.0)
    assert accounts.shares() == {"ann": 0.9, "bob": 0.1}
    accounts.sample()
    assert accounts.shares() == {}
    add_usage(accounts, "bob", "m", 3.0)
    add_usage(accounts, "eve", "n", 1.0)
    for _ in range(5):
        accounts.sample()
        assert accounts.shares() == {"ann": 0.0, "bob": 0.75, "eve": 0.25}
    accounts.sample()
    assert accounts.shares() == {}
