"""The process that adopts orphans reaps them, and its child is the program. A child subreaper stands for PID 1."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any, Dict, List

import pytest

from testkit.waiting import until

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

BEGIN = """
import ctypes, os, signal, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
first = os.getpid()
from weightd_common import init, signals
signals.reset()
init.serve_as_init()
assert os.getppid() == first != os.getpid()
"""

WAITS = """
print(os.getpid(), flush=True)
time.sleep(600)
"""

# Each signal that comes, in a line. They are waited for: a handler runs only after the call that its signal came just
# before, and this call would be the endless sleep.
NOTES = """
numbers = set(map(int, sys.argv[1:]))
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
print(os.getpid(), flush=True)
while True:
    print(int(signal.sigwait(numbers)), flush=True)
"""


def start(program: str, *arguments: object, **settings: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", BEGIN + program, *map(str, arguments)]
    settings = {"stdout": subprocess.PIPE, "env": ENVIRONMENT, **settings}
    return subprocess.Popen(command, **settings)


def line(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout
    return int(process.stdout.readline())


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_process_that_adopts_nobody_stays_what_it_is() -> None:
    program = "import os; from weightd_common import init; init.serve_as_init(); print(os.getpid())"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=ENVIRONMENT) as process:
        assert line(process) == process.pid
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("program", "status"),
    [("sys.exit(0)", 0), ("sys.exit(78)", 78), ("os.kill(os.getpid(), signal.SIGKILL)", 137)],
)
def test_the_exit_status_is_that_of_the_program(program: str, status: int) -> None:
    with start(program) as process:
        pass
    assert process.returncode == status


def test_orphans_are_reaped_and_the_programs_own_children_are_its_own() -> None:
    program = """
orphan, starts = os.pipe()
if not os.fork():
    if not os.fork():
        os.write(starts, b"%d\\n" % os.getpid())
        time.sleep(600)
    os._exit(7)
assert os.WEXITSTATUS(os.wait()[1]) == 7
os.write(1, os.read(orphan, 100))
time.sleep(600)
"""
    with start(program) as process:
        orphan = line(process)
        fields = Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()
        assert int(fields[1]) == process.pid
        os.kill(orphan, signal.SIGKILL)
        until(lambda: gone(orphan), "it is reaped")
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM


def test_signals_are_passed_on() -> None:
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGWINCH]
    with start(NOTES, *map(int, numbers)) as process:
        line(process)
        for number in numbers:
            process.send_signal(number)
            assert line(process) == number
        process.kill()


def test_the_program_ends_with_its_init() -> None:
    with start(WAITS) as process:
        child = line(process)
        process.kill()
    assert process.returncode == -signal.SIGKILL

    def ended() -> bool:
        try:
            return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except FileNotFoundError:
            return True

    until(ended, "the kernel ends it")


def test_a_key_at_the_terminal_is_one_signal() -> None:
    master, slave = pty.openpty()

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    settings: Dict[str, Any] = {"stdin": slave, "preexec_fn": own_terminal}
    with start(NOTES, int(signal.SIGINT), int(signal.SIGUSR1), **settings) as process:
        child = line(process)
        # The init comes after the program, or the kernel could merge a signal that it passes on with the pending one.
        process.send_signal(signal.SIGSTOP)
        os.write(master, b"\x03")
        first = line(process)
        # After what its init would have passed on: the lowest pending signal is the first.
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGCONT)
        second = line(process)
        os.kill(child, signal.SIGKILL)
    assert (first, second) == (signal.SIGINT, signal.SIGUSR1)
    os.close(master)
    os.close(slave)


def test_only_the_program_has_the_descriptors_that_were_passed_and_knows_that_they_are_its_own() -> None:
    program = """
assert (os.environ["LISTEN_PID"], os.environ["WATCHDOG_PID"]) == (str(os.getpid()), "1")
os.close(int(sys.argv[1]))
print(0, flush=True)
time.sleep(600)
"""
    # As sd_listen_fds(3) has it: the pid is that of the process itself.
    environment = """
import os
os.environ.update(LISTEN_PID=str(os.getpid()), WATCHDOG_PID="1")
"""
    reading, writing = os.pipe()
    command: List[str] = [sys.executable, "-c", environment + BEGIN + program, str(writing)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT, pass_fds=[writing]) as process:
        os.close(writing)
        assert line(process) == 0
        assert os.read(reading, 1) == b""
        process.terminate()
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        process.kill()
