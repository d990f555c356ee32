"""The keys of the configuration, with the docstrings below them in the source as what they mean."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from weightd_common import toml_schema


class Key(NamedTuple):
    """One key of a table.

    Attributes:
        name: as in the file.
        kind: what it takes.
        default: as it would stand in the file; "" where there is none that could.
        is_required: whether it must be given.
        meaning: what it is for.
    """

    name: str
    kind: str
    default: str
    is_required: bool
    meaning: str


def iterate_keys(cls: type[Any]) -> Iterator[Key]:
    """Yield the keys of a table of the configuration, without those that are tables themselves."""
    meanings = _docstrings(cls)
    for field in toml_schema.table_keys(cls):
        if field.metadata["field_type"].record:
            continue
        required = field.default is dataclasses.MISSING
        default = "" if required or field.default is None else _toml(field.default)
        yield Key(field.name, field.metadata["field_type"].description, default, required, meanings[field.name])


def _toml(value: object) -> str:
    """JSON is TOML for all that a default can be."""
    return json.dumps(value)


def _docstrings(cls: type[Any]) -> dict[str, str]:
    """The text below each field: Python drops it, so it is read from the source."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)  # noqa: S101 - a class is nothing else
    body = definition.body
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in zip(body, body[1:])
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
