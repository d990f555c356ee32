"""Estimates from measurements: the duration of batches and the number of concurrent requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Weight of the latest batch in an exponentially weighted mean.
_WEIGHT = 0.2

# Maximum number of pairs of a device and a kind of request for which means are kept. Clients can send requests of any
# number of kinds, so this number must be limited.
_MAX_KINDS = 256

Kind = tuple[Any, ...]


class DurationEstimates:
    """Mean durations of batches, by device, kind of request (`BatchKey.kind`) and number of rows.

    Numbers of rows with equal bit length, such as 4 to 7, share one mean.
    """

    def __init__(self) -> None:
        # For each device and kind, by bit length of the number of rows: the mean number of rows and the mean seconds.
        self._means: dict[tuple[str, Kind], dict[int, tuple[float, float]]] = {}

    def add(self, device: str, kind: Kind, rows: int, seconds: float) -> None:
        """Add the measured duration of a batch of `rows` rows."""
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
        """Return an upper estimate of the seconds that a batch of `rows` rows takes; 0.0 if nothing was measured.

        The duration that was measured for the nearest number of rows is scaled up for more rows, but not scaled down
        for fewer.
        """
        nearest = self._nearest(device, kind, rows)
        return nearest[1] * max(1.0, rows / nearest[0]) if nearest else 0.0

    def max_rows_within(self, device: str, kind: Kind, rows: int, seconds: float) -> int:
        """Return how many rows, from 1 to `rows`, are expected to take at most `seconds`.

        If only a larger batch has been measured, its duration is scaled down in proportion to the rows. Once a smaller
        batch has run, its measured duration is used instead of this estimate.
        """
        while rows > 1 and (nearest := self._nearest(device, kind, rows)) and nearest[1] * rows / nearest[0] > seconds:
            rows = max(1, min(rows - 1, int(seconds * nearest[0] / nearest[1])))
        return rows

    def share(self, device: str, devices: Sequence[str], kind: Kind, rows: int) -> float:
        """Return the fraction of `rows` rows that `device` should run so that all `devices` finish at the same time."""
        speeds = {
            each: rows / self.expected_s(each, kind, rows) for each in {*devices} if self.expected_s(each, kind, rows)
        }
        mean_speed = sum(speeds.values()) / len(speeds) if speeds else 1.0
        return speeds.get(device, mean_speed) / sum(speeds.get(each, mean_speed) for each in devices)

    def _nearest(self, device: str, kind: Kind, rows: int) -> tuple[float, float] | None:
        """Return the mean rows and mean seconds of the batches whose number of rows is nearest to `rows`, or None."""
        means = self._means.get((device, kind))
        if not means:
            return None
        bucket = rows.bit_length()
        return means[min(means, key=lambda each: (abs(each - bucket), each))]


class RollingMax:
    """The maximum of a count over a recent period that is between one and two windows long.

    Args:
        window_s: the length of the window in seconds.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._window_started_at = 0.0
        self._max = self._previous_max = 0

    def add(self, count: int, now: float) -> int:
        """Add the count at the time `now`; return the maximum of the recent period."""
        if now >= self._window_started_at + self._window_s:
            self._previous_max = self._max if now < self._window_started_at + 2 * self._window_s else 0
            self._window_started_at, self._max = now, 0
        self._max = max(self._max, count)
        return max(self._max, self._previous_max)
