"""Test that `weightctl top` restores the terminal."""

from __future__ import annotations

import contextlib
import curses
import os
import signal
from typing import Any, Callable
from unittest import mock

import pytest

from weightctl.top import terminal


def test_second_interrupt_restores_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[bool] = []

    def wrapper(run: Callable[[Any], None]) -> None:
        try:
            run(mock.Mock())
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            restored.append(True)

    monkeypatch.setattr(curses, "wrapper", wrapper)
    monkeypatch.setattr(terminal, "PollThread", lambda *_: contextlib.nullcontext(mock.Mock()))
    monkeypatch.setattr(terminal.Screen, "run", mock.Mock(side_effect=KeyboardInterrupt))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        terminal.show(mock.Mock(), mock.Mock(), 1.0, None)
    assert restored
    assert signal.getsignal(signal.SIGINT) is before
