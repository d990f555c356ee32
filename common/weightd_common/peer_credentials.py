"""Credentials of the peer of a unix socket as reported by the kernel, and which users operate a service."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple, Tuple

OVERFLOW_ID = 65534
"""The user id and group id that the kernel shows for all ids without a mapping in the user namespace."""

# struct ucred, see unix(7).
_UCRED = struct.Struct("=iII")

# See unix(7); Python has no constant for it. A peer may be in 65,536 groups, but this module reads at most 256.
_SO_PEERGROUPS = 59
_MAX_GROUPS = 256


class Credentials(NamedTuple):
    """Credentials of a peer at the time it connected. The pid of a process in another pid namespace is 0."""

    pid: int
    uid: int
    gid: int


def peer_credentials(connection: socket.socket) -> Credentials:
    """Return the credentials of the peer of a connected unix socket (SO_PEERCRED)."""
    return Credentials(*_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def peer_groups(connection: socket.socket) -> Tuple[int, ...]:
    """Return the supplementary groups of a peer at the time it connected to a unix socket (SO_PEERGROUPS).

    They come from the kernel, not from the user database. The result is empty for a peer in more than 256 groups.
    """
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    except OSError:
        # Too many groups, or a socket for whose peer the kernel has not stored them.
        return ()
    return struct.unpack(f"={len(raw) // 4}I", raw)


def is_operator(uid: int) -> bool:
    """Return whether a user operates this service: root or this process's user, unless a namespace hides the id."""
    return uid != OVERFLOW_ID and uid in (0, os.getuid())
