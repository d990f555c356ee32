"""How many clients may be connected, and who has to go when it is more.

Children, logs and stores need descriptors, too. So when too many are connected some are hung up: those of the user who
has the most.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Collection, Sequence

from weightd.daemon.clients.connection import Connection
from weightd.daemon.host.crowding import REOPEN, for_clients, surplus

_log = logging.getLogger("weightd.frontend")


def max_regions() -> int:
    """Return how many regions of memory all clients together may have: half of the descriptors that no client is."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (limit - for_clients()) // 2


class Crowd:
    """Says who has to go, and tells the log when it begins and ends."""

    def __init__(self) -> None:
        self._is_full = False

    def came(self, there: Collection[Connection]) -> Sequence[Connection]:
        """Somebody has come: return who has to go."""
        most = for_clients()
        if len(there) <= most:
            return ()
        staying = [each for each in there if not each.leaving]
        if not self._is_full:
            self._is_full = True
            _log.error("%d clients are connected: some of the user who has the most are turned away", most)
        return surplus(staying, len(staying) - most)

    def went(self, there: Collection[Connection]) -> None:
        """Somebody has gone."""
        if self._is_full and len(there) < REOPEN * for_clients():
            self._is_full = False
            _log.warning("%d clients are connected: others are let in again", len(there))
