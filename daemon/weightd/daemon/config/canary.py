"""The key `canary` of a model: "auto", "off", a file of arrays, or the shape of each input by its name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

from weightd.protocol import limits
from weightd.protocol.messages.findings import Case
from weightd.protocol.schema import FieldError, Kind, integer, many, mapping, shown, text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CanaryKey = str | Case

AUTO = "auto"
OFF = "off"

_EXPECTED = '"auto", "off", a path that ends in .npz, or a table of shapes by input name'

# A shape has no free dimension, and an input without elements shows nothing.
_SHAPES = mapping(many(integer(1, limits.MAX_DIM), limits.MAX_RANK), limits.MAX_TENSORS)["kind"]
_PATH = text(limits.MAX_PATH_BYTES)["kind"]


def metadata() -> dict[str, Kind]:
    """Return the metadata of the field."""
    return {"kind": Kind(_check, _check, _plain, _EXPECTED)}


def from_text(text: str) -> CanaryKey:
    """Return the key that a command line gives as the configuration would, a path without quotes too.

    Raises:
        FieldError: it is none.
    """
    value: Any = text
    if text.lstrip().startswith("{"):
        try:
            value = tomllib.loads(f"canary = {text}")["canary"]
        except ValueError as error:
            raise FieldError(f"not TOML: {error}") from None
    key = _check(value)
    return str(Path(key).absolute()) if isinstance(key, str) and key not in (AUTO, OFF) else key


def sample(key: CanaryKey) -> str:
    """Return the path of the file that the key names, or ""."""
    return key if isinstance(key, str) and key not in (AUTO, OFF) else ""


def _check(value: Any) -> CanaryKey:
    if isinstance(value, dict) and value:
        return cast("Case", _SHAPES.check(cast("Any", value)))
    if isinstance(value, str) and (value in (AUTO, OFF) or value.endswith(".npz")) and "\0" not in value:
        return cast("str", _PATH.check(value))
    raise FieldError(f"expected {_EXPECTED}, got {shown(cast('object', value))}")


def _plain(value: Any) -> Any:
    return _PATH.plain(value) if isinstance(value, str) else _SHAPES.plain(value)
