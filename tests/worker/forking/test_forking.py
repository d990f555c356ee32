"""The system call, in processes of its own, and the forker: who forks goes on whatever happens."""

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

    monkeypatch.setattr(forking, "cannot_fork_reason", lambda: reason)
    Forker(ProcessState(), lambda words, made: lambda: 0).fork(ORDER, tell)
    return told


def test_a_refusal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(monkeypatch, "cannot fork: no") == [Forked("w", 0, "cannot fork: no")]


def descriptors() -> List[str]:
    return sorted(each.name for each in Path("/proc/self/fd").iterdir())


def test_so_is_what_the_kernel_refuses_and_nothing_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def clone() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(forking, "clone", clone)
    before = descriptors()
    assert refused(monkeypatch, "") == [Forked("w", 0, "cannot fork: Resource temporarily unavailable")]
    assert descriptors() == before


# Its child's thread has a right number, may have others, and learns of an abort.
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
    """Run the script to its end; return the words that it has printed."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, stdin=-3, stdout=subprocess.PIPE, env=ENVIRONMENT, timeout=60, check=True)
    return done.stdout.decode().split()


def test_what_is_forked_is_a_whole_process_and_a_child_of_the_parent() -> None:
    pid, parent = map(int, run(CLONE_SCRIPT))
    assert parent == os.getpid()
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == 6


def test_a_second_thread_is_named() -> None:
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


def test_another_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert forking.cannot_fork_reason() == "cannot fork: expected x86_64 or aarch64 under Linux, got riscv64"


def test_so_is_a_kernel_that_does_not_say_where_the_thread_s_number_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "_PR_GET_TID_ADDRESS", 1 << 20)
    assert forking.cannot_fork_reason().startswith(
        "cannot fork: the kernel does not report the address of the C library"
    )


def test_what_the_kernel_refuses_is_an_error_and_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    # A thread that shares signal handlers has to share memory.
    monkeypatch.setattr(forking, "_FLAGS", 0x800)
    with pytest.raises(OSError, match="Invalid argument"):
        forking.clone()


def test_a_thread_that_ends_meanwhile_still_counts(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    assert forking.cannot_fork_reason(str(tmp_path)) == "cannot fork: expected one thread, got 1 more: ?"
