"""When a model that could not be loaded is loaded again by itself."""

from __future__ import annotations

_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 60.0

# Doublings that lead past the longest delay.
_MAX_DOUBLINGS = 6

NEVER = float("inf")


class LoadBackoff:
    """Exponential back-off between two attempts to load a model. Times are monotonic seconds.

    Attributes:
        due_at: when the next attempt is; `NEVER` if none is planned.
    """

    def __init__(self) -> None:
        self.due_at = NEVER
        self._failures = 0

    def on_failure(self, now: float) -> None:
        """Plan the next attempt, unless one is planned."""
        if self.due_at == NEVER:
            delay_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0**self._failures)
            self._failures = min(self._failures + 1, _MAX_DOUBLINGS)
            self.due_at = now + delay_s

    def cancel(self) -> None:
        """Plan no attempt; the delay before the next one is not shorter for that."""
        self.due_at = NEVER

    def on_success(self) -> None:
        """Begin with the shortest delay again."""
        self.due_at = NEVER
        self._failures = 0
