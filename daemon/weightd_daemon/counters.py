"""Counters and histograms of each model and of the daemon, which survive restarts of the daemon.

The counter store (`handover/counter_store.py`) writes the classes named `...Record` to its file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from weightd_protocol import limits
from weightd_protocol.messages.metrics import Histogram
from weightd_protocol.schema import integer, list_of, number, record, text

# Maximum value of a counter in the file. A daemon that restores this value can still count up without exceeding the
# integers of the protocol.
MAX_COUNT = 2**55

_MAX_SUM = 1e18

_COUNT = integer(0, MAX_COUNT)

# Upper bounds in seconds of the intervals of duration histograms: from the compute time of a small model to the longest
# usual wait. Each bound is 2 to 3 times the bound before.
SECONDS_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

ROWS_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


@dataclass(frozen=True)
class HistogramRecord:
    """A histogram as it is written to the counter store's file; see `HistogramCounter` for the fields."""

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

    def add(self, value: float, count: int = 1) -> None:
        """Count a value `count` times."""
        self.counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def to_record(self) -> HistogramRecord:
        """Return the record for the counter store. Values are limited to the maximum of the file format."""
        return HistogramRecord(tuple(min(each, MAX_COUNT) for each in self.counts), min(self.sum, _MAX_SUM))

    def to_histogram(self) -> Histogram:
        """Return the histogram as a message of the protocol."""
        return Histogram(tuple(self.counts), self.sum)

    def restore(self, record: HistogramRecord) -> None:
        """Add the values of a record from the counter store. Ignore a record with another number of intervals."""
        if len(record.counts) == len(self.counts):
            self.counts = [now + before for now, before in zip(self.counts, record.counts, strict=True)]
            self.sum += record.sum


class ModelCounters:
    """Counters of one model: of its requests, batches and processes. They only increase.

    Attributes:
        requests: histogram of the seconds from the arrival of a request to its response, over all answered requests.
        queue: histogram of the seconds from the arrival of a request to its first slot, over all ended requests that
            got a slot.
        compute: histogram of the seconds for which a batch ran.
        rows: histogram of the number of rows of a batch, if the model's inputs have rows.
        unexpected_exits: the number of processes that exited, or had to be killed, although the daemon had not stopped
            them.
        restarts: the number of processes that were started to replace lost processes.
        selftest_failures: the number of workers that did not reproduce the known answers of the self-test.
        batch_mismatches: the number of generations whose results for batched rows differed from those for single rows.
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
        # Number of lost processes that have not been replaced yet.
        self._unreplaced = 0

    @property
    def is_zero(self) -> bool:
        """Whether nothing has been counted."""
        numbers = self.unexpected_exits, self.restarts, self.selftest_failures, self.batch_mismatches
        histograms = self.requests, self.queue, self.compute, self.rows
        return not any(numbers) and not any(any(each.counts) for each in histograms)

    def on_lost(self, count: int) -> None:
        """Count processes that became unusable although the daemon had not stopped them; they will be replaced."""
        self._unreplaced += count

    def on_started(self) -> None:
        """Count a started process. It counts as a restart if a lost process has not been replaced yet."""
        if self._unreplaced:
            self._unreplaced -= 1
            self.restarts += 1


class ProcessCounters:
    """Counts process events for every model that the processes serve: several in a model group, else one.

    Args:
        counters: the counters of each of these models.
    """

    __slots__ = ("_counters",)

    def __init__(self, *counters: ModelCounters) -> None:
        self._counters = counters

    def on_death(self) -> None:
        """Count a process that exited, or had to be killed, although the daemon had not stopped it."""
        for each in self._counters:
            each.unexpected_exits += 1

    def on_lost(self, count: int = 1) -> None:
        """Count processes that became unusable, even if they reported the failure; other processes may replace them."""
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
    """The counters of a model as they are written to the counter store's file; see `ModelCounters` for the fields."""

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
        """Drop the counters of all models except these."""
        self._by_model = {name: counters for name, counters in self._by_model.items() if name in models}

    def records(self) -> Iterator[ModelCounterRecord]:
        """Yield a record for the counter store of each model with a counter above 0."""
        for model, counters in list(self._by_model.items()):
            if counters.is_zero:
                continue  # write nothing for a model that was never used, as most models that load on demand
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
        """Add the values of each model's record from the counter store."""
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
    """The daemon's counters as they are written to the counter store's file; see `DaemonCounters` for the fields."""

    reloads: int = field(metadata=_COUNT)
    refused_reloads: int = field(metadata=_COUNT)
    dropped_responses: int = field(metadata=_COUNT)

    @property
    def key(self) -> str:
        """The empty string, because the file has only one record of this kind."""
        return ""


class DaemonCounters:
    """Counters of the whole daemon.

    Args:
        count_dropped: returns the number of responses that this daemon process could not send.

    Attributes:
        reloads: the number of reloads that have put a configuration in force.
        refused_reloads: the number of failed reloads.
    """

    def __init__(self, count_dropped: Callable[[], int]) -> None:
        self.reloads = 0
        self.refused_reloads = 0
        self._restored_dropped = 0
        self._count_dropped = count_dropped

    @property
    def dropped_by_this_daemon(self) -> int:
        """The number of responses that this daemon process could not send."""
        return self._count_dropped()

    @property
    def dropped_responses(self) -> int:
        """The number of responses that this daemon process and its predecessors could not send."""
        return self._restored_dropped + self._count_dropped()

    def records(self) -> Iterator[DaemonCounterRecord]:
        """Yield the record for the counter store."""
        counted = self.reloads, self.refused_reloads, self.dropped_responses
        yield DaemonCounterRecord(*(min(each, MAX_COUNT) for each in counted))

    def restore(self, records: Iterable[DaemonCounterRecord]) -> None:
        """Add the values of the daemon's record from the counter store."""
        for each in records:
            self.reloads += each.reloads
            self.refused_reloads += each.refused_reloads
            self._restored_dropped += each.dropped_responses
