"""The terminal that closes, and a Ctrl-C that a library swallows."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Iterator

import pytest

from weightd_common.terminal import Terminal, redelivering_interrupts

# Of /proc/PID/stat: state, parent, group, session, terminal, foreground group, flags.
_STAT = "7 (a) b (c) S 1 7 7 {} {} 4194304"
NOWHERE = _STAT.format(0, -1)
FOREGROUND = _STAT.format(34816, 7)
BACKGROUND = _STAT.format(34816, 9)


@pytest.mark.parametrize(
    ("before", "handler", "after", "has_closed"),
    [
        (FOREGROUND, signal.SIG_DFL, NOWHERE, True),
        (FOREGROUND, signal.SIG_DFL, FOREGROUND, False),  # somebody asks for a reload
        (FOREGROUND, signal.SIG_DFL, BACKGROUND, False),
        (FOREGROUND, signal.SIG_IGN, NOWHERE, False),  # nohup
        (BACKGROUND, signal.SIG_DFL, NOWHERE, False),  # it outlives its shell
        (NOWHERE, signal.SIG_DFL, NOWHERE, False),  # a service
    ],
)
def test_who_ends_with_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, handler: signal.Handlers, after: str, has_closed: bool
) -> None:
    monkeypatch.setattr("weightd_common.terminal.signal.getsignal", lambda _: handler)
    stat = tmp_path / "stat"
    stat.write_text(before)
    terminal = Terminal(stat)
    stat.write_text(after)
    assert terminal.has_closed() is has_closed


IS_TOLD = sys.version_info >= (3, 8)


@pytest.fixture(autouse=True)
def python_handles() -> Iterator[None]:
    """Where the tests run in the background of a shell, nobody would."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupted:
    """Where Ctrl-C comes, Python cannot pass it on."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)


class Fails:
    """The same with any error."""

    def __del__(self) -> None:
        raise OSError


def test_it_comes_again(capfd: pytest.CaptureFixture[str]) -> None:
    def swallow_and_wait() -> None:
        one = Interrupted()
        del one
        time.sleep(30)

    with pytest.raises(KeyboardInterrupt), redelivering_interrupts():
        swallow_and_wait()
    # Python 3.7 prints what it swallows, and tells nobody else.
    assert not IS_TOLD or capfd.readouterr() == ("", "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(not IS_TOLD, reason="Python 3.7 tells nobody what it swallows")
def test_what_else_is_swallowed_is_told_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: told.append(each.exc_type))
    hooks = sys.unraisablehook, sys.excepthook
    with redelivering_interrupts():
        one = Fails()
        del one
    assert told == [OSError]
    assert hooks == (sys.unraisablehook, sys.excepthook)
