"""Schedule of the faults, a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from .kinds import AT_RANKS, BEHAVIOUR, LETHAL, Fault

# weightd replaces a worker at once if it had run for ten seconds; otherwise the delay grows with each crash. A model
# may get any number of faults together, then has this time without faults.
CALM_S = 13.0
MAX_BLOWS = 3

# The last daemon must be old enough at the end to have leaked something if it leaks.
LAST_RESTART = 0.6

# Faults that need a moment must have one before the end.
_TAIL_S = 3.0

_ANY_MODEL = frozenset({Fault.FLOOD, Fault.KILL_HOLDER, Fault.REPLACE_STORE, Fault.UPDATE, Fault.RELOAD})


@dataclass(frozen=True)
class Event:
    """A fault that is due `at` seconds after the start; `draw` in [0, 1) selects one of the available targets."""

    at: float
    fault: Fault
    model: str = ""
    draw: float = 0.0


@dataclass(frozen=True)
class Target:
    """A model.

    Attributes:
        name: name of the model.
        dense: whether each prediction uses all weights, so that a damaged weight is always noticed.
        cut: whether a rank group computes the model.
    """

    name: str
    dense: bool
    cut: bool = False

    @property
    def blows(self) -> frozenset[Fault]:
        """The faults that end workers of the model."""
        if self.cut:
            return AT_RANKS
        whole = LETHAL - {Fault.KILL_BROKER}
        return whole if self.dense else whole - {Fault.OVERWRITE_STORE}


def plan(seed: int, seconds: float, faults: Collection[Fault], models: Sequence[Target]) -> list[Event]:
    """Return the faults of a run in the order of time, the same for the same arguments."""
    chosen = [fault for fault in Fault if fault in faults and fault not in BEHAVIOUR]
    end = max(0.0, seconds - _TAIL_S)
    events: list[Event] = []
    for model in models:
        blows = [each for each in chosen if each in model.blows]
        events += _blows(random.Random(f"{seed} {model.name}"), end, blows, model.name)
    others = [each for each in chosen if each not in LETHAL and each is not Fault.KILL_DAEMON]
    events += _others(random.Random(f"{seed} others"), end, others, [model.name for model in models])
    if Fault.KILL_DAEMON in chosen:
        events += _restarts(random.Random(f"{seed} daemon"), LAST_RESTART * seconds)
    return sorted(events, key=lambda event: event.at)


def _blows(rng: random.Random, end: float, faults: Sequence[Fault], model: str) -> Iterator[Event]:
    at = rng.uniform(0.5, CALM_S / 2)
    while faults and at < end:
        for _ in range(rng.randint(1, MAX_BLOWS)):
            yield Event(at, rng.choice(faults), model, rng.random())
            at += rng.choice([0.0, rng.uniform(0.0, 2.0)])
            if at >= end:
                return
        at += rng.uniform(CALM_S, 1.5 * CALM_S)


def _others(rng: random.Random, end: float, faults: Sequence[Fault], models: Sequence[str]) -> Iterator[Event]:
    at = rng.uniform(0.2, 2.0)
    deck: list[Fault] = []
    while faults and at < end:
        if not deck:  # every fault strikes once before any repeats, so that short runs have all of them
            deck = rng.sample(faults, len(faults))
        fault = deck.pop()
        yield Event(at, fault, rng.choice(models) if fault in _ANY_MODEL else "", rng.random())
        at += rng.uniform(0.4, 1.6)


def _restarts(rng: random.Random, end: float) -> Iterator[Event]:
    at = rng.uniform(0.3, 1.0) * min(25.0, end)
    while at < end:
        yield Event(at, Fault.KILL_DAEMON, "", rng.random())
        at += rng.uniform(20.0, 40.0)
