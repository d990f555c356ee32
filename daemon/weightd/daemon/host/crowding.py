"""How many clients a process has descriptors for, and who has to go when it is more: those of whom there are the most.

The daemon and its gates each have their own clients, and the same rule for them.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol, TypeVar

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


def surplus(there: Sequence[G], count: int) -> list[G]:
    """Return so many connections to be hung up, one after another of the user who then has the most.

    Of a user's: first those that have never said a word, the oldest first, for they have had the most time; then those
    that came last.
    """
    users: defaultdict[str, list[G]] = defaultdict(list)
    for each in there:
        users[each.user].append(each)
    for own in users.values():
        # Taken from the end.
        own.sort(key=lambda each: (not each.has_spoken, each.since if each.has_spoken else -each.since))
    return [max(users.values(), key=len).pop() for _ in range(count)]
