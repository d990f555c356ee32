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


def test_as_many_are_started_again_as_were_lost() -> None:
    meter = ModelCounters()
    mishaps = ProcessCounters(meter)
    for _ in range(3):
        mishaps.on_started()
    assert meter.restarts == 0
    mishaps.on_death()
    mishaps.on_lost(2)
    for _ in range(5):
        mishaps.on_started()
    assert (meter.unexpected_exits, meter.restarts) == (1, 2)


def test_what_befalls_a_process_of_several_models_befalls_each() -> None:
    one, two = ModelCounters(), ModelCounters()
    mishaps = ProcessCounters(one, two)
    mishaps.on_death()
    mishaps.on_selftest_failed()
    mishaps.on_batch_mismatch()
    for each in (one, two):
        assert (each.unexpected_exits, each.selftest_failures, each.batch_mismatches) == (1, 1, 1)
    ProcessCounters().on_death()


def test_a_model_that_is_gone_takes_its_own_with_it() -> None:
    meters = CounterRegistry()
    meters.counters_of("m").unexpected_exits = 1
    meters.counters_of("n").unexpected_exits = 2
    assert meters.counters_of("m") is meters.counters_of("m")
    meters.keep_only(["m"])
    assert [each.model for each in meters.records()] == ["m"]
    assert (meters.counters_of("m").unexpected_exits, meters.counters_of("n").unexpected_exits) == (1, 0)


BOUNDS = (1.0, 10.0)


@pytest.mark.parametrize(
    ("value", "bucket"), [(0.0, 0), (0.5, 0), (1.0, 0), (1.0000001, 1), (10.0, 1), (10.5, 2), (1e300, 2)]
)
def test_a_value_that_is_a_bound_is_up_to_it(value: float, bucket: int) -> None:
    buckets = HistogramCounter(BOUNDS)
    buckets.add(value)
    assert buckets.counts == [int(index == bucket) for index in range(3)]
    assert (buckets.count, buckets.sum) == (1, value)


@given(st.lists(st.floats(0, 100)))
def test_what_is_told_is_what_was_added(values: list[float]) -> None:
    buckets = HistogramCounter(BOUNDS)
    for value in values:
        buckets.add(value)
    told = buckets.to_histogram()
    assert told.counts == tuple(
        sum(low < value <= high for value in values) for low, high in [(-1, 1.0), (1.0, 10.0), (10.0, 1e9)]
    )
    assert told.sum == pytest.approx(sum(values))


def test_what_was_written_down_of_other_bounds_is_of_no_use() -> None:
    buckets = HistogramCounter(BOUNDS)
    buckets.add(5.0)
    buckets.restore(HistogramRecord((1, 1), 3.0))
    assert (buckets.counts, buckets.sum) == ([0, 1, 0], 5.0)
    buckets.restore(HistogramRecord((1, 0, 2), 3.0))
    assert (buckets.counts, buckets.sum) == ([1, 1, 2], 8.0)


@pytest.mark.parametrize("bounds", [SECONDS_BOUNDS, ROWS_BOUNDS])
def test_the_bounds_ascend_and_an_answer_has_room_for_them(bounds: tuple[float, ...]) -> None:
    assert [*bounds] == sorted({*bounds})
    assert len(bounds) <= limits.MAX_BUCKETS
