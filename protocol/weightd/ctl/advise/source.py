"""Rows to ask for: made up, or those of a file."""

from __future__ import annotations

from typing import Any, List, Mapping, Optional, Sequence

import numpy as np

from weightd.ctl import arrays
from weightd.ctl.measuring import samples
from weightd.ctl.measuring.samples import Arrays
from weightd.ctl.measuring.shapes import told
from weightd.ctl.text import clean
from weightd.ctl.verb import BadInput
from weightd.protocol.messages.data import TensorSignature, TensorSpec
from weightd.protocol.tensors import NUMPY_DTYPE

# By which floats of the rows differ, in turn: what a model computes over all of its rows shows.
MAGNITUDES = (1.0, 100.0, 0.01)


class MadeUp:
    """Rows that are all different.

    Args:
        specs: the inputs of a request, however many rows it has.

    Attributes:
        different: how many different rows there are; None: no end of them.
    """

    different: Optional[int] = None

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs

    def block(self, number: int, rows: int) -> Arrays:
        """Return the rows of a block of so many."""
        specs = [TensorSpec(each.name, each.datatype, (rows, *each.shape[1:])) for each in self._specs]
        return {name: _scaled(array) for name, array in samples.make(specs, number).items()}


class FromFile:
    """The rows of an .npz file, in turn.

    Args:
        path: of the file.
        inputs: what the model takes.

    Attributes:
        different: how many rows there are.

    Raises:
        BadInput: the file cannot be read, or holds something else than the model takes.
    """

    def __init__(self, path: str, inputs: Sequence[TensorSignature]) -> None:
        with arrays.opened(path) as file:
            self._arrays = arrays.load_several(path, file)
        lengths = {_checked(path, self._arrays, each) for each in inputs}
        if len(lengths) != 1 or not min(lengths):
            raise BadInput(f"{path}: expected as many rows of each input, at least 1, got {sorted(lengths)}")
        self._length = lengths.pop()
        self.different: Optional[int] = self._length
        self._names = [each.name for each in inputs]

    def block(self, number: int, rows: int) -> Arrays:
        """Return the rows of a block of so many."""
        places = np.arange(number * rows, (number + 1) * rows) % self._length
        return {name: np.ascontiguousarray(self._arrays[name][places]) for name in self._names}


def _scaled(array: Any) -> Any:
    if array.dtype.kind != "f":
        return array
    factors: List[float] = [MAGNITUDES[row % len(MAGNITUDES)] for row in range(len(array))]
    return array * np.asarray(factors, array.dtype).reshape(-1, *[1] * (array.ndim - 1))


def _checked(path: str, found: Mapping[str, Any], signature: TensorSignature) -> int:
    """Return how many rows of an input there are."""
    array = found.get(signature.name)
    if array is None:
        there = ", ".join(map(clean, found)) or "none"
        raise BadInput(f"{path}: expected an array {clean(signature.name)}, there are: {there}")
    wanted = signature.shape
    fits = wanted is None or (
        array.ndim == len(wanted) and all(dim in (-1, got) for got, dim in zip(array.shape, wanted))
    )
    if array.ndim == 0 or not fits or array.dtype != np.dtype(NUMPY_DTYPE[signature.datatype]):
        raise BadInput(f"{path}: expected {told([signature])}, got {array.dtype} {list(array.shape)}")
    return len(array)
