from __future__ import annotations

import itertools

import pytest

from weightd.daemon.generations import restarts as restarts_module
from weightd.daemon.generations.restarts import MAX_FAILED_STARTS, SHORT_LIFE_S, Restarts


@pytest.fixture
def restarts() -> Restarts:
    return Restarts(lambda: 0.0)


def test_each_failed_start_waits_longer_than_the_one_before_until_it_fails(restarts: Restarts) -> None:
    dues: list[float] = []
    assert (restarts.due, restarts.delay) == (0.0, 0.0)
    failing: list[bool] = []
    for _ in range(MAX_FAILED_STARTS):
        restarts.start_failed(100.0)
        dues.append(restarts.due)
        failing.append(restarts.failing)
    assert failing == [False] * (MAX_FAILED_STARTS - 1) + [True]
    assert dues == pytest.approx([100.1, 100.2, 100.4])


def test_a_worker_that_became_ready_ends_the_row(restarts: Restarts) -> None:
    for _ in range(MAX_FAILED_STARTS - 1):
        restarts.start_failed(100.0)
    restarts.became_ready()
    restarts.start_failed(100.0)
    assert not restarts.failing


def test_a_start_that_finds_no_room_is_no_failed_one_for_a_while(restarts: Restarts) -> None:
    waits, now = list[float](), 100.0
    while now < 130.0:
        restarts.no_room(now, 30.0)
        waits.append(restarts.due - now)
        now = restarts.due
    assert waits[:6] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0])
    assert max(waits) == pytest.approx(2.0)
    failing = [restarts.failing]
    for _ in range(MAX_FAILED_STARTS):
        restarts.no_room(now, 30.0)
    failing.append(restarts.failing)
    restarts.became_ready()
    restarts.no_room(1000.0, 30.0)
    assert [*failing, restarts.failing] == [False, True, False]


@pytest.mark.parametrize(("lived", "useful"), [(SHORT_LIFE_S, False), (0.1, True)])
def test_who_lived_long_or_was_useful_is_replaced_at_once_and_ends_the_row(
    restarts: Restarts, lived: float, useful: bool
) -> None:
    for _ in range(6):
        restarts.died(1.0, 100.0)
    for now in (200.0, 300.0):
        restarts.died(lived, now, useful=useful)
        assert restarts.due == now
    restarts.died(1.0, 400.0)
    assert restarts.due == 400.0


def test_short_lives_wait_longer_and_longer_but_never_for_ever(restarts: Restarts) -> None:
    waits: list[float] = []
    for _ in range(3000):  # and are counted without an overflow
        restarts.died(SHORT_LIFE_S - 0.01, 100.0)
        waits.append(restarts.due - 100.0)
    assert waits[:5] == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.8])
    assert waits == sorted(waits)
    assert (waits[-1], restarts.delay) == pytest.approx((30.0, 30.0))
    assert not restarts.failing


def test_chance_makes_a_delay_shorter_and_never_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts_module, "_JITTER", 0.25)
    dues: list[float] = []
    for chance in (0.0, 0.3, 1.0):
        restarts = Restarts(itertools.repeat(chance).__next__)
        restarts.start_failed(100.0)
        dues.append(restarts.due)
    assert dues == pytest.approx([100.1, 100.0925, 100.075])
