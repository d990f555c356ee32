"""The user at the other end of a Unix socket, as the kernel knows it, and which user operates a service."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple, Tuple

OVERFLOW_ID = 65534
"""The user id, and the group id, by which the kernel shows all that a user namespace hides: it may be anybody's."""

# struct ucred of unix(7).
_UCRED = struct.Struct("=iII")

# Of unix(7), in no module of Python's. A peer may be in 65,536 groups; Python asks for no more than these of them.
_SO_PEERGROUPS = 59
_MAX_GROUPS = 256


class Credentials(NamedTuple):
    """Of who has connected, as they were then; the pid of a process of another pid namespace is 0."""

    pid: int
    uid: int
    gid: int


def peer_credentials(connection: socket.socket) -> Credentials:
    """Return whose the other end of a connected unix socket is (SO_PEERCRED)."""
    return Credentials(*_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def peer_groups(connection: socket.socket) -> Tuple[int, ...]:
    """Return the supplementary groups of who has connected to a unix socket, as they were then (SO_PEERGROUPS).

    They come from the kernel, not from the files of users and groups. Of a peer that is in more than 256, none.
    """
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    except OSError:
        # Too many, or a socket of whose peer the kernel has not kept them.
        return ()
    return struct.unpack(f"={len(raw) // 4}I", raw)


def is_operator(uid: int) -> bool:
    """Return whether a user operates this service: root, and the user that this process runs as, unless hidden."""
    return uid != OVERFLOW_ID and uid in (0, os.getuid())
