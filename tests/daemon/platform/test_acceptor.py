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


class Scene:
    """A listener, whoever was let in, and how often anybody was asked for."""

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        self.loop = EventLoop()
        self.path = str(path)
        self.stack = stack
        self.listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        self.listener.setblocking(False)
        self.listener.bind(self.path)
        self.listener.listen()
        self.fileno, self.getsockname = self.listener.fileno, self.listener.getsockname
        self.came: list[socket.socket] = []
        self.reports: list[str] = []
        self.tries = 0
        self.error = 0

    def accept(self) -> Any:
        self.tries += 1
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return self.listener.accept()

    def let_in(self, connection: socket.socket) -> None:
        self.came.append(self.stack.enter_context(connection))

    def connect(self) -> None:
        self.stack.enter_context(socket.socket(socket.AF_UNIX)).connect(self.path)


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(acceptor, "_SLICE_S", 60.0)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with contextlib.ExitStack() as stack:
        made = Scene(tmp_path / "s", stack)
        yield made
        made.loop.close()


def test_so_many_are_let_in_at_once_and_the_others_next(scene: Scene) -> None:
    Acceptor(scene.listener, scene.loop, scene.let_in, scene.reports.append, max_accepted=2)
    for _ in range(3):
        scene.connect()
    scene.loop.run_once(30)
    assert len(scene.came) == 2
    scene.loop.run_once(30)
    assert [peer_credentials(each)[:2] for each in scene.came] == 3 * [(os.getpid(), os.getuid())]


def test_who_has_gone_again_keeps_nobody_from_being_let_in(scene: Scene) -> None:
    scene.error = errno.ECONNABORTED
    Acceptor(cast(socket.socket, scene), scene.loop, scene.let_in, scene.reports.append, max_accepted=2)
    scene.connect()
    scene.loop.run_once(30)
    scene.error = 0
    scene.loop.run_once(30)
    assert len(scene.came) == 1


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_where_no_descriptor_is_left_the_next_one_waits_until_there_is(
    scene: Scene, error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "_EXHAUSTED_BACKOFF_S", 0.3)
    scene.error = error
    waiting = Acceptor(cast(socket.socket, scene), scene.loop, scene.let_in, scene.reports.append)
    scene.connect()
    scene.loop.run_once(30)
    # Nobody is asked for again and again meanwhile, but by who knows of one.
    for _ in range(3):
        scene.loop.run_once(0.0)
    assert scene.tries == 1
    waiting.accept()
    assert len(scene.reports) == 1
    assert scene.reports[0].startswith("cannot accept connections on ")
    scene.error = 0
    scene.loop.run_once(30)
    while not scene.came:
        scene.loop.run_once(30)
    assert scene.tries == 4


def test_after_some_were_refused_it_rests_and_the_loop_does_not(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "_REFUSAL_BACKOFF_S", 0.3)

    def refuse(connection: socket.socket) -> bool:
        scene.let_in(connection)
        return False

    Acceptor(cast(socket.socket, scene), scene.loop, refuse, logging.error, max_accepted=2)
    for _ in range(3):
        scene.connect()
    for _ in range(4):
        scene.loop.run_once(0.0)
    assert len(scene.came) == 2
    while len(scene.came) < 3:
        scene.loop.run_once(30)
    assert scene.tries <= 4


def test_what_has_stopped_while_it_rests_accepts_nothing_more(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "_REFUSAL_BACKOFF_S", 0.05)

    def refuse(connection: socket.socket) -> bool:
        scene.let_in(connection)
        return False

    stopped = Acceptor(cast(socket.socket, scene), scene.loop, refuse, logging.error)
    scene.connect()
    scene.loop.run_once(30)
    stopped.stop()
    scene.connect()
    rested = time.monotonic() + 0.1
    while time.monotonic() < rested:
        scene.loop.run_once(0.02)
    assert len(scene.came) == 1
