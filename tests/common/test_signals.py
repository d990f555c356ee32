"""A program undoes what its parent has ignored and blocked, except for what shells ignore on purpose."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Set

import pytest

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

# Does to itself what a parent would have done; then it begins, and says what is pending, blocked and ignored.
PROGRAM = """
import os, signal, sys
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
if sys.argv[1:]:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
from weightd_common import signals
signals.reset(*(signal.Signals(int(each)) for each in sys.argv[1:]))
sys.stdout.write(open("/proc/self/status").read())
"""


def sets(*ignored: signal.Signals) -> tuple[Set[int], Set[int]]:
    """The signals that the program blocks and ignores."""
    command = [sys.executable, "-c", PROGRAM, *(str(int(each)) for each in ignored)]
    done = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, timeout=60, check=True)
    lines = dict(line.split(":\t", 1) for line in done.stdout.decode().splitlines())
    blocked, ignores = (int(lines[each], 16) for each in ("SigBlk", "SigIgn"))
    return _numbers(blocked), _numbers(ignores)


def _numbers(bits: int) -> Set[int]:
    return {number for number in range(1, 65) if bits >> (number - 1) & 1} - OF_LIBC


# glibc's own: posix_spawn, by which make starts programs, has them ignored.
OF_LIBC = {32, 33}
KEPT = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


def test_nothing_is_blocked_and_only_that_is_ignored_which_shells_and_python_ignore() -> None:
    assert sets() == (set(), KEPT | PYTHON)


def test_a_program_may_ignore_signals_even_one_that_is_pending() -> None:
    assert sets(signal.SIGINT, signal.SIGTERM) == (set(), KEPT | PYTHON | {signal.SIGTERM})


def test_a_signal_that_was_blocked_is_delivered() -> None:
    program = (
        "import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, {15}); os.kill(os.getpid(), 15); "
        "from weightd_common import signals; signals.reset()"
    )
    assert subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, check=False).returncode == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGCHLD])
def test_a_handler_stays(number: signal.Signals) -> None:
    program = (
        "import os, signal; from weightd_common import signals; got = []; "
        f"signal.signal({int(number)}, lambda *each: got.append(each)); "
        f"signals.reset(); os.kill(os.getpid(), {int(number)}); assert got"
    )
    assert subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, check=False).returncode == 0
