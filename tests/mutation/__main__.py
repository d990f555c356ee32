"""Mutation tests with cosmic-ray: `python -m tests.mutation [--sample COUNT] [--seed SEED] [PART OF A PATH ...]`.

For each module that cosmic-ray.toml lists, a random sample of all possible mutations is made, one at a time, in a copy
of the repository. The tests of the module must then fail. The mutations that survive are printed as diffs.
"""

from __future__ import annotations

import argparse
import compileall
import itertools
import os
import py_compile
import queue
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_and_test, mutate_code
from cosmic_ray.work_item import MutationSpec, TestOutcome

from .modules import CONFIG, REPOSITORY, config, modules, tests_of
from .operators import Provider

# A mutation may make tests slower. Tests beyond this factor and the minimum time-out count as failed.
_TIMES_LONGER = 3


class Failure(Exception):
    """An error that prevents the mutations of a module from being tested."""


class Result(NamedTuple):
    """The numbers of killed, tested and possible mutations."""

    killed: int
    tried: int
    possible: int

    def __str__(self) -> str:
        return f"{self.killed:7} {self.tried:7} {self.possible:8}"

    @classmethod
    def total(cls, results: Iterable[Result]) -> Result:
        """Return the sums."""
        return cls(*map(sum, zip((0, 0, 0), *results, strict=False)))


class Copy:
    """A copy of the repository in which one mutation at a time is applied."""

    def __init__(self, directory: Path, stop: threading.Event) -> None:
        self._directory = directory
        self._stop = stop
        ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist")
        shutil.copytree(REPOSITORY, directory, ignore=ignored, symlinks=True)
        for name in (".ci", ".venv", ".venv-mslite"):
            if (REPOSITORY / name).exists():
                (directory / name).symlink_to(REPOSITORY / name)
        # cosmic-ray keeps Python from writing bytecode. With hashes in place of times, no stale bytecode is ever used.
        by_hash = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(directory, quiet=2, workers=0, invalidation_mode=by_hash)
        # An editable installation would find the modules of the repository first.
        roots = [*dict.fromkeys(each.parts[0] for each in modules()), "tests/support"]
        paths = os.pathsep.join(str(directory / each) for each in roots)
        self._python = ["env", "-C", str(directory), f"PYTHONPATH={paths}", sys.executable]

    def run(self, module: Path, mutations: Sequence[MutationSpec]) -> list[str]:
        """Test mutations of a module; return the diffs of the survivors."""
        tests = tests_of(module)
        if not tests:
            raise Failure("no tests belong to it")
        command = [*self._python, *shlex.split(config()["test-command"]), *map(str, tests)]
        begin = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Failure(f"its tests fail without a mutation:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
        limit = max(config()["timeout"], _TIMES_LONGER * (time.monotonic() - begin))
        diffs = (self._try(each, shlex.join(command), limit) for each in mutations if not self._stop.is_set())
        return [each for each in diffs if each]

    def _try(self, mutation: MutationSpec, command: str, limit: float) -> str:
        path = self._directory / mutation.module_path
        copied = MutationSpec(path, mutation.operator_name, mutation.occurrence, mutation.start_pos, mutation.end_pos)
        result = mutate_and_test([copied], command, limit)
        if result.diff is None or result.test_outcome not in (TestOutcome.KILLED, TestOutcome.SURVIVED):
            raise Failure(f"{mutation.operator_name} {mutation.occurrence}: {result.worker_outcome}: {result.output}")
        return result.diff.replace(f"{self._directory}/", "") if result.test_outcome == TestOutcome.SURVIVED else ""


def mutations_of(module: Path) -> Iterator[MutationSpec]:
    """Yield all mutations of a module."""
    excluded = re.compile("|".join(config()["filters"]["operators-filter"]["exclude-operators"]))
    tree = get_ast_from_path(REPOSITORY / module)
    for name in cosmic_ray.plugins.operator_names():
        kind = cosmic_ray.plugins.get_operator(name)
        if excluded.match(name) or kind.arguments():
            continue
        operator = kind()
        found = (position for node in ast_nodes(tree) for position in operator.mutation_positions(node))
        for occurrence, (start, end) in enumerate(found):
            yield MutationSpec(module, name, occurrence, start, end)


def main(arguments: Sequence[str] | None = None) -> int:
    """Test the selected mutations; return 1 if mutations could not be tested. Survivors are no error."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("parts", metavar="PART", nargs="*", help="only the modules whose path has one of these parts")
    parser.add_argument("--sample", type=int, default=5, help="how many mutations of each module; 0 for all [5]")
    parser.add_argument("--seed", default=str(random.randrange(10**6)), help="of the random sample [a random one]")
    parser.add_argument("--list", action="store_true", help="only tell the modules, their mutations and their tests")
    given = parser.parse_args(arguments)
    os.environ.setdefault("EXAMPLES", "0.25")  # This value applies to the property tests, as in CI.
    cosmic_ray.plugins.OPERATOR_PROVIDERS["weightd"] = Provider()
    chosen = [each for each in modules() if not given.parts or any(part in str(each) for part in given.parts)]
    if not chosen:
        parser.error(f"{CONFIG.name} lists no module with one of these parts: {' '.join(given.parts)}")
    if given.list:
        for module in chosen:
            print(f"{module}: {len(list(mutations_of(module)))} mutations; {' '.join(map(str, tests_of(module)))}")
        return 0
    print(f"seed {given.seed}", flush=True)
    results = _run(chosen, given.sample, given.seed)
    print(f"\n{'killed':>7} {'tried':>7} {'possible':>8}")
    for module, result in sorted(results.items()):
        print(f"{result} {module}")
    print(f"{Result.total(results.values())} in all")
    return int(len(results) < len(chosen))


def _run(chosen: Sequence[Path], count: int, seed: str) -> dict[Path, Result]:
    """Test a sample of the mutations of each module, with one module per core at a time."""
    results: dict[Path, Result] = {}
    stop = threading.Event()
    at_once = min(len(os.sched_getaffinity(0)), len(chosen))
    with tempfile.TemporaryDirectory(prefix="weightd-mutation-") as scratch, ThreadPoolExecutor(at_once) as pool:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(at_once):
            copies.put(Copy(Path(scratch, str(number)), stop))

        def run(module: Path) -> None:
            copy = copies.get()
            begin = time.monotonic()
            try:
                possible = list(mutations_of(module))
                mutations = _sample(possible, count, f"{seed} {module}")
                diffs = copy.run(module, mutations) if mutations else []
            except Failure as failure:
                print(f"{module}: {failure}", flush=True)
                return
            finally:
                copies.put(copy)
            results[module] = Result(len(mutations) - len(diffs), len(mutations), len(possible))
            print("\n".join([*diffs, f"{module}: {time.monotonic() - begin:.0f} s"]), flush=True)

        try:
            list(pool.map(run, chosen))
        finally:  # An interrupt does not wait for the remaining modules.
            stop.set()
    return results


def _sample(found: Sequence[MutationSpec], count: int, seed: str) -> list[MutationSpec]:
    shuffled = random.Random(seed).sample(found, len(found))
    return list(itertools.islice(filter(_is_valid, shuffled), count or None))


def _is_valid(mutation: MutationSpec) -> bool:
    """Return whether the mutated module compiles: cosmic-ray also replaces the * of parameters."""
    operator = cosmic_ray.plugins.get_operator(mutation.operator_name)()
    code = mutate_code((REPOSITORY / mutation.module_path).read_text("utf-8"), operator, mutation.occurrence)
    try:
        compile(code or "", "", "exec")
    except SyntaxError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
