"""The start of the program `weightctl`, at a terminal where somebody types Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

# As the script that an installation makes; a shell may have started the tests with SIGINT ignored.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from weightd.ctl.entry import main
sys.exit(main())
"""
# A signal that comes just before a sleep is handled after it: short ones.
WAITS = """
import time
print("now", flush=True)
while True:
    time.sleep(0.05)
"""


def test_ctrl_c_while_it_is_imported_ends_it_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "zmq.py").write_text(WAITS, "utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PROGRAM, "status"], stdout=pipe, stderr=pipe, env=environment) as done:
        assert done.stdout
        assert done.stderr
        try:
            assert done.stdout.readline() == b"now\n"
            done.send_signal(signal.SIGINT)
            assert done.wait(30) == -signal.SIGINT
            assert done.stderr.read() == b""
        finally:
            done.kill()
