"""Whether rows that were run together have the answer, bit for bit, that they have alone."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

import numpy as np

Arrays = Dict[str, Any]


class NotTogether(ValueError):
    """Rows have not each their own answer, or not the one that they have alone; the text says which have what."""


def of_rows(outputs: Arrays, rows: int) -> Arrays:
    """Return the outputs, each of so many rows.

    Raises:
        NotTogether: one has another number of them.
    """
    for name, array in outputs.items():
        if array.shape[:1] != (rows,):
            raise NotTogether(f"output {name} has shape {list(array.shape)} for {rows} rows")
    return outputs


def joined(parts: List[Arrays]) -> Arrays:
    """Return the outputs of several predicts, one behind another.

    Raises:
        NotTogether: they differ in more than their rows.
    """
    if not parts:
        return {}
    for other in parts[1:]:
        for name, array in parts[0].items():
            form, now = (array.dtype, array.shape[1:]), (other[name].dtype, other[name].shape[1:])
            if now != form:
                raise NotTogether(f"output {name} has rows of shape {list(form[1])}, and of {list(now[1])}")
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def variety(parts: Sequence[Arrays]) -> int:
    """Return how many different answers there are, of those that have a finite number in them."""
    telling = [each for each in parts if any(np.isfinite(array).any() for array in each.values())]
    return len({tuple(array.tobytes() for array in each.values()) for each in telling})


def difference(together: Arrays, alone: Arrays) -> str:
    """Return what differs, for people; "" if nothing does."""
    for name, array in alone.items():
        other = together[name]
        if (array.dtype, array.shape) != (other.dtype, other.shape):
            return f"output {name}: {_form(other)} together, {_form(array)} alone"
        if other.tobytes() != array.tobytes():
            return f"output {name}: {_apart(other, array)}"
    return ""


def rows_that_differ(together: Arrays, alone: Arrays) -> Any:
    """Return for each row whether any output of it differs, as an array of bool. The outputs have the same forms."""
    rows = len(next(iter(alone.values())))
    differ = np.zeros(rows, bool)
    for name, array in alone.items():
        one, other = (np.ascontiguousarray(each).reshape(rows, -1).view(np.uint8) for each in (together[name], array))
        differ |= (one != other).any(axis=1)
    return differ


def _apart(together: Any, alone: Any) -> str:
    one, other = (np.ascontiguousarray(each).view(f"u{each.itemsize}") for each in (together, alone))
    differ = one != other
    rows = int(differ.reshape(len(alone), -1).any(axis=1).sum())
    text = f"{rows} of {len(alone)} rows that were run together differ from the same rows run alone"
    with np.errstate(invalid="ignore"):
        a, b, all_values = (each.astype(np.float64) for each in (together[differ], alone[differ], alone))
    finite = np.isfinite(a) & np.isfinite(b)
    far = float(abs(a[finite] - b[finite]).max(initial=0.0))
    largest = float(abs(all_values[np.isfinite(all_values)]).max(initial=0.0))
    text += f", by up to {far:.3g} where the largest value is {largest:.3g}"
    return text if finite.all() else f"{text}, and in which values are finite, or in the bits of one that is not"


def _form(array: Any) -> str:
    return f"{array.dtype} {list(array.shape)}"
