from __future__ import annotations

import itertools

import pytest

from weightd.daemon.requests.blame.contents import content
from weightd.daemon.requests.blame.quarantine import MAX_HANGS, QUARANTINE_S, Quarantine
from weightd.daemon.requests.request import Request
from weightd.protocol.errors import Internal
from weightd.protocol.messages.data import TensorSpec

_numbers = itertools.count(1)
A, B = TensorSpec("a", "UINT8", (3,)), TensorSpec("b", "UINT8", (3,))


def request(*frames: bytes, specs: tuple[TensorSpec, ...] = (A,)) -> Request:
    number = next(_numbers)
    given = frames or (b"abc",)
    return Request(number, b"c", f"id{number}", "m", specs, given, 0.0, 1e9, sum(map(len, given)))


def test_equal_requests_have_equal_contents_whatever_their_order() -> None:
    assert content(request(b"123", b"456", specs=(A, B))) == content(request(b"456", b"123", specs=(B, A)))


@pytest.mark.parametrize(
    "other",
    [
        request(b"124", b"456", specs=(A, B)),
        request(b"456", b"123", specs=(A, B)),
        request(b"123", b"456", specs=(A, TensorSpec("c", "UINT8", (3,)))),
        request(b"123", b"456", specs=(TensorSpec("a", "INT8", (3,)), B)),
        request(b"123", b"456", specs=(TensorSpec("a", "UINT8", (3, 1)), B)),
    ],
)
def test_other_requests_have_other_contents(other: Request) -> None:
    assert content(request(b"123", b"456", specs=(A, B))) != content(other)


def test_what_is_held_is_refused_for_a_time_and_nothing_else_is() -> None:
    quarantine = Quarantine()
    quarantine.check(request(), 0.0)
    quarantine.hold(request(), 100.0)
    with pytest.raises(Internal, match=r"it is refused for 299 s more$"):
        quarantine.check(request(), 101.0)
    quarantine.check(request(b"abd"), 101.0)
    quarantine.check(request(b"abcd"), 101.0)
    assert quarantine.count(101.0) == 1
    quarantine.check(request(), 100.0 + QUARANTINE_S)
    assert quarantine.count(100.0 + QUARANTINE_S) == 0


def test_one_hang_is_no_proof_but_a_second_one_is() -> None:
    quarantine = Quarantine()
    for _ in range(MAX_HANGS - 1):
        assert not quarantine.hung(request(), 0.0)
        quarantine.check(request(), 1.0)
    assert quarantine.hung(request(), 2.0)
    with pytest.raises(Internal):
        quarantine.check(request(), 3.0)


def test_a_content_that_was_answered_is_beyond_suspicion() -> None:
    quarantine = Quarantine()
    for _ in range(5):
        assert not quarantine.hung(request(), 0.0)
        quarantine.answered(request(), 0.0)
    assert not quarantine.hung(request(), 0.0)
    quarantine.answered(request(b"abd"), 0.0)  # another one of that size
    assert quarantine.hung(request(), 0.0)


def test_no_content_is_computed_while_nothing_of_its_size_is_known() -> None:
    quarantine = Quarantine()
    quarantine.hold(request(b"abcd"), 0.0)
    broken = request()
    broken.frames = ()  # it has no content
    quarantine.check(broken, 1.0)
    quarantine.answered(broken, 0.0)


def test_another_model_begins_anew() -> None:
    quarantine = Quarantine()
    quarantine.hold(request(), 0.0)
    quarantine.hung(request(b"abd"), 0.0)
    quarantine.clear()
    quarantine.check(request(), 1.0)
    assert not quarantine.hung(request(b"abd"), 1.0)


def test_what_it_remembers_is_bounded() -> None:
    quarantine = Quarantine()
    for number in range(5000):
        quarantine.hold(request(number.to_bytes(3, "big")), float(number) / 1e6)
        quarantine.hung(request(b"s" + number.to_bytes(3, "big")), 0.0)
    assert quarantine.count(0.0) == 1024
    quarantine.check(request((0).to_bytes(3, "big")), 0.1)
    with pytest.raises(Internal):
        quarantine.check(request((4999).to_bytes(3, "big")), 0.1)


def without_content(like: Request) -> Request:
    """A request of this size whose content cannot be computed: whoever tries fails."""
    made = request()
    made.frames, made.nbytes = (), like.nbytes
    return made


def test_what_is_held_is_no_suspect_any_more() -> None:
    quarantine = Quarantine()
    quarantine.hung(request(), 0.0)
    quarantine.hold(request(), 0.0)  # workers died of it, too
    assert quarantine.count(QUARANTINE_S) == 0
    assert not quarantine.hung(request(), QUARANTINE_S)


def test_suspects_are_bounded_and_the_oldest_gives_way() -> None:
    quarantine = Quarantine()
    for number in range(1025):
        assert not quarantine.hung(request(number.to_bytes(3, "big")), 0.0)
    assert not quarantine.hung(request((0).to_bytes(3, "big")), 0.0)
    assert quarantine.hung(request((1024).to_bytes(3, "big")), 0.0)


def test_no_content_is_computed_of_an_answer_that_cannot_be_the_suspects() -> None:
    quarantine = Quarantine()
    quarantine.hung(request(b"abcd"), 0.0)
    quarantine.answered(without_content(request(b"abc")), 0.0)


def test_no_content_is_computed_of_an_answer_where_there_is_no_suspect() -> None:
    quarantine = Quarantine()
    quarantine.hold(request(), 0.0)
    quarantine.answered(without_content(request()), 0.0)


def test_a_suspect_is_forgotten_in_time_and_costs_nobody_a_digest_any_more() -> None:
    quarantine = Quarantine()
    assert not quarantine.hung(request(), 0.0)
    assert quarantine.may_suspect(request(), QUARANTINE_S - 0.1)
    assert not quarantine.hung(request(), QUARANTINE_S)
    assert not quarantine.may_suspect(without_content(request()), 2 * QUARANTINE_S)


def test_a_suspect_costs_no_digest_when_it_is_asked_for_again() -> None:
    quarantine = Quarantine()
    quarantine.hung(request(), 0.0)
    quarantine.check(without_content(request()), 0.0)


def test_what_was_forgotten_costs_nobody_a_digest() -> None:
    cleared, expired = Quarantine(), Quarantine()
    for each in (cleared, expired):
        each.hold(request(), 0.0)
    cleared.clear()
    assert expired.count(QUARANTINE_S) == 0
    for each in (cleared, expired):
        each.check(without_content(request()), 0.0)


def test_what_is_held_twice_does_not_keep_others_longer() -> None:
    quarantine = Quarantine()
    one, other = request(b"one"), request(b"two")
    quarantine.hold(one, 0.0)
    quarantine.hold(other, 1.0)
    quarantine.hold(one, 299.0)  # it was running on further workers when it was held
    quarantine.check(other, 302.0)
