"""Conversion between numpy arrays and tensors of the Open Inference Protocol, as bytes or lists of values. No I/O.

A tensor that does not match its datatype and shape exactly is rejected with its name; values are never truncated,
rounded or guessed.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from weightd_gateway.error_codes import TooLarge
from weightd_protocol import limits
from weightd_protocol.datatypes import ITEM_BYTES, NUMPY_DTYPE
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.schema import describe_value, label

Array = NDArray[Any]

DTYPES: Mapping[str, np.dtype[Any]] = {name: np.dtype(text) for name, text in NUMPY_DTYPE.items()}
DATATYPES: Mapping[np.dtype[Any], str] = {dtype: name for name, dtype in DTYPES.items()}

# Python types of values in JSON or typed lists that each kind of numpy dtype accepts. The types are compared exactly,
# because bool is a subclass of int.
_ALLOWED_TYPES: Mapping[str, frozenset[type]] = {
    "b": frozenset({bool}),
    # JSON has only one number type: many clients write 1 as 1.0.
    "i": frozenset({int, float}),
    "u": frozenset({int, float}),
    "f": frozenset({int, float}),
}
_KIND_NAMES: Mapping[str, str] = {"b": "booleans", "i": "integers", "u": "integers", "f": "numbers"}

# Maximum product of a shape's dimensions, except dimensions of 0. With a larger product, offsets would not fit into 64
# bits.
_MAX_ELEMENTS = 2**59

# Maximum number of values in the JSON or typed lists of a request or response. Each value is a Python object;
# converting this many takes a third of a second.
MAX_VALUES = 1024 * 1024

# Created once: `json.dumps` creates a new encoder for each call with options.
to_json = json.JSONEncoder(separators=(",", ":")).encode

# Datatypes without a representation in JSON or typed lists.
_RAW_ONLY = frozenset({"FP16"})


def datatype_of(array: Array) -> str:
    """Return the protocol's datatype of an array."""
    return DATATYPES[array.dtype]


def nbytes_of(name: str, datatype: object, shape: object) -> int:
    """Return the size of a tensor in bytes.

    Raises:
        InvalidArgument: the datatype or the shape is not valid.
    """
    count = math.prod(check_shape(name, shape))
    return count * ITEM_BYTES[check_datatype(name, datatype)]


def check_datatype(name: str, datatype: object) -> str:
    """Return `datatype` if weightd supports it.

    Raises:
        InvalidArgument: weightd does not support it.
    """
    if type(datatype) is not str or datatype not in ITEM_BYTES:
        raise InvalidArgument(
            f"{label(name)}: datatype: expected one of {', '.join(ITEM_BYTES)}, got {describe_value(datatype)}"
        )
    return datatype


def check_shape(name: str, shape: object) -> Sequence[int]:
    """Return `shape` if it is a valid shape.

    Raises:
        InvalidArgument: `shape` is not a list of integers within the limits.
    """
    dims = _as_sequence(shape)
    if dims is None or len(dims) > limits.MAX_RANK:
        raise InvalidArgument(
            f"{label(name)}: shape: expected a list of at most {limits.MAX_RANK} integers, got {describe_value(shape)}"
        )
    checked: list[int] = []
    for dim in dims:
        if type(dim) is not int or not 0 <= dim <= limits.MAX_DIM:
            raise InvalidArgument(
                f"{label(name)}: shape: expected integers, 0 to {limits.MAX_DIM}, got {describe_value(dim)}"
            )
        checked.append(dim)
    if math.prod(dim for dim in checked if dim) > _MAX_ELEMENTS:
        raise InvalidArgument(f"{label(name)}: shape: expected at most {_MAX_ELEMENTS} elements, got {checked}")
    return checked


def _as_sequence(value: object) -> Sequence[object] | None:
    return cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else None


def from_bytes(name: str, datatype: str, shape: Sequence[int], content: memoryview) -> Array:
    """Return a tensor that is a view of `content`. The caller must have checked the datatype and the shape.

    Raises:
        InvalidArgument: the number of bytes does not match the shape.
    """
    dtype = DTYPES[datatype]
    expected = math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise InvalidArgument(
            f"{label(name)}: expected {expected} bytes for {datatype} {list(shape)}, got {len(content)}"
        )
    array: Array = np.ndarray(shape, dtype, content)
    return _check_bool(name, array) if dtype.kind == "b" else array


def _check_bool(name: str, array: Array) -> Array:
    """Check that a BOOL tensor has only bytes 0 and 1: other bytes make engines compute wrong results."""
    if array.size and array.view(np.uint8).max() > 1:
        raise InvalidArgument(f"{label(name)}: expected 0 or 1 in each byte of a BOOL")
    return array


