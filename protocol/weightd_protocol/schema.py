"""Declarative schema of messages: converts untrusted msgpack maps to typed messages, and messages to maps.

A message is a frozen dataclass. The metadata of each field declares the values that the protocol allows, such as
`text(128)` or `integer(0, 10)`. So type, limit and documentation of a field are declared in one place.

Encoding and decoding apply the same strict checks. An unknown field, a missing field, a value of another type or a
value beyond its limit is a `FieldError`. It names the path of the field, such as ``inputs[0].shape[1]``. Every message
that one side can encode, the other side decodes to an equal message.

The types of values are compared by identity, not with `isinstance`: in Python a boolean is an int, in the protocol it
is not.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Callable, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Tuple, Type, TypeVar

from weightd_protocol import limits

T = TypeVar("T")

# An alias of `dict`. Comparing a type with `dict` itself would make type checkers infer a dict of unknown types.
_MAP: Type[Any] = dict

# Maximum number of characters of a received value in an error text, and maximum number of bits of an integer whose
# digits the text shows.
_MAX_SHOWN_CHARACTERS = 40
_MAX_SHOWN_BITS = 128


class FieldError(ValueError):
    """A value is not allowed by the type of its field."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = ""

    def at(self, step: str) -> FieldError:
        """Prepend a step (".name" or "[0]") to the path of the field. Return this error, for the caller to raise."""
        self.path = step + self.path
        return self

    def __str__(self) -> str:
        path = self.path[1:] if self.path.startswith(".") else self.path
        return f"{path}: {self.problem}" if path else self.problem


class FieldType(NamedTuple):
    """Type of a field in the protocol: the values that it allows, and their conversion.

    Attributes:
        check: a function that validates a value from msgpack and returns it as a typed value. Raises `FieldError`.
        tolerant: like `check`, but ignores unknown fields of maps.
        plain: a function that converts a typed value to a value that msgpack can pack. Raises `FieldError`.
        description: the type in words, for error texts and for the documentation.
        record: the dataclass, if the value is a map with fixed fields; None for other types.
        items: the maximum number of msgpack items in a legal value. Each key and each value counts as one item; a list
            or map itself counts as `limits.CONTAINER_ITEMS`.
    """

    check: Callable[[Any], Any]
    tolerant: Callable[[Any], Any]
    plain: Callable[[Any], Any]
    description: str
    record: Optional[Type[Any]] = None
    items: int = 1


Metadata = Mapping[str, FieldType]


def short_repr(value: object) -> str:
    """Return a short representation of an untrusted value, however long or deeply nested the value is."""
    # Do not call `repr` here: for a list that is nested deeper than Python's stack, it raises RecursionError.
    if isinstance(value, (list, tuple, dict)):
        return f"of {len(value)} items"  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        # Do not format the number: Python refuses to format integers with thousands of digits.
        return f"of {value.bit_length()} bits"
    text = repr(value[:_MAX_SHOWN_CHARACTERS]) if isinstance(value, (str, bytes)) else _repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[: _MAX_SHOWN_CHARACTERS - 3] + "..."


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - the object's own code may raise anything
        return object.__repr__(value)


def describe_value(value: object) -> str:
    """Return the type and a short representation of an untrusted value, for an error text."""
    return f"{type(value).__name__} {short_repr(value)}"


def label(name: object) -> str:
    """Return an untrusted name for a field path or a log.

    A name that is long or has unprintable characters is quoted.
    """
    return (
        name
        if isinstance(name, str) and 0 < len(name) <= _MAX_SHOWN_CHARACTERS and name.isprintable()
        else short_repr(name)
    )


def _type_error(expected: str, value: object) -> FieldError:
    return FieldError(f"expected {expected}, got {describe_value(value)}")


def _plain_metadata(check: Callable[[Any], Any], description: str) -> Metadata:
    """Return the metadata of a type whose values msgpack packs without conversion."""
    return _new_metadata(check, check, check, description)


def _new_metadata(
    check: Callable[[Any], Any],
    tolerant: Callable[[Any], Any],
    plain: Callable[[Any], Any],
    description: str,
    items: int = 1,
) -> Metadata:
    return {"field_type": FieldType(check, tolerant, plain, description, items=items)}


def text(max_bytes: int, *, empty: bool = False) -> Metadata:
    """Return the type of a string of at most `max_bytes` bytes in UTF-8. Only with `empty` may the string be empty."""
    min_bytes = 0 if empty else 1
    description = f"text, {min_bytes} to {max_bytes} bytes"

    def check(value: Any) -> str:
        if type(value) is not str:
            raise _type_error(description, value)
        size = len(value) if value.isascii() else _utf8_bytes(value)
        if not min_bytes <= size <= max_bytes:
            raise FieldError(f"expected {description}, got {size}")
        return value

    return _plain_metadata(check, description)


