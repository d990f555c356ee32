"""Typed messages out of untrusted msgpack maps, and back.

A message is a frozen dataclass. Each field carries, as metadata, the kind of value that the wire allows
for it (`text(128)`, `integer(0, 10)` ...), so a field is declared once: type, bound and documentation.
Decoding is strict: an unknown field, a missing one or a value of another type or out of its bound is a
`FieldError` that names the path of the field, such as ``inputs[0].shape[1]``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Tuple, Type, TypeVar

T = TypeVar("T")


class FieldError(ValueError):
    """A value of the wire is not what its field allows."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = ""

    def at(self, step: str) -> FieldError:
        """Put `step` (".name" or "[0]") in front of the path; return self, to be raised again."""
        self.path = step + self.path
        return self

    def __str__(self) -> str:
        path = self.path.lstrip(".")
        return f"{path}: {self.problem}" if path else self.problem


class Kind(NamedTuple):
    """What the wire allows for a field: the check that returns the typed value, and its description."""

    check: Callable[[Any], Any]
    description: str


Metadata = Mapping[str, Kind]


def _wrong(expected: str, value: object) -> FieldError:
    shown = repr(value)
    if len(shown) > 40:
        shown = shown[:37] + "..."
    return FieldError(f"expected {expected}, got {type(value).__name__} {shown}")


def text(max_bytes: int, *, empty: bool = False) -> Metadata:
    """A string of at most `max_bytes` bytes of UTF-8, not empty unless `empty`."""
    description = f"text, {0 if empty else 1} to {max_bytes} bytes"

    def check(value: object) -> str:
        if type(value) is not str:
            raise _wrong(description, value)
        # A code point is at most 4 bytes: most strings need no encoding to be measured.
        if len(value) * 4 > max_bytes and len(value.encode("utf-8", "surrogatepass")) > max_bytes:
            raise FieldError(f"expected {description}, got {len(value)} characters")
        if not value and not empty:
            raise _wrong(description, value)
        return value

    return {"kind": Kind(check, description)}


def one_of(names: Iterable[str]) -> Metadata:
    """One of the given strings."""
    allowed: FrozenSet[str] = frozenset(names)
    description = "one of " + ", ".join(sorted(allowed))

    def check(value: object) -> str:
        if type(value) is not str or value not in allowed:
            raise _wrong(description, value)
        return value

    return {"kind": Kind(check, description)}


def integer(low: int, high: int) -> Metadata:
    """An integer from `low` to `high`, both included; a boolean is not an integer."""
    description = f"integer, {low} to {high}"

    def check(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _wrong(description, value)
        return value

    return {"kind": Kind(check, description)}


def boolean() -> Metadata:
    """True or false."""

    def check(value: object) -> bool:
        if type(value) is not bool:
            raise _wrong("boolean", value)
        return value

    return {"kind": Kind(check, "boolean")}


def number() -> Metadata:
    """A finite number of at least 0."""

    def check(value: object) -> float:
        if type(value) not in (float, int) or not 0.0 <= value < float("inf"):  # type: ignore[operator]
            raise _wrong("number of at least 0", value)
        return float(value)  # type: ignore[arg-type]

    return {"kind": Kind(check, "number of at least 0")}


def many(item: Metadata, max_items: int) -> Metadata:
    """A list of at most `max_items` of the given kind; a tuple once decoded."""
    item_check = item["kind"].check
    description = f"list of at most {max_items}: {item['kind'].description}"

    def check(value: object) -> Tuple[Any, ...]:
        if type(value) is not list:
            raise _wrong("list", value)
        if len(value) > max_items:
            raise FieldError(f"expected at most {max_items} items, got {len(value)}")
        index = 0
        try:
            checked: List[Any] = []
            for index, each in enumerate(value):
                checked.append(item_check(each))
        except FieldError as error:
            raise error.at(f"[{index}]") from None
        return tuple(checked)

    return {"kind": Kind(check, description)}


def mapping(item: Metadata, max_items: int) -> Metadata:
    """A map from names to the given kind, at most `max_items` of them."""
    item_check = item["kind"].check
    description = f"map of at most {max_items} names to {item['kind'].description}"

    def check(value: object) -> Dict[str, Any]:
        if type(value) is not dict:
            raise _wrong("map", value)
        if len(value) > max_items:
            raise FieldError(f"expected at most {max_items} items, got {len(value)}")
        name = None
        try:
            for name, each in value.items():
                if type(name) is not str:
                    raise _wrong("text", name)
                item_check(each)
        except FieldError as error:
            raise error.at(f".{name}") from None
        return value

    return {"kind": Kind(check, description)}


def record(cls: Type[Any]) -> Metadata:
    """A map with exactly the fields of the dataclass `cls`; an instance of it once decoded."""
    checks: Dict[str, Callable[[Any], Any]] = {}
    required: List[str] = []
    for field in dataclasses.fields(cls):
        checks[field.name] = field.metadata["kind"].check
        if field.default is dataclasses.MISSING:
            required.append(field.name)

    def check(value: object) -> Any:
        if type(value) is not dict:
            raise _wrong("map", value)
        checked: Dict[str, Any] = {}
        name: Any = None
        try:
            for name, each in value.items():
                checked[name] = checks[name](each)
        except FieldError as error:
            raise error.at(f".{name}") from None
        except KeyError:
            raise FieldError(f"unknown field; expected one of {', '.join(checks) or 'none'}").at(f".{name}") from None
        for name in required:
            if name not in checked:
                raise FieldError("missing").at(f".{name}")
        return cls(**checked)

    return {"kind": Kind(check, cls.__name__)}


def decode(cls: Type[T], value: object) -> T:
    """Return `value` (a map as msgpack unpacked it) as a `cls`.

    Raises:
        FieldError: the map is not a `cls`; the text names the field.
    """
    check = _CHECKS.get(cls)
    if check is None:
        check = _CHECKS[cls] = record(cls)["kind"].check
    return check(value)  # type: ignore[no-any-return]


_CHECKS: Dict[Type[Any], Callable[[Any], Any]] = {}


def plain(message: object) -> Dict[str, Any]:
    """Return `message` as a map of what msgpack can pack; a field that is None is left out."""
    return {name: _plain_value(value) for name, value in vars(message).items() if value is not None}


def _plain_value(value: object) -> object:
    kind = type(value)
    if kind is str or kind is int:
        return value
    if isinstance(value, tuple):
        return [_plain_value(item) for item in value]
    if dataclasses.is_dataclass(value):
        return plain(value)
    return value


def describe(cls: Type[Any]) -> List[Tuple[str, str, Optional[object]]]:
    """Return name, kind and "required" or the default of each field, for the documentation and its test."""
    return [
        (
            field.name,
            field.metadata["kind"].description,
            "required" if field.default is dataclasses.MISSING else field.default,
        )
        for field in dataclasses.fields(cls)
    ]
