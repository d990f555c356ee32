"""No child outlives the daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import List

from testkit.waiting import until
from weightd_common import pdeathsig

CHILD = """
import sys, time
from weightd_common import pdeathsig
pdeathsig.die_with_parent(int(sys.argv[1]))
print("up", flush=True)
time.sleep(600)
"""
# Starts the child as its own, and tells its pid.
DAEMON = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())], stdout=subprocess.PIPE)
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


def test_the_child_dies_with_its_parent() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", DAEMON], stdin=pipe, stdout=pipe, env=ENVIRONMENT) as daemon:
        assert daemon.stdout
        pid = int(daemon.stdout.readline())
        assert alive(pid)
        daemon.kill()
    try:
        until(lambda: not alive(pid), "the end of the child")
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_with_another_parent_than_expected_it_ends_at_once_and_says_why() -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", CHILD, "1"]
    done = subprocess.run(command, stdout=pipe, stderr=pipe, env=ENVIRONMENT, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stdout == b""
    assert done.stderr.decode() == f"expected to be a child of 1, but the parent is {os.getpid()}\n"


def masks(pid: int) -> List[bool]:
    """Whether the process blocks SIGINT, and whether it ignores it."""
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    return [bool(int(status.partition(f"\n{name}:\t")[2].split()[0], 16) & 2) for name in ("SigBlk", "SigIgn")]


DEAF = f"import signal; from weightd_common import pdeathsig, signals; signals.reset(signal.SIGINT); {CHILD}"
# Whoever runs the tests in the background has them ignore SIGINT.
INTERRUPTED = f"import os, signal as s; s.signal(s.SIGINT, s.SIG_DFL); os.kill(os.getpid(), s.SIGINT); {DEAF}"


def test_ctrl_c_is_left_to_the_parent_even_if_it_came_before_the_child_could_say_so() -> None:
    with pdeathsig.sigint_blocked():
        child = subprocess.Popen([sys.executable, "-c", INTERRUPTED, str(os.getpid())], stdout=-1, env=ENVIRONMENT)
    assert child.stdout
    with child, child.stdout:
        try:
            assert child.stdout.readline() == b"up\n"
            assert masks(child.pid) == [False, True]
            assert not masks(os.getpid())[0]
        finally:
            child.kill()
