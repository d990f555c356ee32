"""When a lost worker may be replaced: at once the first time, later and later if it keeps dying, and at last never."""

from __future__ import annotations

import random
from collections.abc import Callable

# A worker that never became READY this many times in a row will not become so the next time either.
MAX_FAILED_STARTS = 3

# A worker that became READY and died before it had answered anything, this many times in a row: it always will.
MAX_USELESS_LIVES = 10

# A worker that dies sooner after READY than this is dying of the same cause as the one before it.
SHORT_LIFE_S = 10.0

_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 30.0

# Room is looked for often: each try costs a process, and requests may wait for it.
_MAX_ROOM_DELAY_S = 2.0

# Doublings that lead well past the longest delay; a float has room for a thousand, deaths are not bounded.
_MAX_DOUBLINGS = 10

# Workers of several models that died of one cause do not all come back at the same moment.
_JITTER = 0.25


class Restarts:
    """Counts deaths and says when the next start is due. Times are monotonic seconds.

    Args:
        uniform: returns a random number from 0 to 1, by which delays are shortened.
        max_useless_lives: after so many in a row no further start makes sense.
    """

    def __init__(
        self, uniform: Callable[[], float] = random.random, *, max_useless_lives: float = MAX_USELESS_LIVES
    ) -> None:
        self.failed_starts = 0
        self.due = 0.0
        self._full_starts = 0
        self._full_since: float | None = None
        self._useless_lives = 0
        self._uniform = uniform
        self._max_useless_lives = max_useless_lives

    @property
    def given_up(self) -> bool:
        """Whether no further start makes sense."""
        return self.failed_starts >= MAX_FAILED_STARTS or self.useless

    @property
    def useless(self) -> bool:
        """Whether workers become READY, but never come to answer anything."""
        return self._useless_lives >= self._max_useless_lives

    def became_ready(self) -> None:
        """A worker has become READY: starting works."""
        self.failed_starts = self._full_starts = 0
        self._full_since = None

    def start_failed(self, now: float) -> None:
        """A worker has died before it was READY."""
        self.failed_starts += 1
        self.due = now + self._delay(self.failed_starts)

    def no_room(self, now: float, patience: float) -> None:
        """A start has found no room where some may come free late: for `patience` seconds that is no failed start."""
        if self._full_since is None:
            self._full_since = now
        if now >= self._full_since + patience:
            self.start_failed(now)
        else:
            self._full_starts += 1
            self.due = now + min(_MAX_ROOM_DELAY_S, self._delay(self._full_starts))

    def died(self, lived: float, now: float, *, useful: bool = False) -> None:
        """A worker has died `lived` seconds after it was READY.

        Args:
            lived: how long.
            now: the clock.
            useful: whether it had answered anything. Then it was no bad start, and its successor is wanted at once:
                a request that kills workers is the quarantine's business.
        """
        if useful or lived >= SHORT_LIFE_S:
            self._useless_lives = 0
            self.due = now
            return
        self.due = now if self._useless_lives == 0 else now + self._delay(self._useless_lives)
        self._useless_lives += 1

    def _delay(self, count: int) -> float:
        delay = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(count - 1, _MAX_DOUBLINGS))
        return delay * (1.0 - _JITTER * self._uniform())
