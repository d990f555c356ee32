"""When a lost worker may be replaced: at once the first time, later and later if it keeps dying, and at last never."""

from __future__ import annotations

# A worker that never became READY this many times in a row will not become so the next time either.
MAX_FAILED_STARTS = 3

# A worker that dies sooner after READY than this is dying of the same cause as the one before it.
SHORT_LIFE_S = 10.0

_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 30.0

# Doublings that lead well past the longest delay; a float has room for a thousand, deaths are not bounded.
_MAX_DOUBLINGS = 10


class Restarts:
    """Counts deaths and says when the next start is due. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.failed_starts = 0
        self.due = 0.0
        self._short_lives = 0

    @property
    def given_up(self) -> bool:
        """Whether no further start makes sense."""
        return self.failed_starts >= MAX_FAILED_STARTS

    def became_ready(self) -> None:
        """A worker has become READY: starting works."""
        self.failed_starts = 0

    def start_failed(self, now: float) -> None:
        """A worker has died before it was READY."""
        self.failed_starts += 1
        self.due = now + _delay(self.failed_starts)

    def died(self, lived: float, now: float) -> None:
        """A worker has died `lived` seconds after it was READY."""
        if lived >= SHORT_LIFE_S:
            self._short_lives = 0
            self.due = now
            return
        self.due = now if self._short_lives == 0 else now + _delay(self._short_lives)
        self._short_lives += 1


def _delay(count: int) -> float:
    return min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(count - 1, _MAX_DOUBLINGS))
