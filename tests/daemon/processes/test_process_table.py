"""Who has ended a child, where it may have been the daemon or another."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightd_daemon.platform import processes
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.exit_cause import ExitInitiator
from weightd_daemon.processes.process_table import ProcessTable


@pytest.fixture
def running() -> Iterator[ProcessTable]:
    loop = EventLoop()
    yield ProcessTable(loop)
    loop.close()


def start(running: ProcessTable, directory: Path) -> int:
    process = processes.start(["sleep", "1000"], directory / "log")
    running.add("child", process, lambda: None)
    return process.pid


def wait(running: ProcessTable) -> None:
    gone = select.poll()
    gone.register(running.processes["child"].pidfd, select.POLLIN)
    assert gone.poll(30_000)


def test_what_the_daemon_kills_it_has_ended(running: ProcessTable, tmp_path: Path) -> None:
    start(running, tmp_path)
    running.kill("child")
    wait(running)
    end = running.reap("child")
    assert (end.status, end.initiator) == (-signal.SIGKILL, ExitInitiator.DAEMON)


def test_what_had_been_killed_before_the_daemon_did_so_another_has_ended(running: ProcessTable, tmp_path: Path) -> None:
    os.kill(start(running, tmp_path), signal.SIGKILL)
    wait(running)
    running.kill("child")
    end = running.reap("child")
    assert (end.status, end.initiator, end.is_external) == (-signal.SIGKILL, ExitInitiator.UNKNOWN, True)
