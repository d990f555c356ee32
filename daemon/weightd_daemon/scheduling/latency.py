"""Percentiles of the last answers."""

from __future__ import annotations

from collections import deque

# Enough for a p99 that ten answers stand behind; 32 KB.
_MAX_SAMPLES = 1024


class LatencyWindow:
    """The last answers' latencies, in seconds."""

    def __init__(self) -> None:
        self.count = 0
        self._samples: deque[float] = deque(maxlen=_MAX_SAMPLES)

    def add(self, seconds: float) -> None:
        """Count an answer."""
        self.count += 1
        self._samples.append(seconds)

    def percentile_us(self, percent: float) -> float | None:
        """Return the percentile over the last answers, in microseconds; None before the first."""
        if not self._samples:
            return None
        ranked = sorted(self._samples)
        return 1e6 * ranked[min(len(ranked) - 1, int(len(ranked) * percent / 100))]
