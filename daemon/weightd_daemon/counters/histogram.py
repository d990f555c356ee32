"""Counts values by their size: an addition to one of a few counters, whatever has been counted before."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from weightd_protocol import limits
from weightd_protocol.messages.metrics import Histogram
from weightd_protocol.schema import integer, list_of, number

# Of each counter in the file: whatever comes to it after that, it is a number of the wire.
MAX_COUNT = 2**55
_MAX_SUM = 1e18

# From what a small model takes to what a patient client waits, two to two and a half times as much each.
SECONDS_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

ROWS_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


@dataclass(frozen=True)
class HistogramRecord:
    """What has been counted, as it is written down."""

    counts: tuple[int, ...] = field(metadata=list_of(integer(0, MAX_COUNT), limits.MAX_BUCKETS + 1))
    sum: float = field(metadata=number(_MAX_SUM))


class HistogramCounter:
    """How many values there were up to each bound and beyond the one before, and beyond the last.

    Args:
        bounds: ascending.

    Attributes:
        counts: as above.
        sum: of all values.
    """

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def to_record(self) -> HistogramRecord:
        """Return what is to be written down."""
        return HistogramRecord(tuple(min(each, MAX_COUNT) for each in self.counts), min(self.sum, _MAX_SUM))

    def to_histogram(self) -> Histogram:
        """Return what has been counted."""
        return Histogram(tuple(self.counts), self.sum)

    def restore(self, record: HistogramRecord) -> None:
        """Count what was written down, too; of other bounds it is of no use."""
        if len(record.counts) == len(self.counts):
            self.counts = [now + before for now, before in zip(self.counts, record.counts, strict=True)]
            self.sum += record.sum
