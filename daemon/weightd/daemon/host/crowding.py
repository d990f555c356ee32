"""How many clients a process has descriptors for, and who has to go when it is more: those of whom there are the most.

The daemon and its gates each have their own clients, and the same rule for them.
"""

from __future__ import annotations

import resource
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

# Children, logs and stores need some, too; and a library may accept hundreds while nobody looks.
_LEAST_RESERVE = 256
_MOST_RESERVE = 4096

REOPEN = 0.9
"""After some were hung up, so many of the connections have to end before it is said that there is room again."""


class Guest(Protocol):
    """A connection: on whose account it goes, when it came, and whether a whole message of it has come."""

    @property
    def user(self) -> str:  # noqa: D102
        ...

    @property
    def since(self) -> float:  # noqa: D102
        ...

    @property
    def has_spoken(self) -> bool:  # noqa: D102
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


class _Own(Generic[G]):
    """The connections of one user, each in one of two tables, in the order in which they came."""

    def __init__(self) -> None:
        # That they have spoken is seen when it matters. All of the others came after all of these.
        self.spoken: OrderedDict[G, None] = OrderedDict()
        self.others: OrderedDict[G, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.spoken) + len(self.others)

    def first_to_go(self) -> G:
        """Return the oldest that has never said a word; else the one that came last."""
        while self.others:
            oldest = next(iter(self.others))
            if not oldest.has_spoken:
                return oldest
            del self.others[oldest]
            self.spoken[oldest] = None
        return next(reversed(self.spoken))


class Crowd(Generic[G]):
    """Connections, and who of them is to be hung up when they are too many; to ask that takes no longer for many.

    It is one after another of the user who then has the most. Of a user's: first those that have never said a word, the
    oldest first, for they have had the most time; then those that came last.
    """

    def __init__(self) -> None:
        self._users: dict[str, _Own[G]] = {}
        self._count = 0

    def add(self, guest: G) -> None:
        """Somebody has come, after all that are there."""
        self._users.setdefault(guest.user, _Own()).others[guest] = None
        self._count += 1

    def remove(self, guest: G) -> None:
        """Somebody goes; it is no matter whether that was known already."""
        own = self._users.get(guest.user)
        if own is None or (guest not in own.spoken and guest not in own.others):
            return
        own.spoken.pop(guest, None)
        own.others.pop(guest, None)
        self._count -= 1
        if not own:
            del self._users[guest.user]

    def reduce(self, most: int) -> list[G]:
        """Return who has to go so that no more are left than that: they are removed."""
        gone: list[G] = []
        while self._count > most:
            gone.append(max(self._users.values(), key=len).first_to_go())
            self.remove(gone[-1])
        return gone
