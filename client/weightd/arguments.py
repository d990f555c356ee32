"""Validation of the arguments of the client's methods.

Each error names the argument, the expected and the received value.
"""

from __future__ import annotations

import math
import operator
from collections import abc
from decimal import Decimal
from numbers import Real
from typing import Any, List, Optional, Tuple

import numpy as np

from weightd_protocol import limits
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.schema import describe_value, label


def parse_seconds(name: str, value: Any, max_seconds: float) -> float:
    """Return a number of seconds as a float. Any type of real number is accepted, except booleans.

    Raises:
        InvalidArgument: `value` is not a real number, or is not in the range 0 < value <= `max_seconds`.
    """
    number = _to_float(value)
    if not 0 < number <= max_seconds:
        raise InvalidArgument(
            f"{name}: expected more than 0 and at most {max_seconds:g} seconds, got {describe_value(value)}"
        )
    return number


def _to_float(value: Any) -> float:
    """Return a real number as a float. Return NaN for any other value."""
    if isinstance(value, bool) or not isinstance(value, (Real, Decimal)):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def parse_text(name: str, value: Any) -> str:
    """Return a string as a plain `str`.

    An instance of a subclass of `str`, such as `numpy.str_`, is converted, because it may compare differently from its
    text.

    Raises:
        InvalidArgument: `value` is not a string.
    """
    if not isinstance(value, str):
        raise InvalidArgument(f"{name}: expected text, got {describe_value(value)}")
    return value if type(value) is str else str.__str__(value)


def parse_name(argument: str, value: Any) -> str:
    """Return a string after checking that the protocol allows it as a name.

    Raises:
        InvalidArgument: `value` is not a string, is empty or too long, or cannot be encoded as UTF-8.
    """
    checked = parse_text(argument, value)
    if not 0 < len(checked.encode("utf-8", "replace")) <= limits.MAX_NAME_BYTES or not is_utf8(checked):
        raise InvalidArgument(
            f"{argument}: expected a name of 1 to {limits.MAX_NAME_BYTES} bytes, got {describe_value(value)}"
        )
    return checked


def is_utf8(value: str) -> bool:
    """Return whether a string can be encoded as UTF-8. A string with a lone surrogate cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_names(name: str, value: Any) -> Tuple[str, ...]:
    """Return a collection of strings, such as a list, as a tuple of strings.

    Raises:
        InvalidArgument: `value` is not a collection, or an item is not a string.
    """
    items = (
        _list_items(value) if issubclass(type(value), abc.Collection) and not isinstance(value, (str, bytes)) else None
    )
    if items is None:
        raise InvalidArgument(f"{name}: expected a list of names, got {describe_value(value)}")
    return tuple([parse_text(f"{name}[{index}]", each) for index, each in enumerate(items)])


def check_mapping(name: str, value: Any) -> None:
    """Check that a value is a mapping.

    Raises:
        InvalidArgument: `value` is not a mapping.
    """
    if not isinstance(value, abc.Mapping):
        raise InvalidArgument(
            f"{name}: expected an array for each name, as in {{'y': array}}, got {describe_value(value)}"
        )


def check_priority(value: Any) -> None:
    """Check that a value is a priority of the protocol. A boolean is none, although True is equal to 1.

    Raises:
        InvalidArgument: `value` is no integer, or is out of range.
    """
    if not (type(value) is int and 0 <= value <= limits.MAX_PRIORITY):
        raise InvalidArgument(
            f"priority: expected an integer from 0 to {limits.MAX_PRIORITY}, got {describe_value(value)}"
        )


def check_out(value: Any) -> None:
    """Check that a value is a mapping of names to writable numpy arrays.

    Raises:
        InvalidArgument: `value` is no mapping, or a value of the mapping is no writable array.
    """
    check_mapping("out", value)
    for name, array in value.items():
        if not isinstance(array, np.ndarray) or not array.flags.writeable:
            found = "a read-only one" if isinstance(array, np.ndarray) else type(array).__name__
            raise InvalidArgument(f"out: {label(name)}: expected a writable numpy array, got {found}")


def parse_shape(name: str, value: Any) -> Tuple[int, ...]:
    """Return an array's shape as a tuple. As in numpy, `value` is one size or a sequence of sizes.

    Raises:
        InvalidArgument: `value` is neither an integer nor a sequence of integers, or a size is negative.
    """
    sizes = _parse_sizes(value)
    if sizes is None or any(size < 0 for size in sizes):
        raise InvalidArgument(f"{name}: expected integers from 0, got {describe_value(value)}")
    return sizes


def _parse_sizes(value: Any) -> Optional[Tuple[int, ...]]:
    sizes = _list_items(value) if isinstance(value, abc.Iterable) else [value]
    try:
        # `int` is needed because `operator.index(True)` returns True, which numpy rejects as a size.
        return None if sizes is None else tuple([int(operator.index(size)) for size in sizes])
    except TypeError:
        return None


def _list_items(value: Any) -> Optional[List[Any]]:
    """Return the items of a collection.

    Return None if the value cannot be iterated, such as an array without dimensions.
    """
    try:
        return [*value]
    except TypeError:
        return None
