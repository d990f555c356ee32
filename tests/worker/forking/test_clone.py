"""The system call, in processes of its own: what is forked is a child of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import List

import pytest

from weightd_worker import forking

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

# Its child's thread has a right number, may have others, and learns of an abort.
SCRIPT = """
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
    pid, parent = map(int, run(SCRIPT))
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
    assert forking.cannot_fork_reason().startswith("cannot fork: the kernel does not tell where")


def test_what_the_kernel_refuses_is_an_error_and_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    # A thread that shares signal handlers has to share memory.
    monkeypatch.setattr(forking, "_FLAGS", 0x800)
    with pytest.raises(OSError, match="Invalid argument"):
        forking.clone()


def test_a_thread_that_ends_meanwhile_still_counts(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    assert forking.cannot_fork_reason(str(tmp_path)) == "cannot fork: expected one thread, got 1 more: ?"
