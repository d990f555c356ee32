"""One client, and who it is as the kernel knows it."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from typing import NamedTuple

from weightd_common.peer_credentials import is_operator, peer_credentials, peer_groups
from weightd_common.stream import Stream
from weightd_daemon.platform.connection_limiter import NO_TENANT
from weightd_daemon.scheduling.request import ClientOrigin
from weightd_daemon.tenants.tenant import PeerCredential, Tenant
from weightd_daemon.zmq_proxy.control import PeerIdentity
from weightd_protocol.errors import RequestError, Unauthenticated
from weightd_protocol.framing import Message


class ClientIdentity(NamedTuple):
    """Who is at the other end.

    Attributes:
        origin: on whose account its requests go where nobody tells tenants apart.
        is_direct: whether it has connected itself, so that it can share memory.
        credential: what is proven of it.
        listener: where it has connected; "" for the daemon's own socket.
    """

    origin: ClientOrigin
    is_direct: bool = False
    credential: PeerCredential = PeerCredential()
    listener: str = ""

    @property
    def audit_name(self) -> str:
        """Who it is for the audit log: by its key, its user or its host."""
        return f"key {self.credential.key}" if self.credential.key else self.origin.principal


def unix_identity(connection: socket.socket) -> ClientIdentity:
    """Return who has connected to a unix socket."""
    pid, uid, gid = peer_credentials(connection)
    # Operators may do what they may whatever tenant they are: nobody locks himself out.
    credential = PeerCredential(uid, (gid, *peer_groups(connection)), is_operator=is_operator(uid))
    return ClientIdentity(_client_origin(user_account(uid), pid, connection), is_direct=True, credential=credential)


def user_account(uid: int) -> str:
    """Return the account of a user of this host."""
    return f"uid {uid}"


def proxied_identity(connection: socket.socket, listener: str, peer: PeerIdentity) -> ClientIdentity:
    """Return who is behind the proxy of a listener, by the proxy's word."""
    return ClientIdentity(
        _client_origin(peer.user, peer.pid or 0, connection),
        credential=PeerCredential(peer.uid, peer.gids, peer.public_key),
        listener=listener,
    )


def _client_origin(user: str, pid: int, connection: socket.socket) -> ClientOrigin:
    # A process of another pid namespace has no number here.
    return ClientOrigin(f"process {pid} of {user}" if pid else f"connection {connection.fileno()} of {user}", user)


class ClientConnection:
    """A client.

    Attributes:
        key: by which the rest of the daemon knows it; none is used twice.
        stream: the way to it.
        identity: who it is.
        tenant: that it is; None where each of its messages is refused.
        rejection: with what.
        origin: on whose account its requests go.
        connected_at: when it came, in monotonic seconds.
        limit_account: whose limits hold for the connection before a tenant is known: the user or host, or `NO_TENANT`.
        has_sent_message: whether a whole message of it has come.
        pending_requests: those that are under way.
        is_closing: whether it was hung up, or its client has closed it.
        incoming_bytes: bytes of the message that is coming, as they are counted in the room.
        unread_bytes: bytes that it has not read, likewise.
        is_dropping: whether it was told of last that it does not read.
        backlog: messages that have been read, and not handled.
    """

    __slots__ = (
        "backlog",
        "connected_at",
        "has_sent_message",
        "identity",
        "incoming_bytes",
        "is_closing",
        "is_dropping",
        "key",
        "limit_account",
        "origin",
        "pending_requests",
        "rejection",
        "stream",
        "tenant",
        "unread_bytes",
    )

    def __init__(self, key: bytes, stream: Stream, identity: ClientIdentity, since: float, owner: str = "") -> None:
        self.key = key
        self.stream = stream
        self.identity = identity
        self.connected_at = since
        self.limit_account = owner or identity.origin.principal
        self.tenant: Tenant | None = None
        self.rejection: RequestError = Unauthenticated("unidentified client")
        self.origin = identity.origin
        self.has_sent_message = False
        self.pending_requests = 0
        self.is_closing = False
        self.incoming_bytes = 0
        self.backlog: deque[Message] = deque()
        self.unread_bytes = 0
        self.is_dropping = False

    @property
    def tenant_name(self) -> str:
        """The tenant to which the connection counts, `NO_TENANT` where each of its messages is refused."""
        return NO_TENANT if self.tenant is None else self.tenant.name

    @property
    def is_busy(self) -> bool:
        """Whether a request of it is under way."""
        return self.pending_requests > 0

    @property
    def user(self) -> str:
        """On whose account it goes."""
        return self.origin.principal

    def shut_down(self) -> None:
        """End it: what it has been told already it can still read."""
        self.is_closing = True
        with contextlib.suppress(OSError):
            self.stream.uncork()
            self.stream.connection.shutdown(socket.SHUT_RDWR)
