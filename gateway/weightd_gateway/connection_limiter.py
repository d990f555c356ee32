"""Admission of connections: how many each peer may have, and how fast it may open new ones. Pure: no I/O, no clock."""

from __future__ import annotations

from weightd_common.peers import Peer
from weightd_common.rate_limits import TokenBuckets
from weightd_gateway.fairness import FairLimit

# New connections that a peer that violates the protocol's limits loses, beside the connection itself.
VIOLATION_PENALTY = 32.0


class GatewayConnectionLimiter:
    """Decides on new connections; a decision takes the same time for any number of peers.

    Args:
        max_connections: connections in all. A peer may have at most three times as many as it leaves to others.
        rate: new connections a second of one peer; 0 for no limit. A peer that opened none for a while may open those
            of `BURST_S` seconds at once.
    """

    BURST_S = 4.0

    def __init__(self, max_connections: int, rate: float) -> None:
        self._max_connections = max_connections
        self._rate = rate
        self._connection_limit = FairLimit(max_connections)
        self._rates = TokenBuckets(rate, max(1.0, self.BURST_S * rate))

    def admit(self, peer: Peer, now: float) -> str | None:
        """Count a new connection of a peer, and return None; or return why the connection is refused."""
        if not (peer.is_operator or self._rates.take(peer.key, now)):
            return f"{peer.key} opens more than {self._rate:g} connections a second (max_connection_rate)"
        if not self._connection_limit.take(None if peer.is_operator else peer.key):
            return f"{peer.key} has its share of {self._max_connections} connections (max_connections)"
        return None

    def remove_connection(self, peer: Peer) -> None:
        """Count one connection of a peer less."""
        self._connection_limit.release(None if peer.is_operator else peer.key)

    def penalize(self, peer: Peer, now: float) -> None:
        """Let a peer that violated the limits of its connection open fewer new ones for a while."""
        if not peer.is_operator:
            self._rates.charge(peer.key, VIOLATION_PENALTY, now)

    def __len__(self) -> int:
        """Return how many peers are kept for their rate."""
        return len(self._rates)
