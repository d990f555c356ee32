"""Test of a simulated process's start time, which precedes every later event even within one clock tick."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_FORK = """
import os, sys, time
from pathlib import Path
from ascendsim import process

directory = Path(sys.argv[1])
for _ in range(10):
    started, used = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(started[1], b".")
        listed = float(os.read(used[0], 100))
        os._exit(not process.Identity(directory, 0).start <= listed)
    os.read(started[0], 1)
    listed = process.now()
    time.sleep(0.02)  # This is two ticks of the kernel's clock, so the tick of the start is over.
    os.write(used[1], repr(listed).encode())
    if os.waitpid(child, 0)[1]:
        sys.exit("listed after it started, and yet before")
"""


def test_lists_process_in_the_tick_of_its_start(tmp_path: Path) -> None:
    (tmp_path / "processes").mkdir()
    support = Path(__file__).parents[1] / "support"
    subprocess.run(
        [sys.executable, "-c", _FORK, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(support)}, check=True
    )
