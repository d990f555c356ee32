"""The meters of all models, by name; they go on over restarts of the daemon."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from weightd.daemon.meters.buckets import MOST_COUNT, BucketFigures
from weightd.daemon.meters.meter import Meter
from weightd.protocol import limits
from weightd.protocol.schema import integer, record, text

_COUNT = integer(0, MOST_COUNT)


@dataclass(frozen=True)
class MeterFigures:
    """A meter as it is written down; the fields are those of `Meter`."""

    model: str = field(metadata=text(limits.MAX_MODEL_NAME_BYTES))
    requests: BucketFigures = field(metadata=record(BucketFigures))
    queue: BucketFigures = field(metadata=record(BucketFigures))
    compute: BucketFigures = field(metadata=record(BucketFigures))
    rows: BucketFigures = field(metadata=record(BucketFigures))
    deaths: int = field(metadata=_COUNT)
    restarts: int = field(metadata=_COUNT)
    canary_failures: int = field(metadata=_COUNT)
    mismatches: int = field(metadata=_COUNT)

    @property
    def key(self) -> str:
        """What tells it from all others."""
        return self.model


class Meters:
    """There are as many as models are configured; a model that is gone takes its own with it."""

    def __init__(self) -> None:
        self._models: dict[str, Meter] = {}

    def of(self, model: str) -> Meter:
        """Return the meter of a model of the configuration."""
        meter = self._models.get(model)
        if meter is None:
            meter = self._models[model] = Meter()
        return meter

    def keep(self, models: Collection[str]) -> None:
        """These are all there are: forget the others."""
        self._models = {name: counters for name, counters in self._models.items() if name in models}

    def records(self) -> Iterator[MeterFigures]:
        """Yield what is to be written down."""
        for model, counters in list(self._models.items()):
            yield MeterFigures(
                model,
                counters.requests.figures(),
                counters.queue.figures(),
                counters.compute.figures(),
                counters.rows.figures(),
                min(counters.deaths, MOST_COUNT),
                min(counters.restarts, MOST_COUNT),
                min(counters.canary_failures, MOST_COUNT),
                min(counters.mismatches, MOST_COUNT),
            )

    def restore(self, records: Iterable[MeterFigures]) -> None:
        """Go on from what was written down."""
        for each in records:
            counters = self.of(each.model)
            counters.requests.restore(each.requests)
            counters.queue.restore(each.queue)
            counters.compute.restore(each.compute)
            counters.rows.restore(each.rows)
            counters.deaths += each.deaths
            counters.restarts += each.restarts
            counters.canary_failures += each.canary_failures
            counters.mismatches += each.mismatches
