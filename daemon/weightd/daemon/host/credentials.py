"""Who is at the other end of a unix socket, as the kernel knows it."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

# struct ucred of unix(7).
_UCRED = struct.Struct("=iII")


class Credentials(NamedTuple):
    """Of who has connected, as they were then; the pid of a process of another pid namespace is 0."""

    pid: int
    uid: int
    gid: int


def credentials(connection: socket.socket) -> Credentials:
    """Return whose the other end of a connected unix socket is (SO_PEERCRED)."""
    return Credentials(*_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))
