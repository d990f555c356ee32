"""Conversion of numbers and lists in a request's inputs into arrays of the datatype in the model's signature.

An array keeps its own datatype. A number, or a list of numbers, becomes an array of the datatype that the signature has
for this input. A number that does not fit this datatype is an error.
"""

from __future__ import annotations

from collections import abc
from itertools import chain
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from weightd_protocol import limits
from weightd_protocol.datatypes import NUMPY_DTYPE
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.schema import describe_value, label

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    # The `Sequence[Any]` is for mypy, which infers a sequence of objects for a nested list of integers and floats.
    Value = Union[ArrayLike, Sequence[Any]]
    Inputs = Union[Mapping[str, Value], Value]
    """Inputs of a request by input name, or one input without a name if the model has a single input.

    An input is an array, a number or a list.
    """

# numpy scalars are included because the elements of `list(array)` are numpy scalars.
UNTYPED_TYPES = (bool, int, float, list, tuple, range, np.generic)
"""Types of inputs whose datatype comes from the model's signature, because the caller has not chosen one."""

_SEQUENCE_TYPES = (list, tuple, range)

# Types of numbers that float64 represents exactly or rounds to the nearest value.
_REAL_TYPES = (int, float, np.integer, np.float16, np.float32)

_Conversion = Tuple[Any, Optional[int]]


class NeedsMetadata(Exception):
    """Raised if inputs have no names or no datatypes. The client must then request the model's signature first."""


def to_typed_inputs(inputs: Inputs, model: str, signatures: Sequence[TensorSignature]) -> Dict[str, Any]:
    """Return the inputs by name, with every number and list replaced by an array of the datatype in the signature.

    Args:
        inputs: the inputs as the caller gave them.
        model: the model's name, for error texts.
        signatures: the signatures of the model's inputs.

    Raises:
        InvalidArgument: the inputs have no names and the model does not have exactly one input; the model has no input
            of a given name; a list is ragged; a number does not fit its datatype.
    """
    inputs_by_name: Mapping[str, Any] = (
        inputs if isinstance(inputs, abc.Mapping) else {_sole_input_name(inputs, model, signatures): inputs}
    )
    datatypes = {each.name: each.datatype for each in signatures}
    return {
        name: _convert_input(datatypes, name, value, model) if isinstance(value, UNTYPED_TYPES) else value
        for name, value in inputs_by_name.items()
    }


def _sole_input_name(inputs: object, model: str, signatures: Sequence[TensorSignature]) -> str:
    if len(signatures) != 1:
        raise InvalidArgument(
            f'inputs: expected a mapping by name, as in {{"x": array}}, got {type(inputs).__name__}; model '
            f"{label(model)} has the inputs {_list_names(signatures)}"
        )
    return signatures[0].name


def _list_names(signatures: Sequence[TensorSignature]) -> str:
    return ", ".join(label(each.name) for each in signatures) or "none"


def _convert_input(datatypes: Mapping[str, str], name: str, value: Any, model: str) -> Any:
    datatype = datatypes.get(name)
    if datatype is None:
        names = ", ".join(map(label, datatypes)) or "none"
        raise InvalidArgument(f"input {label(name)}: model {label(model)} has no input of this name; it has {names}")
    return as_array(f"input {label(name)}", value, datatype)


def as_array(description: str, value: Any, datatype: str) -> Any:
    """Return an array of `datatype` with the values of nested lists, or with the value of one number.

    Integers do not wrap around. An integer datatype accepts 1.0, but neither 1.5 nor booleans. A floating-point value
    is rounded to the nearest value of the datatype; a finite number that would become infinite is an error. A list of
    arrays keeps the datatype of the arrays.

    Args:
        description: how error texts name the input, such as `input "x"`.
        value: a number or list: an instance of one of `UNTYPED_TYPES`.
        datatype: the name of the datatype in the protocol, such as "FP32".

    Raises:
        InvalidArgument: the lists are ragged, too deep or too large, or a value does not fit the datatype.
    """
    dtype: Any = np.dtype(NUMPY_DTYPE[datatype])
    values, shape = _flatten(description, value, dtype.itemsize)
    if any(issubclass(kind, np.ndarray) for kind in set(map(type, values))):
        return _stack_arrays(description, values, shape)
    array, bad_index = _CONVERTERS[dtype.kind](values, dtype)
    if bad_index is not None:
        raise InvalidArgument(
            f"{description}{_format_index(shape, bad_index)}: expected {_expected_values(dtype)}, got"
            f" {describe_value(values[bad_index])}"
        )
    return array.reshape(shape)


# --- lists ----------------------------------------------------------------------------------------------------------


def _flatten(description: str, value: Any, item_bytes: int) -> Tuple[List[Any], Tuple[int, ...]]:
    """Return the values of nested lists in one list, and the shape of the nested lists."""
    level: List[Any] = [value]
    shape: Tuple[int, ...] = ()
    size = 1
    while any(issubclass(kind, _SEQUENCE_TYPES) for kind in set(map(type, level))):
        if len(shape) == limits.MAX_RANK:
            raise InvalidArgument(f"{description}: expected at most {limits.MAX_RANK} levels of lists")
        length = _common_length(description, shape, level)
        shape += (length,)
        size *= length
        # Check the size before memory is allocated, because a list that contains itself would be endless.
        if size * item_bytes > limits.MAX_FRAME_BYTES:
            raise InvalidArgument(
                f"{description}: expected at most {limits.MAX_FRAME_BYTES} bytes, got {size * item_bytes}"
            )
        level = list(chain.from_iterable(level))
    return level, shape