def _utf8_bytes(value: str) -> int:
    try:
        return len(value.encode())
    except UnicodeEncodeError:
        raise FieldError(f"expected text that UTF-8 can encode, got {short_repr(value)}") from None


def one_of(names: Iterable[str]) -> Metadata:
    """Return the type of a string that is one of `names`."""
    allowed: FrozenSet[str] = frozenset(names)
    description = "one of " + ", ".join(name or '""' for name in sorted(allowed))

    def check(value: Any) -> str:
        if type(value) is not str or value not in allowed:
            raise _type_error(description, value)
        return value

    return _plain_metadata(check, description)


def integer(low: int, high: int) -> Metadata:
    """Return the type of an integer from `low` to `high`, both included. Booleans are not allowed."""
    description = f"integer, {low} to {high}"

    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _type_error(description, value)
        return value

    return _plain_metadata(check, description)


def boolean() -> Metadata:
    """Return the type of a boolean."""

    def check(value: Any) -> bool:
        if type(value) is not bool:
            raise _type_error("boolean", value)
        return value

    return _plain_metadata(check, "boolean")


def number(high: float = sys.float_info.max, *, positive: bool = False) -> Metadata:
    """Return the type of a finite number from 0 to `high`. Integers are allowed; 0 is not allowed if `positive`."""
    lower_bound = "more than 0" if positive else "at least 0"
    description = f"number of {lower_bound}" + (f" and at most {high:.15g}" if high < sys.float_info.max else "")

    def check(value: Any) -> float:
        # An integer above `high` might be too large for a float. NaN is rejected, because every comparison with it is
        # false.
        if type(value) not in (float, int) or not 0 <= value <= high or (positive and not value):
            raise _type_error(description, value)
        return float(value)

    return _plain_metadata(check, description)


def list_of(item: Metadata, max_items: int) -> Metadata:
    """Return the type of a list with at most `max_items` items. The list is decoded to a tuple."""
    kind = item["field_type"]

    def convert(value: Any, expected: Type[Any], each_to: Callable[[Any], Any]) -> List[Any]:
        if type(value) is not expected:
            raise _type_error(expected.__name__, value)
        if len(value) > max_items:
            raise FieldError(f"expected at most {max_items} items, got {len(value)}")
        converted: List[Any] = []
        try:
            for each in value:
                converted.append(each_to(each))  # noqa: PERF401 - its length is the index of the item that fails
        except FieldError as error:
            raise error.at(f"[{len(converted)}]") from None
        return converted

    return _new_metadata(
        lambda value: tuple(convert(value, list, kind.check)),
        lambda value: tuple(convert(value, list, kind.tolerant)),
        lambda value: convert(value, tuple, kind.plain),
        f"list of at most {max_items}: {kind.description}",
        limits.CONTAINER_ITEMS + max_items * kind.items,
    )


def nullable(item: Metadata) -> Metadata:
    """Return the type of a value that may also be nil. In such a field nil has a meaning; it is decoded to None."""
    kind = item["field_type"]
    return _new_metadata(
        lambda value: None if value is None else kind.check(value),
        lambda value: None if value is None else kind.tolerant(value),
        lambda value: None if value is None else kind.plain(value),
        f"nil, or {kind.description}",
        kind.items,
    )


def mapping(item: Metadata, max_items: int) -> Metadata:
    """Return the type of a map with at most `max_items` entries, from names to values of the type `item`."""
    kind = item["field_type"]
    check_name = text(limits.MAX_NAME_BYTES)["field_type"].check

    def convert(value: Any, each_to: Callable[[Any], Any]) -> Dict[str, Any]:
        if type(value) is not _MAP:
            raise _type_error("map", value)
        if len(value) > max_items:
            raise FieldError(f"expected at most {max_items} items, got {len(value)}")
        converted: Dict[str, Any] = {}
        name: Any = None
        try:
            for name, each in value.items():
                converted[check_name(name)] = each_to(each)
        except FieldError as error:
            raise error.at(f".{label(name)}") from None
        return converted

    return _new_metadata(
        lambda value: convert(value, kind.check),
        lambda value: convert(value, kind.tolerant),
        lambda value: convert(value, kind.plain),
        f"map of at most {max_items} names to {kind.description}",
        limits.CONTAINER_ITEMS + max_items * (1 + kind.items),
    )


def in_own_frame(cls: Type[Any]) -> Mapping[str, Any]:
    """Return the metadata of a field whose record is encoded in its own frame, not in the map of the message."""
    return {"description": cls}


def record(cls: Type[Any]) -> Metadata:
    """Return the type of a map that has exactly the fields of the dataclass `cls`. It is decoded to a `cls`."""
    return {
        "field_type": FieldType(
            _record_check(cls, tolerant=False),
            _record_check(cls, tolerant=True),
            _record_plain(cls),
            cls.__name__,
            cls,
            limits.CONTAINER_ITEMS + sum(1 + each.metadata["field_type"].items for each in _fields(cls)),
        )
    }


