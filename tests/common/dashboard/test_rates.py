"""Rates and quantiles."""

from __future__ import annotations

import bisect
import itertools
import math
from typing import List

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_common.dashboard.rates import count_difference, quantile, rate
from weightd_protocol.messages.metrics import Histogram

BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.1)

values = st.lists(st.floats(0, 0.1), min_size=1, max_size=200)


def counts_of(values: List[float]) -> List[int]:
    counts = [0] * (len(BOUNDS) + 1)
    for value in values:
        counts[bisect.bisect_left(BOUNDS, value)] += 1
    return counts


@pytest.mark.parametrize(
    ("before", "after", "seconds", "expected"),
    [(10, 30, 4.0, 5.0), (10, 10, 1.0, 0.0), (10, 9, 1.0, None), (10, 20, 0.0, None), (10, 20, -1.0, None)],
)
def test_a_rate_is_told_of_a_counter_that_goes_on(before: int, after: int, seconds: float, expected: object) -> None:
    assert rate(before, after, seconds) == expected


@given(values, values)
def test_what_was_counted_since_is_the_difference(before: List[float], more: List[float]) -> None:
    first, second = Histogram(tuple(counts_of(before)), 0.0), Histogram(tuple(counts_of(before + more)), 0.0)
    assert count_difference(first, second) == tuple(counts_of(more))
    assert count_difference(second, first) is None


def test_other_buckets_have_nothing_in_common() -> None:
    assert count_difference(Histogram((1, 2), 0.0), Histogram((1, 2, 3), 0.0)) is None


@given(values, st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_the_value_that_it_stands_for(values: List[float], share: float) -> None:
    told = quantile(share, BOUNDS, counts_of(values))
    assert told is not None
    index = bisect.bisect_left(BOUNDS, sorted(values)[math.ceil(share * len(values)) - 1])
    assert (0.0, *BOUNDS)[index] <= told * (1 + 1e-9)
    assert told <= BOUNDS[index] * (1 + 1e-9)


@given(values)
def test_quantiles_grow_with_the_share(values: List[float]) -> None:
    told = [quantile(share / 20, BOUNDS, counts_of(values)) for share in range(1, 21)]
    known = [each for each in told if each is not None]
    assert all(one <= other for one, other in zip(known, itertools.islice(known, 1, None)))


def test_values_are_spread_evenly_in_their_bucket() -> None:
    assert quantile(0.5, (1.0, 3.0), (0, 4, 0)) == 2.0
    assert quantile(0.25, (1.0, 3.0), (4, 4, 0)) == 0.5


def test_beyond_the_last_bound_it_is_that_bound() -> None:
    assert quantile(0.99, (1.0, 3.0), (1, 0, 99)) == 3.0


def test_of_nothing_there_is_none() -> None:
    assert quantile(0.5, (1.0,), (0, 0)) is None
    assert quantile(0.5, (), ()) is None
    assert quantile(0.5, (1.0,), (1, 1, 1)) is None
