from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_daemon.counters.histogram import ROWS_BOUNDS, SECONDS_BOUNDS, HistogramCounter, HistogramRecord
from weightd_protocol import limits

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
