"""What the kernel knows of a connection that the library has accepted, by its file descriptor.

The descriptor is the library's, which may close it at any moment: it is only asked, or shut down.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import Generator

from weightd.daemon.gate.link import PeerIdentity

# struct ucred of unix(7).
_UCRED = struct.Struct("=iII")


def identity(descriptor: int) -> PeerIdentity:
    """Return who is at the other end; nobody where that is closed by now."""
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
        if connection.family == socket.AF_UNIX:
            pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            return PeerIdentity(uid, pid, "")
        name = connection.getpeername()
        # A socket that takes both writes addresses of version 4 so.
        return PeerIdentity(None, None, str(name[0]).removeprefix("::ffff:"))
    return PeerIdentity(None, None, "")


def waiting_bytes(descriptor: int) -> int:
    """Return how much has been sent over a connection that the library has not read yet (FIONREAD)."""
    count = struct.pack("=i", 0)
    with contextlib.suppress(OSError):
        count = fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return int(struct.unpack("=i", count)[0])


def write(descriptor: int, data: bytes) -> None:
    """Send a small message (ZMTP 2.0 and later) past the library, over a connection to which it sends nothing.

    The handshake must be over. What does not leave at once is dropped.
    """
    header = struct.pack(">BB", 0, len(data)) if len(data) < 256 else struct.pack(">BQ", 2, len(data))
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
        connection.send(header + data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def shut_down(descriptor: int) -> None:
    """End a connection: the library closes it, as if the other end had gone."""
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:  # it has gone meanwhile
        connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Generator[socket.socket, None, None]:
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()
