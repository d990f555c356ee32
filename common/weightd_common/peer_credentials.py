"""Kernel-reported credentials of the peer of a unix socket, and the check whether a user is the service's operator."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple, Tuple

OVERFLOW_ID = 65534
"""The user id and group id that the kernel shows for all ids without a mapping in the user namespace."""

# struct ucred, see unix(7).
_UCRED = struct.Struct("=iII")

# SO_PEERGROUPS of unix(7), for which Python has no constant. A peer may be in up to 65,536 groups, but this module
# reads at most 256 groups.
_SO_PEERGROUPS = 59
_MAX_GROUPS = 256


class Credentials(NamedTuple):
    """Credentials of the process at the other end of a unix socket, at the time when it connected.

    The pid is 0 if the process is in a pid namespace that this process cannot see.
    """

    pid: int
    uid: int
    gid: int


def peer_credentials(connection: socket.socket) -> Credentials:
    """Return the credentials of the peer of a connected unix socket (SO_PEERCRED)."""
    return Credentials(*_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def peer_groups(connection: socket.socket) -> Tuple[int, ...]:
    """Return the supplementary groups of a peer at the time it connected to a unix socket (SO_PEERGROUPS).

    The groups come from the kernel, not from the user database. The result is empty for a peer in more than 256 groups.
    """
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    except OSError:
        # The peer is in too many groups, or the kernel has not stored the groups of this socket's peer.
        return ()
    return struct.unpack(f"={len(raw) // 4}I", raw)


def is_operator(uid: int) -> bool:
    """Return whether a user is an operator of this service: root, or the user that runs this process.

    The result is False for OVERFLOW_ID, because a user namespace shows this id for many different users.
    """
    return uid != OVERFLOW_ID and uid in (0, os.getuid())