def from_values(name: str, datatype: str, shape: Sequence[int], values: object) -> Array:
    """Return the tensor of a list of values, either flat in C order or nested like the shape.

    Raises:
        InvalidArgument: the datatype cannot represent a value, or the number of values does not match the shape.
    """
    if datatype in _RAW_ONLY:
        raise InvalidArgument(f"{label(name)}: {datatype} can be sent only as binary data")
    if type(values) is not list:
        raise InvalidArgument(f"{label(name)}: data: expected a list, got {describe_value(values)}")
    items: Sequence[Any] = cast("list[object]", values)
    flat = _flatten(name, shape, items) if items and type(items[0]) is list else items
    if len(flat) != math.prod(shape):
        raise InvalidArgument(f"{label(name)}: data: expected {math.prod(shape)} values, got {len(flat)}")
    return _make_array(name, datatype, flat).reshape(shape)


def from_typed(
    name: str,
    datatype: str,
    shape: Sequence[int],
    values: Sequence[Any],
    source_dtype: str,
    max_values: int = MAX_VALUES,
) -> Array:
    """Return the tensor of a flat list whose values all have numpy's type `source_dtype`.

    The list may have at most `max_values` values: the part of `MAX_VALUES` that the request's other tensors do not use.

    Raises:
        InvalidArgument: the datatype cannot represent a value, or the number of values does not match the shape.
        TooLarge: the list has more than `max_values` values.
    """
    if len(values) > max_values:
        text = f"expected at most {MAX_VALUES} values in a request, got {len(values)} with {max_values} left"
        raise TooLarge(f"{label(name)}: data: {text}; send raw contents")
    if len(values) != math.prod(shape):
        raise InvalidArgument(f"{label(name)}: data: expected {math.prod(shape)} values, got {len(values)}")
    source = np.fromiter(values, source_dtype, len(values))
    array: Array = source.astype(DTYPES[datatype], copy=False)
    if array.dtype.kind in "iu" and not np.array_equal(array, source):
        raise InvalidArgument(f"{label(name)}: data: expected values that {datatype} can hold")
    return array.reshape(shape)


def _flatten(name: str, shape: Sequence[int], values: Sequence[Any]) -> Sequence[Any]:
    for depth in range(len(shape)):
        if depth:
            values = list(itertools.chain.from_iterable(_check_lists(name, shape, values)))
        expected = math.prod(shape[: depth + 1])
        if len(values) != expected:
            text = f"expected lists nested as the shape {list(shape)}, got {len(values)} items at depth {depth}"
            raise InvalidArgument(f"{label(name)}: data: {text}, not {expected}")
    return values


def _check_lists(name: str, shape: Sequence[int], values: Iterable[Any]) -> Iterable[list[Any]]:
    for each in values:
        if type(each) is not list:
            raise InvalidArgument(
                f"{label(name)}: data: expected lists nested as the shape {list(shape)}, got {describe_value(each)}"
            )
        yield each


def _make_array(name: str, datatype: str, flat: Sequence[Any]) -> Array:
    dtype = DTYPES[datatype]
    kinds = {*map(type, flat)}
    wrong = kinds - _ALLOWED_TYPES[dtype.kind]
    has_fractions = dtype.kind in "iu" and float in kinds and not all(map(_is_whole, flat))
    if wrong or has_fractions:
        first = next(each for each in flat if type(each) in wrong or (has_fractions and not _is_whole(each)))
        raise InvalidArgument(
            f"{label(name)}: data: expected {_KIND_NAMES[dtype.kind]} for {datatype}, got {describe_value(first)}"
        )
    try:
        with np.errstate(over="ignore"):
            # Without the conversion to int, numpy would not report floats that exceed an integer datatype.
            array = np.array([*map(int, flat)] if dtype.kind in "iu" else flat, dtype)
    except OverflowError:
        array = None
    # Reject infinity, which numpy returns for values that are too large. For JSON numbers such as 1e999, Python's
    # parser already returns infinity.
    if array is None or (dtype.kind == "f" and not _are_finite(array)):
        raise InvalidArgument(f"{label(name)}: data: expected values that {datatype} can hold")
    return array


def _are_finite(array: Array) -> bool:
    # The method `all` is written in Python, and calls this function.
    return bool(np.logical_and.reduce(np.isfinite(array), axis=None))


def _is_whole(value: object) -> bool:
    return not isinstance(value, float) or value.is_integer()


def check_count(name: str, array: Array, max_values: int = MAX_VALUES) -> None:
    """Check that an output has at most `max_values` values: the part of `MAX_VALUES` that other outputs do not use.

    Raises:
        TooLarge: the output has more values.
    """
    if array.size > max_values:
        raise TooLarge(
            f"output {label(name)}: expected at most {MAX_VALUES} values in JSON with {max_values} left, "
            f"got {array.size}; request binary data"
        )


def to_values(name: str, array: Array) -> list[Any]:
    """Return the values of an output for JSON, flat in C order.

    Raises:
        InvalidArgument: JSON cannot represent a value.
    """
    if datatype_of(array) in _RAW_ONLY:
        raise InvalidArgument(f"output {label(name)}: JSON cannot represent FP16; request binary data")
    if array.dtype.kind == "f" and not _are_finite(array):
        raise InvalidArgument(f"output {label(name)}: JSON cannot represent NaN and infinity; request binary data")
    values: list[Any] = array.ravel().tolist()
    return values
