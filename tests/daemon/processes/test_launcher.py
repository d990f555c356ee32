"""DirectLauncher: unadopted forks of this process's children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from testkit.shims import FORKING
from weightd_daemon.processes.launcher import DirectLauncher


def test_kills_only_unknown_forks_of_a_process() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", FORKING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        DirectLauncher().kill_orphans_of(parent.pid, {pid})
        os.kill(pid, 0)
        DirectLauncher().kill_orphans_of(parent.pid, set())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    # The exit status of the parent is still available to its owner.
    assert parent.returncode == -signal.SIGKILL
