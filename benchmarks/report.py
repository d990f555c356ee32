"""Results as a table or as JSON."""

from __future__ import annotations

import abc
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

MB = 1e6


@dataclasses.dataclass(frozen=True)
class Target:
    """A bound for a result. Missing it is not an error, because the machine may be busy."""

    key: str
    bound: float
    at_least: bool = False

    def reached(self, value: float) -> bool:
        """Return whether `value` is within the bound."""
        return value >= self.bound if self.at_least else value <= self.bound


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result(abc.ABC):
    """The results of one benchmark; the fields are the keys of the JSON object.

    `n` is the number of measurements.
    """

    benchmark: ClassVar[str]
    engine: str
    workers: int
    n: int

    @abc.abstractmethod
    def targets(self) -> Sequence[Target]:
        """Return the bounds of the results."""

    @abc.abstractmethod
    def rows(self) -> Sequence[tuple[str, str]]:
        """Return label and value of each line of the table."""


def as_json(result: Result) -> dict[str, Any]:
    """Return the results by key, and whether they reach their targets."""
    values: dict[str, Any] = {"benchmark": result.benchmark}
    values.update(json.loads(json.dumps(vars(result)), parse_float=_short))
    values["targets"] = [
        {
            "key": target.key,
            "at_least" if target.at_least else "at_most": _short(target.bound),
            "reached": target.reached(getattr(result, target.key)),
        }
        for target in result.targets()
    ]
    return values


def as_table(result: Result) -> str:
    """Return the results as lines of text."""
    rows = [*result.rows(), ("n", f"{result.n:,}")]
    for target in result.targets():
        value: float = getattr(result, target.key)
        bound = f"at {'least' if target.at_least else 'most'} {target.bound:.3g}"
        rows.append((f"{target.key} {bound}", f"{value:.3g}   {'reached' if target.reached(value) else 'MISSED'}"))
    width = max(len(label) for label, _ in rows)
    title = f"{result.benchmark}, {result.engine}, {result.workers} worker{'s' if result.workers > 1 else ''}"
    return "\n".join([title, *(f"  {label:<{width}}  {value}" for label, value in rows)])


def progress(text: str) -> None:
    """Print the current step to stderr."""
    print(f"    {text}", file=sys.stderr, flush=True)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile of `values`, without interpolation."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(len(ranked) * percent / 100))]


def median_over_blocks(blocks: Sequence[Sequence[float]], percent: float) -> float:
    """Return the median of the blocks' percentiles, so that single disturbed blocks have no effect."""
    return statistics.median(percentile(block, percent) for block in blocks)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A ratio of two sides measured alternately: median and quartiles over the rounds. The quartiles show the noise."""

    median: float
    spread: tuple[float, float]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return the ratio of both sides, compared round by round, so that slow disturbances affect both sides alike."""
    low, median, high = statistics.quantiles((one / other for one, other in zip(ours, theirs, strict=True)), n=4)
    return Ratio(median, (low, high))


def spread(values: tuple[float, float]) -> str:
    """Return quartiles as text."""
    return f"half of the rounds within {values[0]:.2f} to {values[1]:.2f}"


def _short(number: str | float) -> float:
    """Round to four digits, which exceeds the precision of all measurements."""
    return float(f"{float(number):.4g}")
