"""How many clients may be connected: libzmq 4.3.5 aborts the process if it has no descriptor for the next one.

So who comes when that is near is turned away. Children, logs and stores need descriptors, too.
"""

from __future__ import annotations

import logging
import resource

from weightd.daemon.connections import shut_down
from weightd.daemon.peers import Peers

_log = logging.getLogger("weightd.frontend")

# Connections are accepted beside the loop: while that is busy, hundreds may come.
_LEAST_RESERVE = 256
_MOST_RESERVE = 4096

# After some were turned away, so many of the connections have to end before it is said that others are let in again.
_REOPEN = 0.9


def allow_descriptors() -> None:
    """Take as many descriptors as the system allows: the usual limit of 1,024 is for programs that call select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections() -> int:
    """Return how many clients may be connected under the process's present limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, limit - min(max(limit // 2, _LEAST_RESERVE), _MOST_RESERVE))


class Doorman:
    """Turns away who comes while too many are connected; who is in stays."""

    def __init__(self) -> None:
        self._full = False

    def look(self, peers: Peers) -> None:
        """Somebody has come or gone."""
        most = max_connections()
        if not self._full and peers.connections > most:
            self._full = True
            _log.error("%d clients are connected: further ones are turned away", most)
        elif self._full and peers.connections < _REOPEN * most:
            self._full = False
            _log.warning("%d clients are connected: others are let in again", peers.connections)
        for descriptor in peers.latest(peers.connections - most):
            shut_down(descriptor)
