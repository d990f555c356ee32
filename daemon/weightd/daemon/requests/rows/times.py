"""How long jobs take, by where they run and what of it they are: what comes next is told by what was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Of the last jobs each counts so much in the mean.
_WEIGHT = 0.2

# Forms of requests, on one device each; the clients choose them.
_MAX_KNOWN = 256

Kind = tuple[Any, ...]


class Times:
    """Mean seconds of jobs, on each device, of each kind of request, for numbers of rows within a factor of two."""

    def __init__(self) -> None:
        # Of each power of two that is more than the rows: the mean of the rows, and of the seconds.
        self._means: dict[tuple[str, Kind], dict[int, tuple[float, float]]] = {}

    def add(self, device: str, kind: Kind, rows: int, seconds: float) -> None:
        """A job has run."""
        known = self._means.get((device, kind))
        if known is None:
            if len(self._means) >= _MAX_KNOWN:
                self._means.clear()
            known = self._means[device, kind] = {}
        had_rows, had_seconds = known.get(rows.bit_length(), (float(rows), seconds))
        known[rows.bit_length()] = (
            had_rows + _WEIGHT * (rows - had_rows),
            had_seconds + _WEIGHT * (seconds - had_seconds),
        )

    def expected(self, device: str, kind: Kind, rows: int) -> float:
        """Return the seconds that a job with so many rows is going to take at most, about; 0.0 where nobody knows."""
        near = self._near(device, kind, rows)
        return near[1] * max(1.0, rows / near[0]) if near else 0.0

    def most(self, device: str, kind: Kind, rows: int, seconds: float) -> int:
        """Return how many of so many rows take no longer than this, as far as is known: at least one.

        What is known of more rows tells what less of them take in proportion: less are tried then, and known.
        """
        while rows > 1 and (nearest := self._near(device, kind, rows)) and nearest[1] * rows / nearest[0] > seconds:
            rows = max(1, min(rows - 1, int(seconds * nearest[0] / nearest[1])))
        return rows

    def share(self, device: str, devices: Sequence[str], kind: Kind, rows: int) -> float:
        """Return which share of so many rows one of these devices gets if all are to be ready at once."""
        speeds = {
            each: rows / self.expected(each, kind, rows) for each in {*devices} if self.expected(each, kind, rows)
        }
        usual = sum(speeds.values()) / len(speeds) if speeds else 1.0
        return speeds.get(device, usual) / sum(speeds.get(each, usual) for each in devices)

    def _near(self, device: str, kind: Kind, rows: int) -> tuple[float, float] | None:
        """The mean of the rows, and of the seconds, of the jobs whose rows were nearest to so many."""
        known = self._means.get((device, kind))
        if not known:
            return None
        bucket = rows.bit_length()
        return known[min(known, key=lambda each: (abs(each - bucket), each))]
