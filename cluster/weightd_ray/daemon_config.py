"""The configuration of a replica's own daemon, as TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from weightd_common import endpoints
from weightd_protocol import limits
from weightd_protocol.errors import InvalidArgument

Table = Mapping[str, Any]

# Of the names that the daemon puts into the directory: "/", the key, ".sock.channel". The longest path of its sockets.
_MAX_NAME_BYTES = 27

MAX_DIRECTORY_BYTES = limits.MAX_IPC_PATH_BYTES - _MAX_NAME_BYTES

# Who would read an answer has gone when the daemon is told to end: there is nothing to wait for but workers.
_DRAIN_TIMEOUT_S = 2.0


def client_address(directory: Path) -> str:
    """Return where clients reach the daemon that has this directory."""
    return f"unix://{endpoints.unix_path(_socket_address(directory))}"


def config_text(directory: Path, models: Mapping[str, Table]) -> str:
    """Return the file of a daemon that has all that it needs in one directory.

    Raises:
        InvalidArgument: paths of sockets would be too long there.
    """
    size = len(str(directory).encode("utf-8", "surrogateescape"))
    if size > MAX_DIRECTORY_BYTES:
        raise InvalidArgument(
            f"directory: sockets in {directory} would have paths that are too long: expected at most "
            f"{MAX_DIRECTORY_BYTES} bytes, got {size}"
        )
    daemon = {
        "socket": _socket_address(directory),
        "runtime_dir": str(directory),
        "cache_dir": str(directory / "cache"),
        "drain_timeout": _DRAIN_TIMEOUT_S,
    }
    return (
        "\n".join(f"{key} = {_toml_value(value)}" for key, value in {"daemon": daemon, "models": models}.items()) + "\n"
    )


def _socket_address(directory: Path) -> str:
    return f"ipc://{directory}/d"


def _toml_value(value: Any) -> str:
    """Return a value of TOML as TOML has it: text, numbers, booleans and lists are JSON's, tables are inline ones."""
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        return f"{{ {', '.join(f'{_toml_string(key)} = {_toml_value(each)}' for key, each in table.items())} }}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml_value(each) for each in cast('list[Any]', value))}]"
    return _toml_string(value) if isinstance(value, str) else json.dumps(value)


def _toml_string(text: str) -> str:
    # The one character that JSON leaves as it is and TOML does not.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
