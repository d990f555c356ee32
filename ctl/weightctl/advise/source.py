"""Rows to ask for: made up, or those of a file."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import numpy as np

from weightctl import arrays
from weightctl.command import BadInput
from weightctl.measuring.samples import Arrays
from weightctl.measuring.shapes import describe
from weightctl.text import clean
from weightd_common.rowtest.rows import RowKind, TestRows
from weightd_protocol.messages.inference import TensorSignature, TensorSpec
from weightd_protocol.tensors import NUMPY_DTYPE


class SyntheticRows:
    """Rows that are all different: those on which the daemon tests the model.

    Args:
        specs: the inputs of a request, however many rows it has.
        kind: of the rows.

    Attributes:
        distinct_rows: how many different rows there are; None: no end of them.
        sample: None: the values come from no file.
        shapes: of the inputs, by name, with one row.
    """

    distinct_rows: Optional[int] = None
    sample: Optional[Arrays] = None

    def __init__(self, specs: Sequence[TensorSpec], kind: RowKind = RowKind.SCALED) -> None:
        self.shapes: Dict[str, Tuple[int, ...]] = {each.name: (1, *each.shape[1:]) for each in specs}
        self._inputs = [TensorSignature(each.name, each.datatype, (-1, *each.shape[1:])) for each in specs]
        self.kind = kind

    def block(self, number: int, rows: int) -> Arrays:
        """Return the rows of a block of so many."""
        test_rows = TestRows(self._inputs, self.shapes, kind=self.kind, max_rows=rows, first_index=number * rows)
        return test_rows.select([row % test_rows.count for row in range(rows)])


class FileRows:
    """The rows of an .npz file, in turn.

    Args:
        path: of the file.
        inputs: what the model takes.

    Attributes:
        distinct_rows: how many rows there are.
        sample: the arrays, by name.
        shapes: of the inputs, by name, with one row.

    Raises:
        BadInput: the file cannot be read, or holds something else than the model takes.
    """

    def __init__(self, path: str, inputs: Sequence[TensorSignature]) -> None:
        with arrays.open_input(path) as file:
            self.sample: Arrays = arrays.load_all(path, file)
        lengths = {_check_array(path, self.sample, each) for each in inputs}
        if len(lengths) != 1 or not min(lengths):
            raise BadInput(f"{path}: expected as many rows of each input, at least 1, got {sorted(lengths)}")
        self._length = lengths.pop()
        self.distinct_rows: Optional[int] = self._length
        self._names = [each.name for each in inputs]
        self.shapes: Dict[str, Tuple[int, ...]] = {name: (1, *self.sample[name].shape[1:]) for name in self._names}

    def block(self, number: int, rows: int) -> Arrays:
        """Return the rows of a block of so many."""
        indices = np.arange(number * rows, (number + 1) * rows) % self._length
        return {name: np.ascontiguousarray(self.sample[name][indices]) for name in self._names}


def _check_array(path: str, sample: Mapping[str, Any], signature: TensorSignature) -> int:
    """Return how many rows of an input there are."""
    array = sample.get(signature.name)
    if array is None:
        available = ", ".join(map(clean, sample)) or "none"
        raise BadInput(f"{path}: expected an array {clean(signature.name)}, there are: {available}")
    declared = signature.shape
    fits = declared is None or (
        array.ndim == len(declared) and all(dim in (-1, got) for got, dim in zip(array.shape, declared))
    )
    if array.ndim == 0 or not fits or array.dtype != np.dtype(NUMPY_DTYPE[signature.datatype]):
        raise BadInput(f"{path}: expected {describe([signature])}, got {array.dtype} {list(array.shape)}")
    return len(array)
