"""When what is lost may be replaced: at once the first time, later and later if that is lost, too.

Whether it is tried for ever is not decided here: what has served before is, what has not is given up.
"""

from __future__ import annotations

import random
from collections.abc import Callable

# A worker that never became READY this many times in a row will hardly become so the next time.
MAX_FAILED_STARTS = 3

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

    Attributes:
        due: when the next start is.
        delay: seconds from the last death to that.
    """

    def __init__(self, uniform: Callable[[], float] = random.random) -> None:
        self.due = 0.0
        self.delay = 0.0
        self._failed_starts = 0
        self._full_starts = 0
        self._full_since: float | None = None
        self._short_lives = 0
        self._uniform = uniform

    @property
    def failing(self) -> bool:
        """Whether starts have failed so often in a row that the next one hardly succeeds."""
        return self._failed_starts >= MAX_FAILED_STARTS

    def became_ready(self) -> None:
        """A worker has become READY: starting works."""
        self._failed_starts = self._full_starts = 0
        self._full_since = None

    def start_failed(self, now: float) -> None:
        """A worker has died before it was READY."""
        self._failed_starts += 1
        self._wait(now, self._delay(self._failed_starts))

    def no_room(self, now: float, patience: float) -> None:
        """A start has found no room where some may come free late: for `patience` seconds that is no failed start."""
        if self._full_since is None:
            self._full_since = now
        if now >= self._full_since + patience:
            self.start_failed(now)
        else:
            self._full_starts += 1
            self._wait(now, min(_MAX_ROOM_DELAY_S, self._delay(self._full_starts)))

    def died(self, lived: float, now: float, *, useful: bool = False) -> None:
        """A worker has died `lived` seconds after it was READY.

        Args:
            lived: how long.
            now: the clock.
            useful: whether it had answered anything. Then it was no bad start, and its successor is wanted at once:
                requests that kill workers are the business of `quarantine` and `suspects`.
        """
        if useful or lived >= SHORT_LIFE_S:
            self._short_lives = 0
            self._wait(now, 0.0)
            return
        self._wait(now, self._delay(self._short_lives) if self._short_lives else 0.0)
        self._short_lives += 1

    def _wait(self, now: float, delay: float) -> None:
        self.due, self.delay = now + delay, delay

    def _delay(self, count: int) -> float:
        delay = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(count - 1, _MAX_DOUBLINGS))
        return delay * (1.0 - _JITTER * self._uniform())
