"""Who is forked begins when it was told of, and not else; who forks goes on whatever happens."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import List, Tuple

import pytest

from weightd_protocol.messages.worker import Fork, Forked
from weightd_worker import forking as forker_module
from weightd_worker.forking import Forker, ProcessState

# numpy's threads would be in the way.
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
ORDER = Fork("w", ("--some",), "/log")

# What is forked writes its arguments to a file, and has the status 3.
SCRIPT = """
import os, signal, sys
from pathlib import Path
from weightd_protocol.messages.worker import Fork
from weightd_worker.forking import ProcessState
from weightd_worker.forking import Forker
directory, fate = sys.argv[1:]
def ready(words, made):
    def live():
        Path(directory, "words").write_text(" ".join(words))
        if fate == "fails":
            raise ValueError("as it was told")
        return 3
    return live
def tell(forked):
    print(forked.pid, flush=True)
    if fate == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return fate != "unheard"
forker = Forker(ProcessState(), ready)
forker.freeze_memory()
forker.fork(Fork("w", ("--some", "thing"), directory + "/log"), tell)
print("lives")
"""


def fate(directory: Path, fate: str) -> Tuple[int, List[str]]:
    """Return the status of what was forked, negative for a signal, and what was printed by who has forked it."""
    command = [sys.executable, "-c", SCRIPT, str(directory), fate]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=ENVIRONMENT, timeout=60, check=False)
    pid, *rest = done.stdout.decode().split()
    status = os.waitpid(int(pid), 0)[1]
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status), rest


def test_it_lives_by_its_arguments_and_ends_with_its_status(tmp_path: Path) -> None:
    assert fate(tmp_path, "heard") == (3, ["lives"])
    assert (tmp_path / "words").read_text() == "--some thing"


@pytest.mark.parametrize(("how", "printed"), [("unheard", ["lives"]), ("dies", [])])
def test_it_leaves_where_nobody_was_told_of_it(tmp_path: Path, how: str, printed: List[str]) -> None:
    assert fate(tmp_path, how) == (-signal.SIGKILL, printed)
    assert list(tmp_path.iterdir()) == []


def test_its_failure_is_in_its_own_log(tmp_path: Path) -> None:
    assert fate(tmp_path, "fails") == (70, ["lives"])
    assert "ValueError: as it was told" in (tmp_path / "log").read_text()


def refused(monkeypatch: pytest.MonkeyPatch, reason: str) -> List[Forked]:
    """What is told by a forker that is in the way of itself for this reason."""
    told: List[Forked] = []

    def tell(forked: Forked) -> bool:
        told.append(forked)
        return True

    monkeypatch.setattr(forker_module, "cannot_fork_reason", lambda: reason)
    Forker(ProcessState(), lambda words, made: lambda: 0).fork(ORDER, tell)
    return told


def test_a_refusal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(monkeypatch, "cannot fork: no") == [Forked("w", 0, "cannot fork: no")]


def descriptors() -> List[str]:
    return sorted(each.name for each in Path("/proc/self/fd").iterdir())


def test_so_is_what_the_kernel_refuses_and_nothing_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def clone() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(forker_module, "clone", clone)
    before = descriptors()
    assert refused(monkeypatch, "") == [Forked("w", 0, "cannot fork: Resource temporarily unavailable")]
    assert descriptors() == before
