"""Tables of TOML into frozen objects, and all that is wrong with them: who mends a file wants to know it at once."""

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

# Of whatever takes time. Longer than that, nobody waits; and microseconds of it fit wherever they are told.
MAX_SECONDS = 365 * 86_400.0

# No known key is longer, and what is compared is foreign.
_MAX_COMPARED_CHARACTERS = 64


class ErrorCollector:
    """Collects what is wrong, in the order in which it is found.

    Attributes:
        errors: each with the path of its key.
    """

    def __init__(self) -> None:
        self.errors: list[FieldError] = []
        self._block_start = 0  # of those that were found within the block

    @contextlib.contextmanager
    def at(self, step: str) -> Generator[None, None, None]:
        """What is found within the block lies below `step`; a FieldError that leaves the block is found, too."""
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
        """Add errors, but not if one of the needed keys is wrong itself: they would follow from its default."""
        if not required_keys or self.wrong_keys().isdisjoint(required_keys):
            self.errors += errors

    def wrong_keys(self) -> set[str]:
        """Return the keys with which something is wrong, of those within the block."""
        matches = (_FIRST_STEP.match(each.path) for each in self.errors[self._block_start :])
        return {match.group(1) for match in matches if match}


def derived(metadata: Metadata) -> Mapping[str, Any]:
    """Not a key of the file: what `complete` makes of other tables, and what is written down with the keys."""
    return {**metadata, "derived": True}


def user_path(max_bytes: int, *, empty: bool = False) -> Metadata:
    """A path, as text of at most `max_bytes` bytes; nobody expands a ~, which would mean another home to a service."""
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
    """Return the fields of a table that are keys of the file."""
    return [field for field in dataclasses.fields(cls) if not field.metadata.get("derived")]


def read_table(cls: type[T], table: object, problems: ErrorCollector, *, section: str = "") -> T:
    """Return the table as a `cls`, with the default in the place of every key that is wrong.

    Args:
        cls: a dataclass with the metadata of `weightd_protocol.schema`.
        table: as TOML has it.
        problems: where what is wrong is added; a required key that is missing, too, and what stands for it is None.
        section: how the table is called in the file, where its name is the user's to choose: "models.resnet".

    Raises:
        FieldError: it is no table, or not this one but a part of the name of another.
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
                # A YAML may have one that is no text.
                raise FieldError(quoted[key] or unknown_name_text("key", str(key), kinds))
            values[key] = read_table(kind.record, value, problems) if kind.record else kind.check(value)
    for field in table_keys(cls):
        required = field.default is dataclasses.MISSING
        if required and field.name not in given_keys:
            problems.add([FieldError("missing").at(f".{field.name}")])
        values.setdefault(field.name, None if required else field.default)
    return cls(**values)


def unknown_name_text(what: str, name: str, known: Iterable[str]) -> str:
    """Say that there is no such key or table; and which was meant, or what there is."""
    suggestion = _closest_name(name, known)
    return f"unknown {what}; " + (
        f"did you mean {suggestion}?" if suggestion else f"expected one of {', '.join(known)}"
    )


def _closest_name(name: str, known: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(name[:_MAX_COMPARED_CHARACTERS].lower(), list(known), 1)), "")


def _quoting_hint(section: str, key: str, value: object, kinds: Mapping[str, FieldType]) -> str:
    """How to write a table that is none for TOML: [models.resnet.v1] is `v1` in `resnet`. "" if it is not that."""
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
        return ""  # it would not be a name even so
    return f'unknown table; a name with a dot is quoted: [{head}."{first}.{name}"]'


_NAME_PATTERN = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{limits.MAX_MODEL_NAME_BYTES - 1}}}")


def check_name(kind: str, name: str) -> Iterator[FieldError]:
    """Say so if this is no name for a `kind`."""
    if not _NAME_PATTERN.fullmatch(name):
        yield FieldError(
            f"expected a {kind} name of 1 to {limits.MAX_MODEL_NAME_BYTES} ASCII letters, digits, '_', '.' and '-', "
            "the last two not first"
        )
