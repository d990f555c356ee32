"""Tests of the advice for given measurements."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightctl.advise.recommend import (
    BatchSizeResult,
    Comparison,
    Difference,
    Verdict,
    gain,
    is_worth_its_latency,
    max_difference,
    recommend,
)

ROWS = (1, 2, 4, 8, 16, 32)

# Rows/s of models on a CPU at these batch sizes, and the best number of rows.
MEASURED = {
    "mlp": ((69, 123, 224, 351, 489, 577), 32),
    "few tokens": ((485, 702, 856, 1013, 1079, 985), 8),
    "many tokens": ((124, 115, 104, 103, 107, 102), 1),
    "convolutions": ((19.8, 21.3, 20.1, 21.6, 19.9, 20.0), 1),
}


def unequal(relative: float) -> Comparison:
    evidence = Comparison()
    evidence.rows_compared = 200
    if relative:
        evidence.rows_unequal = 7
        evidence.differences["y"] = Difference(7, relative, relative)
    return evidence


def measured(
    rates: Sequence[float], apart: Sequence[float] = (0.0,) * len(ROWS), way: float = 0.0
) -> List[BatchSizeResult]:
    return [
        BatchSizeResult(rows, rows / rate + way, way, 9, unequal(relative))
        for rows, rate, relative in zip(ROWS, rates, apart)
    ]


@pytest.mark.parametrize(("rates", "max_rows"), MEASURED.values(), ids=MEASURED)
def test_advice_for_measured_models(rates: Sequence[float], max_rows: int) -> None:
    for way in (0.0, 0.0004):
        advice = recommend(measured(rates, way=way))
        assert (advice.max_rows, advice.verdict is Verdict.NO) == (max_rows, max_rows == 1)


RATES = st.lists(st.floats(0.5, 3), min_size=5, max_size=5).map(
    lambda steps: [100.0 * factor for factor in (1.0, *_products(steps))]
)


def _products(steps: Sequence[float]) -> List[float]:
    found = [1.0]
    for step in steps:
        found.append(found[-1] * step)
    return found[1:]


@given(RATES, st.lists(st.sampled_from([0.0, 0.0, 1e-6, 0.5]), min_size=6, max_size=6))
def test_advice_follows_the_rule(rates: List[float], apart: List[float]) -> None:
    sizes = measured(rates, apart)
    advice = recommend(sizes)
    by_rows: Dict[int, BatchSizeResult] = {size.rows: size for size in sizes}
    if advice.verdict is Verdict.NO:
        assert advice.max_rows == 1
        quick = gain(by_rows[8], sizes[0]) >= 1.3
        assert not (quick and is_worth_its_latency(by_rows[2], sizes[0]) and apart[0] < 0.01 and apart[1] < 0.01)
        return
    chosen = by_rows[advice.max_rows]
    limit = 0.0 if advice.verdict is Verdict.MERGE else 0.01
    below = [size for size in sizes if size.rows <= chosen.rows]
    assert is_worth_its_latency(chosen, sizes[0])
    assert gain(by_rows[8], sizes[0]) >= 1.3
    assert all(size.comparison.max_relative <= limit for size in below)
    # No smaller size is as good and worthwhile.
    assert not any(
        gain(size, sizes[0]) >= gain(chosen, sizes[0]) and is_worth_its_latency(size, sizes[0]) for size in below[1:-1]
    )


def test_small_gain_is_not_worthwhile() -> None:
    advice = recommend(measured((100, 120, 130, 140, 150, 160)))
    assert advice.verdict is Verdict.NO
    assert "sooner one after another" in advice.reason


@pytest.mark.parametrize(
    ("apart", "verdict", "max_rows", "words"),
    [
        ((0, 0, 0, 0, 1e-7, 1e-7), Verdict.MERGE, 8, "equal bit for bit"),
        ((0, 1e-7, 1e-7, 1e-7, 1e-7, 0.5), Verdict.INEXACT, 16, "which exact = false permits"),
        ((1e-7, 0, 0, 0, 0, 0), Verdict.INEXACT, 32, "which exact = false permits"),
        ((0, 0.015, 0, 0, 0, 0), Verdict.NO, 1, "depends on the other rows"),
        ((0.5, 0.5, 0.5, 0.5, 0.5, 0.5), Verdict.NO, 1, "of a single row changes between requests"),
        ((0, 0, 0.5, 0.5, 0.5, 0.5), Verdict.MERGE, 2, "equal bit for bit"),
    ],
)
def test_unequal_answers(apart: Sequence[float], verdict: Verdict, max_rows: int, words: str) -> None:
    advice = recommend(measured((100, 190, 350, 600, 900, 1300), apart))
    assert (advice.verdict, advice.max_rows) == (verdict, max_rows)
    assert words in advice.reason


def test_equal_rows_may_be_too_few() -> None:
    advice = recommend(measured((100, 101, 350, 600, 900, 1300), (0, 0, 0.5, 0, 0, 0)))
    assert advice.verdict is Verdict.NO
    assert "smaller batches are not worthwhile" in advice.reason


def test_fast_model_gains_nothing() -> None:
    advice = recommend(measured((10_000, 20_000, 40_000, 80_000, 160_000, 320_000), way=0.0004))
    assert advice.verdict is Verdict.NO
    assert "less than the overhead of 0.40 ms" in advice.reason


def test_excludes_rejected_and_split_sizes() -> None:
    sizes = measured((100, 190, 350, 600, 900, 1300))
    sizes[5] = sizes[5]._replace(is_split=True)
    sizes[4] = sizes[4]._replace(answers=0, refusal="too many")
    assert recommend(sizes)[:3] == (Verdict.MERGE, 8, ())
    sizes[1] = sizes[1]._replace(answers=0, refusal="no such gear")
    assert recommend(sizes)[:3] == (Verdict.MERGE, 8, (1, 4, 8))
    assert "no request of several rows" in recommend(sizes[:2]).reason


def test_reason_names_output_without_rows() -> None:
    sizes = measured((100, 190, 350, 600, 900, 1300))
    sizes[3].comparison.shape_mismatches["sum"] = "[] for 8 rows"
    assert recommend(sizes).reason == "output sum does not have one row per input row: [] for 8 rows"


NUMBERS = st.lists(st.floats(width=32), min_size=2, max_size=6)


def rows(*values: Any) -> List[Dict[str, Any]]:
    return [{"y": np.array([value], np.float32)} for value in values]


@given(NUMBERS)
def test_equal_bits_are_equal(values: List[float]) -> None:
    evidence = Comparison()
    evidence.compare({"y": np.array(values, np.float32)}, rows(*values))
    assert evidence.is_equal
    assert evidence.rows_compared == len(values)


@given(NUMBERS, st.data())
def test_finds_one_different_bit(values: List[float], data: st.DataObject) -> None:
    array = np.array(values, np.float32)
    place = data.draw(st.integers(0, len(values) - 1))
    array.view(np.uint32)[place] ^= np.uint32(1)
    evidence = Comparison()
    evidence.compare(
        {"same": np.array(values), "y": array},
        [{**each, "same": np.array([value])} for each, value in zip(rows(*values), values)],
    )
    assert (evidence.rows_unequal, [*evidence.differences]) == (1, ["y"])
    assert not evidence.is_equal


def test_reports_largest_and_relative_difference() -> None:
    evidence = Comparison()
    large, small = np.array([[100.0, 1.0]]), np.array([[0.01, 0.02]])
    evidence.compare({"y": np.array([[100.5, 1.0], [0.01, 0.03]])}, [{"y": large}, {"y": small}])
    assert evidence.differences["y"][:2] == (2, 0.5)
    assert evidence.max_relative == pytest.approx(0.5)
    evidence.compare({"y": np.array([[0, 1]])}, [{"y": np.array([[0, 0]])}])
    assert (evidence.max_relative, evidence.rows_unequal, evidence.rows_compared) == (math.inf, 3, 3)


def test_reports_shape_mismatches() -> None:
    evidence = Comparison()
    alone = [{"y": np.zeros((1, 3)), "z": np.zeros(())}] * 2
    evidence.compare({"y": np.zeros((2, 4)), "z": np.zeros(())}, alone)
    assert evidence.shape_mismatches == {"y": "[1, 4] for a row that has [1, 3] alone", "z": "[] for 2 rows"}
    assert not evidence.is_equal


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (math.nan, math.nan, 0.0),
        (math.nan, 1.0, math.inf),
        (math.inf, math.inf, 0.0),
        (math.inf, -math.inf, math.inf),
        (0.0, -0.0, 0.0),
        (True, False, 1.0),
        (3, 5, 2.0),
    ],
)
def test_absolute_difference(one: Any, other: Any, apart: float) -> None:
    assert max_difference(np.array([one]), np.array([other])) == apart
