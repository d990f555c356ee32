"""Who may be connected, and who has to go.

libzmq 4.3.5 aborts the process if it has no descriptor for the next connection, and children, logs and stores need
descriptors, too. So when too many are connected some are hung up: those of the user who has the most.
"""

from __future__ import annotations

import logging
import resource
from collections import defaultdict
from collections.abc import Sequence

from weightd.daemon.clients import connections
from weightd.daemon.clients.listening import HANDSHAKE_MS
from weightd.daemon.clients.peers import Connection, Peers
from weightd.daemon.host.timers import Timer
from weightd.protocol.codec import encode
from weightd.protocol.errors import InvalidArgument
from weightd.protocol.messages.data import Error

_log = logging.getLogger("weightd.frontend")

# Connections are accepted beside the loop: while that is busy, hundreds may come.
_LEAST_RESERVE = 256
_MOST_RESERVE = 4096

# After some were hung up, so many of the connections have to end before it is said that there is room again.
_REOPEN = 0.9

# Twice what a handshake may take: who says nothing for so long has nothing to say, or cannot be heard.
PATIENCE_S = 2 * HANDSHAKE_MS / 1000

_UNHEARD = (
    f"nothing was heard over this connection for {PATIENCE_S:g} s, so it ends; what was sent is lost: another client "
    "has the same routing id. Choose none, or one that nobody else has"
)


def allow_descriptors() -> None:
    """Take as many descriptors as the system allows: the usual limit of 1,024 is for programs that call select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections() -> int:
    """Return how many clients may be connected under the process's present limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, limit - min(max(limit // 2, _LEAST_RESERVE), _MOST_RESERVE))


class Doorman:
    """Hangs up who is too many, and who may not be heard.

    Args:
        peers: who is there.

    Attributes:
        timer: when `tick` is due.
    """

    def __init__(self, peers: Peers) -> None:
        self.timer = Timer(self.tick)
        self._peers = peers
        self._full = False
        # When nobody was found to have a routing id of its own.
        self._unnamed_at = float("-inf")

    def look(self) -> None:
        """Somebody has come or gone."""
        peers = self._peers
        most = max_connections()
        count = len(peers.connections)
        if count > most:
            there = [each for each in peers.connections.values() if not each.leaving]
            for each in surplus(there, len(there) - most):
                each.hang_up()
        if not self._full and count > most:
            self._full = True
            _log.error("%d clients are connected: some of the user who has the most are turned away", most)
        elif self._full and count < _REOPEN * most:
            self._full = False
            _log.warning("%d clients are connected: others are let in again", count)
        first = next(iter(peers.silent.values()), None)
        begin = float("inf") if first is None else max(first.since, self._unnamed_at)
        self.timer.set(begin + PATIENCE_S)

    def tick(self, now: float) -> None:
        """Hang up who was not heard for too long, where that may not be its own choice.

        The library hears no second peer with a routing id that is taken, and does not tell. So where clients have
        chosen such ids, who is not heard is told that. Elsewhere who says nothing may stay while there is room.
        """
        if self._peers.any_named:
            self._unnamed_at = float("-inf")
            self._end_unheard(now)
        else:
            self._unnamed_at = now
        self.look()

    def _end_unheard(self, now: float) -> None:
        silent = self._peers.silent
        for each in list(silent.values()):
            if each.since + PATIENCE_S > now:
                break
            if not each.leaving:
                _log.debug("nothing was heard of a connection of %s for %g s: hung up", each.user, PATIENCE_S)
                [frame] = encode(Error("", InvalidArgument.code, _UNHEARD))
                connections.write(each.descriptor, frame)
                each.hang_up()
            del silent[each.descriptor]


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
        own.sort(key=lambda each: (each.heard is None, -each.since if each.heard is None else each.since))
    return [max(users.values(), key=len).pop() for _ in range(count)]
