"""Converts JSON and CSV text to arrays for a model, with strict checks, and formats scores.

JSON text contains a flat list or lists nested like the input's shape; CSV text contains a table. The model's input
determines the datatype. A number that the datatype cannot represent is an error: no integer is silently rounded, and no
float silently becomes infinite.

The highest values of an output can be shown as scores, with names from a file.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Type

import numpy as np

from weightctl.command import BadInput
from weightctl.text import clean, count
from weightd_common.safe_open import read_regular
from weightd_protocol import limits
from weightd_protocol.datatypes import NUMPY_DTYPE
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.schema import describe_value

# Maximum number of characters of a number. A double or int64 needs fewer, and parsing millions of digits takes minutes.
_MAX_CHARACTERS = 64

# How NaN and infinities are written in JSON: as in the output of `predict --json` and in protobuf's JSON mapping.
_NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}

_INTEGER = re.compile(r"[+-]?[0-9]+")

Index = Tuple[int, ...]

# An alias of `list`. With `isinstance(value, list)`, type checkers would infer a list of unknown elements.
_LIST: Type[Any] = list

# Maximum number of vectors whose scores are shown. Further vectors are only counted.
_MAX_ROWS = 16

# Maximum size of a file with names of scores in bytes.
_MAX_BYTES = 16 * 2**20

Labels = Optional[Sequence[str]]


class WrongNumbers(ValueError):
    """JSON or CSV text is invalid or does not match an input of the model. The error text gives the position."""


def read_json(text: str) -> Any:
    """Parse JSON text.

    Raises:
        WrongNumbers: the text is not valid JSON, or a number is out of range.
    """
    try:
        return json.loads(text, parse_int=_parse_integer, parse_float=_parse_float, object_pairs_hook=_make_object)
    except RecursionError:
        raise WrongNumbers(f"expected lists of at most {limits.MAX_RANK} levels") from None
    except WrongNumbers:
        raise
    except ValueError as error:
        raise WrongNumbers(f"not JSON: {error}") from None


class CsvTable:
    """A parsed CSV text: rows of numbers, all of the same length. Empty lines are skipped.

    Raises:
        WrongNumbers: the text is not a table of numbers.
    """

    def __init__(self, text: str) -> None:
        self.rows: List[List[float]] = []
        self._lines: List[int] = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                cells = line.split(",")
                if self.rows and len(cells) != len(self.rows[0]):
                    raise WrongNumbers(f"line {number}: expected {len(self.rows[0])} numbers, got {len(cells)}")
                self.rows.append([_parse_cell(cell.strip(), number, column) for column, cell in enumerate(cells, 1)])
                self._lines.append(number)

    def position(self, index: Index) -> str:
        """Return line and column of the number at `index`, for an error text."""
        return f"line {self._lines[index[0]]}, column {index[1] + 1}"


def list_position(index: Index) -> str:
    """Return the position of a number in nested lists as text, such as `[0][2]`."""
    return "".join(f"[{each}]" for each in index) or "the value"


def array_of_lists(value: Any, signature: TensorSignature) -> Any:
    """Return an array with the values of a number, a flat list or nested lists.

    Raises:
        WrongNumbers: the value does not match the input of the model.
    """
    shape = _shape(value)
    leaves: List[Any] = []
    _flatten(value, shape, (), leaves)
    fitted = _fitted_shape(len(leaves), signature) if len(shape) < 2 else None
    return _make_array(leaves, shape, fitted, signature, list_position)


def array_of_table(table: CsvTable, signature: TensorSignature) -> Any:
    """Return an array with the numbers of a table.

    If the input does not have two dimensions, the numbers fill the input's shape in C order.

    Raises:
        WrongNumbers: the table does not match the input of the model.
    """
    leaves = [cell for row in table.rows for cell in row]
    shape = len(table.rows), len(table.rows[0]) if table.rows else 0
    return _make_array(leaves, shape, _fitted_shape(len(leaves), signature, rank=2), signature, table.position)


def read_labels(path: str) -> List[str]:
    """Return the names of scores from a file, which has one name per line.

    Raises:
        BadInput: the file cannot be read.
    """
    try:
        content = read_regular(path, _MAX_BYTES)
        return [line.strip() for line in content.decode("utf-8-sig").splitlines()]
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path}: expected names as UTF-8 text, one per line") from None


def are_scores(array: Any) -> bool:
    """Return whether an output may consist of scores: floats whose last dimension is larger than 1."""
    return bool(array.dtype.kind == "f" and array.ndim and array.shape[-1] > 1)


def check_labels(path: str, labels: Sequence[str], arrays: Sequence[Any]) -> None:
    """Check that the outputs have vectors with as many scores as there are names in the file.

    Raises:
        BadInput: no output has vectors of this length.
    """
    sizes = sorted({array.shape[-1] for array in arrays if are_scores(array)})
    if len(labels) not in sizes:
        available = " or ".join(f"{size:,}" for size in sizes) or "none"
        raise BadInput(f"{path}: {count(len(labels), 'name')}, but outputs have vectors of {available} scores")


def top_scores(array: Any, k: int, labels: Labels) -> List[List[Dict[str, Any]]]:
    """Return the `k` highest scores of each vector, in descending order.

    Equal scores keep their order in the vector.
    """
    named = labels if labels is not None and len(labels) == array.shape[-1] else None
    return [_highest(row, k, named) for row in array.reshape(-1, array.shape[-1])]


def format_scores(array: Any, k: int, labels: Labels) -> Iterator[str]:
    """Yield a line for each of the `k` highest scores. If there are several vectors, a heading precedes each vector."""
    rows = array.reshape(-1, array.shape[-1])
    shown = top_scores(rows[:_MAX_ROWS], k, labels)
    width = len(str(array.shape[-1] - 1))
    for number, row in enumerate(shown):
        if len(rows) > 1:
            yield f" row {number}"
        for each in row:
            yield f"  {each['index']:>{width}}  {each['score']:<12.6g}  {clean(each.get('label', ''))}".rstrip()
    if len(rows) > len(shown):
        yield f" ... and {len(rows) - len(shown):,} more rows; use --output to get all"


def _parse_integer(digits: str) -> int:
    if len(digits) > _MAX_CHARACTERS:
        raise WrongNumbers(f"expected numbers of at most {_MAX_CHARACTERS} digits, got one of {len(digits)}")
    return int(digits)


def _parse_float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise WrongNumbers(f"expected numbers in the range of a double, got {describe_value(digits)}")
    return value


def _make_object(pairs: Sequence[Tuple[str, Any]]) -> Dict[str, Any]:
    values: Dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise WrongNumbers(f"duplicate name {name!r}")
        values[name] = value
    return values


def _parse_cell(cell: str, line: int, column: int) -> float:
    try:
        if len(cell) > _MAX_CHARACTERS or "_" in cell:
            raise ValueError
        value = int(cell) if _INTEGER.fullmatch(cell) else float(cell)
        if cell[-1:].isdigit() and math.isinf(value):
            raise ValueError
        return value
    except ValueError:
        raise WrongNumbers(f"line {line}, column {column}: expected a number, got {describe_value(cell)}") from None


def _shape(value: Any) -> Index:
    """Return the shape of nested lists. The first element of each level determines it."""
    shape: List[int] = []
    while isinstance(value, _LIST):
        if len(shape) == limits.MAX_RANK:
            raise WrongNumbers(f"expected lists of at most {limits.MAX_RANK} levels")
        shape.append(len(value))
        value = value[0] if value else None
    return tuple(shape)


def _flatten(value: Any, shape: Index, index: Index, leaves: List[Any]) -> None:
    """Append the numbers of nested lists to `leaves` in C order.

    Check that lists of the same level have equal lengths.
    """
    if not shape:
        leaves.append(value)
        return
    if not isinstance(value, _LIST) or len(value) != shape[0]:
        what = f"a list of {len(value)}" if isinstance(value, _LIST) else describe_value(value)
        raise WrongNumbers(f"{list_position(index)}: expected a list of {shape[0]} like the previous ones, got {what}")
    if len(shape) == 1:
        leaves.extend(value)
        return
    for number, each in enumerate(value):
        _flatten(each, shape[1:], (*index, number), leaves)


def _fitted_shape(count: int, signature: TensorSignature, rank: int = 1) -> Optional[Index]:
    """Return the shape of the input if numbers of `rank` dimensions must be reshaped to it; otherwise None.

    Numbers that are nested as deeply as the input keep their own shape.
    """
    declared = signature.shape
    if declared is None or len(declared) == rank:
        return None
    fixed = 1
    for dim in declared:
        fixed *= 1 if dim < 0 else dim
    free = sum(dim < 0 for dim in declared)
    if free > 1:
        raise WrongNumbers(f"{signature.shape_text} has several free dimensions; use nested lists")
    if free and fixed and count % fixed == 0:
        return tuple(count // fixed if dim < 0 else dim for dim in declared)
    if not free and count == fixed:
        return declared
    expected = f"a multiple of {fixed:,}" if free else f"{fixed:,}"
    raise WrongNumbers(f"expected {expected} numbers for {signature.shape_text}, got {count:,}")


def _make_array(
    leaves: List[Any],
    shape: Index,
    fitted: Optional[Index],
    signature: TensorSignature,
    position_of: Callable[[Index], str],
) -> Any:
    dtype = np.dtype(NUMPY_DTYPE[signature.datatype])
    convert: Callable[[Any, Any], Any] = _CONVERT.get(str(dtype.kind), _to_int)
    values: List[Any] = []
    try:
        for leaf in leaves:
            values.append(convert(leaf, dtype))  # noqa: PERF401 - on an error, its length is the index of the value
    except _Unfit as error:
        index = len(values)
        where = tuple(int(each) for each in np.unravel_index(index, shape)) if shape else ()
        expected = f"{position_of(where)}: expected {error} for {signature.datatype}"
        raise WrongNumbers(f"{expected}, got {describe_value(leaves[index])}") from None
    return np.array(values, dtype).reshape(shape if fitted is None else fitted)


class _Unfit(ValueError):
    """A value cannot be converted. The error text says what was expected."""


def _to_float(value: Any, dtype: Any) -> float:
    maximum = float(np.finfo(dtype).max)
    if isinstance(value, str):
        value = _NOT_FINITE.get(value, value)
    if type(value) not in (int, float):
        raise _Unfit("a number")
    # Reject finite numbers that the datatype cannot represent. NaN and explicit infinities are allowed.
    if abs(value) > maximum and value not in (float("inf"), float("-inf")):
        raise _Unfit(f"at most {maximum:g}")
    return float(value)


def _to_int(value: Any, dtype: Any) -> int:
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    if type(value) is float and value.is_integer():
        value = int(value)
    if not (type(value) is int and low <= value <= high):
        raise _Unfit(f"an integer from {low} to {high}")
    return value


def _to_bool(value: Any, _: Any) -> bool:
    if type(value) is not bool and not (type(value) in (int, float) and value in (0, 1)):
        raise _Unfit("true or false, 0 or 1")
    return bool(value)


_CONVERT: Mapping[str, Callable[[Any, Any], Any]] = {"f": _to_float, "b": _to_bool}


def _highest(row: Any, k: int, labels: Labels) -> List[Dict[str, Any]]:
    # `argsort` puts NaN after all numbers, so NaN counts as the lowest score.
    found = [int(index) for index in np.argsort(-row.astype(np.float64), kind="stable")[:k]]
    named = [{"label": labels[index]} if labels is not None else {} for index in found]
    return [{"index": index, "score": float(row[index]), **name} for index, name in zip(found, named)]
