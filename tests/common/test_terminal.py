from __future__ import annotations

import signal
from pathlib import Path

import pytest

from weightd_common.terminal import Terminal

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
