"""How many clients a process has descriptors for, and which connections end when there are more.

The daemon, its gates and the metrics endpoint each have their own clients, and the same rule for them.
"""

from __future__ import annotations

import resource
from collections import OrderedDict
from typing import Generic, NamedTuple, Protocol, TypeVar

# Children, logs and stores need some, too; and a library may accept hundreds while nobody looks.
_LEAST_RESERVE = 256
_MOST_RESERVE = 4096

REOPEN = 0.9
"""After some were hung up, so many of the connections have to end before it is said that there is room again."""

NO_TENANT = "users without a tenant"
"""The account and the user of all clients that are in no tenant's table, where there are tables."""

EVERYONE = "everyone"
"""The account of all clients where tenants are not told apart."""

# The parts of all connections: that all users without a tenant may have together, and that a user keeps of its account
# whatever the other users of the account do.
_STRANGERS = 4
_RESERVED = 32


class Guest(Protocol):
    """A connection.

    Attributes:
        since: when it was opened, in monotonic seconds.
        has_spoken: whether a whole message has come over it. Once true it remains true.
        is_busy: whether a request that has come over it is under way.
    """

    @property
    def since(self) -> float:  # noqa: D102
        ...

    @property
    def has_spoken(self) -> bool:  # noqa: D102
        ...

    @property
    def is_busy(self) -> bool:  # noqa: D102
        ...


G = TypeVar("G", bound=Guest)


def allow_descriptors() -> None:
    """Take as many descriptors as the system allows: the usual limit of 1,024 is for programs that call select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def for_clients() -> int:
    """Return how many descriptors clients may take under the process's present limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, limit - min(max(limit // 2, _LEAST_RESERVE), _MOST_RESERVE))


class Excess(NamedTuple, Generic[G]):
    """A connection that has to end, and why."""

    guest: G
    why: str


class _Queue(Generic[G]):
    """Connections in the order in which they were added, in two tables."""

    def __init__(self) -> None:
        # `first_to_go` moves connections that have spoken from the front of `others` to the end of `spoken`. So all
        # connections in `others` were added after all in `spoken`.
        self.spoken: OrderedDict[G, None] = OrderedDict()
        self.others: OrderedDict[G, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.spoken) + len(self.others)

    def remove(self, guest: G) -> None:
        self.spoken.pop(guest, None)
        self.others.pop(guest, None)

    def first_to_go(self) -> G:
        """Return the oldest silent connection; else the newest without a request under way; else the newest."""
        while self.others:
            oldest = next(iter(self.others))
            if not oldest.has_spoken:
                return oldest
            del self.others[oldest]
            self.spoken[oldest] = None
        newest = next(reversed(self.spoken))
        return next((each for each in reversed(self.spoken) if not each.is_busy), newest)


class _Account(Generic[G]):
    """The connections of one account, also by user, and which user has the most."""

    def __init__(self) -> None:
        self.all: _Queue[G] = _Queue()
        self.users: dict[str, _Queue[G]] = {}
        # The users by how many connections they have: the largest is found without a look at all of them.
        self._by_size: dict[int, dict[str, None]] = {0: {}}
        self._largest = 0

    def __len__(self) -> int:
        return len(self.all)

    def add(self, guest: G, user: str) -> None:
        queue = self.users.get(user)
        if queue is None:
            queue = self.users[user] = _Queue()
        queue.others[guest] = self.all.others[guest] = None
        self._resized(user, len(queue) - 1, len(queue))

    def remove(self, guest: G, user: str) -> None:
        queue = self.users[user]
        queue.remove(guest)
        self.all.remove(guest)
        self._resized(user, len(queue) + 1, len(queue))
        if not queue:
            del self.users[user]

    def _resized(self, user: str, before: int, after: int) -> None:
        if before:
            del self._by_size[before][user]
        if after:
            self._by_size.setdefault(after, {})[user] = None
        if not self._by_size[before] and before:
            del self._by_size[before]
        if after > self._largest or before == self._largest not in self._by_size:
            self._largest = after

    def first_to_go(self, reserved: int) -> G:
        """Return which connection has to end: of the user that has the most, unless no user has more than this."""
        if self._largest > reserved:
            return self.users[next(iter(self._by_size[self._largest]))].first_to_go()
        return self.all.first_to_go()


class Crowd(Generic[G]):
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
        self._of: dict[G, tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def add(self, guest: G, user: str, account: str = EVERYONE) -> None:
        """Add a connection, the newest one, of a user whose account this is."""
        self._of[guest] = account, user
        found = self._accounts.get(account)
        if found is None:
            found = self._accounts[account] = _Account()
        found.add(guest, user)

    def remove(self, guest: G) -> None:
        """Remove a connection, if it is there."""
        found = self._of.pop(guest, None)
        if found is None:
            return
        name, user = found
        account = self._accounts[name]
        account.remove(guest, user)
        if not account:
            del self._accounts[name]

    def reduce(self, most: int, key: str) -> list[Excess[G]]:
        """Remove connections until no more than this are left; return them.

        Args:
            most: connections.
            key: the name of this limit.
        """
        gone: list[Excess[G]] = []
        reserved = max(1, most // _RESERVED)
        of_strangers = max(1, most // _STRANGERS)
        while (strangers := self._accounts.get(NO_TENANT)) or len(self) > most:
            if strangers is not None and len(strangers) > of_strangers:
                guest = strangers.first_to_go(reserved)
                why = f"expected at most {of_strangers} of {NO_TENANT}, a part of {most} ({key}), got {len(strangers)}"
            elif len(self) <= most:
                break
            else:
                guest = self._first_to_go(reserved) if strangers is None else strangers.first_to_go(reserved)
                account, user = self._of[guest]
                count = len(self._accounts[account].users[user])
                why = f"expected at most {most} connections ({key}), got {len(self)}, of which {user} has {count}"
                if account not in (EVERYONE, NO_TENANT):
                    why += f", and tenant {account} {len(self._accounts[account])}"
            self.remove(guest)
            gone.append(Excess(guest, why))
        return gone

    def _first_to_go(self, reserved: int) -> G:
        """Of the accounts that have the most, return the connection whose end costs least."""
        size = max(map(len, self._accounts.values()))
        found = (each.first_to_go(reserved) for each in self._accounts.values() if len(each) == size)
        return min(found, key=lambda guest: (guest.is_busy, guest.has_spoken, -guest.since))
