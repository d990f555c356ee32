"""The highest of many scores, with the names that they have in a file."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Sequence

import numpy as np

from weightctl.command import BadInput
from weightctl.text import clean, count
from weightd_common.safe_open import read_regular

# Nobody reads more of them; the others are told by their number.
_MAX_ROWS = 16

# Of a file of names.
_MAX_BYTES = 16 * 2**20

Labels = Optional[Sequence[str]]


def read_labels(path: str) -> List[str]:
    """Return the lines of a file.

    Raises:
        BadInput: it cannot be read.
    """
    try:
        content = read_regular(path, _MAX_BYTES)
        return [line.strip() for line in content.decode("utf-8-sig").splitlines()]
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path}: expected names as text (UTF-8), one a line") from None


def are_scores(array: Any) -> bool:
    """Return whether an output may be scores: vectors of floats, several numbers each."""
    return bool(array.dtype.kind == "f" and array.ndim and array.shape[-1] > 1)


def check_labels(path: str, labels: Sequence[str], arrays: Sequence[Any]) -> None:
    """See to it that the names are those of an output.

    Raises:
        BadInput: no output has as many scores.
    """
    sizes = sorted({array.shape[-1] for array in arrays if are_scores(array)})
    if len(labels) not in sizes:
        available = " or ".join(f"{size:,}" for size in sizes) or "none"
        raise BadInput(f"{path}: {count(len(labels), 'name')}, and the outputs have vectors of {available} scores")


def top_scores(array: Any, k: int, labels: Labels) -> List[List[Dict[str, Any]]]:
    """Return for each vector its highest scores, the highest first, and of equal ones that which comes first."""
    named = labels if labels is not None and len(labels) == array.shape[-1] else None
    return [_highest(row, k, named) for row in array.reshape(-1, array.shape[-1])]


def _highest(row: Any, k: int, labels: Labels) -> List[Dict[str, Any]]:
    # NaN is behind all numbers.
    found = [int(index) for index in np.argsort(-row.astype(np.float64), kind="stable")[:k]]
    named = [{"label": labels[index]} if labels is not None else {} for index in found]
    return [{"index": index, "score": float(row[index]), **name} for index, name in zip(found, named)]


def format_scores(array: Any, k: int, labels: Labels) -> Iterator[str]:
    """Yield what is shown of scores: a line for each of the highest, and a heading for each of several vectors."""
    rows = array.reshape(-1, array.shape[-1])
    shown = top_scores(rows[:_MAX_ROWS], k, labels)
    width = len(str(array.shape[-1] - 1))
    for number, row in enumerate(shown):
        if len(rows) > 1:
            yield f" row {number}"
        for each in row:
            yield f"  {each['index']:>{width}}  {each['score']:<12.6g}  {clean(each.get('label', ''))}".rstrip()
    if len(rows) > len(shown):
        yield f" ... and {len(rows) - len(shown):,} rows more; --output has all"
