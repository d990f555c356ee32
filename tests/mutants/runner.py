"""Tries mutants in copies of the repository, a few at once."""

from __future__ import annotations

import importlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from .mutant import Mutant

REPOSITORY = Path(__file__).resolve().parents[2]
INTERPRETER_37 = REPOSITORY / ".venv-mslite" / "bin" / "python"

_ROOTS = ("cluster", "daemon", "gateway", "worker", "protocol")

# The tests of a mutant, and one of them. What hangs was noticed.
_LIMIT_S = 300.0
_TEST_LIMIT_S = 60

# pytest: all passed, and some failed. Anything else is a mistake of the table.
PASSED, FAILED = 0, 1
_BROKEN = 3

# What takes most of the time of a short test is to import these. They are imported once, and forked.
_IMPORTED = (
    *("pytest", "pytest_timeout", "xdist.plugin", "xdist.looponfail", "hypothesis.stateful", "hypothesis.extra.numpy"),
    *("_hypothesis_pytestplugin", "numpy", "numpy.testing", "zmq", "msgpack", "unittest.mock", "email.message"),
)


class Mistake(Exception):
    """The table is wrong; the text says what is."""


class Job(NamedTuple):
    """Tests to run, with a mutant or with none."""

    tests: str
    on_37: bool
    mutant: Mutant | None = None


class Copy:
    """A copy of the repository in which one mutant at a time lives."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        skipped = shutil.ignore_patterns(".*", "__pycache__", "build", "dist")
        shutil.copytree(REPOSITORY, directory, ignore=skipped, symlinks=True)
        for name in (".venv", ".venv-mslite", ".ci"):
            if (REPOSITORY / name).exists():
                (directory / name).symlink_to(REPOSITORY / name)
        self._ticks = 0
        self._mutated: tuple[Path, str] | None = None
        self._output = directory / "build" / "output"
        self._output.parent.mkdir()

    def begin(self, job: Job) -> int:
        """Run the job's tests; return the pid of the process that does."""
        if job.mutant is not None:
            file = self._directory / place(job.mutant)
            self._mutated = file, file.read_text("utf-8")
            self._write(file, self._mutated[1].replace(job.mutant.piece, job.mutant.instead))
        words = shlex.split(job.tests)
        arguments = [f"tests/{each}" if (REPOSITORY / "tests" / each).exists() else each for each in words]
        # Of what was imported before it pytest would complain.
        common = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        arguments = [*common, f"--timeout={_TEST_LIMIT_S}", *arguments]
        return self._begin_37(arguments) if job.on_37 else self._fork(arguments)

    def end(self) -> str:
        """The tests have ended: let the mutant go; return what pytest has said."""
        if self._mutated:
            self._write(*self._mutated)
        self._mutated = None
        return self._output.read_text("utf-8", "replace")[-1200:]

    def _begin_37(self, arguments: list[str]) -> int:
        command = [str(INTERPRETER_37), "-m", "pytest", *arguments]
        env = {**os.environ, **self._environment()}
        with self._output.open("wb") as output:
            return subprocess.Popen(
                command, cwd=self._directory, env=env, stdout=output, stderr=output, start_new_session=True
            ).pid

    def _environment(self) -> dict[str, str]:
        # What an editable install would find first is the repository.
        return {"PYTHONPATH": os.pathsep.join(str(self._directory / each) for each in (*_ROOTS, "tests/support"))}

    def _fork(self, arguments: list[str]) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = _BROKEN
        try:
            os.setsid()
            os.chdir(self._directory)
            os.environ.update(self._environment())
            descriptor = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            for name in [each for each in sys.modules if each.partition(".")[0] == "tests"]:
                del sys.modules[name]
            sys.path[0] = str(self._directory)
            sys.argv = ["pytest", *arguments]
            import pytest

            status = int(pytest.main(arguments))
        except BaseException as error:  # noqa: BLE001 - it must not go on as a second runner
            traceback.print_exc()
            # Found after the last test: a socket that nobody has closed, a thread that has failed.
            if all(isinstance(each, Warning) for each in getattr(error, "exceptions", [error])):
                status = FAILED
        finally:
            sys.stdout.flush()
            os._exit(status)

    def _write(self, file: Path, text: str) -> None:
        """Write, with a time that no compiled version of the file has: within a second Python would not see it."""
        self._ticks += 10
        then = file.stat().st_mtime_ns + self._ticks * 10**9
        file.write_text(text, "utf-8")
        os.utime(file, ns=(then, then))


def place(mutant: Mutant) -> Path:
    """Return the file of the product that has the piece, as seen from the repository.

    Raises:
        Mistake: none has it, or it is not the only one.
    """
    found = [(path, text.count(mutant.piece)) for path, text in _PRODUCT.items() if mutant.piece in text]
    if [count for _, count in found] != [1]:
        where = ", ".join(f"{path} ({count})" for path, count in found) or "nowhere"
        raise Mistake(f"expected {mutant.piece!r} once in the product, found it: {where}")
    return found[0][0]


_PRODUCT = {
    path.relative_to(REPOSITORY): path.read_text("utf-8")
    for root in _ROOTS
    for path in sorted((REPOSITORY / root).rglob("*.py"))
}


def run(jobs: Iterable[Job], scratch: Path, at_once: int) -> Iterator[tuple[Job, int, str]]:
    """Yield each job with pytest's exit status and what it has said, as they end. What hangs has failed."""
    for name in _IMPORTED:
        importlib.import_module(name)
    waiting = list(jobs)[::-1]
    free = [Copy(scratch / str(index)) for index in range(min(at_once, len(waiting)))]
    running: dict[int, tuple[Job, Copy, float]] = {}
    try:
        while waiting or running:
            while waiting and free:
                job, copy = waiting.pop(), free.pop()
                running[copy.begin(job)] = job, copy, time.monotonic() + _LIMIT_S
            for pid, (_, _, deadline) in running.items():
                if time.monotonic() >= deadline:
                    os.killpg(pid, signal.SIGKILL)
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid not in running:
                time.sleep(0.02)
                continue
            job, copy, _ = running.pop(pid)
            free.append(copy)
            code = os.waitstatus_to_exitcode(status)
            yield job, FAILED if code == -signal.SIGKILL else code, copy.end()
    finally:
        for pid in running:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
