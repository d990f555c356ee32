"""Limits on client connections: how many a process has descriptors for, and which ones it closes when there are more.

The daemon, its proxies and the metrics endpoint each limit their own clients by the same rules.
"""

from __future__ import annotations

import resource
from collections import Counter, OrderedDict
from typing import Generic, NamedTuple, Protocol, TypeVar

from weightd_common.rate_limits import TokenBuckets

# Descriptors for children, logs and stores, and for connections that a library accepts before the limits are applied.
_MIN_RESERVED_DESCRIPTORS = 256
_MAX_RESERVED_DESCRIPTORS = 4096

REOPEN_FRACTION = 0.9
"""After connections were closed: the fraction of the limit below which the log reports free connections again."""

NO_TENANT = "users without a tenant"
"""The account and the user of all clients without a tenant, if tenants are configured."""

EVERYONE = "everyone"
"""The account of all clients, if no tenants are configured."""

# Divisors of the number of all connections: the share that all users without a tenant may have together, and the share
# of its account that a user keeps whatever the account's other users do.
_NO_TENANT_DIVISOR = 4
_GUARANTEED_DIVISOR = 32


class LimitedConnection(Protocol):
    """A connection as the limiter sees it.

    Attributes:
        connected_at: when the connection was opened, in monotonic seconds.
        has_sent_message: whether the peer has sent a whole message. Once true it remains true.
        is_busy: whether a request of the connection is being processed.
    """

    @property
    def connected_at(self) -> float:  # noqa: D102
        ...

    @property
    def has_sent_message(self) -> bool:  # noqa: D102
        ...

    @property
    def is_busy(self) -> bool:  # noqa: D102
        ...


G = TypeVar("G", bound=LimitedConnection)


def raise_descriptor_limit() -> None:
    """Raise the limit of descriptors to the hard limit: the usual 1,024 is meant for programs that call select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_client_descriptors() -> int:
    """Return how many descriptors clients may use under the process's current limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, limit - min(max(limit // 2, _MIN_RESERVED_DESCRIPTORS), _MAX_RESERVED_DESCRIPTORS))


def max_total_regions() -> int:
    """Return how many regions of memory all clients together may have: half of the descriptors kept for other uses."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (limit - max_client_descriptors()) // 2


class Excess(NamedTuple, Generic[G]):
    """A connection that has to be closed, and the reason."""

    connection: G
    reason: str


class _Queue(Generic[G]):
    """Connections in the order in which they were added: those known to have sent a message, and the others."""

    def __init__(self) -> None:
        # `next_to_evict` moves connections that have sent a message from the front of `unchecked` to the end of
        # `active`. So all connections in `unchecked` were added after all in `active`.
        self.active: OrderedDict[G, None] = OrderedDict()
        self.unchecked: OrderedDict[G, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.active) + len(self.unchecked)

    def remove(self, connection: G) -> None:
        self.active.pop(connection, None)
        self.unchecked.pop(connection, None)

    def next_to_evict(self) -> G:
        """Return the oldest silent connection; else the newest without a request under way; else the newest."""
        while self.unchecked:
            oldest = next(iter(self.unchecked))
            if not oldest.has_sent_message:
                return oldest
            del self.unchecked[oldest]
            self.active[oldest] = None
        newest = next(reversed(self.active))
        return next((each for each in reversed(self.active) if not each.is_busy), newest)


class _Account(Generic[G]):
    """The connections of one account, also by user, and the user with the most connections."""

    def __init__(self) -> None:
        self.connections: _Queue[G] = _Queue()
        self.user_queues: dict[str, _Queue[G]] = {}
        # Users by their number of connections, so that the largest is found without a scan of all users.
        self._users_by_count: dict[int, dict[str, None]] = {0: {}}
        self._max_count = 0

    def __len__(self) -> int:
        return len(self.connections)

    def add(self, connection: G, user: str) -> None:
        queue = self.user_queues.get(user)
        if queue is None:
            queue = self.user_queues[user] = _Queue()
        queue.unchecked[connection] = self.connections.unchecked[connection] = None
        self._update_count(user, len(queue) - 1, len(queue))

    def remove(self, connection: G, user: str) -> None:
        queue = self.user_queues[user]
        queue.remove(connection)
        self.connections.remove(connection)
        self._update_count(user, len(queue) + 1, len(queue))
        if not queue:
            del self.user_queues[user]

    def _update_count(self, user: str, before: int, after: int) -> None:
        if before:
            del self._users_by_count[before][user]
        if after:
            self._users_by_count.setdefault(after, {})[user] = None
        if not self._users_by_count[before] and before:
            del self._users_by_count[before]
        if after > self._max_count or before == self._max_count not in self._users_by_count:
            self._max_count = after

    def next_to_evict(self, guaranteed: int) -> G:
        """Return the connection to close: one of the largest user if it has more than `guaranteed`, else any user's."""
        if self._max_count > guaranteed:
            return self.user_queues[next(iter(self._users_by_count[self._max_count]))].next_to_evict()
        return self.connections.next_to_evict()


