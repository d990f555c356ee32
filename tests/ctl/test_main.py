"""Tests of an interrupt while `weightctl` starts."""

from __future__ import annotations

import signal
from pathlib import Path

from testkit.interrupting import PROGRAM, interrupted


def test_interrupt_during_import_ends_quietly(tmp_path: Path) -> None:
    program = PROGRAM.format(module="weightctl.__main__")
    assert interrupted(program, "status", where="zmq", directory=tmp_path) == (-signal.SIGINT, b"")
