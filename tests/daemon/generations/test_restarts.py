from __future__ import annotations

import itertools

import pytest

from weightd.daemon.generations import restarts as restarts_module
from weightd.daemon.generations.restarts import MAX_FAILED_STARTS, SHORT_LIFE_S, Restarts


def test_the_first_start_is_due_at_once() -> None:
    restarts = Restarts(lambda: 0.0)
    assert (restarts.due, restarts.delay, restarts.failing) == (0.0, 0.0, False)


def test_it_fails_after_as_many_failed_starts_in_a_row() -> None:
    restarts = Restarts(lambda: 0.0)
    for _ in range(MAX_FAILED_STARTS):
        assert not restarts.failing
        restarts.start_failed(100.0)
    assert restarts.failing


def test_a_worker_that_became_ready_ends_the_row() -> None:
    restarts = Restarts(lambda: 0.0)
    for _ in range(5):
        for _ in range(MAX_FAILED_STARTS - 1):
            restarts.start_failed(100.0)
        restarts.became_ready()
    assert not restarts.failing


def test_each_failed_start_waits_longer_than_the_one_before() -> None:
    restarts = Restarts(lambda: 0.0)
    dues: list[float] = []
    for _ in range(MAX_FAILED_STARTS):
        restarts.start_failed(100.0)
        dues.append(restarts.due)
    assert dues == pytest.approx([100.1, 100.2, 100.4])


def test_a_start_that_finds_no_room_is_no_failed_one_for_a_while() -> None:
    restarts, now = Restarts(lambda: 0.0), 100.0
    waits: list[float] = []
    while now < 130.0:
        restarts.no_room(now, 30.0)
        waits.append(restarts.due - now)
        now = restarts.due
    assert waits[:6] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0])
    assert max(waits) == pytest.approx(2.0)
    assert not restarts.failing
    for _ in range(MAX_FAILED_STARTS):
        restarts.no_room(now, 30.0)
    seen = [restarts.failing]
    restarts.became_ready()
    restarts.no_room(1000.0, 30.0)
    assert [*seen, restarts.failing] == [True, False]


def test_a_worker_that_lived_long_is_replaced_at_once() -> None:
    restarts = Restarts(lambda: 0.0)
    for now in (100.0, 200.0, 300.0):
        restarts.died(SHORT_LIFE_S, now)
        assert restarts.due == now


def test_short_lives_wait_longer_and_longer_but_never_for_ever() -> None:
    restarts = Restarts(lambda: 0.0)
    waits: list[float] = []
    for _ in range(12):
        restarts.died(SHORT_LIFE_S - 0.01, 100.0)
        waits.append(restarts.due - 100.0)
    assert waits[:5] == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.8])
    assert waits == sorted(waits)
    assert (waits[-1], restarts.delay) == pytest.approx((30.0, 30.0))
    assert not restarts.failing


def test_a_worker_that_was_useful_is_replaced_at_once_however_short_it_lived() -> None:
    restarts = Restarts(lambda: 0.0)
    for _ in range(5):
        restarts.died(0.1, 100.0, useful=True)
        assert restarts.due == 100.0


def test_chance_makes_a_delay_shorter_and_never_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts_module, "_JITTER", 0.25)
    dues: set[float] = set()
    for chance in (0.0, 0.3, 1.0):
        restarts = Restarts(itertools.repeat(chance).__next__)
        restarts.start_failed(100.0)
        dues.add(round(restarts.due, 6))
    assert dues == {100.1, 100.0925, 100.075}


def test_a_long_life_ends_the_row_of_short_ones() -> None:
    restarts = Restarts(lambda: 0.0)
    for _ in range(6):
        restarts.died(1.0, 100.0)
    restarts.died(SHORT_LIFE_S, 200.0)
    restarts.died(1.0, 300.0)
    assert restarts.due == 300.0


def test_thousands_of_deaths_are_counted_without_an_overflow() -> None:
    restarts = Restarts(lambda: 0.0)
    for _ in range(3000):
        restarts.died(0.0, 100.0)
        restarts.start_failed(100.0)
    assert restarts.due == pytest.approx(130.0)
