"""The answer to a row in company beside the answer to the same row alone."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence

import numpy as np


class Difference(NamedTuple):
    """How far apart answers are in an output.

    Attributes:
        rows: how many rows have other bits.
        max_difference: the largest difference of two values; infinite where only one is a number.
        max_relative: the same as a share of the largest value of the row alone; the largest share of all rows.
    """

    rows: int
    max_difference: float
    max_relative: float


class Comparison:
    """What is known of requests with a number of rows.

    Attributes:
        rows_compared: how many rows were compared.
        rows_unequal: how many of them have other bits, in whatever output.
        differences: of the outputs that differ, by name.
        shape_mismatches: of the outputs that have no row for each of the request's, what was found instead.
    """

    def __init__(self) -> None:
        self.rows_compared = 0
        self.rows_unequal = 0
        self.differences: Dict[str, Difference] = {}
        self.shape_mismatches: Dict[str, str] = {}

    @property
    def is_equal(self) -> bool:
        """Whether nothing was found that differs."""
        return not self.rows_unequal and not self.shape_mismatches

    @property
    def max_relative(self) -> float:
        """The largest of the differences, as a share of the row's largest value."""
        return max((each.max_relative for each in self.differences.values()), default=0.0)

    def compare(self, merged: Mapping[str, Any], single: Sequence[Mapping[str, Any]]) -> None:
        """Compare the outputs of some rows with those of each of them."""
        unequal: List[bool] = [False] * len(single)
        self.rows_compared += len(single)
        for name, array in merged.items():
            if array.ndim == 0 or len(array) != len(single):
                self.shape_mismatches[name] = f"{list(array.shape)} for {len(single)} rows"
                continue
            for index, each in enumerate(single):
                row = array[index : index + 1]
                if row.shape != each[name].shape:
                    self.shape_mismatches[name] = f"{list(row.shape)} for a row that has {list(each[name].shape)} alone"
                elif row.tobytes() != each[name].tobytes():
                    unequal[index] = True
                    self._add(name, row, each[name])
        self.rows_unequal += sum(unequal)

    def _add(self, name: str, row: Any, single: Any) -> None:
        found = self.differences.get(name, Difference(0, 0.0, 0.0))
        largest = max_difference(row, single)
        relative = relative_difference(largest, single)
        self.differences[name] = Difference(
            found.rows + 1, max(found.max_difference, largest), max(found.max_relative, relative)
        )


def max_difference(row: Any, single: Any) -> float:
    """Return the largest difference of two values in the same place; infinite where only one is a number."""
    # Numbers that are none, and differences that are none, are looked at below.
    with np.errstate(invalid="ignore", over="ignore"):
        one, other = (np.asarray(each, np.float64).reshape(-1) for each in (row, single))
        differences = np.abs(one - other)
    # The same infinity twice is no difference, and neither is no number twice.
    differences[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
    differences[np.isnan(differences)] = math.inf
    return float(differences.max())


def relative_difference(difference: float, single: Any) -> float:
    """Return a difference as a share of the largest value; infinite where that is 0."""
    if not difference:
        return 0.0
    with np.errstate(invalid="ignore"):
        values = np.abs(np.asarray(single, np.float64))
    scale = float(values[np.isfinite(values)].max(initial=0.0))
    return difference / scale if scale else math.inf
