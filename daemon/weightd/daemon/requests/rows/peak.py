"""How many requests there were at once, lately."""

from __future__ import annotations


class Peak:
    """The most at any time in the last seconds: in at least as many as given, and at most twice as many.

    Args:
        seconds: how long it is remembered.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since = 0.0
        self._most = self._most_before = 0

    def add(self, count: int, now: float) -> int:
        """There are so many now; return the peak."""
        if now >= self._since + self._seconds:
            self._most_before = self._most if now < self._since + 2 * self._seconds else 0
            self._since, self._most = now, 0
        self._most = max(self._most, count)
        return max(self._most, self._most_before)
