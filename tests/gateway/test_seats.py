"""How much is under way at once."""

from __future__ import annotations

import pytest

from weightd.gateway.callers import Caller
from weightd.gateway.codes import TooLarge
from weightd.gateway.seats import Seats
from weightd.protocol.errors import ResourceExhausted

ALICE, BOB = Caller("a", "alice"), Caller("b", "bob")


def test_who_comes_beyond_the_bound_is_told_so_and_a_seat_is_another_s_again() -> None:
    seats = Seats(2, 100)
    with seats.one(ALICE):
        with seats.one(BOB):
            with pytest.raises(ResourceExhausted, match="max_in_flight") as caught, seats.one(None):
                pass
            assert caught.value.retry_after
        assert seats.taken == 1
        with seats.one(None):
            assert seats.taken == 2
    assert seats.taken == 0


def test_a_seat_is_given_back_whatever_happens() -> None:
    seats = Seats(1, 100)
    with pytest.raises(ValueError, match="x"), seats.one(ALICE):
        raise ValueError("x")
    assert seats.taken == 0


def test_bytes_are_kept_until_the_end_of_their_request() -> None:
    seats = Seats(2, 100)
    with seats.one(ALICE) as one:
        one.take(60)
        with seats.one(BOB) as other:
            other.take(0)
            other.take(30)
            with pytest.raises(ResourceExhausted, match="max_memory_bytes"):
                other.take(11)
            assert seats.taken_bytes == 90
        one.take(15)
    assert seats.taken_bytes == 0


def test_one_request_may_have_all_that_there_is_and_is_told_if_it_wants_more() -> None:
    seats = Seats(8, 100)
    with seats.one(ALICE) as one:
        for _ in range(4):
            one.take(25)
        with pytest.raises(TooLarge, match="max_memory_bytes"):
            one.take(1)
    with seats.one(ALICE) as one, seats.one(ALICE) as other:
        one.take(75)
        with pytest.raises(ResourceExhausted) as caught:
            other.take(1)
        assert caught.value.retry_after


def test_an_answer_is_kept_until_it_has_been_sent() -> None:
    seats = Seats(1, 100)
    sent = seats.keep(ALICE, 60)
    with pytest.raises(ResourceExhausted, match="max_memory_bytes"):
        seats.keep(BOB, 41)
    sent.leave()
    sent.leave()
    assert (seats.taken, seats.taken_bytes) == (0, 0)
