"""How much is under way at once."""

from __future__ import annotations

import pytest

from weightd_gateway.admission_control import AdmissionControl
from weightd_gateway.auth import Caller
from weightd_gateway.error_codes import TooLarge
from weightd_protocol.errors import ResourceExhausted

ALICE, BOB = Caller("a", "alice"), Caller("b", "bob")


def test_who_comes_beyond_the_bound_is_told_so_and_a_seat_is_another_s_again() -> None:
    seats = AdmissionControl(2, 100)
    with seats.admit(ALICE):
        with seats.admit(BOB):
            with pytest.raises(ResourceExhausted, match="max_in_flight") as caught, seats.admit(None):
                pass
            assert caught.value.retry_after
        assert seats.in_flight == 1
        with seats.admit(None):
            assert seats.in_flight == 2
    assert seats.in_flight == 0


def test_a_seat_is_given_back_whatever_happens() -> None:
    seats = AdmissionControl(1, 100)
    with pytest.raises(ValueError, match="x"), seats.admit(ALICE):
        raise ValueError("x")
    assert seats.in_flight == 0


def test_bytes_are_kept_until_the_end_of_their_request() -> None:
    seats = AdmissionControl(2, 100)
    with seats.admit(ALICE) as one:
        one.reserve(60)
        with seats.admit(BOB) as other:
            other.reserve(0)
            other.reserve(30)
            with pytest.raises(ResourceExhausted, match="max_memory_bytes"):
                other.reserve(11)
            assert seats.reserved_bytes == 90
        one.reserve(15)
    assert seats.reserved_bytes == 0


def test_one_request_may_have_all_that_there_is_and_is_told_if_it_wants_more() -> None:
    seats = AdmissionControl(8, 100)
    with seats.admit(ALICE) as one:
        for _ in range(4):
            one.reserve(25)
        with pytest.raises(TooLarge, match="max_memory_bytes"):
            one.reserve(1)
    with seats.admit(ALICE) as one, seats.admit(ALICE) as other:
        one.reserve(75)
        with pytest.raises(ResourceExhausted) as caught:
            other.reserve(1)
        assert caught.value.retry_after


def test_an_answer_is_kept_until_it_has_been_sent() -> None:
    seats = AdmissionControl(1, 100)
    sent = seats.reserve_response(ALICE, 60)
    with pytest.raises(ResourceExhausted, match="max_memory_bytes"):
        seats.reserve_response(BOB, 41)
    sent.release()
    sent.release()
    assert (seats.in_flight, seats.reserved_bytes) == (0, 0)
