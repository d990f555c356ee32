from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_daemon.counters import (
    ROWS_BOUNDS,
    SECONDS_BOUNDS,
    CounterRegistry,
    HistogramCounter,
    HistogramRecord,
    ModelCounters,
    ProcessCounters,
)
from weightd_protocol import limits


def test_counts_restarts_up_to_the_number_lost() -> None:
    counters = ModelCounters()
    process_counters = ProcessCounters(counters)
    for _ in range(3):
        process_counters.on_started()
    assert counters.restarts == 0
    process_counters.on_death()
    process_counters.on_lost(2)
    for _ in range(5):
        process_counters.on_started()
    assert (counters.unexpected_exits, counters.restarts) == (1, 2)


def test_shared_process_counts_for_each_model() -> None:
    first, second = ModelCounters(), ModelCounters()
    process_counters = ProcessCounters(first, second)
    process_counters.on_death()
    process_counters.on_selftest_failed()
    process_counters.on_batch_mismatch()
    for each in (first, second):
        assert (each.unexpected_exits, each.selftest_failures, each.batch_mismatches) == (1, 1, 1)
    ProcessCounters().on_death()


def test_removed_model_loses_its_counters() -> None:
    registry = CounterRegistry()
    registry.counters_of("m").unexpected_exits = 1
    registry.counters_of("n").unexpected_exits = 2
    assert registry.counters_of("m") is registry.counters_of("m")
    registry.keep_only(["m"])
    assert [each.model for each in registry.records()] == ["m"]
    assert (registry.counters_of("m").unexpected_exits, registry.counters_of("n").unexpected_exits) == (1, 0)


@pytest.mark.parametrize("field", ["unexpected_exits", "restarts", "selftest_failures", "batch_mismatches"])
def test_only_models_with_numbers_are_recorded(field: str) -> None:
    registry = CounterRegistry()
    registry.counters_of("unused")
    setattr(registry.counters_of("used"), field, 1)
    assert [each.model for each in registry.records()] == ["used"]


@pytest.mark.parametrize("field", ["requests", "queue", "compute", "rows"])
def test_models_with_times_are_recorded(field: str) -> None:
    registry = CounterRegistry()
    getattr(registry.counters_of("used"), field).add(0.0)
    assert [each.model for each in registry.records()] == ["used"]


BOUNDS = (1.0, 10.0)


@pytest.mark.parametrize(
    ("value", "bucket"), [(0.0, 0), (0.5, 0), (1.0, 0), (1.0000001, 1), (10.0, 1), (10.5, 2), (1e300, 2)]
)
def test_value_equal_to_a_bound_is_in_its_bucket(value: float, bucket: int) -> None:
    buckets = HistogramCounter(BOUNDS)
    buckets.add(value)
    assert buckets.counts == [int(index == bucket) for index in range(3)]
    assert (buckets.count, buckets.sum) == (1, value)


@given(st.lists(st.floats(0, 100)))
def test_histogram_matches_the_added_values(values: list[float]) -> None:
    buckets = HistogramCounter(BOUNDS)
    for value in values:
        buckets.add(value)
    histogram = buckets.to_histogram()
    assert histogram.counts == tuple(
        sum(low < value <= high for value in values) for low, high in [(-1, 1.0), (1.0, 10.0), (10.0, 1e9)]
    )
    assert histogram.sum == pytest.approx(sum(values))


def test_ignores_saved_buckets_of_other_bounds() -> None:
    buckets = HistogramCounter(BOUNDS)
    buckets.add(5.0)
    buckets.restore(HistogramRecord((1, 1), 3.0))
    assert (buckets.counts, buckets.sum) == ([0, 1, 0], 5.0)
    buckets.restore(HistogramRecord((1, 0, 2), 3.0))
    assert (buckets.counts, buckets.sum) == ([1, 1, 2], 8.0)


@pytest.mark.parametrize("bounds", [SECONDS_BOUNDS, ROWS_BOUNDS])
def test_bounds_ascend_and_fit_into_a_response(bounds: tuple[float, ...]) -> None:
    assert [*bounds] == sorted({*bounds})
    assert len(bounds) <= limits.MAX_BUCKETS
