"""When what is lost may be replaced: at once the first time, later and later if that is lost, too.

Whether it is tried for ever is not decided here: what has served before is, what has not is given up.
"""

from __future__ import annotations

import random
from collections.abc import Callable

# A worker that never became READY this many times in a row will hardly become so the next time.
MAX_FAILED_STARTS = 3

# A worker that dies sooner after READY than this is dying of the same cause as the one before it.
EARLY_DEATH_S = 10.0

_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 30.0

# Room is looked for often: each try costs a process, and requests may wait for it.
_MAX_MEMORY_DELAY_S = 2.0

# Doublings that lead well past the longest delay; a float has room for a thousand, deaths are not bounded.
_MAX_DOUBLINGS = 10

# Workers of several models that died of one cause do not all come back at the same moment.
_JITTER = 0.25


class RestartBackoff:
    """Counts deaths and says when the next start is due. Times are monotonic seconds.

    Args:
        random_fraction: returns a random number from 0 to 1, by which delays are shortened.

    Attributes:
        due_at: when the next start is.
        delay_s: seconds from the last death to that.
    """

    def __init__(self, random_fraction: Callable[[], float] = random.random) -> None:
        self.due_at = 0.0
        self.delay_s = 0.0
        self._failed_starts = 0
        self._memory_failures = 0
        self._out_of_memory_since: float | None = None
        self._early_deaths = 0
        self._random = random_fraction

    @property
    def is_exhausted(self) -> bool:
        """Whether starts have failed so often in a row that the next one hardly succeeds."""
        return self._failed_starts >= MAX_FAILED_STARTS

    def on_ready(self) -> None:
        """A worker has become READY: starting works."""
        self._failed_starts = self._memory_failures = 0
        self._out_of_memory_since = None

    def on_start_failed(self, now: float) -> None:
        """A worker has died before it was READY."""
        self._failed_starts += 1
        self._schedule(now, self._delay_after(self._failed_starts))

    def on_out_of_memory(self, now: float, timeout_s: float) -> None:
        """A start has found no room where some may come free late: for `timeout_s` seconds that is no failed start."""
        if self._out_of_memory_since is None:
            self._out_of_memory_since = now
        if now >= self._out_of_memory_since + timeout_s:
            self.on_start_failed(now)
        else:
            self._memory_failures += 1
            self._schedule(now, min(_MAX_MEMORY_DELAY_S, self._delay_after(self._memory_failures)))

    def on_death(self, lifetime_s: float, now: float, *, has_answered: bool = False) -> None:
        """A worker has died `lifetime_s` seconds after it was READY.

        Args:
            lifetime_s: how long.
            now: the clock.
            has_answered: whether it had answered anything. Then it was no bad start, and its successor is wanted at
                once: requests that kill workers are the business of `quarantine` and `offenders`.
        """
        if has_answered or lifetime_s >= EARLY_DEATH_S:
            self._early_deaths = 0
            self._schedule(now, 0.0)
            return
        self._schedule(now, self._delay_after(self._early_deaths) if self._early_deaths else 0.0)
        self._early_deaths += 1

    def _schedule(self, now: float, delay: float) -> None:
        self.due_at, self.delay_s = now + delay, delay

    def _delay_after(self, count: int) -> float:
        delay_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(count - 1, _MAX_DOUBLINGS))
        return delay_s * (1.0 - _JITTER * self._random())
