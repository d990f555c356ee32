"""Sockets at which the daemon listens and clients connect: default directories, paths and TCP addresses.

Daemon and client must agree on them, and neither may import the other.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Tuple

# The directory of the service, which systemd creates (RuntimeDirectory=weightd), and of root.
SYSTEM_RUNTIME_DIR = "/run/weightd"

_SOCKET_NAME = "weightd.sock"

# The suffix of the daemon's unix socket for clients. No other socket has it.
UNIX_SUFFIX = ".unix"

_CHANNEL_SUFFIX = ".channel"

MAX_PORT = 65535

TCP_ADDRESS_FORM = f"tcp://HOST:PORT, PORT from 1 to {MAX_PORT}"
"""The form of an address that `is_tcp_address` accepts, for error texts."""

_TCP_ADDRESS = re.compile(r"tcp://(\[[^\]\s]+\]|[^:\s]+):([0-9]{1,5})")


def runtime_dir() -> str:
    """Return the directory for the sockets of a daemon that this user starts."""
    if os.getuid() == 0:
        return SYSTEM_RUNTIME_DIR
    return xdg_dir("XDG_RUNTIME_DIR") or f"/tmp/weightd-{os.getuid()}"  # noqa: S108 - the daemon checks whose it is


def xdg_dir(variable: str) -> str:
    """Return weightd's directory in one of the user's XDG directories, or "" if that is not set.

    The XDG Base Directory Specification treats an empty variable as unset and ignores a relative path.
    """
    base = os.environ.get(variable, "")
    return str(Path(base, "weightd")) if Path(base).is_absolute() else ""


def socket_address(directory: str) -> str:
    """Return the client address of the daemon with this runtime directory."""
    return f"ipc://{directory}/{_SOCKET_NAME}"


def daemon_key(address: str) -> str:
    """Return a short name that is unique for the daemon with this address, for use in file names."""
    return hashlib.sha256(os.fsencode(address)).hexdigest()[:12]


def unix_path(address: str, directory: str = "") -> str:
    """Return the path of the unix socket of the daemon with this address.

    The unix socket is beside an ipc:// socket. A daemon on TCP has it in `directory`, its runtime directory.
    """
    if address.startswith("ipc://"):
        return f"{address[len('ipc://') :]}{UNIX_SUFFIX}"
    return f"{directory}/{daemon_key(address)}{UNIX_SUFFIX}"


def daemon_socket(address: str) -> str:
    """Return the socket address in the daemon's configuration for a client address /PATH or unix:///PATH.

    Any other address is returned unchanged.
    """
    path = address[len("unix://") :] if address.startswith("unix://") else address
    if not path.startswith("/"):
        return address
    return f"ipc://{path[: -len(UNIX_SUFFIX)] if path.endswith(UNIX_SUFFIX) else path}"


def channel_path(address: str) -> str:
    """Return the path of the socket for channels of a daemon with this address for child processes."""
    return f"{address[len('ipc://') :]}{_CHANNEL_SUFFIX}"


def is_tcp_address(address: str) -> bool:
    """Return whether `address` is a TCP address for which libzmq uses exactly the given host and port.

    libzmq takes ports modulo 65,536, and 0 as any free port, so that both sides would silently use another address.
    """
    match = _TCP_ADDRESS.fullmatch(address)
    return match is not None and 1 <= int(match.group(2)) <= MAX_PORT


def split_tcp_address(address: str) -> Tuple[str, int]:
    """Return host and port of a valid TCP address. An IPv6 host is in brackets.

    Raises:
        ValueError: `address` is not a valid TCP address.
    """
    match = _TCP_ADDRESS.fullmatch(address)
    if match is None:
        raise ValueError(address)
    return match.group(1), int(match.group(2))
