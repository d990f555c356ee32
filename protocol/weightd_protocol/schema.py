"""Typed messages out of untrusted msgpack maps, and back.

A message is a frozen dataclass. Each field carries, as metadata, the kind of value that the wire allows
for it (`text(128)`, `integer(0, 10)` ...), so a field is declared once: type, bound and documentation.

Both directions are strict, by the same checks: an unknown field, a missing one or a value of another type or out of
its bound is a `FieldError` that names the path of the field, such as ``inputs[0].shape[1]``. So what one side
encodes, the other decodes, to an equal message.

Types are compared by identity, never by `isinstance`: a boolean is an int for Python, but not for the wire.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Callable, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Tuple, Type, TypeVar

from weightd_protocol import limits

T = TypeVar("T")

# Named so that no checker infers a map of unknown things from the comparison.
_MAP: Type[Any] = dict

# How much of a foreign value an error shows.
_MAX_SHOWN_CHARACTERS = 40
_MAX_SHOWN_BITS = 128


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
        path = self.path[1:] if self.path.startswith(".") else self.path
        return f"{path}: {self.problem}" if path else self.problem


class FieldType(NamedTuple):
    """What the wire allows for a field.

    `check` takes a value as msgpack unpacked it and returns the typed one; `tolerant` does the same and passes over
    fields that it does not know; `plain` is the way back. All raise `FieldError`. `description` is for people. `record`
    is the dataclass of a map with fixed fields. `items` is the largest number of items that a legal value has
    in msgpack: each key and each value is one, and a list or a map itself counts as `limits.CONTAINER_ITEMS`.
    """

    check: Callable[[Any], Any]
    tolerant: Callable[[Any], Any]
    plain: Callable[[Any], Any]
    description: str
    record: Optional[Type[Any]] = None
    items: int = 1


Metadata = Mapping[str, FieldType]


def short_repr(value: object) -> str:
    """Return a picture of a foreign value, short however long or deep the value is."""
    # repr() of a list that nests deeper than Python's stack raises RecursionError.
    if isinstance(value, (list, tuple, dict)):
        return f"of {len(value)} items"  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        # Python refuses to write a number of thousands of digits.
        return f"of {value.bit_length()} bits"
    text = repr(value[:_MAX_SHOWN_CHARACTERS]) if isinstance(value, (str, bytes)) else _repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[: _MAX_SHOWN_CHARACTERS - 3] + "..."


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - the object's own code may raise anything
        return object.__repr__(value)


def describe_value(value: object) -> str:
    """Return type and picture of a foreign value."""
    return f"{type(value).__name__} {short_repr(value)}"


def label(name: object) -> str:
    """Return a foreign name as it may stand in a path or a log: as it is where that is harmless, else quoted."""
    return (
        name
        if isinstance(name, str) and 0 < len(name) <= _MAX_SHOWN_CHARACTERS and name.isprintable()
        else short_repr(name)
    )


def _type_error(expected: str, value: object) -> FieldError:
    return FieldError(f"expected {expected}, got {describe_value(value)}")


def _plain_metadata(check: Callable[[Any], Any], description: str) -> Metadata:
    """A value that msgpack packs as it is: the check alone decides."""
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
    """A string of at most `max_bytes` bytes of UTF-8, not empty unless `empty`."""
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
    """One of the given strings."""
    allowed: FrozenSet[str] = frozenset(names)
    description = "one of " + ", ".join(name or '""' for name in sorted(allowed))

    def check(value: Any) -> str:
        if type(value) is not str or value not in allowed:
            raise _type_error(description, value)
        return value

    return _plain_metadata(check, description)


def integer(low: int, high: int) -> Metadata:
    """An integer from `low` to `high`, both included; a boolean is not an integer."""
    description = f"integer, {low} to {high}"

    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _type_error(description, value)
        return value

    return _plain_metadata(check, description)


def boolean() -> Metadata:
    """True or false."""

    def check(value: Any) -> bool:
        if type(value) is not bool:
            raise _type_error("boolean", value)
        return value

    return _plain_metadata(check, "boolean")


def number(high: float = sys.float_info.max, *, positive: bool = False) -> Metadata:
    """A finite number of at least 0, or more than 0 if `positive`, up to `high`; an integer will do."""
    lower_bound = "more than 0" if positive else "at least 0"
    description = f"number of {lower_bound}" + (f" and at most {high:.15g}" if high < sys.float_info.max else "")

    def check(value: Any) -> float:
        # An integer beyond the largest float would not become one; NaN fails every comparison.
        if type(value) not in (float, int) or not 0 <= value <= high or (positive and not value):
            raise _type_error(description, value)
        return float(value)

    return _plain_metadata(check, description)


def list_of(item: Metadata, max_items: int) -> Metadata:
    """A list of at most `max_items` of the given kind; a tuple once decoded."""
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
    """The given kind, or nil, where that says something of its own; None once decoded."""
    kind = item["field_type"]
    return _new_metadata(
        lambda value: None if value is None else kind.check(value),
        lambda value: None if value is None else kind.tolerant(value),
        lambda value: None if value is None else kind.plain(value),
        f"nil, or {kind.description}",
        kind.items,
    )


def mapping(item: Metadata, max_items: int) -> Metadata:
    """A map from names to the given kind, at most `max_items` of them."""
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
    """Not a field of the message's own map: a record `cls` that has a frame of its own."""
    return {"description": cls}


