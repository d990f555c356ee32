"""Who may be connected, and who has to go.

libzmq 4.3.5 aborts the process if it has no descriptor for the next connection. So when too many are connected some are
hung up: those of the user who has the most.
"""

from __future__ import annotations

from weightd.daemon.gate import kernel
from weightd.daemon.gate.link import DEBUG, ERROR, WARNING, Log
from weightd.daemon.gate.peers import Connection, Peers
from weightd.daemon.host.crowding import REOPEN, Crowd, for_clients
from weightd.daemon.host.timers import Timer

# Who has not said by then what it speaks is hung up by the library.
HANDSHAKE_MS = 5000

# Twice what a handshake may take: who says nothing for so long has nothing to say, or cannot be heard.
PATIENCE_S = 2 * HANDSHAKE_MS / 1000

# Of a connection: the library's, and this end of its pair.
_DESCRIPTORS = 2


def max_connections(bound: int = 0) -> int:
    """Return how many clients may be connected under the process's present limit, and this bound if it is none of 0."""
    most = max(1, for_clients() // _DESCRIPTORS)
    return min(most, bound) if bound else most


class Doorman:
    """Hangs up who is too many, and who may not be heard.

    Args:
        peers: who is there.
        bound: of clients, see `max_connections`.
        twin: the message for who may not be heard.
        log: writes what happens.

    Attributes:
        timer: when `tick` is due.
    """

    def __init__(self, peers: Peers, bound: int, twin: bytes, log: Log) -> None:
        self.timer = Timer(self.tick)
        self._peers = peers
        self._bound = bound
        self._twin = twin
        self._log = log
        self._full = False
        # When nobody was found to have a routing id of its own.
        self._unnamed_at = float("-inf")

    def look(self) -> None:
        """Somebody has come or gone."""
        peers = self._peers
        most = max_connections(self._bound)
        count = len(peers.connections)
        if count > most:
            crowd: Crowd[Connection] = Crowd()
            for each in sorted(peers.connections.values(), key=lambda each: each.since):
                if not each.leaving:
                    crowd.add(each)
            for each in crowd.reduce(most):
                each.hang_up()
        if not self._full and count > most:
            self._full = True
            self._log(ERROR, f"{most} clients are connected: some of the user who has the most are turned away")
        elif self._full and count < REOPEN * most:
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
                kernel.write(each.handle, self._twin)
                each.hang_up()
            del silent[each.descriptor]
