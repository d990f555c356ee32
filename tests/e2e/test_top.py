"""`weightctl top` on a terminal: a real one, as far as it can tell, and a real daemon."""

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


# Has the terminal for its own, to which Ctrl-C goes, and becomes weightctl.
HAVE_IT = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "weightctl", *sys.argv[1:]])
"""


class Terminal:
    """A program that has a terminal, until the end of the block.

    Args:
        kind: $TERM.
        encoding: $LC_ALL.
        arguments: of weightctl.
    """

    def __init__(self, kind: str, encoding: str, *arguments: str) -> None:
        self._screen = pyte.Screen(80, 24)
        self._stream = pyte.ByteStream(self._screen)
        self._ours, theirs = pty.openpty()
        self.resize(80, 24)
        self._before = termios.tcgetattr(self._ours)
        environment = {**os.environ, "TERM": kind, "LC_ALL": encoding}
        self.process = subprocess.Popen(
            [sys.executable, "-c", HAVE_IT, *arguments],
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
        """Have another size; whose terminal it is gets SIGWINCH."""
        self._screen.resize(lines, columns)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._ours, keys.encode())

    def shows(self, check: Callable[[list[str]], bool], what: str) -> list[str]:
        """Wait until what is on the screen is right, and return it."""
        begin = time.monotonic()
        while not check(self.lines):
            assert time.monotonic() < begin + LIMIT_S, "\n".join([f"waited in vain: {what}", *self.lines])
            assert self._read() or self.process.poll() is None, "\n".join(["it has ended", *self.lines])
        return self.lines

    def ends(self) -> int:
        """Wait for its end; return its exit status."""
        while self._read():
            pass
        return self.process.wait(LIMIT_S)

    @property
    def is_as_it_was(self) -> bool:
        """Whether the program has left the terminal in the mode in which it found it."""
        return termios.tcgetattr(self._ours)[:4] == self._before[:4]

    @property
    def lines(self) -> list[str]:
        """What is on the screen."""
        return [line.rstrip() for line in self._screen.display]

    def _read(self) -> bool:
        """Take what the program has written, for a moment; return whether there may be more."""
        if not select.select([self._ours], [], [], 1.0)[0]:
            return self.process.poll() is None
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # nobody has the other side any more
            return False
        self._stream.feed(data)
        return bool(data)


def has(*words: str) -> Callable[[list[str]], bool]:
    """Whether some line has all of these."""
    return lambda lines: any(all(word in line for word in words) for line in lines)


def test_top_shows_a_daemon_at_work_keeps_the_picture_of_one_that_is_gone_and_finds_the_next(
    mlp: Path, questions: list[SampleRequest], place: DaemonPaths
) -> None:
    daemon = place.serve({"mlp": {"path": mlp, "workers": 2}})
    command = ("--socket", place.address, "top", "-d", "0.2")
    with daemon, daemon.client(place.address) as client, Terminal("xterm-256color", "C.UTF-8", *command) as top:
        top.shows(has("mlp", "serving", "2/2"), "it serves")

        def are_counted(lines: list[str]) -> bool:
            ask_all(client, "mlp", questions)
            return has("requests", "█")(lines) and not has("requests", " 0.0/s")(lines)

        top.shows(are_counted, "requests")
        top.shows(has("memory", "█", "of it shared weights"), "one copy")
        top.shows(has("plain", "░", "2 plain processes"), "and several")
        top.type("\r")
        top.shows(has("1.w2", "ready"), "its processes")
        top.type("\x1b")
        top.shows(lambda lines: not has("1.w2")(lines), "the models again")
        top.resize(140, 30)
        top.shows(has("GEN", "RUN"), "more columns")
        daemon.end()
        lines = top.shows(has("no response for", "UNAVAILABLE"), "it is lost")
        assert has("mlp")(lines)  # as it was told last: it may have been draining
        with place.serve({"mlp": {"path": mlp, "workers": 1}}):
            top.shows(lambda lines: has("every 0.2 s")(lines) and has("mlp", "serving", "1/1")(lines), "it is back")
        top.type("\x03")
        assert top.ends() == 130
        assert top.is_as_it_was


def test_a_terminal_that_can_little_will_do_and_pictures_are_counted(zoo: Zoo, place: DaemonPaths) -> None:
    path = zoo.path("two_inputs", "onnxruntime")
    command = ("--socket", place.address, "top", "-d", "0.2", "-n", "3")
    with place.serve({"sums": {"path": path}}) as daemon:
        daemon.wait_for("sums.1: serving")
        with Terminal("vt100", "C", *command) as top:
            top.shows(has("memory", "---"), "a bar")
            assert has("sums", "serving", "1/1")(top.lines)
            assert top.ends() == 0
            assert top.is_as_it_was
        with Terminal("dumb", "C", *command) as top:
            assert top.ends() == 0
            assert sum(line.startswith("weightd ") for line in top.lines) >= 1
