"""The key `selftest` of a model: "auto", "off", the path of a file with arrays, or the shape of each input by name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

from weightd_protocol import limits
from weightd_protocol.messages.worker_common import SelfTestCase
from weightd_protocol.schema import FieldError, FieldType, integer, list_of, mapping, short_repr, text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SelfTestSetting = str | SelfTestCase

AUTO = "auto"
OFF = "off"

_EXPECTED = '"auto", "off", a path that ends in .npz, or a table of shapes by input name'

# Shapes are fully specified, and dimensions are at least 1: an input without elements tests nothing.
_SHAPES_KIND = mapping(list_of(integer(1, limits.MAX_DIM), limits.MAX_RANK), limits.MAX_TENSORS)["field_type"]
_PATH_KIND = text(limits.MAX_PATH_BYTES)["field_type"]


def field_metadata() -> dict[str, FieldType]:
    """Return the dataclass metadata that parses the field `selftest`."""
    return {"field_type": FieldType(_check_value, _check_value, _to_plain, _EXPECTED)}


def parse_text(text: str) -> SelfTestSetting:
    """Return the setting from the text of a command-line option; unlike in TOML, a path needs no quotes.

    Raises:
        FieldError: the text is no valid setting.
    """
    value: Any = text
    if text.lstrip().startswith("{"):
        try:
            value = tomllib.loads(f"selftest = {text}")["selftest"]
        except ValueError as error:
            raise FieldError(f"not TOML: {error}") from None
    setting = _check_value(value)
    return str(Path(setting).absolute()) if isinstance(setting, str) and setting not in (AUTO, OFF) else setting


def inputs_path(setting: SelfTestSetting) -> str:
    """Return the path of the file that the setting names; "" if the setting is not a path."""
    return setting if isinstance(setting, str) and setting not in (AUTO, OFF) else ""


def _check_value(value: Any) -> SelfTestSetting:
    if isinstance(value, dict) and value:
        return cast("SelfTestCase", _SHAPES_KIND.check(cast("Any", value)))
    if isinstance(value, str) and (value in (AUTO, OFF) or value.endswith(".npz")) and "\0" not in value:
        return cast("str", _PATH_KIND.check(value))
    raise FieldError(f"expected {_EXPECTED}, got {short_repr(cast('object', value))}")


def _to_plain(value: Any) -> Any:
    return _PATH_KIND.plain(value) if isinstance(value, str) else _SHAPES_KIND.plain(value)
