"""How many clients a process has descriptors for, and which connections end when there are more.

The daemon, its proxies and the metrics endpoint each have their own clients, and the same rule for them.
"""

from __future__ import annotations

import resource
from collections import Counter, OrderedDict
from typing import Generic, NamedTuple, Protocol, TypeVar

from weightd_common.rate_limits import TokenBuckets

# Children, logs and stores need some, too; and a library may accept hundreds while nobody looks.
_MIN_RESERVED_DESCRIPTORS = 256
_MAX_RESERVED_DESCRIPTORS = 4096

REOPEN_FRACTION = 0.9
"""After some were hung up, so many of the connections have to end before it is said that there is room again."""

NO_TENANT = "users without a tenant"
"""The account and the user of all clients that are in no tenant's table, where there are tables."""

EVERYONE = "everyone"
"""The account of all clients where tenants are not told apart."""

# The parts of all connections: that all users without a tenant may have together, and that a user keeps of its account
# whatever the other users of the account do.
_NO_TENANT_DIVISOR = 4
_GUARANTEED_DIVISOR = 32


class LimitedConnection(Protocol):
    """A connection.

    Attributes:
        connected_at: when it was opened, in monotonic seconds.
        has_sent_message: whether a whole message has come over it. Once true it remains true.
        is_busy: whether a request that has come over it is under way.
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
    """Take as many descriptors as the system allows: the usual limit of 1,024 is for programs that call select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_client_descriptors() -> int:
    """Return how many descriptors clients may take under the process's present limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, limit - min(max(limit // 2, _MIN_RESERVED_DESCRIPTORS), _MAX_RESERVED_DESCRIPTORS))


def max_total_regions() -> int:
    """Return how many regions of memory all clients together may have: half of the descriptors that no client is."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (limit - max_client_descriptors()) // 2


class Excess(NamedTuple, Generic[G]):
    """A connection that has to end, and why."""

    connection: G
    reason: str


class _Queue(Generic[G]):
    """Connections in the order in which they were added, in two tables."""

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
    """The connections of one account, also by user, and which user has the most."""

    def __init__(self) -> None:
        self.connections: _Queue[G] = _Queue()
        self.user_queues: dict[str, _Queue[G]] = {}
        # The users by how many connections they have: the largest is found without a look at all of them.
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
        """Return which connection has to end: of the user that has the most, unless no user has more than this."""
        if self._max_count > guaranteed:
            return self.user_queues[next(iter(self._users_by_count[self._max_count]))].next_to_evict()
        return self.connections.next_to_evict()


class ConnectionLimiter(Generic[G]):
    """Connections by account and user, and which of them have to end when there are too many.

    An account is a tenant; all users without a tenant are one account, `NO_TENANT`, which has at most a quarter of the
    connections, and whose connections end before those of tenants. Of tenants the one that has the most loses one, so
    none loses any while it has at most its equal share. Within an account, the user that has the most loses one; while
    no user has more than a thirty-second of all connections, the users are not compared: a user who can take many
    identities, with one connection each, pushes out nobody who has two. Among the connections that are left the oldest
    that has never spoken ends, else the newest without a request under way, else the newest. So where all have spoken,
    the new connection is refused.

    The time for a decision does not depend on the numbers of connections and users, unless many connections of the
    user or account in question have requests under way.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, _Account[G]] = {}
        self._account_and_user: dict[G, tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._account_and_user)

    def add(self, connection: G, user: str, account: str = EVERYONE) -> None:
        """Add a connection, the newest one, of a user whose account this is."""
        self._account_and_user[connection] = account, user
        found = self._accounts.get(account)
        if found is None:
            found = self._accounts[account] = _Account()
        found.add(connection, user)

    def remove(self, connection: G) -> None:
        """Remove a connection, if it is there."""
        found = self._account_and_user.pop(connection, None)
        if found is None:
            return
        name, user = found
        account = self._accounts[name]
        account.remove(connection, user)
        if not account:
            del self._accounts[name]

    def evict_excess(self, max_connections: int, limit_name: str) -> list[Excess[G]]:
        """Remove connections until no more than this are left; return them.

        Args:
            max_connections: connections.
            limit_name: the name of this limit.
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
        """Of the accounts that have the most, return the connection whose end costs least."""
        size = max(map(len, self._accounts.values()))
        found = (each.next_to_evict(guaranteed) for each in self._accounts.values() if len(each) == size)
        return min(
            found, key=lambda connection: (connection.is_busy, connection.has_sent_message, -connection.connected_at)
        )


class UserConnectionLimits(NamedTuple):
    """Limits of one user.

    Attributes:
        max_connections: connections that it may have open; 0 for no limit.
        rate: new connections a second, on average; 0 for no limit. A user that opened none for a while may open
            `burst` at once.
    """

    max_connections: int = 0
    rate: float = 0.0

    @property
    def burst(self) -> float:
        """New connections that a user may open at once: as many as it may have, or those of one second."""
        return float(max(1.0, self.rate, self.max_connections))


class ConnectionAdmission:
    """Counts the connections of each user and applies the limits; a decision takes the same time for any number.

    Args:
        limits: of each user.
    """

    def __init__(self, limits: UserConnectionLimits) -> None:
        self._limits = limits
        self._rates = TokenBuckets(limits.rate, limits.burst)
        self._open_connections = Counter[str]()

    def refusal_reason(self, user: str, now: float) -> str | None:
        """Return why a new connection of a user is refused, None if the user may have one more.

        A connection that is not refused counts towards the rate, and towards the open connections after
        `add_connection`.
        """
        limits = self._limits
        if limits.max_connections and self._open_connections[user] >= limits.max_connections:
            return f"this user has {limits.max_connections} connections already (max_user_connections)"
        if not self._rates.take(user, now):
            return f"this user opens more than {limits.rate:g} connections a second (max_user_connection_rate)"
        return None

    def add_connection(self, user: str) -> int:
        """Count one more open connection of a user; return how many it has."""
        self._open_connections[user] += 1
        return self._open_connections[user]

    def remove_connection(self, user: str) -> None:
        """Count one open connection of a user less."""
        self._open_connections[user] -= 1
        if not self._open_connections[user]:
            del self._open_connections[user]

    def __len__(self) -> int:
        """Return how many users are kept: those with connections, and those that opened some a short time ago."""
        return len(self._rates) + len(self._open_connections)
