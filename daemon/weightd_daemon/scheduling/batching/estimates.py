"""Estimates from what was measured: how long batches take, and how many requests there are at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Of the last batches each counts so much in the mean.
_WEIGHT = 0.2

# Forms of requests, on one device each; the clients choose them.
_MAX_KINDS = 256

Kind = tuple[Any, ...]


class DurationEstimates:
    """Mean seconds of batches, on each device, of each kind of request, for numbers of rows within a factor of two."""

    def __init__(self) -> None:
        # Of each power of two that is more than the rows: the mean of the rows, and of the seconds.
        self._means: dict[tuple[str, Kind], dict[int, tuple[float, float]]] = {}

    def add(self, device: str, kind: Kind, rows: int, seconds: float) -> None:
        """A batch has run."""
        means = self._means.get((device, kind))
        if means is None:
            if len(self._means) >= _MAX_KINDS:
                self._means.clear()
            means = self._means[device, kind] = {}
        mean_rows, mean_seconds = means.get(rows.bit_length(), (float(rows), seconds))
        means[rows.bit_length()] = (
            mean_rows + _WEIGHT * (rows - mean_rows),
            mean_seconds + _WEIGHT * (seconds - mean_seconds),
        )

    def expected_s(self, device: str, kind: Kind, rows: int) -> float:
        """Return the seconds that a batch with so many rows is going to take at most, about; 0.0 where nobody knows."""
        nearest = self._nearest(device, kind, rows)
        return nearest[1] * max(1.0, rows / nearest[0]) if nearest else 0.0

    def max_rows_within(self, device: str, kind: Kind, rows: int, seconds: float) -> int:
        """Return how many of so many rows take no longer than this, as far as is known: at least one.

        What is known of more rows tells what less of them take in proportion: less are tried then, and known.
        """
        while rows > 1 and (nearest := self._nearest(device, kind, rows)) and nearest[1] * rows / nearest[0] > seconds:
            rows = max(1, min(rows - 1, int(seconds * nearest[0] / nearest[1])))
        return rows

    def share(self, device: str, devices: Sequence[str], kind: Kind, rows: int) -> float:
        """Return which share of so many rows one of these devices gets if all are to be ready at once."""
        speeds = {
            each: rows / self.expected_s(each, kind, rows) for each in {*devices} if self.expected_s(each, kind, rows)
        }
        mean_speed = sum(speeds.values()) / len(speeds) if speeds else 1.0
        return speeds.get(device, mean_speed) / sum(speeds.get(each, mean_speed) for each in devices)

    def _nearest(self, device: str, kind: Kind, rows: int) -> tuple[float, float] | None:
        """The mean of the rows, and of the seconds, of the batches whose rows were nearest to so many."""
        means = self._means.get((device, kind))
        if not means:
            return None
        bucket = rows.bit_length()
        return means[min(means, key=lambda each: (abs(each - bucket), each))]


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
