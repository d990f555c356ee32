"""Estimates from measurements: the duration of batches and the number of concurrent requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# The weight of the latest batch in a mean.
_WEIGHT = 0.2

# The maximum number of pairs of a device and a kind of request. Clients choose the kinds, so there is no other limit.
_MAX_KINDS = 256

Kind = tuple[Any, ...]


class DurationEstimates:
    """The mean durations of batches by device, kind of request and number of rows within a factor of two."""

    def __init__(self) -> None:
        # For each bit length of the number of rows: the mean number of rows and the mean seconds.
        self._means: dict[tuple[str, Kind], dict[int, tuple[float, float]]] = {}

    def add(self, device: str, kind: Kind, rows: int, seconds: float) -> None:
        """Add the duration of a batch."""
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
        """Return the expected maximum duration of a batch of `rows` rows, in seconds; 0.0 if nothing is known."""
        nearest = self._nearest(device, kind, rows)
        return nearest[1] * max(1.0, rows / nearest[0]) if nearest else 0.0

    def max_rows_within(self, device: str, kind: Kind, rows: int, seconds: float) -> int:
        """Return how many of `rows` rows take at most `seconds`, as far as is known: at least one.

        The estimate scales the time of a larger batch down in proportion. The smaller batch is then measured itself.
        """
        while rows > 1 and (nearest := self._nearest(device, kind, rows)) and nearest[1] * rows / nearest[0] > seconds:
            rows = max(1, min(rows - 1, int(seconds * nearest[0] / nearest[1])))
        return rows

    def share(self, device: str, devices: Sequence[str], kind: Kind, rows: int) -> float:
        """Return the share of `rows` rows for one of these devices, so that all devices finish at the same time."""
        speeds = {
            each: rows / self.expected_s(each, kind, rows) for each in {*devices} if self.expected_s(each, kind, rows)
        }
        mean_speed = sum(speeds.values()) / len(speeds) if speeds else 1.0
        return speeds.get(device, mean_speed) / sum(speeds.get(each, mean_speed) for each in devices)

    def _nearest(self, device: str, kind: Kind, rows: int) -> tuple[float, float] | None:
        """Return the mean rows and mean seconds of the measured batches whose number of rows is nearest to `rows`."""
        means = self._means.get((device, kind))
        if not means:
            return None
        bucket = rows.bit_length()
        return means[min(means, key=lambda each: (abs(each - bucket), each))]


class RollingMax:
    """The maximum of a count over the last seconds: over at least one window, and less than two.

    Args:
        window_s: the length of the window in seconds.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._window_started_at = 0.0
        self._max = self._previous_max = 0

    def add(self, count: int, now: float) -> int:
        """Add the current count; return the maximum."""
        if now >= self._window_started_at + self._window_s:
            self._previous_max = self._max if now < self._window_started_at + 2 * self._window_s else 0
            self._window_started_at, self._max = now, 0
        self._max = max(self._max, count)
        return max(self._max, self._previous_max)
