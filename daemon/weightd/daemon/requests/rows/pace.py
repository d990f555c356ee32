"""Which parties have slow requests: compares the times of jobs that have a single request.

The time of a job may depend on the values of its inputs: rows of denormal floats can take several times as long as
others. Where such rows share a job with those of another party (a tenant or user, `Origin.far`), that one waits for
them, and is charged for them by rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from weightd.daemon.requests.rows.times import Kind

# A party is slow if its jobs take more than this many times as long as those of another party.
_TIMES_AS_LONG = 2.0

# Seconds: shorter jobs delay nobody noticeably, and their times vary by as much for other causes.
_LEAST_S = 0.001

# Of the last jobs of a party, the median counts: one may have had another cause.
_SAMPLES = 3

# After so many jobs that a party shared with others, for each party in them, one of its requests has a job of its own,
# so that its time is known. The first number holds while a party in the job has had less than `_SAMPLES` of these.
_MEASURED_EVERY = 2, 16

# Those that were measured last are kept.
_MAX_KINDS = 256
_MAX_PARTIES = 64


@dataclass(slots=True)
class _Known:
    """Of the jobs of one kind, the rows and seconds of the last ones of each party, and the parties that are slow."""

    samples: dict[str, deque[tuple[int, float]]] = field(default_factory=dict[str, deque[tuple[int, float]]])
    slow: set[str] = field(default_factory=set[str])


class Paces:
    """Compares the times of requests of different parties, for each device and kind of request."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, Kind], _Known] = {}
        # The jobs that each party has shared with others since one of its requests had a job of its own.
        self._shared: dict[str, int] = {}

    def add(self, device: str, kind: Kind, party: str, rows: int, seconds: float) -> bool:
        """A job has run that had a single request; return whether its party is slow now and was not before."""
        self._shared.pop(party, None)
        known = self._known.pop((device, kind), None) or _Known()
        _keep(self._known, (device, kind), known, _MAX_KINDS)
        samples = known.samples.pop(party, None) or deque(maxlen=_SAMPLES)
        samples.append((rows, seconds))
        _keep(known.samples, party, samples, _MAX_PARTIES)
        known.slow &= known.samples.keys()
        others = [_median(each) for name, each in known.samples.items() if name != party and len(each) == _SAMPLES]
        if not others or len(samples) < _SAMPLES:
            return False
        rows, seconds = _median(samples)
        # More rows take no more time in proportion, and less rows take no more time.
        usual = min(its_seconds * max(1.0, rows / its_rows) for its_rows, its_seconds in others)
        was_slow, is_slow = party in known.slow, seconds > max(_LEAST_S, _TIMES_AS_LONG * usual)
        (known.slow.add if is_slow else known.slow.discard)(party)
        return is_slow and not was_slow

    def slow(self, device: str, kind: Kind) -> Collection[str]:
        """Return the parties whose jobs take much longer than those of another party."""
        known = self._known.get((device, kind))
        return known.slow if known is not None else ()

    def measures(self, device: str, kind: Kind, first: str, parties: Collection[str]) -> bool:
        """A job is made of requests of several parties: return whether it should have the first request only."""
        known = self._known.get((device, kind), _Known()).samples
        every = _MEASURED_EVERY[all(len(known.get(each, ())) == _SAMPLES for each in parties)] * len(parties)
        for each in parties:
            _keep(self._shared, each, self._shared.pop(each, 0) + 1, _MAX_PARTIES)
        if all(self._shared.get(each, 0) <= every for each in parties):
            return False
        self._shared.pop(first, None)
        return True


def _keep(table: dict[Any, Any], key: object, value: object, most: int) -> None:
    """Add the newest entry of a table, and drop the oldest one if there are too many."""
    if len(table) >= most:
        del table[next(iter(table))]
    table[key] = value


def _median(samples: Collection[tuple[int, float]]) -> tuple[int, float]:
    return sorted(samples, key=lambda each: each[1] / each[0])[len(samples) // 2]
