"""Converts TOML tables to frozen dataclasses, and collects all errors of a file to report them at once."""

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

# Maximum of all configured durations, in seconds: one year. It is longer than any useful duration, and its number of
# microseconds fits into every field of weightd's protocol.
MAX_SECONDS = 365 * 86_400.0

# Maximum number of characters of an unknown name that are compared with the known keys. All known keys are shorter.
_MAX_COMPARED_CHARACTERS = 64


class ErrorCollector:
    """Collects the errors of a configuration file in the order in which they are found.

    Attributes:
        errors: the errors, each with the path of the invalid key.
    """

    def __init__(self) -> None:
        self.errors: list[FieldError] = []
        self._block_start = 0  # index of the first error of the current block

    @contextlib.contextmanager
    def at(self, step: str) -> Generator[None, None, None]:
        """Collect a FieldError that the block raises, and prepend `step` to the key paths of all errors of the block.

        Args:
            step: the key of the table that the block reads, such as ".models".
        """
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
        """Add errors, unless one of the required keys has an error already.

        An invalid key has its default value, so that the additional errors might only result from this default.
        """
        if not required_keys or self.wrong_keys().isdisjoint(required_keys):
            self.errors += errors

    def wrong_keys(self) -> set[str]:
        """Return the keys of the current block (see `at`) that have errors."""
        matches = (_FIRST_STEP.match(each.path) for each in self.errors[self._block_start :])
        return {match.group(1) for match in matches if match}


def derived(metadata: Metadata) -> Mapping[str, Any]:
    """Return the metadata of a dataclass field that is no key of the file, because it is computed from other tables."""
    return {**metadata, "derived": True}


def user_path(max_bytes: int, *, empty: bool = False) -> Metadata:
    """Return the metadata of a field with a path of at most `max_bytes` bytes.

    A path that begins with ~ is invalid. It is not expanded, because a service's home directory is not the home
    directory of the user who writes the file.
    """
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
    """Return the fields of a table's dataclass that are keys of the file."""
    return [field for field in dataclasses.fields(cls) if not field.metadata.get("derived")]


def read_table(cls: type[T], table: object, problems: ErrorCollector, *, section: str = "") -> T:
    """Convert a TOML table to a `cls` object. Invalid keys have their default values.

    Args:
        cls: a dataclass whose fields have metadata of `weightd_protocol.schema`.
        table: the table as parsed from TOML.
        problems: collects the errors. A missing required key is an error as well, and its field is None.
        section: the full name of the table, such as "models.resnet", if the user has chosen the last part of the name.

    Raises:
        FieldError: `table` is not a table, or it contains only the rest of a table name with an unquoted dot, such as
            [models.resnet.v1].
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
                # In TOML all keys are text, but a YAML file may have other keys.
                raise FieldError(quoted[key] or unknown_name_text("key", str(key), kinds))
            values[key] = read_table(kind.record, value, problems) if kind.record else kind.check(value)
    for field in table_keys(cls):
        required = field.default is dataclasses.MISSING
        if required and field.name not in given_keys:
            problems.add([FieldError("missing").at(f".{field.name}")])
        values.setdefault(field.name, None if required else field.default)
    return cls(**values)


def unknown_name_text(what: str, name: str, known: Iterable[str]) -> str:
    """Return the error text for an unknown key or table. It suggests the closest known name, or lists all of them."""
    suggestion = _closest_name(name, known)
    return f"unknown {what}; " + (
        f"did you mean {suggestion}?" if suggestion else f"expected one of {', '.join(known)}"
    )


def _closest_name(name: str, known: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(name[:_MAX_COMPARED_CHARACTERS].lower(), list(known), 1)), "")


def _quoting_hint(section: str, key: str, value: object, kinds: Mapping[str, FieldType]) -> str:
    """Return an error text that says to quote a name with dots, or "" if the key has not been split from such a name.

    For example, TOML parses [models.resnet.v1] as a table `v1` in the table `resnet`.
    """
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
        return ""  # quoting would not help, because the name has invalid characters
    return f'unknown table; a name with a dot is quoted: [{head}."{first}.{name}"]'


_NAME_PATTERN = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{limits.MAX_MODEL_NAME_BYTES - 1}}}")


def check_name(kind: str, name: str) -> Iterator[FieldError]:
    """Yield an error if the user has chosen an invalid name. `kind` says what is named, such as "model"."""
    if not _NAME_PATTERN.fullmatch(name):
        yield FieldError(
            f"expected a {kind} name of 1 to {limits.MAX_MODEL_NAME_BYTES} ASCII letters, digits, '_', '.' and '-', "
            "which does not begin with '.' or '-'"
        )
