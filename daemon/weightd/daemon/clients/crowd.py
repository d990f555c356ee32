"""How many clients may be connected, and who has to go when it is more.

Children, logs and stores need descriptors, too. So when too many are connected some are hung up: those of the user who
has the most.
"""

from __future__ import annotations

import logging
import resource
from collections import defaultdict
from collections.abc import Collection, Sequence

from weightd.daemon.clients.connection import Connection

_log = logging.getLogger("weightd.frontend")

_LEAST_RESERVE = 256
_MOST_RESERVE = 4096

# After some were hung up, so many of the connections have to end before it is said that there is room again.
_REOPEN = 0.9


def allow_descriptors() -> None:
    """Take as many descriptors as the system allows: the usual limit of 1,024 is for programs that call select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections() -> int:
    """Return how many clients may be connected under the process's present limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, limit - min(max(limit // 2, _LEAST_RESERVE), _MOST_RESERVE))


def max_regions() -> int:
    """Return how many regions of memory all clients together may have: half of the descriptors that no client is."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (limit - max_connections()) // 2


class Crowd:
    """Says who has to go, and tells the log when it begins and ends."""

    def __init__(self) -> None:
        self._is_full = False

    def came(self, there: Collection[Connection]) -> Sequence[Connection]:
        """Somebody has come: return who has to go."""
        most = max_connections()
        if len(there) <= most:
            return ()
        staying = [each for each in there if not each.leaving]
        if not self._is_full:
            self._is_full = True
            _log.error("%d clients are connected: some of the user who has the most are turned away", most)
        return surplus(staying, len(staying) - most)

    def went(self, there: Collection[Connection]) -> None:
        """Somebody has gone."""
        if self._is_full and len(there) < _REOPEN * max_connections():
            self._is_full = False
            _log.warning("%d clients are connected: others are let in again", len(there))


def surplus(there: Sequence[Connection], count: int) -> list[Connection]:
    """Return so many connections to be hung up, one after another of the user who then has the most.

    Of a user's: first those that have never said a word, the oldest first, for they have had the most time; then those
    that came last.
    """
    users: defaultdict[str, list[Connection]] = defaultdict(list)
    for each in there:
        users[each.user].append(each)
    for own in users.values():
        # Taken from the end.
        own.sort(key=lambda each: (not each.has_spoken, each.since if each.has_spoken else -each.since))
    return [max(users.values(), key=len).pop() for _ in range(count)]
