"""Ctrl-C that a library swallows."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Iterator

import pytest

from weightd_common.sigint import redelivering_interrupts

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
