"""How many requests there were at once, lately."""

from __future__ import annotations


class RollingMax:
    """The most at any time in the last seconds: in at least as many as given, and at most twice as many.

    Args:
        window_s: how long it is remembered.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._window_started_at = 0.0
        self._max = self._previous_max = 0

    def add(self, count: int, now: float) -> int:
        """There are so many now; return the peak."""
        if now >= self._window_started_at + self._window_s:
            self._previous_max = self._max if now < self._window_started_at + 2 * self._window_s else 0
            self._window_started_at, self._max = now, 0
        self._max = max(self._max, count)
        return max(self._max, self._previous_max)
