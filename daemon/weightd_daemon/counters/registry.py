"""The meters of all models, by name; they go on over restarts of the daemon."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from weightd_daemon.counters.histogram import MAX_COUNT, HistogramRecord
from weightd_daemon.counters.model_counters import ModelCounters
from weightd_protocol import limits
from weightd_protocol.schema import integer, record, text

_COUNT = integer(0, MAX_COUNT)


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
