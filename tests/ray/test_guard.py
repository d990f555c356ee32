"""A guard with a real daemon, whoever of the two is killed."""

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


class Started:
    """A guard as a replica starts it, with a daemon that has nothing to serve: its model is no file."""

    def __init__(self, base: Path) -> None:
        process = subprocess.Popen(
            daemon_supervisor.supervisor_command(base), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self.leash: IO[bytes] = process.stdin
        self.reports: IO[bytes] = process.stdout
        self.leash.write(daemon_supervisor.encode_order({"m": {"path": str(base / "none.onnx")}}))
        self.leash.flush()
        process.wait()
        found = json.loads(self.reports.readline())
        self.pid: int = found["pid"]
        self.socket = Path(found["address"].removeprefix("unix://"))
        until(self.socket.exists, "the daemon listens")

    def let_go(self) -> None:
        """Do as the end of the replica does, and wait for that of the guard."""
        with contextlib.suppress(OSError):
            self.leash.close()
        until(lambda: not there(self.pid), "the guard ends")
        self.reports.close()

    @property
    def daemon(self) -> int:
        """The pid of the daemon."""
        (pid,) = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return int(pid)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """A guard with its daemon; ended, whatever the test has done."""
    one = Started(tmp_path / "b")
    yield one
    one.let_go()


def there(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_it_is_nobodys_child_and_leaves_nothing_when_the_replica_is_no_more(started: Started) -> None:
    assert f"\nPPid:\t{os.getpid()}\n" not in Path(f"/proc/{started.pid}/status").read_text()
    daemon = started.daemon
    started.let_go()
    assert not there(daemon)
    assert not list(started.socket.parents[1].iterdir())


def test_its_own_death_ends_the_daemon_and_the_next_one_removes_the_files(started: Started, tmp_path: Path) -> None:
    daemon = started.daemon
    os.kill(started.pid, signal.SIGKILL)
    until(lambda: not there(daemon), "the daemon ends")
    assert started.socket.parent.exists()

    def is_swept() -> bool:
        with work_dir(tmp_path / "b"):
            return not started.socket.parent.exists()

    # As soon as the last process of that daemon has ended, which takes a moment more.
    until(is_swept, "another replica removes what is left")
