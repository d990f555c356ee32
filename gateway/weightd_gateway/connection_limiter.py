"""Connection limiter: how many connections each peer may have, and how fast it may open them. No I/O, no clock."""

from __future__ import annotations

from weightd_common.peers import Peer
from weightd_common.rate_limits import TokenBuckets
from weightd_gateway.fairness import FairLimit

# New connections of its rate limit that a peer forfeits when it violates a limit of the protocol.
VIOLATION_PENALTY = 32.0


class GatewayConnectionLimiter:
    """Admits or refuses new connections. A decision takes constant time for any number of peers.

    Args:
        max_connections: the limit of all connections. A peer may have at most three times as many as remain free.
        rate: new connections per second of one peer; 0: no limit. A peer that has opened none for `BURST_S` seconds may
            open the connections of these seconds at once.
    """

    BURST_S = 4.0

    def __init__(self, max_connections: int, rate: float) -> None:
        self._max_connections = max_connections
        self._rate = rate
        self._connection_limit = FairLimit(max_connections)
        self._rates = TokenBuckets(rate, max(1.0, self.BURST_S * rate))

    def admit(self, peer: Peer, now: float) -> str | None:
        """Count a new connection of a peer and return None, or return the reason why the connection is refused."""
        if not (peer.is_operator or self._rates.take(peer.key, now)):
            return f"{peer.key} opens more than {self._rate:g} connections a second (max_connection_rate)"
        if not self._connection_limit.take(None if peer.is_operator else peer.key):
            return f"{peer.key} has reached its share of {self._max_connections} connections (max_connections)"
        return None

    def remove_connection(self, peer: Peer) -> None:
        """Count a closed connection of a peer."""
        self._connection_limit.release(None if peer.is_operator else peer.key)

    def penalize(self, peer: Peer, now: float) -> None:
        """Reduce the rate at which a peer may open connections for a while, because it violated a limit."""
        if not peer.is_operator:
            self._rates.charge(peer.key, VIOLATION_PENALTY, now)

    def __len__(self) -> int:
        """Return the number of peers whose connection rate is tracked."""
        return len(self._rates)
