"""Tests of the fork system call in separate processes, and of the forker, which continues after every failure."""

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
from weightd_worker import forking
from weightd_worker.forking import Forker, ProcessState

# numpy's threads would prevent a fork.
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"}
ORDER = Fork("w", ("--some",), "/log")

# The forked process writes its arguments to a file and exits with status 3.
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
            raise ValueError("as requested")
        return 3
    return live
def report(forked):
    print(forked.pid, flush=True)
    if fate == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return fate != "unreported"
forker = Forker(ProcessState(), ready)
forker.freeze_memory()
forker.fork(Fork("w", ("--some", "thing"), directory + "/log"), report)
print("lives")
"""


def fate(directory: Path, fate: str) -> Tuple[int, List[str]]:
    """Fork in a new process; return the child's status (negative for a signal) and the output of the parent."""
    command = [sys.executable, "-c", SCRIPT, str(directory), fate]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=ENVIRONMENT, timeout=60, check=False)
    pid, *rest = done.stdout.decode().split()
    status = os.waitpid(int(pid), 0)[1]
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status), rest


def test_child_uses_its_arguments_and_status(tmp_path: Path) -> None:
    assert fate(tmp_path, "normal") == (3, ["lives"])
    assert (tmp_path / "words").read_text() == "--some thing"


@pytest.mark.parametrize(("how", "printed"), [("unreported", ["lives"]), ("dies", [])])
def test_unreported_child_is_killed(tmp_path: Path, how: str, printed: List[str]) -> None:
    assert fate(tmp_path, how) == (-signal.SIGKILL, printed)
    assert list(tmp_path.iterdir()) == []


def test_failure_is_in_the_childs_log(tmp_path: Path) -> None:
    assert fate(tmp_path, "fails") == (70, ["lives"])
    assert "ValueError: as requested" in (tmp_path / "log").read_text()


def refused(monkeypatch: pytest.MonkeyPatch, reason: str) -> List[Forked]:
    """Return the messages of a forker that cannot fork for this reason."""
    messages: List[Forked] = []

    def report(forked: Forked) -> bool:
        messages.append(forked)
        return True

    monkeypatch.setattr(forking, "cannot_fork_reason", lambda: reason)
    Forker(ProcessState(), lambda words, made: lambda: 0).fork(ORDER, report)
    return messages


def test_reports_why_it_cannot_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(monkeypatch, "cannot fork: no") == [Forked("w", 0, "cannot fork: no")]


def descriptors() -> List[str]:
    return sorted(each.name for each in Path("/proc/self/fd").iterdir())


def test_failed_clone_leaves_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def clone() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(forking, "clone", clone)
    before = descriptors()
    assert refused(monkeypatch, "") == [Forked("w", 0, "cannot fork: Resource temporarily unavailable")]
    assert descriptors() == before


# The child's thread has the correct thread id, can start threads, and receives the signal of abort().
CLONE_SCRIPT = """
import ctypes, os, signal, sys, threading
from weightd_worker import forking as clone
assert clone.cannot_fork_reason() == ""
reading, writing = os.pipe()
pid = clone.clone()
if not pid:
    assert ctypes.c_int.from_address(clone._tid_address()).value == os.getpid()
    assert threading.main_thread() is threading.current_thread()
    thread = threading.Thread(target=os.write, args=(writing, b"%d" % os.getppid()))
    thread.start()
    thread.join()
    os.abort()
os.close(writing)
print(pid, os.read(reading, 9).decode(), flush=True)
assert clone.cannot_fork_reason() == ""
"""


def run(script: str) -> List[str]:
    """Run the script to its end; return the printed words."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, stdin=-3, stdout=subprocess.PIPE, env=ENVIRONMENT, timeout=60, check=True)
    return done.stdout.decode().split()


def test_fork_is_a_full_child_of_the_parent() -> None:
    pid, parent = map(int, run(CLONE_SCRIPT))
    assert parent == os.getpid()
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == 6


def test_reason_names_second_thread() -> None:
    script = """
import threading, time
from pathlib import Path
from weightd_worker import forking as clone
def sleep():
    Path("/proc/thread-self/comm").write_text("dreamer")
    named.set()
    time.sleep(60)
named = threading.Event()
threading.Thread(target=sleep, daemon=True).start()
named.wait()
print(clone.cannot_fork_reason())
"""
    assert " ".join(run(script)) == "cannot fork: expected one thread, got 1 more: dreamer"


def test_reason_names_unsupported_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert forking.cannot_fork_reason() == "cannot fork: expected x86_64 or aarch64 under Linux, got riscv64"


def test_kernel_without_tid_address_cannot_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "_PR_GET_TID_ADDRESS", 1 << 20)
    assert forking.cannot_fork_reason().startswith(
        "cannot fork: the kernel does not report the address of the C library"
    )


def test_failed_clone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # A thread that shares signal handlers must share memory.
    monkeypatch.setattr(forking, "_FLAGS", 0x800)
    with pytest.raises(OSError, match="Invalid argument"):
        forking.clone()


def test_counts_thread_that_ends_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    assert forking.cannot_fork_reason(str(tmp_path)) == "cannot fork: expected one thread, got 1 more: ?"
