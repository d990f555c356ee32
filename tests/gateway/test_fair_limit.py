"""Places that callers have among them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weightd_gateway.auth import Caller
from weightd_gateway.fair_limit import FairLimit

ALICE, BOB, EVE = Caller("a", "alice"), Caller("b", "bob"), Caller("e", "eve")


def test_who_is_alone_has_three_quarters_and_leaves_the_rest_to_who_comes() -> None:
    shares = FairLimit(256)
    assert sum(shares.take(EVE) for _ in range(1000)) == 192
    assert sum(shares.take(ALICE) for _ in range(1000)) == 48
    assert sum(shares.take(BOB) for _ in range(1000)) == 12
    assert shares.in_use == 252
    for _ in range(192):
        shares.release(EVE)
    assert sum(shares.take(EVE) for _ in range(1000)) == 147


def test_callers_of_one_tenant_are_one_and_those_of_none_are_told_apart() -> None:
    shares = FairLimit(8)
    assert sum(shares.take(Caller("e", f"token {number}")) for number in range(9)) == 6
    assert [shares.take(Caller(None, f"token {number}")) for number in range(3)] == [True, True, False]


def test_whoever_asks_has_no_share() -> None:
    shares = FairLimit(4)
    assert [shares.take(None) for _ in range(5)] == [True] * 4 + [False]
    shares.release(None)
    assert shares.take(ALICE)


def test_the_first_of_a_caller_may_be_all_there_is() -> None:
    shares = FairLimit(100)
    assert shares.take(ALICE, 100)
    assert not shares.take(BOB)
    shares.release(ALICE, 100)
    assert shares.take(BOB)


@given(st.integers(1, 300), st.lists(st.tuples(st.sampled_from([ALICE, BOB, EVE]), st.integers(-40, 40))))
def test_the_last_place_is_for_who_has_none(most: int, steps: list[tuple[Caller, int]]) -> None:
    shares, has = FairLimit(most), dict.fromkeys((ALICE, BOB, EVE), 0)
    for who, count in steps:
        if count < 0:
            given_back = min(-count, has[who])
            shares.release(who, given_back)
            has[who] -= given_back
        elif count and shares.take(who, count):
            has[who] += count
            assert has[who] == count or shares.in_use < most
        assert shares.in_use == sum(has.values()) <= most
