"""Measurement windows: group responses by time until three windows in a row agree. Pure: does not read a clock."""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Counter as Counts
from typing import Deque, List, NamedTuple, Optional, Sequence, Tuple

# The criterion of perf_analyzer: three windows in a row within 10 % of their mean, among at most ten.
STABLE_WINDOWS = 3
TOLERANCE = 0.1
MAX_WINDOWS = 10


class Window(NamedTuple):
    """The results in one window.

    Attributes:
        seconds: duration of the window.
        latencies: latencies of the responses in seconds, in the order of their arrival.
        errors: number of failed requests by error code.
    """

    seconds: float
    latencies: Tuple[float, ...]
    errors: Counts[str]

    @property
    def rate(self) -> float:
        """Responses per second."""
        return len(self.latencies) / self.seconds


def deviation(rates: Sequence[float]) -> float:
    """Return the largest deviation of a rate from the mean, relative to the mean."""
    mean = sum(rates) / len(rates)
    return max(abs(each - mean) for each in rates) / mean if mean else math.inf


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Return the smallest of the ascending values that at least a fraction of them does not exceed."""
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


class Windows:
    """Collects responses in windows. The first window is the warm-up and is dropped.

    A window ends with the first response after its time, where the next one begins. Thus the rate is accurate even with
    few responses.

    Args:
        started_at: when the first request was sent.
        window_s: minimum duration of a window in seconds.

    Attributes:
        recent: the latest complete windows, at most `STABLE_WINDOWS`.
        count: number of complete windows without the warm-up; -1 before the warm-up has ended.
    """

    def __init__(self, started_at: float, window_s: float) -> None:
        self.recent: Deque[Window] = deque(maxlen=STABLE_WINDOWS)
        self.count = -1
        self._window_s = window_s
        self._start_window(started_at)

    @property
    def is_stable(self) -> bool:
        """Whether the latest windows agree."""
        return len(self.recent) == STABLE_WINDOWS and deviation([each.rate for each in self.recent]) <= TOLERANCE

    @property
    def is_over(self) -> bool:
        """Whether the measurement is complete: the windows agree, or the maximum number of windows is reached."""
        return self.is_stable or self.count + 1 >= MAX_WINDOWS

    def on_response(self, now: float, latency_s: float) -> bool:
        """Record a response; return whether it ends a window."""
        self._latencies.append(latency_s)
        if now < self._ends_at:
            return False
        self.count += 1
        if self.count:
            self.recent.append(self._close_window(now))
        self._start_window(now)
        return True

    def on_error(self, code: str) -> None:
        """Record a failed request."""
        self._errors[code] += 1

    def finish(self, now: float) -> None:
        """End the measurement. The current window counts if its time is over, or if there is no complete one."""
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
    """The result for one number of requests in flight.

    Attributes:
        in_flight: number of requests in flight.
        answers: number of responses in the windows that count.
        requests_per_s: responses per second; None without responses.
        latencies: 50th, 95th and 99th percentile in seconds; None without responses.
        errors: number of failed requests by error code.
        windows: number of windows that were measured.
        is_stable: whether the last three windows agree.
        deviation: their largest relative deviation from the mean; None if unknown.
        requests_per_execution: average number of requests in one execution; None if unknown.
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
    """Return the result from the latest windows."""
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
