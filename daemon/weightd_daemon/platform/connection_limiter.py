"""Limits on client connections: how many a process may have, and which ones it closes if it has too many.

The daemon, each ZeroMQ proxy and the metrics endpoint apply these rules to their own clients.
"""

from __future__ import annotations

import resource
from collections import Counter, OrderedDict
from typing import Generic, NamedTuple, Protocol, TypeVar

from weightd_common.rate_limits import TokenBuckets

# Minimum and maximum number of descriptors that clients may not use. They are reserved for child processes, logs, page
# stores, and connections that a library accepts before the limits are applied. Within these bounds, half of the
# process's descriptors are reserved.
_MIN_RESERVED_DESCRIPTORS = 256
_MAX_RESERVED_DESCRIPTORS = 4096

REOPEN_FRACTION = 0.9
"""After connections had to be closed, the daemon logs that it accepts connections again once their number is below this
fraction of the limit.
"""

NO_TENANT = "users without a tenant"
"""If tenants are configured: name of the account of all clients without a tenant, and of its only user."""

EVERYONE = "everyone"
"""If no tenants are configured: name of the account of all clients."""

# Divisors of the maximum number of connections. All users without a tenant together may have a quarter of the maximum.
# A user with more than a thirty-second of the maximum may be the first of its account to lose a connection.
_NO_TENANT_DIVISOR = 4
_GUARANTEED_DIVISOR = 32


class LimitedConnection(Protocol):
    """The properties of a connection by which the limiter decides.

    Attributes:
        connected_at: the time at which the connection was opened, in monotonic seconds.
        has_sent_message: whether the peer has ever sent a whole message.
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
    """Raise the soft limit of descriptors to the hard limit.

    The usual soft limit of 1,024 only protects programs that call select(2), which cannot handle larger descriptors.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_client_descriptors() -> int:
    """Return how many descriptors clients may use: the process's limit less the reserved descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, limit - min(max(limit // 2, _MIN_RESERVED_DESCRIPTORS), _MAX_RESERVED_DESCRIPTORS))


def max_total_regions() -> int:
    """Return the maximum number of shared memory regions of all clients together.

    Each region needs a descriptor. All regions together may use half of the reserved descriptors.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (limit - max_client_descriptors()) // 2


class Excess(NamedTuple, Generic[G]):
    """A connection that the caller has to close, and the reason for the log."""

    connection: G
    reason: str


class _Queue(Generic[G]):
    """Connections in the order in which they were added.

    `active` has the connections that are known to have sent a message, and `unchecked` has all others.
    """

    def __init__(self) -> None:
        # `next_to_evict` moves connections that have sent a message from the front of `unchecked` to the end of
        # `active`. So every connection in `unchecked` was added after every connection in `active`.
        self.active: OrderedDict[G, None] = OrderedDict()
        self.unchecked: OrderedDict[G, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.active) + len(self.unchecked)

    def remove(self, connection: G) -> None:
        self.active.pop(connection, None)
        self.unchecked.pop(connection, None)

    def next_to_evict(self) -> G:
        """Return the connection to close.

        This is the oldest connection that has never sent a message. If all have sent one, it is the newest connection
        without a request in progress, or else the newest connection.
        """
        while self.unchecked:
            oldest = next(iter(self.unchecked))
            if not oldest.has_sent_message:
                return oldest
            del self.unchecked[oldest]
            self.active[oldest] = None
        newest = next(reversed(self.active))
        return next((each for each in reversed(self.active) if not each.is_busy), newest)


class _Account(Generic[G]):
    """The connections of one account, in total and by user; knows the user with the most connections."""

    def __init__(self) -> None:
        self.connections: _Queue[G] = _Queue()
        self.user_queues: dict[str, _Queue[G]] = {}
        # Users by their number of connections, so that the user with the most connections is found without a scan.
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
        """Return the connection to close.

        If the user with the most connections has more than `guaranteed` connections, it is a connection of this user.
        Otherwise it may be a connection of any user.
        """
        if self._max_count > guaranteed:
            return self.user_queues[next(iter(self._users_by_count[self._max_count]))].next_to_evict()
        return self.connections.next_to_evict()


