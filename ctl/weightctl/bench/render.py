"""What was measured, for people and for programs."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Sequence

from weightctl.bench.windows import STABLE_WINDOWS, TOLERANCE, Level
from weightctl.text import clean, count, table
from weightd_protocol.messages.inference import TensorSpec

_HEADING = (
    "IN FLIGHT",
    "REQUESTS/s",
    "ROWS/s",
    "P50 ms",
    "P95 ms",
    "P99 ms",
    "ERRORS",
    "ROWS PER RUN",
)
_NONE = "-"


def render(model: str, specs: Sequence[TensorSpec], rows: Optional[int], levels: Sequence[Level]) -> str:
    """Return a table, and what should be known of its rows."""
    inputs = ", ".join(f"{clean(spec.name)} {spec.datatype} {list(spec.shape)}" for spec in specs) or "no inputs"
    lines = [f"{clean(model)}: {inputs}", ""]
    lines += table([_HEADING, *(_row(level, rows) for level in levels)], 0, "")
    remarks = [remark for level in levels for remark in _remarks(level)]
    return "\n".join([*lines, "", *remarks] if remarks else lines)


def _row(level: Level, rows: Optional[int]) -> List[str]:
    rate, errors = level.requests_per_s, sum(level.errors.values())
    return [
        f"{level.in_flight:,}",
        _number(rate, 1),
        _number(_scale(rate, rows), 1),
        *([_NONE] * 3 if level.latencies is None else [f"{each * 1e3:,.2f}" for each in level.latencies]),
        f"{errors:,}" if errors else _NONE,
        _number(_scale(level.requests_per_execution, rows), 2),
    ]


def _remarks(level: Level) -> Iterator[str]:
    label = f"{level.in_flight:,} in flight"
    if level.latencies is None:
        yield f"{label}: no request was answered"
    elif level.windows < STABLE_WINDOWS:
        yield f"{label}: ended after {count(level.windows, 'window')}; {STABLE_WINDOWS} that agree are wanted"
    elif not level.is_stable:
        yield (
            f"{label}: not stable: of the last {STABLE_WINDOWS} windows of {level.windows}, one is "
            f"{level.deviation or 0.0:.0%} off their mean; at most {TOLERANCE:.0%} is wanted"
        )
    for code, number in sorted(level.errors.items()):
        yield f"{label}: {count(number, 'request')} ended in {code}"


def as_json(model: str, specs: Sequence[TensorSpec], rows: Optional[int], levels: Sequence[Level]) -> Dict[str, Any]:
    """Return the same as a dictionary."""
    return {
        "model_name": model,
        "inputs": [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs],
        "rows": rows,
        "levels": [_level_json(level, rows) for level in levels],
    }


def _level_json(level: Level, rows: Optional[int]) -> Dict[str, Any]:
    p50, p95, p99 = level.latencies or (None, None, None)
    return {
        "in_flight": level.in_flight,
        "answers": level.answers,
        "requests_per_s": level.requests_per_s,
        "rows_per_s": _scale(level.requests_per_s, rows),
        "p50_us": _scale(p50, 1e6),
        "p95_us": _scale(p95, 1e6),
        "p99_us": _scale(p99, 1e6),
        "errors": dict(level.errors),
        "rows_per_execution": _scale(level.requests_per_execution, rows),
        "windows": level.windows,
        "stable": level.is_stable,
        "deviation": level.deviation,
    }


def _scale(value: Optional[float], factor: Optional[float]) -> Optional[float]:
    return None if value is None or factor is None else value * factor


def _number(value: Optional[float], digits: int) -> str:
    return _NONE if value is None else f"{value:,.{digits}f}"
