from __future__ import annotations

import itertools

import pytest

from weightd_daemon.generations import restarts as restarts_module
from weightd_daemon.generations.restarts import EARLY_DEATH_S, MAX_FAILED_STARTS, RestartBackoff


@pytest.fixture
def restarts() -> RestartBackoff:
    return RestartBackoff(lambda: 0.0)


def test_failed_starts_back_off_and_exhaust(restarts: RestartBackoff) -> None:
    dues: list[float] = []
    assert (restarts.due_at, restarts.delay_s) == (0.0, 0.0)
    failing: list[bool] = []
    for _ in range(MAX_FAILED_STARTS):
        restarts.on_start_failed(100.0)
        dues.append(restarts.due_at)
        failing.append(restarts.is_exhausted)
    assert failing == [False] * (MAX_FAILED_STARTS - 1) + [True]
    assert dues == pytest.approx([100.1, 100.2, 100.4])


def test_ready_worker_resets_failed_starts(restarts: RestartBackoff) -> None:
    for _ in range(MAX_FAILED_STARTS - 1):
        restarts.on_start_failed(100.0)
    restarts.on_ready()
    restarts.on_start_failed(100.0)
    assert not restarts.is_exhausted


def test_out_of_memory_counts_as_failure_only_after_timeout(restarts: RestartBackoff) -> None:
    waits, now = list[float](), 100.0
    while now < 130.0:
        restarts.on_out_of_memory(now, 30.0)
        waits.append(restarts.due_at - now)
        now = restarts.due_at
    assert waits[:6] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0])
    assert max(waits) == pytest.approx(2.0)
    failing = [restarts.is_exhausted]
    for _ in range(MAX_FAILED_STARTS):
        restarts.on_out_of_memory(now, 30.0)
    failing.append(restarts.is_exhausted)
    restarts.on_ready()
    restarts.on_out_of_memory(1000.0, 30.0)
    assert [*failing, restarts.is_exhausted] == [False, True, False]


@pytest.mark.parametrize(("lived", "useful"), [(EARLY_DEATH_S, False), (0.1, True)])
def test_long_or_useful_life_resets_backoff(restarts: RestartBackoff, lived: float, useful: bool) -> None:
    for _ in range(6):
        restarts.on_death(1.0, 100.0)
    for now in (200.0, 300.0):
        restarts.on_death(lived, now, has_answered=useful)
        assert restarts.due_at == now
    restarts.on_death(1.0, 400.0)
    assert restarts.due_at == 400.0


def test_early_exits_back_off_without_limit(restarts: RestartBackoff) -> None:
    waits: list[float] = []
    for _ in range(3000):  # The count must not overflow.
        restarts.on_death(EARLY_DEATH_S - 0.01, 100.0)
        waits.append(restarts.due_at - 100.0)
    assert waits[:5] == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.8])
    assert waits == sorted(waits)
    assert (waits[-1], restarts.delay_s) == pytest.approx((30.0, 30.0))
    assert not restarts.is_exhausted


def test_jitter_only_shortens_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts_module, "_JITTER", 0.25)
    dues: list[float] = []
    for chance in (0.0, 0.3, 1.0):
        restarts = RestartBackoff(itertools.repeat(chance).__next__)
        restarts.on_start_failed(100.0)
        dues.append(restarts.due_at)
    assert dues == pytest.approx([100.1, 100.0925, 100.075])
