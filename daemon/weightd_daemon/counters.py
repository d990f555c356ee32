"""Counters and histograms of each model and of the daemon, which survive restarts of the daemon.

The counter store writes the record classes to its file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from weightd_protocol import limits
from weightd_protocol.messages.metrics import Histogram
from weightd_protocol.schema import integer, list_of, number, record, text

# Limit of each counter in the file. A counter that starts from this value still fits an integer of the protocol.
MAX_COUNT = 2**55

_MAX_SUM = 1e18

_COUNT = integer(0, MAX_COUNT)

# From the compute time of a small model to the wait of a patient client; each bound is 2 to 3 times the one before.
SECONDS_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

ROWS_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


@dataclass(frozen=True)
class HistogramRecord:
    """A histogram in the counter store's file."""

    counts: tuple[int, ...] = field(metadata=list_of(integer(0, MAX_COUNT), limits.MAX_BUCKETS + 1))
    sum: float = field(metadata=number(_MAX_SUM))


class HistogramCounter:
    """A histogram: counts of values by interval, and their sum.

    Args:
        bounds: the upper, inclusive bounds of the intervals, ascending.

    Attributes:
        counts: the number of values in each interval; the last one counts values above all bounds.
        sum: the sum of all values.
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
        """The number of values."""
        return sum(self.counts)

    def to_record(self) -> HistogramRecord:
        """Return the record for the counter store, with its values limited to the bounds of the file format."""
        return HistogramRecord(tuple(min(each, MAX_COUNT) for each in self.counts), min(self.sum, _MAX_SUM))

    def to_histogram(self) -> Histogram:
        """Return the histogram as a message of the protocol."""
        return Histogram(tuple(self.counts), self.sum)

    def restore(self, record: HistogramRecord) -> None:
        """Add the values of a record, unless it was written with another number of bounds."""
        if len(record.counts) == len(self.counts):
            self.counts = [now + before for now, before in zip(self.counts, record.counts, strict=True)]
            self.sum += record.sum


class ModelCounters:
    """Counters of the requests for one model and of its processes.

    Attributes:
        requests: seconds from arrival to response, for each request that was answered.
        queue: seconds from arrival to the first slot, for each request that got a slot, counted when the request ends.
        compute: seconds that each batch ran.
        rows: rows of each batch, if the model's rows are known.
        unexpected_exits: processes that exited, or had to be killed, without having been asked to stop.
        restarts: processes started to replace lost ones.
        selftest_failures: workers that did not reproduce the known answers of the self-test.
        batch_mismatches: generations whose results for batched rows differed from the results for single rows.
    """

    __slots__ = (
        "_unreplaced",
        "batch_mismatches",
        "compute",
        "queue",
        "requests",
        "restarts",
        "rows",
        "selftest_failures",
        "unexpected_exits",
    )

    def __init__(self) -> None:
        self.requests = HistogramCounter(SECONDS_BOUNDS)
        self.queue = HistogramCounter(SECONDS_BOUNDS)
        self.compute = HistogramCounter(SECONDS_BOUNDS)
        self.rows = HistogramCounter(ROWS_BOUNDS)
        self.unexpected_exits = 0
        self.restarts = 0
        self.selftest_failures = 0
        self.batch_mismatches = 0
        # Lost processes that have not been replaced yet.
        self._unreplaced = 0

    @property
    def is_zero(self) -> bool:
        """Whether nothing has been counted."""
        numbers = self.unexpected_exits, self.restarts, self.selftest_failures, self.batch_mismatches
        histograms = self.requests, self.queue, self.compute, self.rows
        return not any(numbers) and not any(any(each.counts) for each in histograms)

    def on_lost(self, count: int) -> None:
        """Count processes that became unusable without having been asked to stop."""
        self._unreplaced += count

    def on_started(self) -> None:
        """Count a started process: as a restart if a lost process has not been replaced yet."""
        if self._unreplaced:
            self._unreplaced -= 1
            self.restarts += 1


class ProcessCounters:
    """Counters of process events, added to the counters of every model that the processes serve.

    Args:
        counters: the counters of these models.
    """

    __slots__ = ("_counters",)

    def __init__(self, *counters: ModelCounters) -> None:
        self._counters = counters

    def on_death(self) -> None:
        """Count a process that exited, or had to be killed, without having been asked to stop."""
        for each in self._counters:
            each.unexpected_exits += 1

    def on_lost(self, count: int = 1) -> None:
        """Count processes that became unusable, even if they reported it themselves: others may replace them."""
        for each in self._counters:
            each.on_lost(count)

    def on_started(self) -> None:
        """Count a started process."""
        for each in self._counters:
            each.on_started()

    def on_selftest_failed(self) -> None:
        """Count a worker whose answers to the self-test differ from the holder's."""
        for each in self._counters:
            each.selftest_failures += 1

    def on_batch_mismatch(self) -> None:
        """Count a generation whose results for batched rows differ from the results for single rows."""
        for each in self._counters:
            each.batch_mismatches += 1


