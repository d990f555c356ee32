"""The daemon supervisor of a Ray replica with a real daemon, when either of them is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from testkit.waiting import until
from weightd_ray import daemon_supervisor
from weightd_ray.work_dirs import work_dir


class StartedSupervisor:
    """A supervisor as a replica starts it; the model of its daemon does not exist."""

    def __init__(self, base: Path) -> None:
        process = subprocess.Popen(
            daemon_supervisor.supervisor_command(base), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdin: IO[bytes] = process.stdin
        self.reports: IO[bytes] = process.stdout
        self.stdin.write(daemon_supervisor.encode_order({"m": {"path": str(base / "none.onnx")}}))
        self.stdin.flush()
        process.wait()
        found = json.loads(self.reports.readline())
        self.pid: int = found["pid"]
        self.socket = Path(found["address"].removeprefix("unix://"))
        until(self.socket.exists, "the daemon listens")

    def disconnect(self) -> None:
        """Close the supervisor's input, as the exit of the replica does, and wait until the supervisor exits."""
        with contextlib.suppress(OSError):
            self.stdin.close()
        until(lambda: not is_running(self.pid), "the supervisor exits")
        self.reports.close()

    @property
    def daemon(self) -> int:
        """The pid of the daemon."""
        (pid,) = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return int(pid)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[StartedSupervisor]:
    """A supervisor with its daemon, stopped after the test."""
    one = StartedSupervisor(tmp_path / "b")
    yield one
    one.disconnect()


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_supervisor_cleans_up_when_replica_exits(started: StartedSupervisor) -> None:
    assert f"\nPPid:\t{os.getpid()}\n" not in Path(f"/proc/{started.pid}/status").read_text()
    daemon = started.daemon
    started.disconnect()
    assert not is_running(daemon)
    assert not list(started.socket.parents[1].iterdir())


def test_daemon_exits_with_killed_supervisor(started: StartedSupervisor, tmp_path: Path) -> None:
    daemon = started.daemon
    os.kill(started.pid, signal.SIGKILL)
    until(lambda: not is_running(daemon), "the daemon exits")
    assert started.socket.parent.exists()

    def is_removed() -> bool:
        with work_dir(tmp_path / "b"):
            return not started.socket.parent.exists()

    # Possible only when the last process of that daemon has exited, a moment later.
    until(is_removed, "another replica removes the files")