class ConnectionLimiter(Generic[G]):
    """Connections by account and user; decides which ones to close when there are too many.

    An account is a tenant; all users without a tenant share one account, `NO_TENANT`, which may have at most a quarter
    of the connections, and whose connections are closed before any of a tenant. Among tenants, the tenant with the
    most connections loses one, so a tenant with at most its equal share loses none. Within an account, the user with
    the most connections loses one. While no user has more than a thirty-second of all connections, users are not
    compared: an attacker with many identities and one connection each cannot push out a user with two connections.
    Among the connections that remain, the oldest one that has never sent a message is closed, else the newest one
    without a request in progress, else the newest one. So if all connections have sent a message, the new connection is
    refused.

    The time for a decision does not depend on the numbers of connections and users, unless many connections of the user
    or account in question have requests in progress.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, _Account[G]] = {}
        self._account_and_user: dict[G, tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._account_and_user)

    def add(self, connection: G, user: str, account: str = EVERYONE) -> None:
        """Add a new connection of a user; the user belongs to this account."""
        self._account_and_user[connection] = account, user
        found = self._accounts.get(account)
        if found is None:
            found = self._accounts[account] = _Account()
        found.add(connection, user)

    def remove(self, connection: G) -> None:
        """Remove a connection, if the limiter has it."""
        found = self._account_and_user.pop(connection, None)
        if found is None:
            return
        name, user = found
        account = self._accounts[name]
        account.remove(connection, user)
        if not account:
            del self._accounts[name]

    def evict_excess(self, max_connections: int, limit_name: str) -> list[Excess[G]]:
        """Remove connections until the limits hold; return the removed ones.

        Args:
            max_connections: the maximum number of connections.
            limit_name: the name of this limit, for the reason.
        """
        evicted: list[Excess[G]] = []
        guaranteed = max(1, max_connections // _GUARANTEED_DIVISOR)
        max_without_tenant = max(1, max_connections // _NO_TENANT_DIVISOR)
        while (strangers := self._accounts.get(NO_TENANT)) or len(self) > max_connections:
            if strangers is not None and len(strangers) > max_without_tenant:
                connection = strangers.next_to_evict(guaranteed)
                why = (
                    f"expected at most {max_without_tenant} of {NO_TENANT}, a part of {max_connections} ({limit_name}),"
                    f" got {len(strangers)}"
                )
            elif len(self) <= max_connections:
                break
            else:
                connection = (
                    self._next_to_evict(guaranteed) if strangers is None else strangers.next_to_evict(guaranteed)
                )
                account, user = self._account_and_user[connection]
                count = len(self._accounts[account].user_queues[user])
                why = (
                    f"expected at most {max_connections} connections ({limit_name}), got {len(self)}, of which {user}"
                    f" has {count}"
                )
                if account not in (EVERYONE, NO_TENANT):
                    why += f", and tenant {account} {len(self._accounts[account])}"
            self.remove(connection)
            evicted.append(Excess(connection, why))
        return evicted

    def _next_to_evict(self, guaranteed: int) -> G:
        """Return the connection of the largest accounts whose end costs least."""
        size = max(map(len, self._accounts.values()))
        found = (each.next_to_evict(guaranteed) for each in self._accounts.values() if len(each) == size)
        return min(
            found, key=lambda connection: (connection.is_busy, connection.has_sent_message, -connection.connected_at)
        )


class UserConnectionLimits(NamedTuple):
    """Limits of one user.

    Attributes:
        max_connections: the number of open connections; 0 for no limit.
        rate: new connections a second, on average; 0 for no limit. A user that has opened none for a while may open
            `burst` at once.
    """

    max_connections: int = 0
    rate: float = 0.0

    @property
    def burst(self) -> float:
        """The number of connections that a user may open at once: `max_connections`, or `rate` if that is more."""
        return float(max(1.0, self.rate, self.max_connections))


class ConnectionAdmission:
    """Admission control for the connections of each user; a decision takes constant time.

    Args:
        limits: the limits of each user.
    """

    def __init__(self, limits: UserConnectionLimits) -> None:
        self._limits = limits
        self._rates = TokenBuckets(limits.rate, limits.burst)
        self._open_connections = Counter[str]()

    def refusal_reason(self, user: str, now: float) -> str | None:
        """Return why a new connection of a user is refused; None if it is admitted.

        An admitted connection counts towards the rate at once, and towards the open connections after `add_connection`.
        """
        limits = self._limits
        if limits.max_connections and self._open_connections[user] >= limits.max_connections:
            return f"this user has {limits.max_connections} connections already (max_user_connections)"
        if not self._rates.take(user, now):
            return f"this user opens more than {limits.rate:g} connections a second (max_user_connection_rate)"
        return None

    def add_connection(self, user: str) -> int:
        """Count one more open connection of a user; return the user's number of open connections."""
        self._open_connections[user] += 1
        return self._open_connections[user]

    def remove_connection(self, user: str) -> None:
        """Count one open connection of a user less."""
        self._open_connections[user] -= 1
        if not self._open_connections[user]:
            del self._open_connections[user]

    def __len__(self) -> int:
        """Return the number of entries: users with open connections, and users that opened some a short time ago."""
        return len(self._rates) + len(self._open_connections)
