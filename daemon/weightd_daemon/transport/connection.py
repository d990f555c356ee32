"""One client connection, and the identity of its client as the kernel or a ZeroMQ proxy reports it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
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
    """The identity of the client at the other end of a connection.

    Attributes:
        origin: the process and the principal that the client's requests have if no tenants are configured.
        is_direct: whether the client is connected to the daemon's own Unix socket, over which it can share memory.
        credential: the proven properties of the client, from which its tenant is derived.
        listener: the name of the ZeroMQ listener to which the client has connected; "" for the daemon's own socket.
    """

    origin: ClientOrigin
    is_direct: bool = False
    credential: PeerCredential = PeerCredential()
    listener: str = ""

    @property
    def audit_name(self) -> str:
        """The name of the client in the audit log: its public key if it has one, otherwise its user or host."""
        return f"key {self.credential.key}" if self.credential.key else self.origin.principal


def unix_identity(connection: socket.socket) -> ClientIdentity:
    """Return the identity of the client at the other end of a Unix socket."""
    pid, uid, gid = peer_credentials(connection)
    # Only the uid makes a client an operator, whichever tenant it is assigned to. So operators cannot lock themselves
    # out by a mistake in the tables of tenants.
    credential = PeerCredential(uid, (gid, *peer_groups(connection)), is_operator=is_operator(uid))
    return ClientIdentity(_client_origin(user_account(uid), pid, connection), is_direct=True, credential=credential)


def user_account(uid: int) -> str:
    """Return the principal of a user of this host."""
    return f"uid {uid}"


def proxied_identity(connection: socket.socket, listener: str, peer: PeerIdentity) -> ClientIdentity:
    """Return the identity of a client behind the proxy of a listener, as the proxy reports the identity."""
    return ClientIdentity(
        _client_origin(peer.user, peer.pid or 0, connection),
        credential=PeerCredential(peer.uid, peer.gids, peer.public_key),
        listener=listener,
    )


def _client_origin(user: str, pid: int, connection: socket.socket) -> ClientOrigin:
    # The pid is 0 for a process in another pid namespace. Such a client is named by its connection.
    return ClientOrigin(f"process {pid} of {user}" if pid else f"connection {connection.fileno()} of {user}", user)


class ClientConnection:
    """The connection of one client.

    Attributes:
        key: identifies the connection in the daemon; no later connection gets the same key.
        stream: reads and writes messages.
        identity: the identity of the client.
        tenant: the tenant of the client; None if each of its messages is rejected.
        rejection: the error with which messages are rejected if `tenant` is None.
        origin: the process and the principal of the client's requests.
        connected_at: when the daemon accepted the connection, in monotonic seconds.
        limit_account: the account whose connection limits apply: the user or host, or `NO_TENANT`.
        has_sent_message: whether the client has sent at least one complete message.
        pending_requests: the number of requests in progress.
        is_closing: whether the daemon has shut the connection down or the client has closed it.
        incoming_bytes: the bytes of a partly received message that are reserved in the memory budget.
        unread_bytes: the bytes that the client has not read, which are reserved in the memory budget.
        is_dropping: whether a warning was logged that replies are dropped, because the client does not read them.
        backlog: the messages that were read but not handled yet.
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
        self.backlog: Sequence[Message] = ()
        self.unread_bytes = 0
        self.is_dropping = False

    @property
    def tenant_name(self) -> str:
        """The name of the client's tenant; `NO_TENANT` if each message of the client is rejected."""
        return NO_TENANT if self.tenant is None else self.tenant.name

    @property
    def is_busy(self) -> bool:
        """Whether a request of the client is in progress."""
        return self.pending_requests > 0

    @property
    def user(self) -> str:
        """The principal of the client's requests."""
        return self.origin.principal

    def shut_down(self) -> None:
        """Send corked messages and shut the connection down. The client can still read what was sent."""
        self.is_closing = True
        with contextlib.suppress(OSError):
            self.stream.uncork()
            self.stream.connection.shutdown(socket.SHUT_RDWR)
