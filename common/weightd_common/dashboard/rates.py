"""Rates and quantiles of what was counted between two looks at counters that only grow."""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

from weightd_protocol.messages.metrics import Histogram


def rate(before: float, after: float, seconds: float) -> Optional[float]:
    """Return how much was counted in a second; None where the counter has begun anew, or no time has passed."""
    return (after - before) / seconds if after >= before and seconds > 0 else None


def count_difference(before: Histogram, after: Histogram) -> Optional[Tuple[int, ...]]:
    """Return how often each size was counted since; None where it has begun anew, or has other buckets."""
    if len(before.counts) != len(after.counts):
        return None
    counts = tuple(now - then for then, now in zip(before.counts, after.counts))
    return None if any(each < 0 for each in counts) else counts


def quantile(fraction: float, bounds: Sequence[float], counts: Sequence[int]) -> Optional[float]:
    """Return what this share of all values does not exceed, as if those of a bucket were spread evenly in it.

    Of what is beyond the last bound no more is known: then it is that bound. None where nothing was counted.

    Args:
        fraction: 0.99 for p99.
        bounds: of the buckets, ascending; the first begins at 0.
        counts: one for each bound, and one for what is beyond the last.
    """
    total = sum(counts)
    if not total or len(counts) != len(bounds) + 1:
        return None
    target_count, below, low = fraction * total, 0, 0.0
    for bound, count in zip(bounds, counts):
        if count and below + count >= target_count:
            return low + (bound - low) * (target_count - below) / count
        below += count
        low = bound
    return low
