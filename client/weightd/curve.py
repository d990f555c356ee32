"""The keys with which a client proves over TCP who it is, and by which it knows the daemon: CURVE."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from weightd_common.curve_keys import KeyFileError, read_public, read_secret
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.schema import describe_value

KeyFile = Union[str, "os.PathLike[str]"]


class CurveKeys(NamedTuple):
    """The keys of a connection, in Z85.

    Attributes:
        server_key: the public one of the daemon's listener.
        secret_key: the client's own.
    """

    server_key: str
    secret_key: str

    def __repr__(self) -> str:
        """Return what may be shown."""
        return f"Curve(server={self.server_key!r})"


def read_keys(key: Optional[KeyFile], server_key: Optional[KeyFile]) -> Optional[CurveKeys]:
    """Return the keys in the files, None where none are given.

    Args:
        key: the file with the client's secret key, as `weightctl keygen` writes it.
        server_key: the file with the public key of the daemon's listener.

    Raises:
        InvalidArgument: one is given without the other, or a file has no such key, or must not be used.
    """
    if key is None and server_key is None:
        return None
    if key is None or server_key is None:
        missing = "key, the client's secret one" if key is None else "server_key, the listener's public one"
        raise InvalidArgument(f"expected the files of both keys of CURVE, or none: {missing}, is missing")
    try:
        return CurveKeys(read_public(_to_path("server_key", server_key)), read_secret(_to_path("key", key)))
    except KeyFileError as error:
        raise InvalidArgument(str(error)) from None


def _to_path(name: str, file: Any) -> Path:
    try:
        return Path(file)
    except TypeError:
        raise InvalidArgument(f"{name}: expected the path of a file, got {describe_value(file)}") from None
