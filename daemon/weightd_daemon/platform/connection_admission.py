"""Per-user limits of connections: how many a user may have open, and how fast it may open new ones."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from weightd_common.rate_limits import TokenBuckets


class UserConnectionLimits(NamedTuple):
    """Limits of one user.

    Attributes:
        max_connections: connections that it may have open; 0 for no limit.
        rate: new connections a second, on average; 0 for no limit. A user that opened none for a while may open
            `burst` at once.
    """

    max_connections: int = 0
    rate: float = 0.0

    @property
    def burst(self) -> float:
        """New connections that a user may open at once: as many as it may have, or those of one second."""
        return float(max(1.0, self.rate, self.max_connections))


class ConnectionAdmission:
    """Counts the connections of each user and applies the limits; a decision takes the same time for any number.

    Args:
        limits: of each user.
    """

    def __init__(self, limits: UserConnectionLimits) -> None:
        self._limits = limits
        self._rates = TokenBuckets(limits.rate, limits.burst)
        self._open_connections = Counter[str]()

    def refusal_reason(self, user: str, now: float) -> str | None:
        """Return why a new connection of a user is refused, None if the user may have one more.

        A connection that is not refused counts towards the rate, and towards the open connections after
        `add_connection`.
        """
        limits = self._limits
        if limits.max_connections and self._open_connections[user] >= limits.max_connections:
            return f"this user has {limits.max_connections} connections already (max_user_connections)"
        if not self._rates.take(user, now):
            return f"this user opens more than {limits.rate:g} connections a second (max_user_connection_rate)"
        return None

    def add_connection(self, user: str) -> int:
        """Count one more open connection of a user; return how many it has."""
        self._open_connections[user] += 1
        return self._open_connections[user]

    def remove_connection(self, user: str) -> None:
        """Count one open connection of a user less."""
        self._open_connections[user] -= 1
        if not self._open_connections[user]:
            del self._open_connections[user]

    def __len__(self) -> int:
        """Return how many users are kept: those with connections, and those that opened some a short time ago."""
        return len(self._rates) + len(self._open_connections)
