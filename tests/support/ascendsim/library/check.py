"""Type checks of arguments (mindspore_lite/_checkparam.py). As there, True is an int."""

from __future__ import annotations

from typing import Any


def instance(name: str, value: Any, kind: type) -> None:
    """Raise an error if the value has another type."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {kind.__name__}, but got {type(value)}.")


def is_sequence(value: Any) -> bool:
    """Whether it is a list or a tuple."""
    return isinstance(value, (list, tuple))


def elements(name: str, value: Any, kind: type) -> None:
    """Raise an error unless the value is a list whose elements have this type."""
    instance(name, value, list)
    for each in value:
        instance(f"{name} element", each, kind)
