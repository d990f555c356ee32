"""Conversion of TOML tables to frozen dataclasses. It reports all errors of a file at once."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

from weightd_protocol import limits
from weightd_protocol.schema import FieldError, FieldType, Metadata, describe_value, label, short_repr, text

T = TypeVar("T")

_FIRST_STEP = re.compile(r"\.([^.\[]*)")

# Limit for all durations: a year is longer than any useful wait, and its microseconds fit into every field.
MAX_SECONDS = 365 * 86_400.0

# Length limit for comparisons with foreign names. All known keys are shorter.
_MAX_COMPARED_CHARACTERS = 64


class ErrorCollector:
    """Collects errors in the order in which they are found.

    Attributes:
        errors: the errors, each with the path of its key.
    """

    def __init__(self) -> None:
        self.errors: list[FieldError] = []
        self._block_start = 0  # index of the first error of the current block

    @contextlib.contextmanager
    def at(self, step: str) -> Generator[None, None, None]:
        """Prepend `step` to the paths of errors found in the block, and collect a FieldError raised in it."""
        outer, self._block_start = self._block_start, len(self.errors)
        try:
            yield
        except FieldError as error:
            self.errors.append(error)
        finally:
            for each in self.errors[self._block_start :]:
                each.at(step)
            self._block_start = outer

    def add(self, errors: Iterable[FieldError], *required_keys: str) -> None:
        """Add errors, unless one of the required keys is invalid: the errors would result from its default."""
        if not required_keys or self.wrong_keys().isdisjoint(required_keys):
            self.errors += errors

    def wrong_keys(self) -> set[str]:
        """Return the keys with errors in the current block."""
        matches = (_FIRST_STEP.match(each.path) for each in self.errors[self._block_start :])
        return {match.group(1) for match in matches if match}


def derived(metadata: Metadata) -> Mapping[str, Any]:
    """Return the metadata of a field that is not a key of the file, but is computed from other tables."""
    return {**metadata, "derived": True}


def user_path(max_bytes: int, *, empty: bool = False) -> Metadata:
    """Return the type of a path of at most `max_bytes` bytes. A ~ is invalid: a service has another home."""
    kind = text(max_bytes, empty=empty)["field_type"]

    def check(value: Any) -> str:
        checked: str = kind.check(value)
        if "\0" in checked:
            raise FieldError(f"expected text without a NUL character, got {short_repr(checked)}")
        if checked == "~" or (checked.startswith("~") and "/" in checked):
            raise FieldError(f"expected a path without ~, which is not expanded, got {short_repr(checked)}")
        return checked

    return {"field_type": FieldType(check, check, check, kind.description)}


def table_keys(cls: type[Any]) -> list[dataclasses.Field[Any]]:
    """Return the fields of a table class that are keys of the file."""
    return [field for field in dataclasses.fields(cls) if not field.metadata.get("derived")]


def read_table(cls: type[T], table: object, problems: ErrorCollector, *, section: str = "") -> T:
    """Return the table as a `cls`. Invalid keys have their default values.

    Args:
        cls: a dataclass with metadata of `weightd_protocol.schema`.
        table: the table as parsed from TOML.
        problems: receives the errors. A missing required key is an error as well, and its value is None.
        section: the full name of the table, such as "models.resnet", if its last part is chosen by the user.

    Raises:
        FieldError: `table` is not a table, or is only a part of another table's name with an unquoted dot.
    """
    kinds: dict[str, FieldType] = {field.name: field.metadata["field_type"] for field in table_keys(cls)}
    if type(table) is not dict:
        raise FieldError(f"expected a table, got {describe_value(table)}")
    given_keys = cast("dict[str, Any]", table)
    quoted = {key: _quoting_hint(section, key, value, kinds) for key, value in given_keys.items() if key not in kinds}
    if any(quoted.values()) and kinds.keys().isdisjoint(given_keys):
        *others, last = (FieldError(text).at(f".{label(key)}") for key, text in quoted.items() if text)
        problems.add(others)
        raise last
    values: dict[str, Any] = {}
    for key, value in given_keys.items():
        with problems.at(f".{label(key)}"):
            kind = kinds.get(key)
            if kind is None:
                # A YAML file may have keys that are not text.
                raise FieldError(quoted[key] or unknown_name_text("key", str(key), kinds))
            values[key] = read_table(kind.record, value, problems) if kind.record else kind.check(value)
    for field in table_keys(cls):
        required = field.default is dataclasses.MISSING
        if required and field.name not in given_keys:
            problems.add([FieldError("missing").at(f".{field.name}")])
        values.setdefault(field.name, None if required else field.default)
    return cls(**values)


def unknown_name_text(what: str, name: str, known: Iterable[str]) -> str:
    """Return the error text for an unknown key or table, with the closest match or all known names."""
    suggestion = _closest_name(name, known)
    return f"unknown {what}; " + (
        f"did you mean {suggestion}?" if suggestion else f"expected one of {', '.join(known)}"
    )


def _closest_name(name: str, known: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(name[:_MAX_COMPARED_CHARACTERS].lower(), list(known), 1)), "")


def _quoting_hint(section: str, key: str, value: object, kinds: Mapping[str, FieldType]) -> str:
    """Return a hint if TOML has split an unquoted name with dots, such as [models.resnet.v1], otherwise ""."""
    if (
        not section
        or type(value) is not dict
        or _closest_name(key, [name for name, kind in kinds.items() if kind.record])
    ):
        return ""
    name = key
    inner = cast("dict[str, Any]", value)
    while len(inner) == 1 and type(next(iter(inner.values()))) is dict:
        [(step, inner)] = inner.items()
        name += f".{step}"
    head, _, first = section.partition(".")
    if not (first + name).isprintable():
        return ""  # the quoted name would be invalid as well
    return f'unknown table; a name with a dot is quoted: [{head}."{first}.{name}"]'


_NAME_PATTERN = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{limits.MAX_MODEL_NAME_BYTES - 1}}}")


def check_name(kind: str, name: str) -> Iterator[FieldError]:
    """Yield an error if `name` is not a valid name for a `kind`."""
    if not _NAME_PATTERN.fullmatch(name):
        yield FieldError(
            f"expected a {kind} name of 1 to {limits.MAX_MODEL_NAME_BYTES} ASCII letters, digits, '_', '.' and '-', "
            "which does not begin with '.' or '-'"
        )
