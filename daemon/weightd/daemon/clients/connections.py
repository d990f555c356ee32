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
from typing import NamedTuple

import zmq

from weightd.daemon.host.sockets import unix_peer
from weightd.daemon.requests.request import Origin

# struct ucred of unix(7).
_UCRED = struct.Struct("=iII")


class Credentials(NamedTuple):
    """The process at the other end of a unix socket when it connected (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int


def credentials(descriptor: int) -> Credentials | None:
    """Return who is at the other end; None where the kernel does not know: over TCP, or once it is closed."""
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
        if connection.family == socket.AF_UNIX:
            return Credentials(*_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)))
    return None


def user(descriptor: int) -> str:
    """Return on whose account a connection goes: "uid 1000", over TCP the host; "" once it is closed."""
    known = credentials(descriptor)
    if known is not None:
        return f"uid {known.uid}"
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
        name = connection.getpeername()
        return f"host {name[0]}" if isinstance(name, tuple) else ""
    return ""


def peer_uid(identity: zmq.Frame) -> int | None:
    """Return the user of the process that has sent a message, by its first frame, as the kernel knows it.

    None for TCP, and once the connection has ended: then nobody vouches for what the library says of it.
    """
    peer = unix_peer(identity)
    if peer is None:
        return None
    known = credentials(int(identity.get(zmq.SRCFD)))
    return known.uid if known is not None and known.uid == peer.uid else None


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


def origin(descriptor: int, peer: bytes) -> Origin:
    """Return who is at the other end, of a connection on which messages come with this routing id."""
    far = user(descriptor) or "a user who has gone"
    known = credentials(descriptor)
    # A process of another pid namespace has no number here.
    near = f"process {known.pid}" if known is not None and known.pid else f"connection {peer.hex()}"
    return Origin(f"{near} of {far}", far)


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
