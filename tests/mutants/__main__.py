"""Breaks the guards of the product one at a time: ``python -m tests.mutants [ROOM | NUMBER]...``.

Each of the mutants of `daemon`, `worker`, `protocol`, `gateway`, `rpc` and `cluster` in this directory puts a piece of
a line in place of another. The tests that stand beside it must notice, or the table must say why nobody can. First the
same tests run on the product as it is, and have to pass. All is done in copies.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import cluster, daemon, gateway, protocol, rpc, worker
from .mutant import Mutant
from .runner import FAILED, INTERPRETER_37, PASSED, Job, Mistake, place, run

MUTANTS = [*daemon.MUTANTS, *worker.MUTANTS, *protocol.MUTANTS, *gateway.MUTANTS, *rpc.MUTANTS, *cluster.MUTANTS]

_AT_ONCE = 2


def chosen(names: Iterable[str]) -> dict[Mutant, int]:
    """Return the mutants of these rooms and numbers, all if there are no names, with their numbers."""
    names = {*names}
    numbers = {mutant: number for number, mutant in enumerate(MUTANTS, 1)}
    known = {*map(str, numbers.values()), *(mutant.room for mutant in MUTANTS)}
    if not names <= known:
        raise Mistake(f"no room or number: {', '.join(sorted(names - known))}")
    return {mutant: number for mutant, number in numbers.items() if not names or names & {str(number), mutant.room}}


def main(argv: Sequence[str]) -> int:
    """Try all, or those that are named; return 1 if one survives without an argument in the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Breaks the product's guards.")
    parser.add_argument("names", metavar="ROOM|NUMBER", nargs="*", help="which; all of them by default")
    parser.add_argument("--list", action="store_true", help="only tell which there are, and where")
    options = parser.parse_args(argv)
    begin = time.monotonic()
    try:
        numbers = chosen(options.names)
        found = [mutant for mutant, number in numbers.items() if _is_found(mutant, number, told=options.list)]
        if options.list:
            return int(len(found) < len(numbers))
        tried = [mutant for mutant in found if not mutant.on_37 or _has_37()]
        if len(tried) < len(found):
            print("SKIPPED: the mutants of MindSpore Lite. There is no .venv-mslite: make .venv-mslite")
        survivors = _try(tried, numbers)
    except Mistake as mistake:
        print(mistake, file=sys.stderr)
        return 1
    print(f"{len(tried) - len(survivors)} of {len(tried)} noticed in {time.monotonic() - begin:.0f} s")
    for mutant in survivors:
        print(f"{numbers[mutant]:3} {mutant.room}: {mutant.equivalent or 'SURVIVES'}: {mutant.piece!r}")
    if len(found) < len(numbers):
        print(f"not found, so not tried: {len(numbers) - len(found)}")
    return int(len(found) < len(numbers) or any(not mutant.equivalent for mutant in survivors))


def _is_found(mutant: Mutant, number: int, *, told: bool) -> bool:
    try:
        where = f"{place(mutant)}: {mutant.piece!r} -> {mutant.instead!r}"
    except Mistake as mistake:
        print(f"{number:3} {mutant.room:14} {mistake}")
        return False
    if told:
        print(f"{number:3} {mutant.room:14} {where}")
    return True


def _has_37() -> bool:
    if not INTERPRETER_37.exists() and os.environ.get("CI") == "true":
        raise Mistake("there is no .venv-mslite: the mutants of MindSpore Lite cannot be tried")
    return INTERPRETER_37.exists()


def _try(tried: Sequence[Mutant], numbers: dict[Mutant, int]) -> list[Mutant]:
    """Try them; return those that nobody has noticed, or whose tests fail without them."""
    with tempfile.TemporaryDirectory(prefix="weightd-mutants-") as scratch:
        good: set[str] = set()
        suites = dict.fromkeys(Job(each.tests, each.on_37) for each in tried)
        for job, status, said in run(suites, Path(scratch, "good"), _AT_ONCE):
            if status == PASSED:
                good.add(job.tests)
            else:
                print(f"without any mutant these fail: {job.tests}: {said}", flush=True)
        noticed: set[Mutant] = set()
        jobs = [Job(each.tests, each.on_37, each) for each in tried if each.tests in good]
        for job, status, said in run(jobs, Path(scratch, "bad"), _AT_ONCE):
            assert job.mutant
            verdict = {PASSED: "SURVIVES", FAILED: "noticed"}.get(status, f"is none, pytest says: {said}")
            piece = job.mutant.piece.strip().splitlines()[0]
            print(f"{numbers[job.mutant]:3} {job.mutant.room:14} {verdict:8} {piece:.90}", flush=True)
            if status == FAILED:
                noticed.add(job.mutant)
    return [mutant for mutant in tried if mutant not in noticed]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
