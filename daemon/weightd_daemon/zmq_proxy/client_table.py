"""All clients of a proxy: whose they are, how many each user may have, and what is kept for them."""

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

# A client has to complete its handshake in this time, and a user may have so many that have not.
HANDSHAKE_TIMEOUT_S = 5.0
MAX_USER_HANDSHAKES = 256

# After more than this was kept, and nothing for some time, memory is given back to the kernel.
_TRIM_THRESHOLD_BYTES = 1024 * 1024
_TRIM_DELAY_S = 1.0

# Of a connection: its own, and this end of its pair.
_DESCRIPTORS_PER_CLIENT = 2


def max_connections(configured_limit: int = 0) -> int:
    """Return how many clients may be connected under the process's present limit, and this bound if it is none of 0."""
    descriptor_limit = max(1, max_client_descriptors() // _DESCRIPTORS_PER_CLIENT)
    return min(descriptor_limit, configured_limit) if configured_limit else descriptor_limit


class ProxyUser:
    """What one user has here.

    Attributes:
        clients: its connections.
        handshakes: those of them whose handshake is not complete, the oldest first.
        buffered_bytes: that are kept for them.
    """

    def __init__(self) -> None:
        self.clients: set[ProxyClient] = set()
        self.handshakes: dict[ProxyClient, None] = {}
        self.buffered_bytes = 0


class ClientTable:
    """The clients of a proxy, by their users.

    Args:
        config: the limits, and who belongs to which tenant.
        loop: calls the timers.
        peers: identifies the clients of a listener of TCP; None where it listens on a Unix socket.
        disconnect: called with a client that has to go, and why.

    Attributes:
        users: by their names; of whoever has a connection.
        handshakes: the clients whose handshake is not complete, the oldest first.
        buffered_bytes: that are kept for all clients.
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
        """Return the user of a new connection, and whether it is an operator.

        All users of a Unix socket that belong to no tenant are one user. Over TCP a key may still show the tenant.

        Raises:
            OSError: it has gone.
        """
        user, is_operator = clients.identify_user(connection, self._peers)
        if self._tenant_lookup is None or self._peers is not None or is_operator:
            return user, is_operator
        has_tenant = clients.tenant_of(connection, "", self._tenant_lookup) not in (None, NO_TENANT)
        return user if has_tenant else NO_TENANT, False

    def refusal_reason(self, user: str, now: float) -> str | None:
        """Return why a new connection of a user is refused, None if the user may have one more."""
        return self._admission.refusal_reason(user, now)

    def connection_count(self, user: str) -> int:
        """Return how many connections a user has."""
        return len(self.users[user].clients) if user in self.users else 0

    def add(self, client: ProxyClient) -> None:
        """Add a client whose handshake begins."""
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
        """Forget a client that is closed."""
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
        """Record that a client has completed its handshake; if it has shown a key, it counts as its tenant's now."""
        self._forget_handshake(client)
        if client.protocol.mechanism.peer_key and self._tenant_lookup is not None:
            self._limiter.remove(client)
            self._limiter.add(client, client.user, self._account_of(client))
            self._evict_excess()

    def update_tenants(self, members: Sequence[TenantCredentials] | None) -> None:
        """Use other tables of tenants: all clients get the accounts that they have by them."""
        self._tenant_lookup = _make_tenant_lookup(members)
        self._limiter = ConnectionLimiter()
        for each in sorted(self, key=lambda client: client.connected_at):
            self._limiter.add(each, each.user, self._account_of(each))
        self._evict_excess()

    def update_buffered_bytes(self, client: ProxyClient) -> None:
        """See how much is kept for a client; where that is too much in all, hang up who has most."""
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
        with contextlib.suppress(OSError):  # it has gone
            return (
                clients.tenant_of(client.connection, client.protocol.mechanism.peer_key, self._tenant_lookup)
                or NO_TENANT
            )
        return NO_TENANT

    def _evict_excess(self) -> None:
        """Hang up the connections that are too many."""
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
