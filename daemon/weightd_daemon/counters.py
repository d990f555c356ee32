"""Counters and histograms of each model and of the daemon, which survive restarts of the daemon.

Each record class is what the counter store writes to its file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from weightd_protocol import limits
from weightd_protocol.messages.metrics import Histogram
from weightd_protocol.schema import integer, list_of, number, record, text

# Of each counter in the file: whatever comes to it after that, it is a number of the wire.
MAX_COUNT = 2**55

_MAX_SUM = 1e18

_COUNT = integer(0, MAX_COUNT)

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


class ModelCounters:
    """Counts what becomes of the requests for one model, and of its processes.

    Attributes:
        requests: seconds from the arrival of each to its answer, of those that were answered.
        queue: likewise to when a slot was given it, or the first of it; counted once it has ended.
        compute: seconds for which batches ran.
        rows: of batches, as far as those of the model are known.
        unexpected_exits: processes that ended without being asked to.
        restarts: processes that were started in the place of lost ones.
        selftest_failures: workers that did not reproduce the known answer.
        batch_mismatches: generations of which rows together were found not to be what each is alone.
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
        # Processes that were lost, in whose place none has been started yet.
        self._unreplaced = 0

    def on_lost(self, count: int) -> None:
        """So many are of no use any more, without having been asked to leave for another model."""
        self._unreplaced += count

    def on_started(self) -> None:
        """One is started."""
        if self._unreplaced:
            self._unreplaced -= 1
            self.restarts += 1


class ProcessCounters:
    """Counts what befalls processes, of each model that these serve.

    Args:
        counters: of the models.
    """

    __slots__ = ("_counters",)

    def __init__(self, *counters: ModelCounters) -> None:
        self._counters = counters

    def on_death(self) -> None:
        """One has ended, or had to be ended, without being asked to."""
        for each in self._counters:
            each.unexpected_exits += 1

    def on_lost(self, count: int = 1) -> None:
        """So many are of no use any more, be it that they said so: others may be started in their place."""
        for each in self._counters:
            each.on_lost(count)

    def on_started(self) -> None:
        """One is started."""
        for each in self._counters:
            each.on_started()

    def on_selftest_failed(self) -> None:
        """A worker's answer to the self-test is not the holder's."""
        for each in self._counters:
            each.selftest_failures += 1

    def on_batch_mismatch(self) -> None:
        """Rows together were found not to be what each is alone."""
        for each in self._counters:
            each.batch_mismatches += 1


@dataclass(frozen=True)
class ModelCounterRecord:
    """The counters of a model as they are written down; the fields are those of `ModelCounters`."""

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
        """What tells it from all others."""
        return self.model


class CounterRegistry:
    """There are as many as models are configured; a model that is gone takes its own with it."""

    def __init__(self) -> None:
        self._by_model: dict[str, ModelCounters] = {}

    def counters_of(self, model: str) -> ModelCounters:
        """Return the meter of a model of the configuration."""
        counters = self._by_model.get(model)
        if counters is None:
            counters = self._by_model[model] = ModelCounters()
        return counters

    def keep_only(self, models: Collection[str]) -> None:
        """These are all there are: forget the others."""
        self._by_model = {name: counters for name, counters in self._by_model.items() if name in models}

    def records(self) -> Iterator[ModelCounterRecord]:
        """Yield what is to be written down."""
        for model, counters in list(self._by_model.items()):
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
        """Go on from what was written down."""
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
    """The totals as they are written down; the fields are those of `DaemonCounters`."""

    reloads: int = field(metadata=_COUNT)
    refused_reloads: int = field(metadata=_COUNT)
    dropped_responses: int = field(metadata=_COUNT)

    @property
    def key(self) -> str:
        """There is one."""
        return ""


class DaemonCounters:
    """Counts what concerns no single model.

    Args:
        count_dropped: returns how many answers could not be sent by this daemon.

    Attributes:
        reloads: how often another configuration was put in force.
        refused_reloads: how often that was refused.
    """

    def __init__(self, count_dropped: Callable[[], int]) -> None:
        self.reloads = 0
        self.refused_reloads = 0
        self._restored_dropped = 0
        self._count_dropped = count_dropped

    @property
    def dropped_by_this_daemon(self) -> int:
        """Answers that could not be sent by this daemon."""
        return self._count_dropped()

    @property
    def dropped_responses(self) -> int:
        """Answers that could not be sent, by this daemon and those before it."""
        return self._restored_dropped + self._count_dropped()

    def records(self) -> Iterator[DaemonCounterRecord]:
        """Yield what is to be written down."""
        counted = self.reloads, self.refused_reloads, self.dropped_responses
        yield DaemonCounterRecord(*(min(each, MAX_COUNT) for each in counted))

    def restore(self, records: Iterable[DaemonCounterRecord]) -> None:
        """Go on from what was written down."""
        for each in records:
            self.reloads += each.reloads
            self.refused_reloads += each.refused_reloads
            self._restored_dropped += each.dropped_responses
