"""Ctrl-C that a library swallows."""

from __future__ import annotations

import sys
import time

import pytest

from weightd.shared.interrupts import never_lost

pytestmark = pytest.mark.skipif(sys.version_info < (3, 8), reason="Python 3.7 tells nobody what it swallows")


class Swallows:
    """Raises where Python cannot pass it on."""

    def __init__(self, error: type) -> None:
        self._error = error

    def __del__(self) -> None:
        raise self._error


def test_it_comes_again(capfd: pytest.CaptureFixture[str]) -> None:
    def swallow_and_wait() -> None:
        one = Swallows(KeyboardInterrupt)
        del one
        time.sleep(30)

    with pytest.raises(KeyboardInterrupt), never_lost():
        swallow_and_wait()
    assert capfd.readouterr() == ("", "")


def test_what_else_is_swallowed_is_told_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: told.append(each.exc_type))
    hooks = sys.unraisablehook, sys.excepthook
    with never_lost():
        one = Swallows(OSError)
        del one
    assert told == [OSError]
    assert hooks == (sys.unraisablehook, sys.excepthook)
