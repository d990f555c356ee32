"""Connection limiter: limits the number of each peer's connections, and the rate at which it opens them. No I/O."""

from __future__ import annotations

from weightd_common.peers import Peer
from weightd_common.rate_limits import TokenBuckets
from weightd_gateway.fairness import FairLimit

# Number of new connections that the rate limit charges to a peer whose gRPC connection has violated a limit on HTTP/2
# frames.
VIOLATION_PENALTY = 32.0


class GatewayConnectionLimiter:
    """Admits or refuses new connections. A decision takes constant time for any number of peers.

    Args:
        max_connections: maximum number of connections of all peers. `FairLimit` limits the share of each peer.
        rate: maximum new connections per second of one peer; 0: no limit. After `BURST_S` seconds without a new
            connection, a peer may open `BURST_S * rate` connections at once.
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
        """Remove a closed connection from the count of its peer."""
        self._connection_limit.release(None if peer.is_operator else peer.key)

    def penalize(self, peer: Peer, now: float) -> None:
        """Charge `VIOLATION_PENALTY` connections to the rate limit of a peer that violated a limit."""
        if not peer.is_operator:
            self._rates.charge(peer.key, VIOLATION_PENALTY, now)

    def __len__(self) -> int:
        """Return the number of peers whose connection rate is tracked."""
        return len(self._rates)
