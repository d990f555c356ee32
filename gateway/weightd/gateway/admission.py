"""Admission of connections: how many each peer may have, and how fast it may open new ones. Pure: no I/O, no clock."""

from __future__ import annotations

from weightd.gateway.peers import Peer
from weightd.gateway.shares import Shares

# Peers without connections are dropped when the table has grown to twice its size after the last time.
_LEAST_KEPT = 1024

# New connections that a peer that violates the protocol's limits loses, beside the connection itself.
PENALTY = 32.0


class Admission:
    """Decides on new connections; a decision takes the same time for any number of peers.

    Args:
        most: connections in all. A peer may have at most three times as many as it leaves to others.
        rate: new connections a second of one peer; 0 for no limit. A peer that opened none for a while may open those
            of `BURST_S` seconds at once.
    """

    BURST_S = 4.0

    def __init__(self, most: int, rate: float) -> None:
        self._most = most
        self._rate = rate
        self._burst = max(1.0, self.BURST_S * rate)
        self._shares = Shares(most)
        # Tokens of each peer that opened connections of late, and when they were counted.
        self._tokens: dict[str, tuple[float, float]] = {}
        self._drop_at = _LEAST_KEPT

    def refusal(self, peer: Peer, now: float) -> str | None:
        """Count a new connection of a peer, and return None; or return why the connection is refused."""
        if self._rate and not peer.is_operator:
            tokens = self._tokens_of(peer.key, now)
            if tokens < 1.0:
                return f"{peer.key} opens more than {self._rate:g} connections a second (max_connection_rate)"
            self._tokens[peer.key] = tokens - 1.0, now
        if not self._shares.take(None if peer.is_operator else peer.key):
            return f"{peer.key} has its share of {self._most} connections (max_connections)"
        return None

    def leaves(self, peer: Peer) -> None:
        """Count one connection of a peer less."""
        self._shares.give(None if peer.is_operator else peer.key)

    def punish(self, peer: Peer, now: float) -> None:
        """Let a peer that violated the limits of its connection open fewer new ones for a while."""
        if self._rate and not peer.is_operator:
            self._tokens[peer.key] = max(-self._burst, self._tokens_of(peer.key, now) - PENALTY), now

    def _tokens_of(self, key: str, now: float) -> float:
        if key not in self._tokens:
            if len(self._tokens) >= self._drop_at:
                self._drop_idle(now)
            self._tokens[key] = self._burst, now
        tokens, at = self._tokens[key]
        return min(self._burst, tokens + (now - at) * self._rate)

    def _drop_idle(self, now: float) -> None:
        """Drop the peers that may open as many connections as one that is new."""
        self._tokens = {
            key: (tokens, at)
            for key, (tokens, at) in self._tokens.items()
            if tokens + (now - at) * self._rate < self._burst
        }
        self._drop_at = max(_LEAST_KEPT, 2 * len(self._tokens))

    def __len__(self) -> int:
        return len(self._tokens)
