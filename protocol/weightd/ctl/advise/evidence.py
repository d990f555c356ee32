"""The answer to a row in company beside the answer to the same row alone."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence

import numpy as np


class Difference(NamedTuple):
    """How far apart answers are in an output.

    Attributes:
        rows: how many rows have other bits.
        largest: the largest difference of two values; infinite where only one is a number.
        relative: the same as a share of the largest value of the row alone; the largest share of all rows.
    """

    rows: int
    largest: float
    relative: float


class Evidence:
    """What is known of requests with a number of rows.

    Attributes:
        compared: how many rows were compared.
        unequal: how many of them have other bits, in whatever output.
        differences: of the outputs that differ, by name.
        strange: of the outputs that have no row for each of the request's, what was found instead.
    """

    def __init__(self) -> None:
        self.compared = 0
        self.unequal = 0
        self.differences: Dict[str, Difference] = {}
        self.strange: Dict[str, str] = {}

    @property
    def is_equal(self) -> bool:
        """Whether nothing was found that differs."""
        return not self.unequal and not self.strange

    @property
    def relative(self) -> float:
        """The largest of the differences, as a share of the row's largest value."""
        return max((each.relative for each in self.differences.values()), default=0.0)

    def compare(self, together: Mapping[str, Any], alone: Sequence[Mapping[str, Any]]) -> None:
        """Compare the outputs of some rows with those of each of them."""
        unequal: List[bool] = [False] * len(alone)
        self.compared += len(alone)
        for name, array in together.items():
            if array.ndim == 0 or len(array) != len(alone):
                self.strange[name] = f"{list(array.shape)} for {len(alone)} rows"
                continue
            for index, each in enumerate(alone):
                row = array[index : index + 1]
                if row.shape != each[name].shape:
                    self.strange[name] = f"{list(row.shape)} for a row that has {list(each[name].shape)} alone"
                elif row.tobytes() != each[name].tobytes():
                    unequal[index] = True
                    self._add(name, row, each[name])
        self.unequal += sum(unequal)

    def _add(self, name: str, row: Any, alone: Any) -> None:
        found = self.differences.get(name, Difference(0, 0.0, 0.0))
        largest = distance(row, alone)
        relative = share(largest, alone)
        self.differences[name] = Difference(found.rows + 1, max(found.largest, largest), max(found.relative, relative))


def distance(row: Any, alone: Any) -> float:
    """Return the largest difference of two values in the same place; infinite where only one is a number."""
    # Numbers that are none, and differences that are none, are looked at below.
    with np.errstate(invalid="ignore", over="ignore"):
        one, other = (np.asarray(each, np.float64).reshape(-1) for each in (row, alone))
        apart = np.abs(one - other)
    # The same infinity twice is no difference, and neither is no number twice.
    apart[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
    apart[np.isnan(apart)] = math.inf
    return float(apart.max())


def share(largest: float, alone: Any) -> float:
    """Return a difference as a share of the largest value; infinite where that is 0."""
    if not largest:
        return 0.0
    with np.errstate(invalid="ignore"):
        values = np.abs(np.asarray(alone, np.float64))
    scale = float(values[np.isfinite(values)].max(initial=0.0))
    return largest / scale if scale else math.inf