class ConnectionLimiter(Generic[G]):
    """Decides which connections to close when there are too many, by their accounts and users.

    Each tenant has an account. All users without a tenant share the account `NO_TENANT`, which may have at most a
    quarter of all connections. The connection to close is chosen in three steps:

    1. The account: `NO_TENANT` if it has connections, else the tenant with the most connections. So a tenant loses no
       connection while it has at most an equal share of them.
    2. The user: the user of this account with the most connections, if it has more than a thirty-second of all
       connections. Otherwise users are not compared, so that an attacker with many identities and one connection each
       cannot push out a user with two connections.
    3. The connection: the oldest connection that has never sent a message, else the newest connection without a request
       in progress, else the newest connection. So if all connections have sent a message, the new connection is
       refused.

    A decision takes the same time for any number of connections and users, except that connections with a request in
    progress are skipped one by one.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, _Account[G]] = {}
        self._account_and_user: dict[G, tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._account_and_user)

    def add(self, connection: G, user: str, account: str = EVERYONE) -> None:
        """Add a new connection of a user to the user's account."""
        self._account_and_user[connection] = account, user
        found = self._accounts.get(account)
        if found is None:
            found = self._accounts[account] = _Account()
        found.add(connection, user)

    def remove(self, connection: G) -> None:
        """Remove a closed connection. Do nothing if the limiter does not have it."""
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
            limit_name: the name of the setting that determines `max_connections`. Each reason names this setting.
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
        """Return the connection to close, from the accounts with the most connections.

        If several accounts have equally many connections, each of them proposes one. Of these connections, the method
        prefers one without a request in progress, then one that has never sent a message, then the newest.
        """
        size = max(map(len, self._accounts.values()))
        found = (each.next_to_evict(guaranteed) for each in self._accounts.values() if len(each) == size)
        return min(
            found, key=lambda connection: (connection.is_busy, connection.has_sent_message, -connection.connected_at)
        )


class UserConnectionLimits(NamedTuple):
    """Limits on the connections of each user.

    Attributes:
        max_connections: the maximum number of open connections; 0 for no limit.
        rate: the maximum number of new connections a second, on average; 0 for no limit. A user that has opened no
            connection for a while may open `burst` connections at once.
    """

    max_connections: int = 0
    rate: float = 0.0

    @property
    def burst(self) -> float:
        """The number of connections that a user may open at once: the maximum of `max_connections`, `rate` and 1."""
        return float(max(1.0, self.rate, self.max_connections))


class ConnectionAdmission:
    """Admits or refuses new connections by the limits for each user. A decision takes constant time.

    Args:
        limits: the limits that apply to each user.
    """

    def __init__(self, limits: UserConnectionLimits) -> None:
        self._limits = limits
        self._rates = TokenBuckets(limits.rate, limits.burst)
        self._open_connections = Counter[str]()

    def refusal_reason(self, user: str, now: float) -> str | None:
        """Return why a new connection of a user is refused; None if it is admitted.

        An admitted connection counts towards the rate at once. Call `add_connection` to count it as open.
        """
        limits = self._limits
        if limits.max_connections and self._open_connections[user] >= limits.max_connections:
            return f"this user has {limits.max_connections} connections already (max_user_connections)"
        if not self._rates.take(user, now):
            return f"this user opens more than {limits.rate:g} connections a second (max_user_connection_rate)"
        return None

    def add_connection(self, user: str) -> int:
        """Add one to the number of a user's open connections, and return the new number."""
        self._open_connections[user] += 1
        return self._open_connections[user]

    def remove_connection(self, user: str) -> None:
        """Subtract one from the number of a user's open connections."""
        self._open_connections[user] -= 1
        if not self._open_connections[user]:
            del self._open_connections[user]

    def __len__(self) -> int:
        """Return the number of stored entries: users with open connections, and users that opened one recently."""
        return len(self._rates) + len(self._open_connections)
