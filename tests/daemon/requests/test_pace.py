from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd.daemon.requests.rows.pace import Paces

KIND = ("x",)


def slow(*jobs: tuple[str, int, float]) -> set[str]:
    """Return who is slow after jobs of so many rows and seconds."""
    paces = Paces()
    for party, rows, seconds in jobs:
        paces.add("cpu", KIND, party, rows, seconds)
    assert not paces.slow("cpu", ("y",))
    assert not paces.slow("ascend:0", KIND)
    return set(paces.slow("cpu", KIND))


@pytest.mark.parametrize(
    ("rows", "seconds", "is_slow"),
    [(4, 0.19, False), (4, 0.21, True), (8, 0.39, False), (8, 0.41, True), (1, 0.19, False), (1, 0.21, True)],
)
def test_a_party_is_slow_if_its_jobs_take_more_than_twice_as_long_as_those_of_another(
    rows: int, seconds: float, is_slow: bool
) -> None:
    usual = [("b", 4, 0.1)] * 3 + [("c", 4, 5.0)] * 2
    assert ("a" in slow(*usual, *[("a", rows, seconds)] * 3)) == is_slow


def test_one_job_that_took_long_says_nothing() -> None:
    usual, long = [("b", 4, 0.1)] * 3, ("a", 4, 1.0)
    assert slow(*usual, long, long) == set()
    assert slow(*usual, *[("a", 4, 0.1)] * 3, long) == set()
    assert slow(*usual, *[("a", 4, 0.1)] * 3, long, long) == {"a"}
    assert slow(*usual, *[long] * 3, ("a", 4, 0.1), ("a", 4, 0.1)) == set()


def test_jobs_that_take_less_than_a_millisecond_make_nobody_slow() -> None:
    assert slow(*[("b", 1, 0.0)] * 3, *[("a", 1, 0.0009)] * 3) == set()
    assert slow(*[("b", 1, 0.0)] * 3, *[("a", 1, 0.0011)] * 3) == {"a"}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 64), st.floats(0.0, 1.0)), max_size=60))
def test_one_of_several_parties_is_never_slow_by_itself_and_jobs_of_usual_times_make_nobody_slow(
    jobs: list[tuple[str, int, float]],
) -> None:
    alone = [each for each in jobs if each[0] == "a"]
    assert slow(*alone) == set()
    # A part of the time that does not depend on the rows, and one in proportion to them.
    usual = [(party, rows, 0.01 + 0.002 * rows + 0.001 * other) for party, rows, other in jobs]
    assert slow(*usual) == set()


def measured(paces: Paces, parties: str, jobs: int) -> list[str]:
    """Return the parties of so many jobs, "" for a shared one; whose turn it is changes from job to job."""
    found: list[str] = []
    for number in range(jobs):
        first = parties[number % len(parties)]
        is_alone = paces.measures("cpu", KIND, first, set(parties))
        if is_alone:
            paces.add("cpu", KIND, first, 1, 0.1)
        found.append(first if is_alone else "")
    return found


def test_each_party_has_a_job_of_its_own_now_and_then_and_more_often_at_first() -> None:
    paces = Paces()
    at_first = measured(paces, "abc", 40)
    assert [at_first.count(each) >= 3 for each in "abc"] == [True] * 3
    later = measured(paces, "abc", 1000)
    assert [15 < later.count(each) < 25 for each in "abc"] == [True] * 3


def test_a_party_that_has_jobs_of_its_own_anyway_is_not_measured() -> None:
    paces = Paces()
    for _ in range(200):
        paces.add("cpu", KIND, "a", 1, 0.1)
        paces.add("cpu", KIND, "b", 1, 0.1)
        assert not paces.measures("cpu", KIND, "a", {"a", "b"})


def test_what_is_kept_has_a_bound() -> None:
    paces = Paces()
    for number in range(1000):
        paces.add("cpu", (number,), f"party {number}", 1, 0.1)
        paces.add("cpu", KIND, f"party {number}", 1, 0.1)
        paces.measures("cpu", KIND, "a", {"a", f"new {number}"})
    assert len(paces._known) <= 256
    assert len(paces._known["cpu", KIND].samples) <= 64
    assert len(paces._shared) <= 64
