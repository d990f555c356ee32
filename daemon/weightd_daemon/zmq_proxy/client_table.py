"""Table of a proxy's clients by user. It enforces the limits on connections, handshakes and buffered bytes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from weightd_daemon.platform import event_loop
from weightd_daemon.platform.connection_limiter import (
    EVERYONE,
    NO_TENANT,
    ConnectionAdmission,
    ConnectionLimiter,
    UserConnectionLimits,
    max_client_descriptors,
)
from weightd_daemon.platform.event_loop import EventLoop, Timer
from weightd_daemon.platform.tenant_lookup import TenantCredentials, TenantLookup
from weightd_daemon.zmq_proxy import client as clients
from weightd_daemon.zmq_proxy import sandbox
from weightd_daemon.zmq_proxy.client import ProxyClient
from weightd_daemon.zmq_proxy.control import ProxyConfig

if TYPE_CHECKING:
    from weightd_common.peers import Peers

# Seconds in which a client has to complete its handshake, and maximum number of incomplete handshakes of one user.
HANDSHAKE_TIMEOUT_S = 5.0
MAX_USER_HANDSHAKES = 256

# If more bytes than this threshold were buffered, the proxy returns free memory to the kernel: it waits until the
# number of buffered bytes has not changed for `_TRIM_DELAY_S` seconds.
_TRIM_THRESHOLD_BYTES = 1024 * 1024
_TRIM_DELAY_S = 1.0

# Number of descriptors that the proxy needs for each client: the connection to the client, and one end of the socket
# pair to the daemon.
_DESCRIPTORS_PER_CLIENT = 2


def max_connections(configured_limit: int = 0) -> int:
    """Return how many clients the limit of descriptors and `configured_limit` (0 for none) allow."""
    descriptor_limit = max(1, max_client_descriptors() // _DESCRIPTORS_PER_CLIENT)
    return min(descriptor_limit, configured_limit) if configured_limit else descriptor_limit


class ProxyUser:
    """The connections of one user.

    Attributes:
        clients: the clients of the user.
        handshakes: the clients of the user whose handshake is not complete, the oldest first.
        buffered_bytes: the number of bytes that the proxy buffers for the clients of the user.
    """

    def __init__(self) -> None:
        self.clients: set[ProxyClient] = set()
        self.handshakes: dict[ProxyClient, None] = {}
        self.buffered_bytes = 0


class ClientTable:
    """All clients of a proxy.

    Args:
        config: the configuration of the proxy, with the limits and the credentials of the tenants.
        loop: runs the timers.
        peers: identifies the clients of a TCP listener; None for a Unix socket.
        disconnect: called with a client that exceeds a limit, and the reason; disconnects the client.

    Attributes:
        users: the users with connections, by name.
        handshakes: the clients of all users whose handshake is not complete, the oldest first.
        buffered_bytes: the number of bytes that the proxy buffers for all clients.
    """

    def __init__(
        self,
        config: ProxyConfig,
        loop: EventLoop,
        peers: Peers | None,
        disconnect: Callable[[ProxyClient, str], object],
    ) -> None:
        self.users: dict[str, ProxyUser] = {}
        self.handshakes: dict[ProxyClient, None] = {}
        self.buffered_bytes = 0
        self._config = config
        self._peers = peers
        self._disconnect = disconnect
        self._tenant_lookup = _make_tenant_lookup(config.tenant_members)
        self._admission = ConnectionAdmission(
            UserConnectionLimits(config.max_user_connections, config.max_user_connection_rate)
        )
        self._limiter: ConnectionLimiter[ProxyClient] = ConnectionLimiter()
        self._handshake_timer = Timer(self._on_handshake_timer)
        self._trim_timer = Timer(lambda _: sandbox.trim_heap())
        loop.add_timer(self._handshake_timer)
        loop.add_timer(self._trim_timer)

    def __iter__(self) -> Iterator[ProxyClient]:
        return (client for user in self.users.values() for client in user.clients)

    def close(self) -> None:
        """Close all connections."""
        for each in self:
            each.close()
        if self._peers is not None:
            self._peers.close()

    def identify_user(self, connection: socket.socket) -> tuple[str, bool]:
        """Return the user whose limits apply to a new connection, and whether the client is an operator.

        If tenants are configured, all users without a tenant count as one user on a Unix socket. Over TCP, these users
        count separately, because the proxy may learn their tenant only from the key in the handshake.

        Raises:
            OSError: the client has disconnected.
        """
        user, is_operator = clients.identify_user(connection, self._peers)
        if self._tenant_lookup is None or self._peers is not None or is_operator:
            return user, is_operator
        has_tenant = clients.tenant_of(connection, "", self._tenant_lookup) not in (None, NO_TENANT)
        return user if has_tenant else NO_TENANT, False

    def refusal_reason(self, user: str, now: float) -> str | None:
        """Return why a new connection of a user is refused; None if the connection is accepted."""
        return self._admission.refusal_reason(user, now)

    def connection_count(self, user: str) -> int:
        """Return the number of connections of a user."""
        return len(self.users[user].clients) if user in self.users else 0

    def add(self, client: ProxyClient) -> None:
        """Add a new client, whose handshake begins; disconnect clients beyond the limits."""
        user = self.users.setdefault(client.user, ProxyUser())
        user.clients.add(client)
        user.handshakes[client] = self.handshakes[client] = None
        self._admission.add_connection(client.user)
        self._limiter.add(client, client.user, self._account_of(client))
        self._handshake_timer.set_no_later_than(client.connected_at + HANDSHAKE_TIMEOUT_S)
        if len(user.handshakes) > MAX_USER_HANDSHAKES:
            self._disconnect(
                next(iter(user.handshakes)), f"its user has more than {MAX_USER_HANDSHAKES} handshakes under way"
            )
        self._evict_excess()

    def remove(self, client: ProxyClient) -> None:
        """Remove a closed client."""
        self._forget_handshake(client)
        self._limiter.remove(client)
        self._admission.remove_connection(client.user)
        user = self.users[client.user]
        user.clients.discard(client)
        user.buffered_bytes -= client.buffered_bytes
        self.buffered_bytes -= client.buffered_bytes
        if not user.clients:
            del self.users[client.user]

    def on_handshake_complete(self, client: ProxyClient) -> None:
        """Record that a client has completed its handshake. A client with a key now counts to the key's tenant."""
        self._forget_handshake(client)
        if client.protocol.mechanism.peer_key and self._tenant_lookup is not None:
            self._limiter.remove(client)
            self._limiter.add(client, client.user, self._account_of(client))
            self._evict_excess()

    def update_tenants(self, members: Sequence[TenantCredentials] | None) -> None:
        """Replace the credentials of the tenants, and assign each client to its new tenant."""
        self._tenant_lookup = _make_tenant_lookup(members)
        self._limiter = ConnectionLimiter()
        for each in sorted(self, key=lambda client: client.connected_at):
            self._limiter.add(each, each.user, self._account_of(each))
        self._evict_excess()

    def update_buffered_bytes(self, client: ProxyClient) -> None:
        """Count a client's buffered bytes again; while the total exceeds the limit, disconnect the largest client.

        The largest client is the client with the most buffered bytes of the user with the most buffered bytes.
        """
        if client.is_closed:
            return
        growth = client.count_buffered_bytes() - client.buffered_bytes
        if not growth:
            return
        client.buffered_bytes += growth
        self.users[client.user].buffered_bytes += growth
        self.buffered_bytes += growth
        if self.buffered_bytes > _TRIM_THRESHOLD_BYTES:
            self._trim_timer.set(event_loop.now() + _TRIM_DELAY_S)
        max_bytes = self._config.max_memory_bytes
        while self.buffered_bytes > max_bytes:
            user = max(self.users.values(), key=lambda each: each.buffered_bytes)
            largest = max(user.clients, key=lambda each: each.buffered_bytes)
            self._disconnect(
                largest,
                f"more than {max_bytes} bytes (max_memory_bytes) are kept for clients, and {user.buffered_bytes} of"
                " them for this user",
            )

    def _account_of(self, client: ProxyClient) -> str:
        if self._tenant_lookup is None:
            return EVERYONE
        with contextlib.suppress(OSError):  # the client has disconnected
            return (
                clients.tenant_of(client.connection, client.protocol.mechanism.peer_key, self._tenant_lookup)
                or NO_TENANT
            )
        return NO_TENANT

    def _evict_excess(self) -> None:
        """Disconnect clients until the limits on connections hold."""
        limit = max_connections(self._config.max_connections)
        limit_name = "max_connections" if limit == self._config.max_connections else "LimitNOFILE"
        for each in self._limiter.evict_excess(limit, limit_name):
            self._disconnect(each.connection, each.reason)

    def _on_handshake_timer(self, now: float) -> None:
        while self.handshakes:
            first = next(iter(self.handshakes))
            if first.connected_at + HANDSHAKE_TIMEOUT_S > now:
                self._handshake_timer.set(first.connected_at + HANDSHAKE_TIMEOUT_S)
                return
            self._disconnect(first, f"its handshake is not complete after {HANDSHAKE_TIMEOUT_S:g} s")

    def _forget_handshake(self, client: ProxyClient) -> None:
        self.handshakes.pop(client, None)
        self.users[client.user].handshakes.pop(client, None)


def _make_tenant_lookup(tenants: Sequence[TenantCredentials] | None) -> TenantLookup | None:
    return None if tenants is None else TenantLookup(tenants)
