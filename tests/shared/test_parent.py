"""No child outlives the daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import List

import pytest

from weightd.shared import parent

CHILD = (
    "import sys, time; from weightd.shared import parent; parent.die_with(int(sys.argv[1])); print('up', flush=True)"
)
SLEEP = f"{CHILD}; time.sleep(600)"
# Starts the child as its own, tells its pid, and ends when it is told to.
DAEMON = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}, str(os.getpid())], stdout=subprocess.PIPE)
assert child.stdout.readline() == b"up\\n"
print(child.pid, flush=True)
sys.stdin.readline()
"""

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def alive(pid: int) -> bool:
    """Whether it runs; a zombie, which nobody may be there to reap, does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@pytest.mark.parametrize("how", ["exit", "SIGTERM", "SIGKILL"])
def test_the_child_dies_with_its_parent(how: str) -> None:
    pipe = subprocess.PIPE
    daemon = subprocess.Popen([sys.executable, "-c", DAEMON], stdin=pipe, stdout=pipe, env=ENVIRONMENT)
    assert daemon.stdin
    assert daemon.stdout
    pid = int(daemon.stdout.readline())
    try:
        assert alive(pid)
        if how != "exit":
            daemon.send_signal(signal.Signals[how])
        daemon.communicate(timeout=30)
        deadline = time.monotonic() + 10
        while alive(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not alive(pid)
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_with_its_own_parent_it_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(os.getpid())], stdout=subprocess.PIPE, env=ENVIRONMENT, timeout=30, check=True
    )
    assert done.stdout == b"up\n"


def test_with_another_parent_than_expected_it_ends_at_once_and_says_why() -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SLEEP, "1"]
    done = subprocess.run(command, stdout=pipe, stderr=pipe, env=ENVIRONMENT, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stdout == b""
    assert done.stderr.decode() == f"expected to be a child of 1, but the parent is {os.getpid()}\n"


def masks(pid: int) -> List[bool]:
    """Whether the process blocks SIGINT, and whether it ignores it."""
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    return [bool(int(status.partition(f"\n{name}:\t")[2].split()[0], 16) & 2) for name in ("SigBlk", "SigIgn")]


# Pid of itself, once it is past all that can happen to it.
DEAF = f"from weightd.shared import parent; parent.ignore_interrupts(); {SLEEP}"
INTERRUPTED = f"import os, signal; os.kill(os.getpid(), signal.SIGINT); {DEAF}"


def test_ctrl_c_is_left_to_the_parent_even_if_it_came_before_the_child_could_say_so() -> None:
    with parent.without_interrupts():
        child = subprocess.Popen([sys.executable, "-c", INTERRUPTED, str(os.getpid())], stdout=-1, env=ENVIRONMENT)
    assert child.stdout
    with child, child.stdout:
        try:
            assert child.stdout.readline() == b"up\n"
            assert masks(child.pid) == [False, True]
            assert not masks(os.getpid())[0]
        finally:
            child.kill()
