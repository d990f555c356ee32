from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from weightd_common.peer_credentials import peer_credentials
from weightd_daemon.platform import acceptor
from weightd_daemon.platform.acceptor import Acceptor
from weightd_daemon.platform.event_loop import EventLoop


class AcceptorHarness:
    """A listener that can fail, its accepted connections, its error reports and the number of `accept` calls."""

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        self.loop = EventLoop()
        self.path = str(path)
        self.stack = stack
        self.listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        self.listener.setblocking(False)
        self.listener.bind(self.path)
        self.listener.listen()
        self.fileno, self.getsockname = self.listener.fileno, self.listener.getsockname
        self.accepted: list[socket.socket] = []
        self.reports: list[str] = []
        self.tries = 0
        self.error = 0

    def accept(self) -> Any:
        self.tries += 1
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return self.listener.accept()

    def add(self, connection: socket.socket) -> None:
        self.accepted.append(self.stack.enter_context(connection))

    def connect(self) -> None:
        self.stack.enter_context(socket.socket(socket.AF_UNIX)).connect(self.path)


@pytest.fixture(autouse=True)
def _long_time_slice(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(acceptor, "_SLICE_S", 60.0)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[AcceptorHarness]:
    with contextlib.ExitStack() as stack:
        made = AcceptorHarness(tmp_path / "s", stack)
        yield made
        made.loop.close()


def test_limits_accepted_connections_per_turn(harness: AcceptorHarness) -> None:
    Acceptor(harness.listener, harness.loop, harness.add, harness.reports.append, max_accepted=2)
    for _ in range(3):
        harness.connect()
    harness.loop.run_once(30)
    assert len(harness.accepted) == 2
    harness.loop.run_once(30)
    assert [peer_credentials(each)[:2] for each in harness.accepted] == 3 * [(os.getpid(), os.getuid())]


def test_survives_aborted_connections(harness: AcceptorHarness) -> None:
    harness.error = errno.ECONNABORTED
    Acceptor(cast(socket.socket, harness), harness.loop, harness.add, harness.reports.append, max_accepted=2)
    harness.connect()
    harness.loop.run_once(30)
    harness.error = 0
    harness.loop.run_once(30)
    assert len(harness.accepted) == 1


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_pauses_while_descriptors_are_exhausted(
    harness: AcceptorHarness, error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "_EXHAUSTED_BACKOFF_S", 0.3)
    harness.error = error
    acceptor_under_test = Acceptor(cast(socket.socket, harness), harness.loop, harness.add, harness.reports.append)
    harness.connect()
    harness.loop.run_once(30)
    # The loop does not retry during the pause; only an explicit call of `accept` does.
    for _ in range(3):
        harness.loop.run_once(0.0)
    assert harness.tries == 1
    acceptor_under_test.accept()
    assert len(harness.reports) == 1
    assert harness.reports[0].startswith("cannot accept connections on ")
    harness.error = 0
    harness.loop.run_once(30)
    while not harness.accepted:
        harness.loop.run_once(30)
    assert harness.tries == 4


def test_pauses_after_refusals(harness: AcceptorHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "_REFUSAL_BACKOFF_S", 0.3)

    def refuse(connection: socket.socket) -> bool:
        harness.add(connection)
        return False

    Acceptor(cast(socket.socket, harness), harness.loop, refuse, logging.error, max_accepted=2)
    for _ in range(3):
        harness.connect()
    for _ in range(4):
        harness.loop.run_once(0.0)
    assert len(harness.accepted) == 2
    while len(harness.accepted) < 3:
        harness.loop.run_once(30)
    assert harness.tries <= 4


def test_accepts_nothing_after_stop_during_a_pause(harness: AcceptorHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "_REFUSAL_BACKOFF_S", 0.05)

    def refuse(connection: socket.socket) -> bool:
        harness.add(connection)
        return False

    stopped = Acceptor(cast(socket.socket, harness), harness.loop, refuse, logging.error)
    harness.connect()
    harness.loop.run_once(30)
    stopped.stop()
    harness.connect()
    rested = time.monotonic() + 0.1
    while time.monotonic() < rested:
        harness.loop.run_once(0.02)
    assert len(harness.accepted) == 1
