"""One client, and who it is as the kernel knows it."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import NamedTuple

from weightd.daemon.host.credentials import credentials
from weightd.daemon.requests.request import Origin
from weightd.daemon.tenants.tenant import EVERYONE, Tenant
from weightd.shared.stream import Stream


class Identity(NamedTuple):
    """Who is at the other end.

    Attributes:
        origin: on whose account its requests go.
        may_operate: whether it may change what the daemon does.
        is_near: whether it has connected itself, so that it can share memory.
    """

    origin: Origin
    may_operate: bool = False
    is_near: bool = False


def unix_identity(connection: socket.socket) -> Identity:
    """Return who has connected to a unix socket."""
    pid, uid, _ = credentials(connection)
    return Identity(_origin(f"uid {uid}", pid, connection), uid in (os.getuid(), 0), is_near=True)


def foreign_identity(connection: socket.socket, uid: int | None, pid: int | None, host: str) -> Identity:
    """Return who is behind a gate, by the gate's word: that is enough for inference and for looking."""
    return Identity(_origin(f"uid {uid}" if uid is not None else f"host {host}", pid or 0, connection))


def _origin(user: str, pid: int, connection: socket.socket) -> Origin:
    # A process of another pid namespace has no number here.
    return Origin(f"process {pid} of {user}" if pid else f"connection {connection.fileno()} of {user}", user)


class Connection:
    """A client.

    Attributes:
        key: by which the rest of the daemon knows it; none is used twice.
        stream: the way to it.
        identity: who it is.
        tenant: that it is; None where nobody knows it.
        since: when it came, in monotonic seconds.
        has_spoken: whether a whole message of it has come.
        leaving: it was hung up, and is on its way out.
        arriving: bytes of the message that is coming, as they are counted in the room.
        unread: bytes that it has not read, likewise.
        drops: whether it was told of last that it does not read.
    """

    __slots__ = ("arriving", "drops", "has_spoken", "identity", "key", "leaving", "since", "stream", "tenant", "unread")

    def __init__(
        self, key: bytes, stream: Stream, identity: Identity, since: float, tenant: Tenant | None = EVERYONE
    ) -> None:
        self.key = key
        self.stream = stream
        self.identity = identity
        self.since = since
        self.tenant = tenant
        self.has_spoken = False
        self.leaving = False
        self.arriving = 0
        self.unread = 0
        self.drops = False

    @property
    def user(self) -> str:
        """On whose account it goes."""
        return self.identity.origin.far

    def hang_up(self) -> None:
        """End it: what it has been told already it can still read."""
        self.leaving = True
        with contextlib.suppress(OSError):
            self.stream.let_go()
            self.stream.connection.shutdown(socket.SHUT_RDWR)
