"""Tests that a process which is still importing its modules ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testkit.waiting import until

# Starts the module as a child whose numpy prints its pid and never finishes loading; then waits.
PARENT = """
import os, subprocess, sys
command = [sys.executable, "-m", sys.argv[1], "--parent", str(os.getpid())]
subprocess.Popen(command).wait()
"""
NUMPY = """
import os, time
print(os.getpid(), flush=True)
time.sleep(600)
"""


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("module", ["weightd_worker", "weightd_worker.forkserver"])
def test_importing_process_ends_with_parent(module: str, tmp_path: Path) -> None:
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text(NUMPY)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-c", PARENT, module]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
    try:
        until(lambda: ended(pid), "its end")
    finally:
        if not ended(pid):
            os.kill(pid, signal.SIGKILL)
