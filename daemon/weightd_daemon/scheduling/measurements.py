"""What is measured of the batches of a model: counters, latencies, and estimates of how long the next one takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from weightd_daemon.scheduling.batch import Batch
from weightd_daemon.scheduling.batching.estimates import DurationEstimates

# Of so many of the last answers the mean duration is taken.
_MEAN_WINDOW = 16

# A hint to try again sooner would only bring the next refusal.
_MIN_RETRY_S = 0.01


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


class ExecutionCounters:
    """Counts batches that were answered, since the model is served.

    Attributes:
        executions: batches.
        padded_rows: rows that were added to what was asked, because the model takes certain numbers of rows alone.
        split_requests: requests that ran in parts.
        retried_items: parts of batches that ran once more, because of what became of their slot or of those beside
            them.
    """

    def __init__(self) -> None:
        self.executions = 0
        self.padded_rows = 0
        self.split_requests = 0
        self.retried_items = 0
        self._batches_by_power: dict[int, int] = {}

    @property
    def batches_by_rows(self) -> Mapping[int, int]:
        """How many batches had rows up to each power of two, and more than the one before.

        Of others nothing is known.
        """
        return {1 << power: count for power, count in sorted(self._batches_by_power.items())}

    def count_rows(self, rows: int, model_rows: int) -> None:
        """A batch of rows was answered; `model_rows` are those that the model was given, 0 if they are its own."""
        power = (rows - 1).bit_length()
        self._batches_by_power[power] = self._batches_by_power.get(power, 0) + 1
        self.padded_rows += max(0, model_rows - rows)


class BatchTimes:
    """How long the batches of one model took, and what that says of the next ones.

    Attributes:
        estimates: for batches with rows.
    """

    def __init__(self) -> None:
        self.estimates = DurationEstimates()
        # For how long each part of the last batches ran.
        self._recent_s: deque[float] = deque(maxlen=_MEAN_WINDOW)

    def add(self, device: str, batch: Batch, seconds: float) -> None:
        """A batch has run."""
        self._recent_s.append(seconds / batch.item_count)
        if batch.batch_key is not None:
            self.estimates.add(device, batch.batch_key.kind, batch.rows, seconds)

    @property
    def mean_item_s(self) -> float:
        """The seconds that a part took of late; 0.0 before anything was answered."""
        return sum(self._recent_s) / len(self._recent_s) if self._recent_s else 0.0

    def expected_s(self, device: str, batch: Batch) -> float:
        """Return how many seconds a batch will take on a device, about; 0.0 where nobody knows."""
        if batch.batch_key is None:
            return batch.item_count * self.mean_item_s
        estimate_s = self.estimates.expected_s(device, batch.batch_key.kind, batch.rows)
        return estimate_s or batch.item_count * self.mean_item_s

    def retry_after_s(self, queued: int, slot_count: int, busy_s: float) -> float | None:
        """Return in how many seconds there may be room in a queue that is full.

        It has moved on by one place for each slot after the time that a request takes, and that is not less than the
        `busy_s` for which a slot has computed by now. Before anything was answered nobody knows how long that is.
        """
        if not self._recent_s or not slot_count:
            return None
        return max(max(self.mean_item_s, busy_s) * queued / slot_count, _MIN_RETRY_S)
