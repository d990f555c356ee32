"""Where the daemon listens, and whether anyone could be there at all."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from weightd.protocol import limits
from weightd.protocol.errors import InvalidArgument, PermissionDenied, RequestError, Unavailable
from weightd.shared import paths, tcp

_HINT = "start it with `weightd serve CONFIG` or `weightd run MODEL`"


def default_address() -> str:
    """Return where weightd listens unless told otherwise.

    That is $WEIGHTD_SOCKET, or this user's own daemon, or the system's where this user has none.
    """
    given = os.environ.get("WEIGHTD_SOCKET")
    if given:
        return given
    own, system = paths.runtime_dir(), paths.SYSTEM_RUNTIME_DIR
    address = paths.socket_address(own)
    if _is_foreign(own):
        return paths.socket_address(system)
    if not os.path.exists(ipc_path(address)) and os.path.isdir(system):  # noqa: PTH110, PTH112 - these never raise
        return paths.socket_address(system)
    return address


def _is_foreign(directory: str) -> bool:
    """Whether it is another user's: anyone may make a directory in /tmp, and wait there for our tensors."""
    try:
        return os.lstat(directory).st_uid not in (os.getuid(), 0)
    except OSError:
        return False


def ipc_path(address: str) -> str:
    """Return the path of an ipc:// address, "" for any other."""
    return address[len("ipc://") :] if address.startswith("ipc://") else ""


def check(address: str) -> None:
    """Raise what a connection to `address` would meet, where that can be known at once.

    libzmq connects in the background and tries again for ever: without this, a wrong path or a missing permission
    would look like a slow daemon.

    Raises:
        InvalidArgument: it is no address.
        PermissionDenied: this user may not connect.
        Unavailable: nobody listens there.
    """
    path = ipc_path(address)
    if path.startswith("/") and "\0" not in path:
        _check_path(path)
    elif not tcp.is_address(address):
        raise InvalidArgument(f"expected an address ipc:///PATH or {tcp.FORM}, got {address!r}")


def _check_path(path: str) -> None:
    size = len(os.fsencode(path))
    if size > limits.MAX_IPC_PATH_BYTES:
        raise InvalidArgument(
            f"expected a socket path of at most {limits.MAX_IPC_PATH_BYTES} bytes, got {size}: {path}"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            pass  # Its backlog is full, so someone listens.
        except OSError as error:
            raise _explain(error, path) from None


def _explain(error: OSError, path: str) -> RequestError:
    if error.errno in (errno.EACCES, errno.EPERM):
        return PermissionDenied(
            f"this user may not connect to {path}: {error.strerror}; ask for membership of the socket's group"
        )
    if error.errno == errno.ENOENT:
        return Unavailable(f"no daemon at {path}: there is no socket; {_HINT}")
    if error.errno == errno.EPROTOTYPE or not _is_socket(path):
        return InvalidArgument(f"{path} is not a socket of weightd")
    if error.errno == errno.ECONNREFUSED:
        return Unavailable(f"no daemon at {path}: nobody listens on the socket; {_HINT}")
    return Unavailable(f"cannot connect to {path}: {error.strerror}")


def _is_socket(path: str) -> bool:
    try:
        return Path(path).is_socket()
    except OSError:
        return False
