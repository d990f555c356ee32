"""Where the daemon listens, and whether anyone could be there at all."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from weightd.protocol import limits
from weightd.protocol.errors import InvalidArgument, PermissionDenied, RequestError, Unavailable

_HINT = "start it with `weightd serve CONFIG` or `weightd run MODEL`"


def default_address() -> str:
    """Return where weightd listens unless told otherwise: $WEIGHTD_SOCKET, or the default of `weightd`."""
    if "WEIGHTD_SOCKET" in os.environ:
        return os.environ["WEIGHTD_SOCKET"]
    if os.getuid() == 0 or "XDG_RUNTIME_DIR" not in os.environ:
        own = Path(f"/tmp/weightd-{os.getuid()}/weightd.sock")
        directory = own.parent if os.getuid() != 0 and own.exists() else Path("/run/weightd")
    else:
        directory = Path(os.environ["XDG_RUNTIME_DIR"], "weightd")
    return f"ipc://{directory}/weightd.sock"


def check(address: str) -> None:
    """Raise what a connection to `address` would meet, where that can be known at once.

    libzmq connects in the background and tries again for ever: without this, a wrong path or a missing permission
    would look like a slow daemon.

    Raises:
        InvalidArgument: it is no address.
        PermissionDenied: this user may not connect.
        Unavailable: nobody listens there.
    """
    if not address.startswith(("ipc://", "tcp://")):
        raise InvalidArgument(f"expected an address ipc:///PATH or tcp://HOST:PORT, got {address!r}")
    if address.startswith("ipc://"):
        _check_path(address[len("ipc://") :])


def _check_path(path: str) -> None:
    size = len(os.fsencode(path))
    if size > limits.MAX_IPC_PATH_BYTES:
        raise InvalidArgument(
            f"expected a socket path of at most {limits.MAX_IPC_PATH_BYTES} bytes, got {size}: {path}"
        )
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.setblocking(False)
        probe.connect(path)
    except OSError as error:
        problem = _explain(error, path)
        if problem is not None:
            raise problem from None
    finally:
        probe.close()


def _explain(error: OSError, path: str) -> "RequestError | None":
    if error.errno in (errno.EACCES, errno.EPERM):
        return PermissionDenied(f"this user may not connect to {path}: {error.strerror}; ask for membership of its group")
    if error.errno == errno.ENOENT:
        return Unavailable(f"no daemon at {path}: there is no socket; {_HINT}")
    if error.errno == errno.ECONNREFUSED:
        return Unavailable(f"no daemon at {path}: nobody listens on the socket; {_HINT}")
    if error.errno == errno.ENOTSOCK:
        return InvalidArgument(f"{path} is not a socket")
    # EAGAIN: its backlog is full, so someone listens.
    return None
