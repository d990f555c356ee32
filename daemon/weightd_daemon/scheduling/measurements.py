"""Measurements of the batches of one model: counters, latencies, and estimates of durations."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weightd_daemon.scheduling.batch import Batch
from weightd_daemon.scheduling.batching.estimates import DurationEstimates

# Number of recent batches from which the mean time per item is computed.
_MEAN_WINDOW = 16

# Minimum of the retry hint in seconds: an earlier retry would only be refused again.
_MIN_RETRY_S = 0.01


# Number of recent latencies in a window, which take 32 KB. Ten of them are above the 99th percentile, which is enough
# to determine this percentile.
_MAX_SAMPLES = 1024


class LatencyWindow:
    """The latencies of the most recent answers, in seconds."""

    def __init__(self) -> None:
        self.count = 0
        # None before the first answer, because even an empty deque takes 760 bytes.
        self._samples: deque[float] | None = None

    def add(self, seconds: float, count: int = 1) -> None:
        """Add the latency of an answer, or of several answers."""
        if self._samples is None:
            self._samples = deque(maxlen=_MAX_SAMPLES)
        self.count += count
        self._samples.append(seconds)
        if count > 1:
            self._samples.extend([seconds] * min(count - 1, _MAX_SAMPLES))

    def percentile_us(self, percent: float) -> float | None:
        """Return a percentile of the latencies in microseconds; None before the first answer."""
        if not self._samples:
            return None
        ranked = sorted(self._samples)
        return 1e6 * ranked[min(len(ranked) - 1, int(len(ranked) * percent / 100))]


class ExecutionCounters:
    """Counts the answered batches since the model started to serve.

    Attributes:
        executions: answered batches.
        padded_rows: rows that were added because the model supports only certain numbers of rows.
        split_requests: requests that ran in parts.
        retried_items: batch items that were queued again because their slot was lost or their batch failed.
    """

    def __init__(self) -> None:
        self.executions = 0
        self.padded_rows = 0
        self.split_requests = 0
        self.retried_items = 0
        self._batches_by_power: dict[int, int] = {}

    @property
    def batches_by_rows(self) -> Mapping[int, int]:
        """The number of answered batches by their number of rows, with powers of two as keys.

        For example, the value for the key 8 is the number of batches with 5 to 8 rows. Batches without rows are not
        counted.
        """
        return {1 << power: count for power, count in sorted(self._batches_by_power.items())}

    def count_rows(self, rows: int, model_rows: int) -> None:
        """Count the rows of an answered batch; `model_rows` is the padded number of rows, 0 without padding."""
        power = (rows - 1).bit_length()
        self._batches_by_power[power] = self._batches_by_power.get(power, 0) + 1
        self.padded_rows += max(0, model_rows - rows)


class BatchTimes:
    """The durations of the recent batches of one model, and the estimates that follow from them.

    Attributes:
        estimates: the expected durations of batches with rows.
    """

    def __init__(self) -> None:
        self.estimates = DurationEstimates()
        # The seconds of each recent batch, divided by the number of its items; None before the first answer.
        self._recent_s: deque[float] | None = None

    def add(self, device: str, batch: Batch, seconds: float) -> None:
        """Add the measured duration of a batch."""
        if self._recent_s is None:
            self._recent_s = deque(maxlen=_MEAN_WINDOW)
        self._recent_s.append(seconds / batch.item_count)
        if batch.batch_key is not None:
            self.estimates.add(device, batch.batch_key.kind, batch.rows, seconds)

    @property
    def mean_item_s(self) -> float:
        """The mean seconds per item in recent batches; 0.0 before the first answer."""
        return sum(self._recent_s) / len(self._recent_s) if self._recent_s else 0.0

    def expected_s(self, device: str, batch: Batch) -> float:
        """Return the expected duration of a batch on a device, in seconds; 0.0 if it is unknown."""
        if batch.batch_key is None:
            return batch.item_count * self.mean_item_s
        estimate_s = self.estimates.expected_s(device, batch.batch_key.kind, batch.rows)
        return estimate_s or batch.item_count * self.mean_item_s

    def retry_after_s(self, queued: int, slot_count: int, busy_s: float) -> float | None:
        """Return after how many seconds a full queue may have room; None before the first answer or without slots.

        The estimate assumes that each slot takes one request from the queue every `mean_item_s` seconds, or every
        `busy_s` seconds if that is longer. `busy_s` is the longest time for which a slot has been running its batch.
        """
        if not self._recent_s or not slot_count:
            return None
        return max(max(self.mean_item_s, busy_s) * queued / slot_count, _MIN_RETRY_S)


class DispatcherStatus(NamedTuple):
    """The state of a dispatcher.

    Attributes:
        queued: the number of queued requests.
        running: the number of unfinished requests at slots.
        failed: the number of accepted requests that ended in an error.
        latencies: the latencies of the answers.
        quarantined: the number of contents in quarantine.
        confined_clients: clients whose requests run one at a time.
        execution_counters: counters of the batches that have run.
    """

    queued: int
    running: int
    failed: int
    latencies: LatencyWindow
    quarantined: int
    confined_clients: Sequence[str]
    execution_counters: ExecutionCounters
