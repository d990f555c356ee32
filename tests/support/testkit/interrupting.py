"""Ctrl-C at a chosen moment of a program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# As the script that an installation makes; a shell may have started the tests with SIGINT ignored.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from {module} import main
sys.exit(main())
"""
# A signal that comes just before a sleep is handled after it: short ones.
_WAITS = """
import time
print("now", flush=True)
while True:
    time.sleep(0.05)
"""


class Interrupted(NamedTuple):
    """How a program has ended, and what it has said on stderr."""

    status: int
    stderr: bytes


def interrupted(program: str, *arguments: str, where: str, directory: Path) -> Interrupted:
    """Run the text of a program, and send it SIGINT while it imports the module `where`, which never ends by itself."""
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
