"""`weightctl top` in a pseudo-terminal, with a real daemon."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pyte
import pytest

from .support import LIMIT_S, ONE_ENGINE, DaemonPaths, SampleRequest, Zoo, ask_all

pytestmark = [pytest.mark.e2e, ONE_ENGINE]


# Makes the terminal its controlling terminal, so that it receives Ctrl-C, and executes weightctl.
TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "weightctl", *sys.argv[1:]])
"""


class Terminal:
    """The command weightctl in a terminal, until the end of the block.

    Args:
        kind: $TERM.
        encoding: $LC_ALL.
        arguments: arguments of weightctl.
    """

    def __init__(self, kind: str, encoding: str, *arguments: str) -> None:
        self._screen = pyte.Screen(80, 24)
        self._stream = pyte.ByteStream(self._screen)
        self._ours, theirs = pty.openpty()
        self.resize(80, 24)
        self._before = termios.tcgetattr(self._ours)
        environment = {**os.environ, "TERM": kind, "LC_ALL": encoding}
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)

    def resize(self, columns: int, lines: int) -> None:
        """Resize the terminal; the program gets SIGWINCH."""
        self._screen.resize(lines, columns)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait_for(self, check: Callable[[list[str]], bool], what: str) -> list[str]:
        """Wait until the check accepts the screen; return its lines."""
        begin = time.monotonic()
        while not check(self.lines):
            assert time.monotonic() < begin + LIMIT_S, "\n".join([f"time-out: {what}", *self.lines])
            assert self._read() or self.process.poll() is None, "\n".join(["the program has exited", *self.lines])
        return self.lines

    def wait(self) -> int:
        """Wait until the program exits; return its exit status."""
        while self._read():
            pass
        return self.process.wait(LIMIT_S)

    @property
    def is_restored(self) -> bool:
        """Whether the program has left the terminal in the mode in which it found it."""
        return termios.tcgetattr(self._ours)[:4] == self._before[:4]

    @property
    def lines(self) -> list[str]:
        """The lines on the screen."""
        return [line.rstrip() for line in self._screen.display]

    def _read(self) -> bool:
        """Read output of the program for up to a second; return whether there may be more."""
        if not select.select([self._ours], [], [], 1.0)[0]:
            return self.process.poll() is None
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # the program has closed the terminal
            return False
        self._stream.feed(data)
        return bool(data)


def has(*words: str) -> Callable[[list[str]], bool]:
    """Return a check that some line contains all these words."""
    return lambda lines: any(all(word in line for word in words) for line in lines)


def test_top_keeps_screen_while_daemon_restarts(mlp: Path, questions: list[SampleRequest], place: DaemonPaths) -> None:
    daemon = place.serve({"mlp": {"path": mlp, "workers": 2}})
    command = ("--socket", place.address, "top", "-d", "0.2")
    with daemon, daemon.client(place.address) as client, Terminal("xterm-256color", "C.UTF-8", *command) as top:
        top.wait_for(has("mlp", "serving", "2/2"), "the model serves")

        def are_counted(lines: list[str]) -> bool:
            ask_all(client, "mlp", questions)
            return has("requests", "█")(lines) and not has("requests", " 0.0/s")(lines)

        top.wait_for(are_counted, "requests")
        top.wait_for(has("memory", "█", "of it shared weights"), "the memory with one copy")
        top.wait_for(has("plain", "░", "2 plain processes"), "the memory of plain processes")
        top.type("\r")
        top.wait_for(has("1.w2", "ready"), "the processes of the model")
        top.type("\x1b")
        top.wait_for(lambda lines: not has("1.w2")(lines), "the list of models")
        top.resize(140, 30)
        top.wait_for(has("GEN", "RUN"), "more columns")
        daemon.end()
        lines = top.wait_for(has("no response for", "UNAVAILABLE"), "the connection is lost")
        assert has("mlp")(lines)  # the last known state; the model may have been draining
        with place.serve({"mlp": {"path": mlp, "workers": 1}}):
            top.wait_for(
                lambda lines: has("every 0.2 s")(lines) and has("mlp", "serving", "1/1")(lines), "the new daemon"
            )
        top.type("\x03")
        assert top.wait() == 130
        assert top.is_restored


def test_top_on_simple_terminals(zoo: Zoo, place: DaemonPaths) -> None:
    path = zoo.path("two_inputs", "onnxruntime")
    command = ("--socket", place.address, "top", "-d", "0.2", "-n", "3")
    with place.serve({"sums": {"path": path}}) as daemon:
        daemon.wait_for("sums.1: serving")
        with Terminal("vt100", "C", *command) as top:
            top.wait_for(has("memory", "---"), "a bar")
            assert has("sums", "serving", "1/1")(top.lines)
            assert top.wait() == 0
            assert top.is_restored
        with Terminal("dumb", "C", *command) as top:
            assert top.wait() == 0
            assert sum(line.startswith("weightd ") for line in top.lines) >= 1