def record(cls: Type[Any]) -> Metadata:
    """A map with exactly the fields of the dataclass `cls`; an instance of it once decoded."""
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
    """The given kind; on the wire the field is left out where it has its default."""
    return {**kind, "omit_default": True}


def _fields(cls: Type[Any]) -> List[dataclasses.Field[Any]]:
    """The fields of its map."""
    return [field for field in dataclasses.fields(cls) if "field_type" in field.metadata]


def _record_check(cls: Type[Any], *, tolerant: bool) -> Callable[[Any], Any]:
    checks: Dict[str, Callable[[Any], Any]] = {}
    for field in _fields(cls):
        kind: FieldType = field.metadata["field_type"]
        checks[field.name] = kind.tolerant if tolerant else kind.check
    defaults = [(field.name, field.default) for field in _fields(cls)]

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
        # What __init__ of a frozen dataclass does, in a third of the time.
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
    # Name, way back, whether the field is left out when it is None, and as which other plain value it is.
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
    """Return `value` (a map as msgpack unpacked it) as a `cls`; `tolerant` passes over unknown fields.

    Raises:
        FieldError: the map is not a `cls`; the text names the field.
    """
    kind = _KINDS.get(cls) or _cache_kind(cls)
    return (kind.tolerant if tolerant else kind.check)(value)  # type: ignore[no-any-return]


def max_record_items(cls: Type[Any]) -> int:
    """Return the largest number of items that a legal map of a `cls` has, see `FieldType`."""
    return (_KINDS.get(cls) or _cache_kind(cls)).items


def plain(message: object) -> Dict[str, Any]:
    """Return `message` as a map of what msgpack can pack; a field that is None, or `omit_default`, is not there.

    Raises:
        FieldError: a value is not what its field allows; the text names the field.
    """
    cls = type(message)
    return (_KINDS.get(cls) or _cache_kind(cls)).plain(message)  # type: ignore[no-any-return]


_KINDS: Dict[Type[Any], FieldType] = {}


def _cache_kind(cls: Type[Any]) -> FieldType:
    kind = _KINDS[cls] = record(cls)["field_type"]
    return kind


def describe_fields(cls: Type[Any]) -> List[Tuple[str, str, Optional[object]]]:
    """Return name, kind and "required" or the default of each field, for the documentation and its test."""
    return [
        (
            field.name,
            field.metadata["field_type"].description,
            "required" if field.default is dataclasses.MISSING else field.default,
        )
        for field in _fields(cls)
    ]