def omit_default(kind: Metadata) -> Mapping[str, Any]:
    """Return the type `kind` for a field that is left out of the encoded map if it has its default value."""
    return {**kind, "omit_default": True}


def _fields(cls: Type[Any]) -> List[dataclasses.Field[Any]]:
    """Return the fields of a dataclass that are encoded in its map. A field in its own frame is not."""
    return [field for field in dataclasses.fields(cls) if "field_type" in field.metadata]


def _record_check(cls: Type[Any], *, tolerant: bool) -> Callable[[Any], Any]:
    checks: Dict[str, Callable[[Any], Any]] = {}
    for field in _fields(cls):
        kind: FieldType = field.metadata["field_type"]
        checks[field.name] = kind.tolerant if tolerant else kind.check
    defaults = [(field.name, field.default) for field in _fields(cls)]
    has_slots = not cls.__dictoffset__

    def check(value: Any) -> Any:
        if type(value) is not _MAP:
            raise _type_error("map", value)
        checked: Dict[str, Any] = {}
        name: Any = None
        try:
            for name, each in value.items():
                check_each = checks.get(name)
                if check_each is None:
                    if tolerant:
                        continue
                    raise FieldError(f"unknown field; expected one of {', '.join(checks) or 'none'}")
                checked[name] = check_each(each)
        except FieldError as error:
            raise error.at(f".{label(name)}") from None
        if len(checked) < len(checks):
            _fill_defaults(checked, defaults)
        if has_slots:
            return cls(**checked)
        # This does the same as `__init__` of a frozen dataclass, in a third of the time.
        instance: Any = object.__new__(cls)
        instance.__dict__.update(checked)
        return instance

    return check


def _fill_defaults(checked: Dict[str, Any], defaults: Iterable[Tuple[str, Any]]) -> None:
    for name, default in defaults:
        if name not in checked:
            if default is dataclasses.MISSING:
                raise FieldError("missing").at(f".{name}")
            checked[name] = default


def _record_plain(cls: Type[Any]) -> Callable[[Any], Dict[str, Any]]:
    # For each field: its name, its conversion, whether it is left out if it is None, and, for `omit_default`, its
    # converted default, for which it is left out as well.
    fields: List[Tuple[str, Callable[[Any], Any], bool, object]] = [
        (
            field.name,
            field.metadata["field_type"].plain,
            field.default is None,
            field.metadata["field_type"].plain(field.default)
            if "omit_default" in field.metadata
            else dataclasses.MISSING,
        )
        for field in _fields(cls)
    ]

    def plain(value: Any) -> Dict[str, Any]:
        if type(value) is not cls:
            raise _type_error(cls.__name__, value)
        plain_fields: Dict[str, Any] = {}
        name = ""
        try:
            for name, plain_each, optional, without in fields:
                each = getattr(value, name)
                if each is not None or not optional:
                    made = plain_each(each)
                    if made != without:
                        plain_fields[name] = made
        except FieldError as error:
            raise error.at(f".{name}") from None
        return plain_fields

    return plain


def decode(cls: Type[T], value: object, *, tolerant: bool = False) -> T:
    """Convert `value`, a map unpacked by msgpack, to a `cls`. With `tolerant`, ignore unknown fields.

    Raises:
        FieldError: the map is not a valid `cls`; the text names the field.
    """
    kind = _KINDS.get(cls) or _cache_kind(cls)
    return (kind.tolerant if tolerant else kind.check)(value)  # type: ignore[no-any-return]


def max_record_items(cls: Type[Any]) -> int:
    """Return the maximum number of msgpack items in a legal map of a `cls`. `FieldType.items` says how items count."""
    return (_KINDS.get(cls) or _cache_kind(cls)).items


def plain(message: object) -> Dict[str, Any]:
    """Return `message` as a map that msgpack can pack.

    Fields that are None are left out, and `omit_default` fields that have their default.

    Raises:
        FieldError: a value violates the type of its field; the text names the field.
    """
    cls = type(message)
    return (_KINDS.get(cls) or _cache_kind(cls)).plain(message)  # type: ignore[no-any-return]


_KINDS: Dict[Type[Any], FieldType] = {}


def _cache_kind(cls: Type[Any]) -> FieldType:
    kind = _KINDS[cls] = record(cls)["field_type"]
    return kind


def describe_fields(cls: Type[Any]) -> List[Tuple[str, str, Optional[object]]]:
    """Return name, type and default of each field of a dataclass, for the documentation and its test.

    The default of a field without a default is "required".
    """
    return [
        (
            field.name,
            field.metadata["field_type"].description,
            "required" if field.default is dataclasses.MISSING else field.default,
        )
        for field in _fields(cls)
    ]
