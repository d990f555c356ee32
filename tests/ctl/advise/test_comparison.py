"""Rows in company beside rows alone."""

from __future__ import annotations

import math
from typing import Any, Dict, List

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightctl.advise.comparison import Comparison, max_difference

NUMBERS = st.lists(st.floats(width=32), min_size=2, max_size=6)


def rows(*values: Any) -> List[Dict[str, Any]]:
    return [{"y": np.array([value], np.float32)} for value in values]


@given(NUMBERS)
def test_the_same_bits_are_equal_whatever_they_mean(values: List[float]) -> None:
    evidence = Comparison()
    evidence.compare({"y": np.array(values, np.float32)}, rows(*values))
    assert evidence.is_equal
    assert evidence.rows_compared == len(values)


@given(NUMBERS, st.data())
def test_one_other_bit_is_found_in_its_output(values: List[float], data: st.DataObject) -> None:
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


def test_differences_are_told_by_their_largest_and_by_what_that_is_of_its_row() -> None:
    evidence = Comparison()
    large, small = np.array([[100.0, 1.0]]), np.array([[0.01, 0.02]])
    evidence.compare({"y": np.array([[100.5, 1.0], [0.01, 0.03]])}, [{"y": large}, {"y": small}])
    assert evidence.differences["y"][:2] == (2, 0.5)
    assert evidence.max_relative == pytest.approx(0.5)
    evidence.compare({"y": np.array([[0, 1]])}, [{"y": np.array([[0, 0]])}])
    assert (evidence.max_relative, evidence.rows_unequal, evidence.rows_compared) == (math.inf, 3, 3)


def test_what_has_no_rows_is_strange() -> None:
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
def test_distance(one: Any, other: Any, apart: float) -> None:
    assert max_difference(np.array([one]), np.array([other])) == apart
