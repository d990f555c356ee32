from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd.daemon.requests.latency import Latencies

seconds = st.floats(0.0, 1e4)


def filled(values: list[float]) -> Latencies:
    latencies = Latencies()
    for value in values:
        latencies.add(value)
    return latencies


def test_there_is_none_before_the_first() -> None:
    assert Latencies().percentile_us(50) is None
    assert Latencies().count == 0


def test_percentiles_are_in_microseconds() -> None:
    latencies = filled([each / 1000 for each in range(1000)])
    assert latencies.percentile_us(50) == pytest.approx(500_000)
    assert latencies.percentile_us(99) == pytest.approx(990_000)
    assert latencies.percentile_us(0) == 0.0
    assert latencies.percentile_us(100) == pytest.approx(999_000)


def test_only_the_last_ones_are_looked_at_but_all_are_counted() -> None:
    latencies = filled([1.0] * 5000 + [2.0] * 1024)
    assert latencies.percentile_us(0) == 2e6
    assert latencies.count == 6024


@given(st.lists(seconds, min_size=1, max_size=50), st.floats(0, 100))
def test_a_percentile_is_one_of_the_values_and_as_many_are_below(values: list[float], percent: float) -> None:
    found = filled(values).percentile_us(percent)
    assert found is not None
    assert found in [1e6 * value for value in values]
    assert sum(1e6 * value <= found for value in values) >= len(values) * percent / 100
