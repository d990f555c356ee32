"""Sockets at which the daemon listens and clients connect: default directories, paths and TCP addresses.

Daemon and client must use the same addresses, but neither package may import the other, so the addresses are defined
here.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Tuple

# Runtime directory of the systemd service (RuntimeDirectory=weightd), and of every daemon that root starts.
SYSTEM_RUNTIME_DIR = "/run/weightd"

_SOCKET_NAME = "weightd.sock"

# Suffix of the path of the daemon's unix socket for clients. No other socket of the daemon has this suffix.
UNIX_SUFFIX = ".unix"

_CHANNEL_SUFFIX = ".channel"

MAX_PORT = 65535

TCP_ADDRESS_FORM = f"tcp://HOST:PORT, PORT from 1 to {MAX_PORT}"
"""The form of an address that `is_tcp_address` accepts, for error texts."""

_TCP_ADDRESS = re.compile(r"tcp://(\[[^\]\s]+\]|[^:\s]+):([0-9]{1,5})")


def runtime_dir() -> str:
    """Return the directory for the sockets of a daemon that the current user starts."""
    if os.getuid() == 0:
        return SYSTEM_RUNTIME_DIR
    return xdg_dir("XDG_RUNTIME_DIR") or f"/tmp/weightd-{os.getuid()}"  # noqa: S108 - the daemon checks whose it is


def xdg_dir(variable: str) -> str:
    """Return weightd's directory below the directory in an XDG variable such as "XDG_RUNTIME_DIR".

    The result is "" if the variable is unset, empty or a relative path, which the XDG Base Directory Specification says
    to ignore.
    """
    base = os.environ.get(variable, "")
    return str(Path(base, "weightd")) if Path(base).is_absolute() else ""


def socket_address(directory: str) -> str:
    """Return the address at which clients connect to the daemon whose runtime directory is `directory`."""
    return f"ipc://{directory}/{_SOCKET_NAME}"


def daemon_key(address: str) -> str:
    """Return a short name for use in file names, computed from a daemon's address. Each address has another name."""
    return hashlib.sha256(os.fsencode(address)).hexdigest()[:12]


def unix_path(address: str, directory: str = "") -> str:
    """Return the path of the unix socket for clients of the daemon at `address`.

    For an ipc:// address, the unix socket is in the directory of the ipc:// socket. For a TCP address, it is in the
    daemon's runtime directory `directory`.
    """
    if address.startswith("ipc://"):
        return f"{address[len('ipc://') :]}{UNIX_SUFFIX}"
    return f"{directory}/{daemon_key(address)}{UNIX_SUFFIX}"


def daemon_socket(address: str) -> str:
    """Return the `socket` value of the configuration of the daemon at client address /PATH or unix:///PATH.

    Any other address is returned unchanged.
    """
    path = address[len("unix://") :] if address.startswith("unix://") else address
    if not path.startswith("/"):
        return address
    return f"ipc://{path[: -len(UNIX_SUFFIX)] if path.endswith(UNIX_SUFFIX) else path}"


def channel_path(address: str) -> str:
    """Return the path of the socket at which workers open their channels, for the daemon's ipc:// address `address`."""
    return f"{address[len('ipc://') :]}{_CHANNEL_SUFFIX}"


def is_tcp_address(address: str) -> bool:
    """Return whether `address` is a valid TCP address, with a port from 1 to 65,535.

    libzmq itself would accept any number: it takes the port modulo 65,536, and port 0 as any free port. Daemon or
    client would then silently use another port than the given one.
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
