"""The command `weightctl bench`: its arguments, the sequence of the measurement, and its report."""

from __future__ import annotations

import argparse
import json
from typing import Any, Dict, Iterator, List, Optional, Sequence

from weightctl import exit_codes, request_inputs, target
from weightctl.bench.windows import MAX_WINDOWS, STABLE_WINDOWS, TOLERANCE, Level, Windows
from weightctl.command import Command, Connect
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
_DESCRIPTION = f"""\
Measures the requests/s and the latency of a model with 1, 8 and 64 requests in flight. Each
response is followed immediately by the next request.

  weightctl bench resnet50
  weightctl bench bert --shape ids=1,128 --shape mask=1,128 --in-flight 1,32

Requests are generated from the model's metadata: floats around 0, other values 0 or 1.
{request_inputs.MAX_SAMPLES} different requests take turns. --shape or --rows set the shapes.
Otherwise they come from the self-test, with which the model is known to run; if it has none, free
dimensions are 1. The first line of the output shows the shapes.

The time is divided into at most {MAX_WINDOWS} windows in --seconds; the first one is the warm-up.
The results come from the last {STABLE_WINDOWS} windows. A measurement ends as soon as their
requests/s are within {TOLERANCE:.0%} of their mean; if they never are, a line below the table says
so. Ctrl-C shows the results so far.

Latency is measured at the client, from before a request is created until its response is read.
ROWS PER RUN is the average number of rows per execution of the model, including rows of other
clients, or "-" if the daemon does not report it.

The client has one thread, which takes 0.1 to 0.2 ms of a core per request, and more for large
requests. With many requests in flight and a faster model, the client limits the result. It also
shares the host's cores with the workers.

Errors are counted separately and have no latency. After an error the client pauses for 10 ms, or
as long as the daemon requests.

--json prints one object, times in microseconds: {{"model_name", "inputs", "rows", "levels":
[{{"in_flight", "answers", "requests_per_s", "rows_per_s", "p50_us", "p95_us", "p99_us", "errors",
"rows_per_execution", "windows", "stable", "deviation"}}]}}.

Exit status: 0 measured, 1 the model does not answer, 64 the model does not accept the shape, 130
Ctrl-C."""


def render(model: str, specs: Sequence[TensorSpec], rows: Optional[int], levels: Sequence[Level]) -> str:
    """Return a table of the results at each number of requests in flight, and remarks on the results."""
    inputs = ", ".join(f"{clean(spec.name)} {spec.datatype} {list(spec.shape)}" for spec in specs) or "no inputs"
    lines = [f"{clean(model)}: {inputs}", ""]
    lines += table([_HEADING, *(_row(level, rows) for level in levels)], 0, "")
    remarks = [remark for level in levels for remark in _remarks(level)]
    return "\n".join([*lines, "", *remarks] if remarks else lines)


def as_json(model: str, specs: Sequence[TensorSpec], rows: Optional[int], levels: Sequence[Level]) -> Dict[str, Any]:
    """Return the results as a dictionary for JSON."""
    return {
        "model_name": model,
        "inputs": [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs],
        "rows": rows,
        "levels": [_level_json(level, rows) for level in levels],
    }


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
        yield f"{label}: no request succeeded"
    elif level.windows < STABLE_WINDOWS:
        yield f"{label}: ended after {count(level.windows, 'window')}, expected {STABLE_WINDOWS} stable ones"
    elif not level.is_stable:
        yield (
            f"{label}: not stable: one of the last {STABLE_WINDOWS} windows of {level.windows} deviates "
            f"{level.deviation or 0.0:.0%} from their mean, expected at most {TOLERANCE:.0%}"
        )
    for code, number in sorted(level.errors.items()):
        yield f"{label}: {count(number, 'request')} failed with {code}"


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


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser)
    parser.add_argument(
        "--rows",
        type=request_inputs.parse_rows,
        metavar="N",
        help="first dimension of each input that has a free one (default: as in the shape)",
    )
    parser.add_argument(
        "--in-flight",
        default=(1, 8, 64),
        type=request_inputs.parse_counts,
        metavar="N,N",
        help="numbers of requests in flight, measured one after another (default: 1,8,64)",
    )
    parser.add_argument(
        "--seconds",
        default=10.0,
        type=request_inputs.parse_seconds,
        metavar="S",
        help="maximum duration per number in flight (default: %(default)g)",
    )


def _run(options: argparse.Namespace, connect: Connect) -> int:
    from weightctl.bench import load  # noqa: PLC0415 - asyncio is slow to import, and few commands need it

    name: str = options.model
    levels: List[Level] = []
    with target.open_target(connect, name) as model:
        specs = request_inputs.specify(model.inputs, options.shape, options.rows, model.example)
        inputs = request_inputs.make_many_inputs(specs)
        with model.explain_errors():
            model.client.infer(name, inputs[0])

        def on_window(in_flight: int, windows: Windows) -> None:
            rate = f"{windows.recent[-1].rate:,.1f} requests/s, " if windows.recent else ""
            model.show_progress(f"{in_flight:,} in flight: {rate}{count(max(0, windows.count), 'window')}")

        plan = load.BenchPlan(name, inputs, options.in_flight, options.seconds, on_window)
        is_interrupted = load.measure(model.client.address, model.client.timeout, plan, levels.append)
    rows = request_inputs.count_rows(model.inputs, specs)
    show = as_json(name, specs, rows, levels)
    print(json.dumps(show) if options.json else render(name, specs, rows, levels))
    if is_interrupted:
        return exit_codes.INTERRUPTED
    return exit_codes.OK if all(level.answers for level in levels) else exit_codes.ERROR


COMMAND = Command("measure requests/s and latency of a model", _DESCRIPTION, _add_arguments, _run)
