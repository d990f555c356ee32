"""The command: its arguments, the order of things, and what is printed."""

from __future__ import annotations

import argparse
import json
from typing import List

from weightctl import exit_codes
from weightctl.bench import render
from weightctl.bench.windows import MAX_WINDOWS, STABLE_WINDOWS, TOLERANCE, Level, Windows
from weightctl.command import Command, Connect
from weightctl.measuring import samples, shapes, subject
from weightctl.text import count

_DESCRIPTION = f"""\
Measures how many requests a model answers in a second, and how soon: with 1, with 8 and with 64 of
them in flight. Each answer that comes is followed by the next request at once.

  weightctl bench resnet50
  weightctl bench bert --shape ids=1,128 --shape mask=1,128 --in-flight 1,32

Requests are made up from the model's metadata: floats around 0, all else 0 or 1; {samples.MAX_SAMPLES} in turn.
They have shapes that the model is known to run on, its self-test's, unless --shape or --rows says
otherwise; where none are known, free dimensions are 1. The first line of the output has the shapes.

Time is cut into windows, at most {MAX_WINDOWS} in --seconds; the first one is the warm-up. The figures are
those of the last {STABLE_WINDOWS}, and it is over as soon as their requests/s are within {TOLERANCE:.0%} of their mean.
Where they never are, a line below the table says so. Ctrl-C shows what has been measured.

Latency is the client's, from before a request is made until its answer has been read. ROWS PER RUN
is what the daemon has put into one execution of the model, on average, and "-" where it does not
tell; if others ask the model meanwhile, their requests are in it.

One thread asks. It takes 0.1 to 0.2 ms of a core for each request, more for large ones: with many
in flight and a model that is faster than that, this is what is measured. It shares the host's cores
with the workers, too.

Errors are counted, and have no latency; after one there is a pause of 10 ms, or as the daemon says.

--json prints one object, times in microseconds: {{"model_name", "inputs", "rows", "levels":
[{{"in_flight", "answers", "requests_per_s", "rows_per_s", "p50_us", "p95_us", "p99_us", "errors",
"rows_per_execution", "windows", "stable", "deviation"}}]}}.

Exit status: 0 measured, 1 the model cannot be asked or does not answer, 64 it does not take such a
shape, 130 Ctrl-C."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    subject.add_arguments(parser)
    parser.add_argument(
        "--rows",
        type=shapes.parse_rows,
        metavar="N",
        help="the first dimension of each input where it is free (default: as in the shape)",
    )
    parser.add_argument(
        "--in-flight",
        default=(1, 8, 64),
        type=shapes.parse_counts,
        metavar="N,N",
        help="how many requests are under way at any time, one number after another (default: 1,8,64)",
    )
    parser.add_argument(
        "--seconds",
        default=10.0,
        type=shapes.parse_seconds,
        metavar="S",
        help="the most for each number in flight (default: %(default)g)",
    )


def _run(options: argparse.Namespace, connect: Connect) -> int:
    from weightctl.bench import load  # noqa: PLC0415 - asyncio takes long, and no other command needs it

    name: str = options.model
    levels: List[Level] = []
    with subject.open_target(connect, name) as model:
        specs = shapes.specify(model.inputs, options.shape, options.rows, model.example)
        inputs = samples.make_many_inputs(specs)
        with model.explain_errors():
            model.client.infer(name, inputs[0])

        def on_window(in_flight: int, windows: Windows) -> None:
            rate = f"{windows.recent[-1].rate:,.1f} requests/s, " if windows.recent else ""
            model.show_progress(f"{in_flight:,} in flight: {rate}{count(max(0, windows.count), 'window')}")

        plan = load.BenchPlan(name, inputs, options.in_flight, options.seconds, on_window)
        is_interrupted = load.measure(model.client.address, model.client.timeout, plan, levels.append)
    rows = shapes.count_rows(model.inputs, specs)
    show = render.as_json(name, specs, rows, levels)
    print(json.dumps(show) if options.json else render.render(name, specs, rows, levels))
    if is_interrupted:
        return exit_codes.INTERRUPTED
    return exit_codes.OK if all(level.answers for level in levels) else exit_codes.ERROR


COMMAND = Command("measure requests/s and latency of a model", _DESCRIPTION, _add_arguments, _run)
