"""Bitwise comparison of the output rows of a batched predict with the same rows from predicts of single rows."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

import numpy as np

Arrays = Dict[str, Any]


class NotBatchable(ValueError):
    """Rows cannot share a predict. The text gives the reason, such as outputs without one row for each input row."""


def check_rows(outputs: Arrays, rows: int) -> Arrays:
    """Return `outputs`, after checking that each output has `rows` rows.

    Raises:
        NotBatchable: an output has another number of rows.
    """
    for name, array in outputs.items():
        if array.shape[:1] != (rows,):
            raise NotBatchable(f"output {name} has shape {list(array.shape)} for {rows} rows")
    return outputs


def concatenate(parts: List[Arrays]) -> Arrays:
    """Return the outputs of several predicts, concatenated along the first dimension.

    Raises:
        NotBatchable: the predicts' outputs differ in dtype, or in a dimension other than the first.
    """
    if not parts:
        return {}
    for other in parts[1:]:
        for name, array in parts[0].items():
            form, now = (array.dtype, array.shape[1:]), (other[name].dtype, other[name].shape[1:])
            if now != form:
                raise NotBatchable(f"output {name} has rows of shape {list(form[1])} and of shape {list(now[1])}")
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def count_distinct(parts: Sequence[Arrays]) -> int:
    """Return the number of distinct answers. Answers with only infinities and NaNs are not counted."""
    finite = [each for each in parts if any(np.isfinite(array).any() for array in each.values())]
    return len({tuple(array.tobytes() for array in each.values()) for each in finite})


def describe_difference(batched: Arrays, single: Arrays) -> str:
    """Return a description of the first output that differs between the two answers, or "" if all are equal."""
    for name, array in single.items():
        other = batched[name]
        if (array.dtype, array.shape) != (other.dtype, other.shape):
            return f"output {name}: {_describe_array(other)} together, {_describe_array(array)} alone"
        if other.tobytes() != array.tobytes():
            return f"output {name}: {_describe_values(other, array)}"
    return ""


def differing_rows(batched: Arrays, single: Arrays) -> Any:
    """Return a boolean array: for each row, whether any output differs. The outputs must have equal shapes."""
    rows = len(next(iter(single.values())))
    differ = np.zeros(rows, bool)
    for name, array in single.items():
        one, other = (np.ascontiguousarray(each).reshape(rows, -1).view(np.uint8) for each in (batched[name], array))
        differ |= (one != other).any(axis=1)
    return differ


def _describe_values(batched: Any, single: Any) -> str:
    one, other = (np.ascontiguousarray(each).view(f"u{each.itemsize}") for each in (batched, single))
    differ = one != other
    rows = int(differ.reshape(len(single), -1).any(axis=1).sum())
    text = f"{rows} of {len(single)} rows that were batched differ from the same rows run alone"
    with np.errstate(invalid="ignore"):
        a, b, all_values = (each.astype(np.float64) for each in (batched[differ], single[differ], single))
    finite = np.isfinite(a) & np.isfinite(b)
    far = float(abs(a[finite] - b[finite]).max(initial=0.0))
    largest = float(abs(all_values[np.isfinite(all_values)]).max(initial=0.0))
    text += f", by up to {far:.3g} where the largest value is {largest:.3g}"
    return text if finite.all() else f"{text}, and in which values are finite, or in the bits of one that is not"


def _describe_array(array: Any) -> str:
    return f"{array.dtype} {list(array.shape)}"
