"""Rows to ask a model: all different, and the same in each process."""

from __future__ import annotations

from typing import Any, Optional, Sequence

import numpy as np

from weightd.protocol.datatypes import ITEM_BYTES
from weightd.protocol.messages.data import TensorSignature
from weightd.protocol.messages.findings import Case
from weightd.worker.canary import canary
from weightd.worker.engines.engine import Arrays, ModelSignature

# Where rows differ together and alone, few of them may: of one operator that is known to, 3.6 in a hundred.
MOST = 200
"""Rows that are asked together and alone."""

MAX_BYTES = 64 * 1024 * 1024
"""Of the rows that are kept, unless LEAST take more."""

LEAST = 8

# A model that looks at all rows at once, to scale them or to choose among them, shows it where one is larger.
_MAGNITUDES = (1.0, 100.0, 0.01)


def has_rows(tensor: TensorSignature) -> bool:
    """Return whether the first dimension of an input may count rows."""
    return tensor.shape is not None and tensor.shape[:1] == (-1,)


class Questions:
    """Rows of the inputs of a model that have some; of each other input the same values go with all rows.

    Args:
        signature: of the model.
        case: the shapes of inputs that it runs on.
        sample: the values of such ones, if they are not made up: rows are like these.
        most: how many are needed.

    Attributes:
        row_bytes: what one row of all inputs that have some takes.
        count: how many different ones there are.
    """

    def __init__(
        self, signature: ModelSignature, case: Case, sample: Optional[Arrays] = None, most: int = MOST
    ) -> None:
        with_rows = [each for each in signature.inputs if has_rows(each)]
        dims = {each.name: case[each.name][1:] for each in with_rows}
        nbytes = [ITEM_BYTES[each.datatype] * _product(dims[each.name]) for each in with_rows]
        self.row_bytes = sum(nbytes)
        self.count = min(most, MOST, max(LEAST, MAX_BYTES // max(self.row_bytes, 1)))
        self._whole: Arrays = {}
        for each in signature.inputs:
            if not has_rows(each):
                given = None if sample is None else sample[each.name]
                self._whole[each.name] = canary.made(each, case[each.name]) if given is None else given
        self._rows: Arrays = {}
        for each in with_rows:
            made = [canary.made(each, dims[each.name], 1 + index) for index in range(self.count)]
            if sample is not None and len(sample[each.name]):
                made = [_like(sample[each.name], index, values) for index, values in enumerate(made)]
            rows = self._rows[each.name] = np.stack(made)
            if rows.dtype.kind == "f":
                magnitudes = np.resize(_MAGNITUDES, self.count).astype(rows.dtype)
                rows *= magnitudes.reshape(-1, *[1] * (rows.ndim - 1))

    def of(self, indices: Sequence[int]) -> Arrays:
        """Return inputs of these rows, in this order."""
        return {**self._whole, **{name: rows[indices] for name, rows in self._rows.items()}}


def _like(sample: Any, index: int, made: Any) -> Any:
    """A row of the sample; one of real numbers is varied, so that no two are equal."""
    row = sample[index % len(sample)]
    return (row * (1 + made / 2)).astype(row.dtype) if row.dtype.kind == "f" else row


def _product(dims: Sequence[int]) -> int:
    return int(np.prod(dims, dtype=np.int64))
