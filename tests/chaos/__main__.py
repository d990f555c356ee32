"""`python -m tests.chaos`: weightd under faults; each request must have one right answer or one clear error."""

from __future__ import annotations

import argparse
import random

from testkit import ranks

from .kinds import LACKING, Fault, UnknownFaultError, parse
from .material import NoEngineError
from .run import Run

_EPILOG = f"""\
faults: "all", or a comma-separated list of
  {", ".join(fault.value for fault in Fault)};
  --faults=all,-flood excludes one

Exit status: 0 passed, 1 failed, 2 this machine cannot run it."""


def main() -> int:
    """Run with the options of the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seed", type=int, help="seed of all random choices (default: a random seed, which is printed)"
    )
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="time from the first fault to the last (default: 30)"
    )
    parser.add_argument("--faults", default="all", help="faults to inject (default: all that this machine supports)")
    parser.add_argument(
        "--managed",
        action="store_true",
        help="run as under systemd: processes survive a restart or crash of the daemon",
    )
    options = parser.parse_args()
    try:
        faults = parse(options.faults)
    except UnknownFaultError as error:
        parser.error(str(error))
    for fault in faults & LACKING.keys():
        print(f"LEFT OUT: {fault.value}: {LACKING[fault]}", flush=True)
    real_ranks = ranks.interpreter() is not None
    if not real_ranks:
        print(f"RANKS ON SIMULATED CARDS: {ranks.HOW_TO_GET_IT}", flush=True)
    seed = random.randrange(2**31) if options.seed is None else options.seed
    print(f"seed {seed}, {options.minutes:g} minutes", flush=True)
    try:
        faults -= LACKING.keys()
        report = Run(seed, 60.0 * options.minutes, faults, options.managed, real_ranks=real_ranks).run()
    except NoEngineError as error:
        print(error)
        return 2
    print(report.text(), flush=True)
    return 1 if report.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
