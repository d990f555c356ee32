"""How many clients may be connected, and who has to go when it is more.

Children, logs and stores need descriptors, too. So when too many are connected some are hung up, see
`ClientConnectionLimiter`.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterable, Sequence

from weightd_daemon.api.connection import ClientConnection
from weightd_daemon.platform.client_log import ClientLog
from weightd_daemon.platform.connection_limit import REOPEN_FRACTION, ConnectionLimiter, Excess, max_client_descriptors

_log = logging.getLogger("weightd.api")


def max_total_regions() -> int:
    """Return how many regions of memory all clients together may have: half of the descriptors that no client is."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (limit - max_client_descriptors()) // 2


class ClientConnectionLimiter:
    """Says who has to go, and logs when that begins and ends.

    Args:
        log: of what clients do.
    """

    def __init__(self, log: ClientLog) -> None:
        self._log = log
        self._limiter: ConnectionLimiter[ClientConnection] = ConnectionLimiter()
        self._is_full = False

    def add_connection(self, connection: ClientConnection, connection_count: int) -> Sequence[Excess[ClientConnection]]:
        """Somebody has come, and so many are there, with those that leave: return who has to go."""
        self._limiter.add(connection, connection.limit_account, connection.tenant_name)
        limit = max_client_descriptors()
        if connection_count > limit and not self._is_full:
            self._is_full = True
            text = "expected at most %d connections of clients (LimitNOFILE), got %d: disconnecting some"
            self._log.log(_log, logging.ERROR, "", text, limit, connection_count)
        return self._limiter.evict_excess(limit, "LimitNOFILE")

    def replace_connections(self, connections: Iterable[ClientConnection]) -> None:
        """Their accounts are others: all that stay, the oldest first."""
        self._limiter = ConnectionLimiter()
        for each in connections:
            self._limiter.add(each, each.limit_account, each.tenant_name)

    def remove_connection(self, connection: ClientConnection) -> None:
        """Somebody is hung up, or has gone."""
        self._limiter.remove(connection)

    def on_disconnected(self, connection_count: int) -> None:
        """Somebody has gone, and so many are there still."""
        if self._is_full and connection_count < REOPEN_FRACTION * max_client_descriptors():
            self._is_full = False
            self._log.log(
                _log, logging.WARNING, "", "%d clients are connected: accepting connections again", connection_count
            )