@dataclass(frozen=True)
class ModelCounterRecord:
    """The counters of a model in the counter store's file; `ModelCounters` describes the fields."""

    model: str = field(metadata=text(limits.MAX_MODEL_NAME_BYTES))
    requests: HistogramRecord = field(metadata=record(HistogramRecord))
    queue: HistogramRecord = field(metadata=record(HistogramRecord))
    compute: HistogramRecord = field(metadata=record(HistogramRecord))
    rows: HistogramRecord = field(metadata=record(HistogramRecord))
    unexpected_exits: int = field(metadata=_COUNT)
    restarts: int = field(metadata=_COUNT)
    selftest_failures: int = field(metadata=_COUNT)
    batch_mismatches: int = field(metadata=_COUNT)

    @property
    def key(self) -> str:
        """The name of the model, which identifies the record."""
        return self.model


class CounterRegistry:
    """The counters of all configured models."""

    def __init__(self) -> None:
        self._by_model: dict[str, ModelCounters] = {}

    def counters_of(self, model: str) -> ModelCounters:
        """Return the counters of a configured model; create them on the first call."""
        counters = self._by_model.get(model)
        if counters is None:
            counters = self._by_model[model] = ModelCounters()
        return counters

    def keep_only(self, models: Collection[str]) -> None:
        """Drop the counters of every model that is not among these."""
        self._by_model = {name: counters for name, counters in self._by_model.items() if name in models}

    def records(self) -> Iterator[ModelCounterRecord]:
        """Yield a record of each model that has counted anything, for the counter store."""
        for model, counters in list(self._by_model.items()):
            if counters.is_zero:
                continue  # most of many models on demand are never used
            yield ModelCounterRecord(
                model,
                counters.requests.to_record(),
                counters.queue.to_record(),
                counters.compute.to_record(),
                counters.rows.to_record(),
                min(counters.unexpected_exits, MAX_COUNT),
                min(counters.restarts, MAX_COUNT),
                min(counters.selftest_failures, MAX_COUNT),
                min(counters.batch_mismatches, MAX_COUNT),
            )

    def restore(self, records: Iterable[ModelCounterRecord]) -> None:
        """Add the counters from the counter store."""
        for each in records:
            counters = self.counters_of(each.model)
            counters.requests.restore(each.requests)
            counters.queue.restore(each.queue)
            counters.compute.restore(each.compute)
            counters.rows.restore(each.rows)
            counters.unexpected_exits += each.unexpected_exits
            counters.restarts += each.restarts
            counters.selftest_failures += each.selftest_failures
            counters.batch_mismatches += each.batch_mismatches


@dataclass(frozen=True)
class DaemonCounterRecord:
    """The counters of the daemon in the counter store's file; `DaemonCounters` describes the fields."""

    reloads: int = field(metadata=_COUNT)
    refused_reloads: int = field(metadata=_COUNT)
    dropped_responses: int = field(metadata=_COUNT)

    @property
    def key(self) -> str:
        """The empty string: the file has one such record."""
        return ""


class DaemonCounters:
    """Counters that belong to no single model.

    Args:
        count_dropped: returns the number of responses that this daemon could not send.

    Attributes:
        reloads: reloads that put a configuration in force.
        refused_reloads: reloads that failed.
    """

    def __init__(self, count_dropped: Callable[[], int]) -> None:
        self.reloads = 0
        self.refused_reloads = 0
        self._restored_dropped = 0
        self._count_dropped = count_dropped

    @property
    def dropped_by_this_daemon(self) -> int:
        """The number of responses that this daemon could not send."""
        return self._count_dropped()

    @property
    def dropped_responses(self) -> int:
        """The number of responses that this daemon and the daemons before it could not send."""
        return self._restored_dropped + self._count_dropped()

    def records(self) -> Iterator[DaemonCounterRecord]:
        """Yield the record for the counter store."""
        counted = self.reloads, self.refused_reloads, self.dropped_responses
        yield DaemonCounterRecord(*(min(each, MAX_COUNT) for each in counted))

    def restore(self, records: Iterable[DaemonCounterRecord]) -> None:
        """Add the counters from the counter store."""
        for each in records:
            self.reloads += each.reloads
            self.refused_reloads += each.refused_reloads
            self._restored_dropped += each.dropped_responses
