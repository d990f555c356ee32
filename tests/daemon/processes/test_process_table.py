"""Initiator of a child's exit: the daemon or another process."""

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
def table() -> Iterator[ProcessTable]:
    loop = EventLoop()
    yield ProcessTable(loop)
    loop.close()


def start(table: ProcessTable, directory: Path) -> int:
    process = processes.start(["sleep", "1000"], directory / "log")
    table.add("child", process, lambda: None)
    return process.pid


def wait(table: ProcessTable) -> None:
    gone = select.poll()
    gone.register(table.processes["child"].pidfd, select.POLLIN)
    assert gone.poll(30_000)


def test_reports_kill_by_the_daemon(table: ProcessTable, tmp_path: Path) -> None:
    start(table, tmp_path)
    table.kill("child")
    wait(table)
    end = table.reap("child")
    assert (end.status, end.initiator) == (-signal.SIGKILL, ExitInitiator.DAEMON)


def test_earlier_kill_is_not_attributed_to_the_daemon(table: ProcessTable, tmp_path: Path) -> None:
    os.kill(start(table, tmp_path), signal.SIGKILL)
    wait(table)
    table.kill("child")
    end = table.reap("child")
    assert (end.status, end.initiator, end.is_external) == (-signal.SIGKILL, ExitInitiator.UNKNOWN, True)
