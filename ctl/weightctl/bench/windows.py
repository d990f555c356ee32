"""Answers, as they come, cut into windows of time, until three in a row tell the same. No clock is looked at here."""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Counter as Counts
from typing import Deque, List, NamedTuple, Optional, Sequence, Tuple

# As perf_analyzer has it: three windows in a row within 10 % of their mean, of ten at most.
STABLE_WINDOWS = 3
TOLERANCE = 0.1
MAX_WINDOWS = 10


class Window(NamedTuple):
    """What came in some time.

    Attributes:
        seconds: how long it was.
        latencies: of the answers, in seconds, as they came.
        errors: how many requests ended in an error, by code.
    """

    seconds: float
    latencies: Tuple[float, ...]
    errors: Counts[str]

    @property
    def rate(self) -> float:
        """Answers in a second."""
        return len(self.latencies) / self.seconds


def deviation(rates: Sequence[float]) -> float:
    """Return how far the rate that is furthest from their mean is from it, as a share of the mean."""
    mean = sum(rates) / len(rates)
    return max(abs(each - mean) for each in rates) / mean if mean else math.inf


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Return the least of some ascending values that is not exceeded by this share of them."""
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


class Windows:
    """Collects answers. The first window is the warm-up, and forgotten.

    A window ends with the first answer after its time, and the next one begins there: so a rate is right however few
    answers there are.

    Args:
        started_at: when the first request was sent.
        window_s: how long a window lasts at least.

    Attributes:
        recent: the last windows that are whole, at most `STABLE_WINDOWS`.
        count: how many there have been, without the warm-up.
    """

    def __init__(self, started_at: float, window_s: float) -> None:
        self.recent: Deque[Window] = deque(maxlen=STABLE_WINDOWS)
        self.count = -1
        self._window_s = window_s
        self._start_window(started_at)

    @property
    def is_stable(self) -> bool:
        """Whether the last of them agree."""
        return len(self.recent) == STABLE_WINDOWS and deviation([each.rate for each in self.recent]) <= TOLERANCE

    @property
    def is_over(self) -> bool:
        """Whether it is enough: they agree, or do not after as many as there may be."""
        return self.is_stable or self.count + 1 >= MAX_WINDOWS

    def on_response(self, now: float, latency_s: float) -> bool:
        """An answer has come; return whether a window ends with it."""
        self._latencies.append(latency_s)
        if now < self._ends_at:
            return False
        self.count += 1
        if self.count:
            self.recent.append(self._close_window(now))
        self._start_window(now)
        return True

    def on_error(self, code: str) -> None:
        """A request has ended in an error."""
        self._errors[code] += 1

    def finish(self, now: float) -> None:
        """It ends here. What has come of a window counts where there is no other, or its time is over."""
        is_overdue = now >= self._ends_at and self.count >= 0
        if is_overdue or (not self.recent and now > self._started_at and (self._latencies or self._errors)):
            self.recent.append(self._close_window(now))

    def _start_window(self, now: float) -> None:
        self._started_at = now
        self._ends_at = now + self._window_s
        self._latencies: List[float] = []
        self._errors: Counts[str] = Counter()

    def _close_window(self, now: float) -> Window:
        return Window(now - self._started_at, tuple(self._latencies), self._errors)


class Level(NamedTuple):
    """What was measured with so many requests in flight. Latencies in seconds; None where no answer came.

    Attributes:
        in_flight: how many requests were under way at any time.
        answers: how many of them count here.
        requests_per_s: answers in a second.
        latencies: half, 95 % and 99 % of the answers took no longer.
        errors: how many requests ended in an error, by code.
        windows: how many windows were measured.
        is_stable: whether the last three agree.
        deviation: how far they are from their mean at most.
        requests_per_execution: how many requests the daemon has put into one execution on average; None where it does
            not tell.
    """

    in_flight: int
    answers: int
    requests_per_s: Optional[float]
    latencies: Optional[Tuple[float, float, float]]
    errors: Counts[str]
    windows: int
    is_stable: bool
    deviation: Optional[float]
    requests_per_execution: Optional[float]


def summarize(in_flight: int, windows: Windows, requests_per_execution: Optional[float]) -> Level:
    """Return what the last windows tell."""
    latencies = sorted(each for window in windows.recent for each in window.latencies)
    errors: Counts[str] = Counter()
    for window in windows.recent:
        errors.update(window.errors)
    return Level(
        in_flight,
        len(latencies),
        len(latencies) / sum(window.seconds for window in windows.recent) if latencies else None,
        (percentile(latencies, 0.5), percentile(latencies, 0.95), percentile(latencies, 0.99)) if latencies else None,
        errors,
        max(0, windows.count),
        windows.is_stable,
        deviation([window.rate for window in windows.recent]) if latencies and len(windows.recent) > 1 else None,
        requests_per_execution,
    )
