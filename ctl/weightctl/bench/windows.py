"""Divides a measurement into windows until three windows in a row agree. This module does not read a clock."""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Counter as Counts
from typing import Deque, List, NamedTuple, Optional, Sequence, Tuple

# As in perf_analyzer, a measurement ends when the rates of three windows in a row differ by at most 10 % from their
# mean, or when ten windows are complete.
STABLE_WINDOWS = 3
TOLERANCE = 0.1
MAX_WINDOWS = 10


class Window(NamedTuple):
    """The responses and errors in one window, which is a part of the measurement's duration.

    Attributes:
        seconds: the duration of the window in seconds.
        latencies: the latency of each response in seconds, in the order of arrival.
        errors: the number of failed requests, by error code.
    """

    seconds: float
    latencies: Tuple[float, ...]
    errors: Counts[str]

    @property
    def rate(self) -> float:
        """Responses per second."""
        return len(self.latencies) / self.seconds


def deviation(rates: Sequence[float]) -> float:
    """Return the largest deviation of any rate from the mean rate, divided by the mean rate."""
    mean = sum(rates) / len(rates)
    return max(abs(each - mean) for each in rates) / mean if mean else math.inf


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Return the smallest value in `ordered` for which at least `fraction` of the values are not larger."""
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


class Windows:
    """Collects responses in windows. The first window is for warming up and is not counted.

    A window ends when the first response after its minimum duration arrives; the next window begins at the same time.
    So the rate of a window is accurate even if there are few responses.

    Args:
        started_at: the time at which the first request was sent, in seconds.
        window_s: the minimum duration of a window in seconds.

    Attributes:
        recent: the complete windows that ended last, at most `STABLE_WINDOWS`.
        count: the number of complete windows without the warm-up; -1 during the warm-up.
    """

    def __init__(self, started_at: float, window_s: float) -> None:
        self.recent: Deque[Window] = deque(maxlen=STABLE_WINDOWS)
        self.count = -1
        self._window_s = window_s
        self._start_window(started_at)

    @property
    def is_stable(self) -> bool:
        """Whether the rates of the last three windows agree."""
        return len(self.recent) == STABLE_WINDOWS and deviation([each.rate for each in self.recent]) <= TOLERANCE

    @property
    def is_over(self) -> bool:
        """Whether the measurement is complete: the last windows agree, or there are as many windows as allowed."""
        return self.is_stable or self.count + 1 >= MAX_WINDOWS

    def on_response(self, now: float, latency_s: float) -> bool:
        """Record a response that arrived at `now`. Return whether the response ends the current window."""
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
        """End the measurement.

        The current window counts if its minimum duration has passed, or if no window is complete.
        """
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
    """Result of a level, which is the measurement with one number of requests in flight.

    Attributes:
        in_flight: the number of requests in flight.
        answers: the number of responses in the windows that ended last.
        requests_per_s: responses per second in these windows; None without responses.
        latencies: the 50th, 95th and 99th percentile of the latency in seconds; None without responses.
        errors: the number of failed requests in these windows, by error code.
        windows: the number of windows that were measured.
        is_stable: whether the rates of the last three windows agree.
        deviation: the largest deviation of a window's rate from the mean rate, divided by the mean rate; None if
            unknown.
        requests_per_execution: the mean number of requests that workers ran in one execution; None if unknown.
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
    """Return the result of a level from the windows that ended last."""
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
