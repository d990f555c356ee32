"""A monotonic clock that stands still while this process does not run.

The daemon judges other processes by deadlines: a worker has to answer within `predict_timeout`, a child has to report
within `load_timeout`. While the daemon itself is stopped (SIGSTOP, a debugger, the cgroup freezer, a suspended virtual
machine), it cannot receive their answers, and often they are stopped, too. That time must not count against them. So
every deadline of another process is a time of this clock.

Deadlines by which others judge the daemon, those of its clients and of the service manager, go by real time: see
`EventLoop.on_suspended`.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable

TICK_S = 0.5
"""The longest wait between two readings of a clock: whoever waits longer does so in several steps."""

_SLACK_S = 0.5
"""A reading that is this much later than expected shows that the process did not run. A busy machine stays below it."""


class Clock:
    """Monotonic seconds in which this process has run.

    A process is not told that it was stopped. It shows in the time between two readings: the event loop reads the clock
    before and after each wait, and waits for `TICK_S` at most. If a reading comes more than half a second later than
    expected, nothing of the time since the reading before counts. The clock is not thread-safe.

    Args:
        real_time: the clock to read.

    Attributes:
        stopped_s: seconds that did not count so far.
    """

    def __init__(self, real_time: Callable[[], float] = time.monotonic) -> None:
        self.stopped_s = 0.0
        self._real_time = real_time
        self._last_reading = real_time()
        self._max_step_s = _SLACK_S

    def now(self) -> float:
        """Return the time."""
        real = self._real_time()
        if real - self._last_reading > self._max_step_s:
            self.stopped_s += real - self._last_reading
        self._last_reading = real
        self._max_step_s = _SLACK_S
        return real - self.stopped_s

    def clamp_wait(self, seconds: float) -> float:
        """Return how long the caller may wait of these seconds before it reads the clock again; not less than 0."""
        seconds = min(max(seconds, 0.0), TICK_S)
        self._max_step_s = seconds + _SLACK_S
        return seconds


_CLOCK = Clock()

now = _CLOCK.now
"""`Clock.now` of the process's clock."""

clamp_wait = _CLOCK.clamp_wait
"""`Clock.wait` of the process's clock."""


def process_clock() -> Clock:
    """Return the clock that `now` reads."""
    return _CLOCK


def poll(poller: select.poll, seconds: float, clock: Clock = _CLOCK) -> list[tuple[int, int]]:
    """Poll until a descriptor is ready; return nothing after so many seconds in which this process ran.

    Python's own `poll` returns nothing if its time-out ended while the process was stopped, even if a descriptor is
    ready.
    """
    deadline = clock.now() + seconds
    while True:
        ready = poller.poll(1000 * clock.clamp_wait(deadline - clock.now()))
        if ready:
            return ready
        if clock.now() >= deadline:
            return poller.poll(0)
