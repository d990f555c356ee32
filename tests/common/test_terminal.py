"""Tests of a terminal that closes, and of an interrupt that a library swallows."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Iterator

import pytest

from weightd_common.terminal import Terminal, redelivering_interrupts

# Fields of /proc/PID/stat: state, parent, group, session, terminal, foreground group, flags.
_STAT = "7 (a) b (c) S 1 7 7 {} {} 4194304"
NOWHERE = _STAT.format(0, -1)
FOREGROUND = _STAT.format(34816, 7)
BACKGROUND = _STAT.format(34816, 9)


@pytest.mark.parametrize(
    ("before", "handler", "after", "has_closed"),
    [
        (FOREGROUND, signal.SIG_DFL, NOWHERE, True),
        (FOREGROUND, signal.SIG_DFL, FOREGROUND, False),  # SIGHUP requests a reload.
        (FOREGROUND, signal.SIG_DFL, BACKGROUND, False),
        (FOREGROUND, signal.SIG_IGN, NOWHERE, False),  # The process runs under nohup.
        (BACKGROUND, signal.SIG_DFL, NOWHERE, False),  # The process outlives its shell.
        (NOWHERE, signal.SIG_DFL, NOWHERE, False),  # The process is a service.
    ],
)
def test_ends_with_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, handler: signal.Handlers, after: str, has_closed: bool
) -> None:
    monkeypatch.setattr("weightd_common.terminal.signal.getsignal", lambda _: handler)
    stat = tmp_path / "stat"
    stat.write_text(before)
    terminal = Terminal(stat)
    stat.write_text(after)
    assert terminal.has_closed() is has_closed


HAS_UNRAISABLEHOOK = sys.version_info >= (3, 8)


@pytest.fixture(autouse=True)
def python_handles() -> Iterator[None]:
    """Restore Python's SIGINT handler, which background jobs of a shell do not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupted:
    """An object whose finalizer is interrupted, where Python cannot raise the exception."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)


class Fails:
    """An object whose finalizer fails with another error."""

    def __del__(self) -> None:
        raise OSError


def test_raises_swallowed_interrupt_again(capfd: pytest.CaptureFixture[str]) -> None:
    def swallow_and_wait() -> None:
        one = Interrupted()
        del one
        time.sleep(30)

    with pytest.raises(KeyboardInterrupt), redelivering_interrupts():
        swallow_and_wait()
    # Python 3.7 prints the exception that it swallows and calls no hook.
    assert not HAS_UNRAISABLEHOOK or capfd.readouterr() == ("", "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(not HAS_UNRAISABLEHOOK, reason="Python 3.7 has no hook for swallowed exceptions")
def test_reports_other_swallowed_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: reported.append(each.exc_type))
    hooks = sys.unraisablehook, sys.excepthook
    with redelivering_interrupts():
        one = Fails()
        del one
    assert reported == [OSError]
    assert hooks == (sys.unraisablehook, sys.excepthook)
