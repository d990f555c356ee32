"""What the kernel knows of a connection that the library has accepted, by its file descriptor.

The descriptor is the library's, which may close it at any moment, and its number may then be another file's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Generator
from typing import NamedTuple

from weightd.daemon.gate.link import PeerIdentity
from weightd.daemon.host.credentials import credentials, groups


class Handle(NamedTuple):
    """A descriptor, and the device and inode that it stood for: no two sockets have the same for a long time."""

    descriptor: int
    file: tuple[int, int]


def handle(descriptor: int) -> Handle:
    """Return what is there now."""
    file = (0, 0)
    with contextlib.suppress(OSError):
        file = _file(descriptor)
    return Handle(descriptor, file)


def identity(connection: Handle) -> PeerIdentity:
    """Return who is at the other end; nobody where that is closed by now."""
    with contextlib.suppress(OSError), _own(connection) as own:
        if own.family == socket.AF_UNIX:
            pid, uid, gid = credentials(own)
            return PeerIdentity(uid, pid, "", (gid, *groups(own)))
        name = own.getpeername()
        # A socket that takes both writes addresses of version 4 so.
        return PeerIdentity(None, None, str(name[0]).removeprefix("::ffff:"))
    return PeerIdentity(None, None, "")


def waiting_bytes(descriptor: int) -> int:
    """Return how much has been sent over a connection that the library has not read yet (FIONREAD)."""
    count = struct.pack("=i", 0)
    with contextlib.suppress(OSError):
        count = fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return int(struct.unpack("=i", count)[0])


def write(connection: Handle, data: bytes) -> None:
    """Send a small message (ZMTP 2.0 and later) past the library, over a connection to which it sends nothing.

    The handshake must be over. What does not leave at once is dropped.
    """
    header = struct.pack(">BB", 0, len(data)) if len(data) < 256 else struct.pack(">BQ", 2, len(data))
    with contextlib.suppress(OSError), _own(connection) as own:
        own.send(header + data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def shut_down(connection: Handle) -> None:
    """End a connection: the library closes it, as if the other end had gone."""
    with contextlib.suppress(OSError), _own(connection) as own:  # it has gone meanwhile
        own.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _own(connection: Handle) -> Generator[socket.socket, None, None]:
    """Give the same socket under another descriptor, where nobody can put another one in its place."""
    descriptor = os.dup(connection.descriptor)
    try:
        if _file(descriptor) != connection.file:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        own = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise
    with own:
        yield own


def _file(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
