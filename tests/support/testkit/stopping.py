"""Stop of the test process for some time, like by a debugger or the freezer."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Iterator

_PROGRAM = """
import os, signal, sys, time
seconds, ours, *others = sys.argv[1:]
os.kill(int(ours), signal.SIGSTOP)
time.sleep(float(seconds))
os.kill(int(ours), signal.SIGCONT)
time.sleep(0.1)
for each in others:
    os.kill(int(each), signal.SIGCONT)
"""


@contextlib.contextmanager
def stopped(seconds: float, *others: int) -> Iterator[None]:
    """Stop this process soon for `seconds`, and continue the stopped processes `others` 0.1 s after it."""
    arguments = [sys.executable, "-I", "-S", "-c", _PROGRAM, *map(str, (seconds, os.getpid(), *others))]
    with subprocess.Popen(arguments):
        yield
