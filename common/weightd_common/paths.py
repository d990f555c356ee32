"""Where daemon and client meet unless they are told otherwise: neither may import the other, both must agree."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

# The service's, which systemd makes for it (RuntimeDirectory=weightd), and root's.
SYSTEM_RUNTIME_DIR = "/run/weightd"

_SOCKET_NAME = "weightd.sock"

# Of the path of a unix socket, and of no other socket for clients.
UNIX_SUFFIX = ".unix"

_CHANNEL_SUFFIX = ".channel"


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
