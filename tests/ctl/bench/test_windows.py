"""Tests of the measurement windows: when the rate is stable, and the figures."""

from __future__ import annotations

import math
from collections import Counter
from typing import List, Sequence, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightctl.bench.windows import (
    MAX_WINDOWS,
    STABLE_WINDOWS,
    TOLERANCE,
    Window,
    Windows,
    deviation,
    percentile,
    summarize,
)

POSITIVE = st.floats(0.01, 100)


@given(st.lists(POSITIVE, min_size=1, max_size=50), st.floats(0, 1))
def test_percentile(values: Sequence[float], share: float) -> None:
    ordered = sorted(values)
    found = percentile(ordered, share)
    assert found in ordered
    assert sum(each <= found for each in ordered) >= share * len(ordered) - 1e-9
    assert sum(each < found for each in ordered) <= share * len(ordered)


@given(st.lists(POSITIVE, min_size=2, max_size=5), POSITIVE)
def test_deviation_is_relative_to_mean(rates: List[float], factor: float) -> None:
    found = deviation(rates)
    assert deviation([each * factor for each in rates]) == pytest.approx(found)
    assert deviation(rates[::-1]) == pytest.approx(found)
    assert deviation([rates[0]] * 3) < 1e-9
    assert deviation([0.0, 0.0]) == math.inf


@given(st.lists(st.tuples(st.floats(1e-6, 0.5), POSITIVE), min_size=1, max_size=200))
def test_windows_partition_time_after_warm_up(steps: List[Tuple[float, float]]) -> None:
    windows = Windows(0.0, 1.0)
    now = 0.0
    ends: List[Tuple[float, int]] = []
    seen: List[float] = []
    whole: List[Window] = []
    for pause, latency in steps:
        now += pause
        seen.append(latency)
        if windows.on_response(now, latency):
            ends.append((now, len(seen)))
            if windows.count:
                whole.append(windows.recent[-1])
                assert list(windows.recent) == whole[-STABLE_WINDOWS:]
    assert windows.count == len(ends) - 1
    if whole:
        (begin, first), (end, last) = ends[0], ends[-1]
        assert sum(each.seconds for each in whole) == pytest.approx(end - begin)
        assert [latency for each in whole for latency in each.latencies] == seen[first:last]
        assert all(each.seconds >= 1.0 - 1e-9 for each in whole)


@given(st.floats(0.001, 5), st.integers(1, 3))
def test_steady_rate_is_stable_and_exact(pause: float, together: int) -> None:
    windows = Windows(0.0, 1.0)
    now = 0.0
    while not windows.is_over:
        now += pause
        for _ in range(together):
            windows.on_response(now, together * pause)
    level = summarize(together, windows, None)
    assert level.is_stable
    assert level.windows == STABLE_WINDOWS
    if together == 1:
        assert level.requests_per_s == pytest.approx(1 / pause)
        assert level.latencies == (pause, pause, pause)


def test_unstable_rate_ends_with_its_deviation() -> None:
    windows = Windows(0.0, 1.0)
    now = 0.0
    while not windows.is_over:
        now += 0.5 if windows.count % 2 else 0.1
        windows.on_response(now, 1.0)
    level = summarize(1, windows, None)
    assert not level.is_stable
    assert level.windows == MAX_WINDOWS - 1
    assert level.deviation
    assert level.deviation > TOLERANCE


def test_incomplete_window_counts_without_a_full_one() -> None:
    begun = Windows(0.0, 1.0)
    begun.on_response(0.5, 0.5)
    begun.on_error("UNAVAILABLE")
    begun.finish(0.6)
    level = summarize(1, begun, None)
    assert (level.answers, level.errors, level.windows, level.deviation) == (1, {"UNAVAILABLE": 1}, 0, None)
    for end, rates in ((2.5, [1.0]), (4.0, [1.0, 0.0])):
        stalled = Windows(0.0, 1.0)
        stalled.on_response(1.0, 0.1)
        stalled.on_response(2.0, 0.1)
        stalled.finish(end)
        assert [window.rate for window in stalled.recent] == rates
    nothing = Windows(0.0, 1.0)
    nothing.finish(0.5)
    assert summarize(1, nothing, None) == (1, 0, None, None, Counter(), 0, False, None, None)
