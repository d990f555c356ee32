"""The start of the program `weightd`, at a terminal where somebody types Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testkit import mindir
from weightd.daemon import exits

# As the script that an installation makes; a shell may have started the tests with SIGINT ignored.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from weightd.daemon.entry import main
sys.exit(main())
"""
# A signal that comes just before a sleep is handled after it: short ones.
WAITS = """
import time
print("now", flush=True)
while True:
    time.sleep(0.05)
"""


def test_an_interpreter_that_is_too_old_is_told_what_is_needed() -> None:
    python = mindir.interpreter()
    if python is None:
        pytest.skip(mindir.HOW_TO_GET_IT)
    path = os.pathsep.join(str(mindir.REPOSITORY / each) for each in ("daemon", "protocol"))
    done = subprocess.run(
        [str(python), "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (exits.CONFIG, "")
    assert done.stderr.startswith("weightd: the daemon needs Python 3.10 or later, and ")
    assert f"{python} is 3.7: " in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "status"),
    [
        ("zmq", -signal.SIGINT),  # the program is imported
        ("waits", 130),  # it runs, and has its blocks to leave
    ],
)
def test_ctrl_c_ends_it_without_a_word(module: str, status: int, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text(WAITS, "utf-8")
    program = PROGRAM
    if module == "waits":
        program = (
            "from weightd.daemon import __main__; __main__.ConfigFile = lambda *_: __import__('waits')\n" + program
        )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program, "serve", "weightd.toml"]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdout
        assert process.stderr
        try:
            assert process.stdout.readline() == b"now\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == status
            assert process.stderr.read() == b""
        finally:
            process.kill()
