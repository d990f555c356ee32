"""The sockets at which the daemon listens and clients connect: default directories, paths, and TCP addresses.

Daemon and client must agree on them, and neither may import the other.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Tuple

# The service's, which systemd makes for it (RuntimeDirectory=weightd), and root's.
SYSTEM_RUNTIME_DIR = "/run/weightd"

_SOCKET_NAME = "weightd.sock"

# Of the path of a unix socket, and of no other socket for clients.
UNIX_SUFFIX = ".unix"

_CHANNEL_SUFFIX = ".channel"

MAX_PORT = 65535

TCP_ADDRESS_FORM = f"tcp://HOST:PORT, PORT from 1 to {MAX_PORT}"
"""For people: what `is_tcp_address` takes."""

_TCP_ADDRESS = re.compile(r"tcp://(\[[^\]\s]+\]|[^:\s]+):([0-9]{1,5})")


def runtime_dir() -> str:
    """Return the directory where a daemon that this user starts has its sockets."""
    if os.getuid() == 0:
        return SYSTEM_RUNTIME_DIR
    return xdg_dir("XDG_RUNTIME_DIR") or f"/tmp/weightd-{os.getuid()}"  # noqa: S108 - the daemon checks whose it is


def xdg_dir(variable: str) -> str:
    """Return weightd's directory in one of the user's XDG directories, "" where there is none.

    Empty means unset there, and a relative path is to be ignored (XDG Base Directory Specification).
    """
    base = os.environ.get(variable, "")
    return str(Path(base, "weightd")) if Path(base).is_absolute() else ""


def socket_address(directory: str) -> str:
    """Return the address for clients of the daemon whose runtime directory is `directory`."""
    return f"ipc://{directory}/{_SOCKET_NAME}"


def daemon_key(address: str) -> str:
    """Return a short name for the daemon whose socket is `address`: two daemons never share a file."""
    return hashlib.sha256(os.fsencode(address)).hexdigest()[:12]


def unix_path(address: str, directory: str = "") -> str:
    """Return the path of the unix socket of the daemon whose socket is `address`.

    It lies beside an ipc:// one; that of a daemon on TCP in `directory`, its runtime directory.
    """
    if address.startswith("ipc://"):
        return f"{address[len('ipc://') :]}{UNIX_SUFFIX}"
    return f"{directory}/{daemon_key(address)}{UNIX_SUFFIX}"


def daemon_socket(address: str) -> str:
    """Return the socket, as a configuration names it, of the daemon that a client finds at /PATH or unix:///PATH.

    Any other address is returned as it is.
    """
    path = address[len("unix://") :] if address.startswith("unix://") else address
    if not path.startswith("/"):
        return address
    return f"ipc://{path[: -len(UNIX_SUFFIX)] if path.endswith(UNIX_SUFFIX) else path}"


def channel_path(address: str) -> str:
    """Return where a daemon whose socket for children is `address` takes the channels of their requests."""
    return f"{address[len('ipc://') :]}{_CHANNEL_SUFFIX}"


def is_tcp_address(address: str) -> bool:
    """Return whether libzmq takes this text for the host and the port that it names.

    It takes ports modulo 65,536, and 0 for any that is free: both sides would be somewhere else in silence.
    """
    match = _TCP_ADDRESS.fullmatch(address)
    return match is not None and 1 <= int(match.group(2)) <= MAX_PORT


def split_tcp_address(address: str) -> Tuple[str, int]:
    """Return host and port of what `is_tcp_address` takes; an IPv6 host is in brackets.

    Raises:
        ValueError: it is none.
    """
    match = _TCP_ADDRESS.fullmatch(address)
    if match is None:
        raise ValueError(address)
    return match.group(1), int(match.group(2))
