from __future__ import annotations

import pytest

from weightd.daemon.tenants.accounts import ELSEWHERE, REASONS, Account, Accounts, Figures, QuotaExceeded
from weightd.protocol import limits
from weightd.protocol.errors import Cancelled, NotFound, RequestError
from weightd.protocol.schema import decode, plain


def busy(accounts: Accounts, tenant: str, model: str, seconds: float = 1.0) -> Account:
    """An account on which one request was answered."""
    account = accounts.of(tenant, model)
    account.accepts(100)
    account.waited(0.5)
    account.ran(seconds, 4)
    account.answers(10)
    return account


def test_a_request_counts_where_it_comes_runs_and_ends() -> None:
    accounts = Accounts()
    account = busy(accounts, "ann", "m")
    account.accepts(7)
    assert account.in_flight == 1
    account.fails(Cancelled("taken back"))
    account.refuses(QuotaExceeded("max_rate", "too many", retry_after=1.0), requests=1)
    told = account.figures("ann", "m")
    assert (told.requests, told.served, told.rows, told.bytes_in, told.bytes_out) == (3, 1, 4, 107, 10)
    assert (told.seat_seconds, told.waited_seconds, told.deaths) == (1.0, 0.5, 0)
    assert (told.refused, account.failed, account.in_flight) == ({"CANCELLED": 1, "max_rate": 1}, 2, 0)


@pytest.mark.parametrize("error", [NotFound("no"), QuotaExceeded("max_queue", "full")])
def test_reasons_are_those_that_are_known(error: RequestError) -> None:
    account = Account()
    account.refuses(error)
    assert {*account.refused} <= {*REASONS}


def test_models_that_are_gone_are_put_together_and_no_sum_changes() -> None:
    accounts = Accounts()
    for model in ("m", "old", "older"):
        busy(accounts, "ann", model)
    running = accounts.of("ann", "leaving")
    running.accepts(5)
    before = accounts.total("ann").figures("ann", "")
    accounts.keep(["ann"], ["m"])
    assert [model for model, _ in accounts.items("ann")] == ["m", "leaving", ELSEWHERE]
    assert accounts.of("ann", ELSEWHERE).served == 2
    running.answers(0)
    accounts.keep(["ann"], ["m"])
    assert [model for model, _ in accounts.items("ann")] == ["m", ELSEWHERE]
    after = accounts.total("ann").figures("ann", "")
    assert (after.requests, after.served, after.bytes_in) == (before.requests, 4, before.bytes_in)


def test_a_tenant_that_is_gone_is_forgotten_once_nothing_of_it_is_in_flight() -> None:
    accounts = Accounts()
    busy(accounts, "ann", "m")
    running = busy(accounts, "bob", "m")
    running.accepts(5)
    for named, left in ((True, ["ann", "bob"]), (False, ["ann"])):
        accounts.keep(["ann"], ["m"])
        assert [each.tenant for each in accounts.records()] == left
        if named:
            running.fails(Cancelled(""))


def test_what_was_written_down_is_gone_on_with() -> None:
    before, after = Accounts(), Accounts()
    busy(before, "ann", "m").refuses(Cancelled(""))
    busy(before, "bob", "n").accepts(1)
    before.of("eve", "m")
    written = [*before.records()]
    assert [(each.tenant, each.model) for each in written] == [("ann", "m"), ("bob", "n")]
    busy(after, "ann", "m")
    after.restore(written)
    assert after.of("ann", "m").served == 2
    assert after.of("ann", "m").refused == {"CANCELLED": 1}
    assert (after.of("bob", "n").requests, after.of("bob", "n").in_flight) == (2, 0)


def test_whatever_was_written_down_can_be_told_and_written_again() -> None:
    accounts = Accounts()
    most = limits.MAX_COUNT
    for number in range(5):
        unknown = {f"reason {number} {index}": 1 for index in range(17)}
        refused = {"NOT_FOUND": most, **unknown}
        accounts.restore([Figures("a", "m", most, most, most, 1.0, 1.0, most, most, most, refused)])
    account = accounts.of("a", "m")
    account.accepts(1)
    account.ran(1.0, 1)
    account.answers(1)
    [figures] = accounts.records()
    assert decode(Figures, plain(figures)) == figures
    assert [*figures.refused] == ["NOT_FOUND"]


def test_shares_are_those_of_late() -> None:
    accounts = Accounts()
    assert accounts.shares() == {}
    busy(accounts, "ann", "m", 9.0)
    busy(accounts, "bob", "m", 1.0)
    assert accounts.shares() == {"ann": 0.9, "bob": 0.1}
    accounts.tick()
    assert accounts.shares() == {}
    busy(accounts, "bob", "m", 3.0)
    busy(accounts, "eve", "n", 1.0)
    for _ in range(5):
        accounts.tick()
        assert accounts.shares() == {"ann": 0.0, "bob": 0.75, "eve": 0.25}
    accounts.tick()
    assert accounts.shares() == {}
