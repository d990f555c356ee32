"""Type checks of arguments (mindspore_lite/_checkparam.py). As there, True is an int."""

from __future__ import annotations

from typing import Any


def instance(name: str, value: Any, kind: type, *, none: bool = False) -> None:
    """Refuse a value of another type."""
    if not (none and value is None) and not isinstance(value, kind):
        raise TypeError(f"{name} must be {kind.__name__}, but got {type(value)}.")


def elements(name: str, value: Any, kind: type) -> None:
    """Refuse what is no list, or has an element of another type."""
    instance(name, value, list)
    for i, each in enumerate(value):
        if not isinstance(each, kind):
            raise TypeError(f"{name} element must be {kind.__name__}, but got {type(each)} at index {i}.")


def sections(name: str, value: Any) -> None:
    """Refuse what is no dict of dicts of texts."""
    instance(name, value, dict)
    for section, items in value.items():
        instance(f"{name}_key", section, str)
        instance(f"{name}_value", items, dict)
        for key, item in items.items():
            instance(f"{name}_value_key", key, str)
            instance(f"{name}_value_value", item, str)
