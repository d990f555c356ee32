"""The start of the program `weightctl`, at a terminal where somebody types Ctrl-C."""

from __future__ import annotations

import signal
from pathlib import Path

from testkit.interrupting import PROGRAM, interrupted


def test_ctrl_c_while_it_is_imported_ends_it_without_a_word(tmp_path: Path) -> None:
    program = PROGRAM.format(module="weightctl.__main__")
    assert interrupted(program, "status", where="zmq", directory=tmp_path) == (-signal.SIGINT, b"")