def _common_length(description: str, shape: Tuple[int, ...], level: List[Any]) -> int:
    """Return the common length of all lists at one nesting level. Raise `InvalidArgument` if their lengths differ."""
    length = len(level[0]) if _is_list(level[0]) else -1
    for index, each in enumerate(level):
        if not _is_list(each) or len(each) != length:
            expected = (
                f"a list of length {length}, like the first one" if length >= 0 else "a list, like other elements"
            )
            found = f"length {len(each)}" if _is_list(each) else describe_value(each)
            raise InvalidArgument(f"{description}{_format_index(shape, index)}: expected {expected}, got {found}")
    return length


def _is_list(value: object) -> bool:
    return isinstance(value, _SEQUENCE_TYPES)


def _format_index(shape: Tuple[int, ...], index: int) -> str:
    """Return the position of a value in the nested lists as an index expression, such as `[0][2]`."""
    return "".join(f"[{each}]" for each in np.unravel_index(index, shape)) if shape else ""


def _stack_arrays(description: str, arrays: List[Any], shape: Tuple[int, ...]) -> Any:
    """Return nested lists of arrays as one array. Raise `InvalidArgument` if datatypes or shapes of the arrays differ.

    Without this check, numpy would convert different datatypes to a common one, and turn ragged shapes into an array of
    objects.
    """
    array_types = [_describe_array(each) for each in arrays]
    first = next(kind for kind in array_types if kind)
    for index, kind in enumerate(array_types):
        if kind != first:
            found = f"an array of {kind}" if kind else describe_value(arrays[index])
            expected = f"an array of {first}, like other elements"
            raise InvalidArgument(f"{description}{_format_index(shape, index)}: expected {expected}, got {found}")
    stacked: Any = np.array(arrays)
    return stacked.reshape(shape + stacked.shape[1:])


def _describe_array(value: Any) -> str:
    """Return datatype and shape of an array as a text. Return "" for any value that is not an array."""
    return f"{value.dtype} {list(value.shape)}" if issubclass(type(value), np.ndarray) else ""


# --- values: each function returns an array and, if a value does not fit the datatype, the index of that value -----


def _convert_booleans(values: List[Any], dtype: Any) -> _Conversion:
    bad_index = _first_of_other_type(values, (bool, np.bool_))
    return np.array([] if bad_index is not None else values, dtype), bad_index


def _convert_integers(values: List[Any], dtype: Any) -> _Conversion:
    # Accept floats such as 1.0, because many JSON clients write the number 1 as 1.0: JSON has only one number type.
    bad_index = _first_of_other_type(values, _REAL_TYPES)
    if bad_index is None and not all(issubclass(kind, (int, np.integer)) for kind in set(map(type, values))):
        bad_index = next((index for index, each in enumerate(values) if not _is_integral(each)), None)
    if bad_index is not None:
        return None, bad_index
    # Convert to Python integers, which can be compared exactly with the limits of the datatype.
    values = [*map(int, values)]
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    if values and not low <= min(values) <= max(values) <= high:
        return None, next(index for index, each in enumerate(values) if not low <= each <= high)
    return np.array(values, dtype), None


def _convert_reals(values: List[Any], dtype: Any) -> _Conversion:
    bad_index = _first_of_other_type(values, _REAL_TYPES)
    if bad_index is not None:
        return None, bad_index
    try:
        wide = np.array(values, np.float64)
    except OverflowError:
        return None, next(index for index, each in enumerate(values) if not _fits_float64(each))
    with np.errstate(over="ignore"):
        array = wide.astype(dtype)
    infinite = np.flatnonzero(np.isinf(array) & ~np.isinf(wide))
    return array, int(infinite[0]) if infinite.size else None


def _is_integral(value: Any) -> bool:
    return issubclass(type(value), (int, np.integer)) or float(value).is_integer()


def _fits_float64(value: Any) -> bool:
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _first_of_other_type(values: List[Any], types: Tuple[type, ...]) -> Optional[int]:
    """Return the index of the first value that is of none of `types`.

    Booleans are accepted only if `types` contains bool.
    """
    other_types = {
        kind
        for kind in set(map(type, values))
        if not issubclass(kind, types) or (issubclass(kind, bool) and bool not in types)
    }
    return (
        next((index for index, each in enumerate(values) if type(each) in other_types), None) if other_types else None
    )


def _expected_values(dtype: Any) -> str:
    if dtype.kind == "b":
        return "True or False"
    if dtype.kind == "f":
        return f"a number within the bounds of {dtype.name}"
    return f"an integer from {np.iinfo(dtype).min} to {np.iinfo(dtype).max}"


_CONVERTERS: Dict[str, Callable[[List[Any], Any], _Conversion]] = {
    "b": _convert_booleans,
    "i": _convert_integers,
    "u": _convert_integers,
    "f": _convert_reals,
}
