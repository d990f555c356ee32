"""Per-user limits of connections: how many a user may have open, and how fast it may open new ones."""

from __future__ import annotations

from typing import NamedTuple

# Entries of users without connections are dropped when the table has grown to twice its size after the last time.
_LEAST_KEPT = 1024


class Limits(NamedTuple):
    """Limits of one user.

    Attributes:
        most: connections that it may have open; 0 for no limit.
        rate: new connections a second, on average; 0 for no limit. A user that opened none for a while may open
            `burst` at once.
    """

    most: int = 0
    rate: float = 0.0

    @property
    def burst(self) -> float:
        """New connections that a user may open at once: as many as it may have, or those of one second."""
        return float(max(1.0, self.rate, self.most))


class _User:
    __slots__ = ("at", "open", "tokens")

    def __init__(self, tokens: float, at: float) -> None:
        self.open = 0
        self.tokens = tokens
        self.at = at


class Admission:
    """Counts the connections of each user and applies the limits; a decision takes the same time for any number.

    Args:
        limits: of each user.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._users: dict[str, _User] = {}
        self._drop_at = _LEAST_KEPT

    def refusal(self, user: str, now: float) -> str | None:
        """Return why a new connection of a user is refused, None if the user may have one more.

        A connection that is not refused counts towards the rate, and towards the open connections after `enters`.
        """
        limits = self._limits
        found = self._find(user, now)
        if limits.most and found.open >= limits.most:
            return f"this user has {limits.most} connections already (max_user_connections)"
        if limits.rate:
            found.tokens = min(limits.burst, found.tokens + (now - found.at) * limits.rate)
            found.at = now
            if found.tokens < 1.0:
                return f"this user opens more than {limits.rate:g} connections a second (max_user_connection_rate)"
            found.tokens -= 1.0
        return None

    def enters(self, user: str, now: float) -> int:
        """Count one more open connection of a user; return how many it has."""
        found = self._find(user, now)
        found.open += 1
        return found.open

    def leaves(self, user: str) -> None:
        """Count one open connection of a user less."""
        self._users[user].open -= 1

    def _find(self, user: str, now: float) -> _User:
        found = self._users.get(user)
        if found is None:
            if len(self._users) >= self._drop_at:
                self._drop_idle(now)
            found = self._users[user] = _User(self._limits.burst, now)
        return found

    def _drop_idle(self, now: float) -> None:
        """Drop the users that have no connection and could open as many as a new user."""
        limits = self._limits
        self._users = {
            name: each
            for name, each in self._users.items()
            if each.open or each.tokens + (now - each.at) * limits.rate < limits.burst
        }
        self._drop_at = max(_LEAST_KEPT, 2 * len(self._users))

    def __len__(self) -> int:
        return len(self._users)
