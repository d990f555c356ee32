"""`python -m benchmarks NAME`: one measurement, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import latency, memory, overload, recovery, startup, throughput
from benchmarks.material import ENGINES, DifferenceError, UnavailableError
from benchmarks.report import Result, as_json, as_table, progress

# Engine and number of workers to figures.
Run = Callable[[str, int], Result]

BENCHMARKS: Mapping[str, tuple[Run, int, str]] = {
    "memory": (memory.run, memory.WORKERS, "PSS of the whole service against as many plain processes"),
    "latency": (latency.run, latency.WORKERS, "one small request in flight, against a bare two-hop ZeroMQ echo"),
    "throughput": (throughput.run, throughput.WORKERS, "requests per second against bare processes of the engine"),
    "startup": (startup.run, startup.WORKERS, "first answer and all workers READY against one bare build"),
    "recovery": (recovery.run, recovery.WORKERS, "from a fault until every worker is READY again, under load"),
    "overload": (overload.run, overload.WORKERS, "the daemon's memory while ten times too much is sent, for a minute"),
}

_EPILOG = """\
benchmarks, with the workers that each has unless --workers is given:
{benchmarks}
  all         each of them

Each compares within one run, checks every answer bit by bit against the engine called directly, and prints its n.
Figures of a busy machine are those of a busy machine: missing a target is reported, and is no error.
Exit status: 0 measured, 1 an answer differs from the bare engine's, 2 it cannot run here."""


def main() -> int:
    """Run what the command line asks for; return the exit status."""
    options = _parser().parse_args()
    names = list(BENCHMARKS) if options.name == "all" else [options.name]
    results: dict[str, Any] = {}
    try:
        for name in names:
            run, default, _ = BENCHMARKS[name]
            progress(f"{name}, {options.engine}")
            result = run(options.engine, options.workers or default)
            results[name] = as_json(result)
            if not options.json:
                print(as_table(result), end="\n\n", flush=True)
    except DifferenceError as error:
        print(f"benchmarks: WRONG ANSWER: {error}", file=sys.stderr)
        return 1
    except UnavailableError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(results if options.name == "all" else results[options.name]))
    return 0


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name:<10}  {help} ({default})" for name, (_, default, help) in BENCHMARKS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures weightd against the bare engine.",
        epilog=_EPILOG.format(benchmarks="\n".join(lines)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", choices=[*BENCHMARKS, "all"], help="which one, see below")
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="the library (default: %(default)s)")
    parser.add_argument("--workers", type=_positive, metavar="N", help="worker processes")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and progress on stderr only")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
