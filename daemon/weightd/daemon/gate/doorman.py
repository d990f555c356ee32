"""Who may be connected, and who has to go.

libzmq 4.3.5 aborts the process if it has no descriptor for the next connection. So when too many are connected some are
hung up: those of the user who has the most.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Sequence

from weightd.daemon.gate import kernel
from weightd.daemon.gate.link import DEBUG, ERROR, WARNING, Log
from weightd.daemon.gate.peers import Connection, Peers
from weightd.daemon.host.timers import Timer

# Who has not said by then what it speaks is hung up by the library.
HANDSHAKE_MS = 5000

# Twice what a handshake may take: who says nothing for so long has nothing to say, or cannot be heard.
PATIENCE_S = 2 * HANDSHAKE_MS / 1000

# Connections are accepted beside the loop: while that is busy, hundreds may come.
_LEAST_RESERVE = 256
_MOST_RESERVE = 4096

# Of a connection: the library's, and this end of its pair.
_DESCRIPTORS = 2

# After some were hung up, so many of the connections have to end before it is said that there is room again.
_REOPEN = 0.9


def allow_descriptors() -> None:
    """Take as many descriptors as the system allows: the usual limit of 1,024 is for programs that call select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections() -> int:
    """Return how many clients may be connected under the process's present limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (limit - min(max(limit // 2, _LEAST_RESERVE), _MOST_RESERVE)) // _DESCRIPTORS)


class Doorman:
    """Hangs up who is too many, and who may not be heard.

    Args:
        peers: who is there.
        twin: the message for who may not be heard.
        log: writes what happens.

    Attributes:
        timer: when `tick` is due.
    """

    def __init__(self, peers: Peers, twin: bytes, log: Log) -> None:
        self.timer = Timer(self.tick)
        self._peers = peers
        self._twin = twin
        self._log = log
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
            self._log(ERROR, f"{most} clients are connected: some of the user who has the most are turned away")
        elif self._full and count < _REOPEN * most:
            self._full = False
            self._log(WARNING, f"{count} clients are connected: others are let in again")
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
                self._log(DEBUG, f"nothing was heard of a connection of {each.user} for {PATIENCE_S:g} s: hung up")
                kernel.write(each.descriptor, self._twin)
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
