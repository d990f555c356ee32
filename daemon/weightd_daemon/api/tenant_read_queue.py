"""Whose messages the daemon reads next: where several users speak, its own time is shared among them, too.

A message costs the daemon's one loop some tens of microseconds, and who sends enough of them, of whatever kind, would
have all of its time. So connections wait in read queues, one for each tenant, and the tenant is next that
has had least of that time, by its weight: a clock like that of a device. The users of one tenant take turns, and so do
all users where there are no tenants. Plain decisions, fed with the clock.
"""

from __future__ import annotations

from weightd_daemon.api.connection import ClientConnection
from weightd_daemon.config.tenants import MIN_WEIGHT, TenantConfig
from weightd_daemon.platform import clock
from weightd_daemon.scheduling.fair_share import MULTI_TENANT_HOLD_S, FairClock
from weightd_daemon.tenants.tenant import Tenant

# Those whose messages are all refused are one, and no tenant has less weight.
_NO_TENANT_QUEUE = Tenant("(no tenant)", TenantConfig(weight=MIN_WEIGHT))


class TenantReadQueue:
    """Connections from which something has come that has not been read."""

    def __init__(self) -> None:
        self._clock = FairClock()
        # The connections of each user of each tenant. Of users and of connections the next one is first.
        self._queues: dict[Tenant, dict[str, dict[ClientConnection, None]]] = {}
        # Where each connection waits. A reload may change its tenant or user meanwhile.
        self._positions: dict[ClientConnection, tuple[Tenant, str]] = {}
        self._last_sender: tuple[Tenant, str] | None = None
        self._contended_until = -float("inf")

    def is_contended(self, connection: ClientConnection) -> bool:
        """A user speaks: return whether another one has within `MULTI_TENANT_HOLD_S`.

        While one alone does, this costs no look at a clock.
        """
        sender = (connection.tenant or _NO_TENANT_QUEUE, connection.origin.principal)
        if sender != self._last_sender:
            if self._last_sender is not None:
                self._contended_until = clock.now() + MULTI_TENANT_HOLD_S
            self._last_sender = sender
        elif self._contended_until < 0.0:
            return False
        if clock.now() < self._contended_until:
            return True
        self._contended_until = -float("inf")
        return bool(self._queues)

    def put(self, connection: ClientConnection) -> None:
        """Something has come from it."""
        tenant, user = connection.tenant or _NO_TENANT_QUEUE, connection.origin.principal
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = {}
            self._clock.add_active(tenant)
        queue.setdefault(user, {})[connection] = None
        self._positions[connection] = tenant, user

    def __bool__(self) -> bool:
        return bool(self._queues)

    def take(self) -> tuple[Tenant, ClientConnection]:
        """Return whose turn it is, and take it out; it may wait again, behind the others of its user."""
        tenant = min(self._queues, key=self._clock.sort_key)
        queue = self._queues[tenant]
        user = next(iter(queue))
        connections = queue.pop(user)
        connection = next(iter(connections))
        del connections[connection], self._positions[connection]
        if connections:
            queue[user] = connections
        return tenant, connection

    def on_served(self, tenant: Tenant, seconds: float) -> None:
        """The one that was taken last has had so much of the loop's time, and waits again if it has to."""
        self._clock.start_batch({tenant: 1.0}, 0.0).settle(seconds)
        queue = self._queues.get(tenant)
        # It is gone already where the others in it were hung up meanwhile.
        if queue is not None and not queue:
            del self._queues[tenant]
            self._clock.remove_active(tenant)

    def remove(self, connection: ClientConnection) -> None:
        """A connection has closed; it may be the one that was taken last, which does not wait."""
        if connection not in self._positions:
            return
        tenant, user = self._positions.pop(connection)
        queue = self._queues[tenant]
        del queue[user][connection]
        if not queue[user]:
            del queue[user]
        if not queue:
            del self._queues[tenant]
            self._clock.remove_active(tenant)
