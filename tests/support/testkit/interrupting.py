"""SIGINT at a chosen moment of a program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# Like the script that pip installs. SIGINT gets its default handler, as the shell may have started the tests with
# SIGINT ignored.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from {module} import main
sys.exit(main())
"""
# Python handles a signal that arrives just before a sleep only after the sleep, so each sleep is short.
_WAITS = """
import time
print("now", flush=True)
while True:
    time.sleep(0.05)
"""


class Interrupted(NamedTuple):
    """Exit status and stderr of an interrupted program."""

    status: int
    stderr: bytes


def interrupted(program: str, *arguments: str, where: str, directory: Path) -> Interrupted:
    """Run the source of a program, and send SIGINT while it imports the module `where`, whose import never returns."""
    (directory / f"{where}.py").write_text(_WAITS, "utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), *filter(None, sys.path)])}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=pipe, stderr=pipe, env=environment) as it:
        assert it.stdout
        assert it.stderr
        try:
            assert it.stdout.readline() == b"now\n"
            it.send_signal(signal.SIGINT)
            return Interrupted(it.wait(30), it.stderr.read())
        finally:
            it.kill()
