"""Tests of the first steps of a program: signals, exit of its parent, core dumps, and the duties of PID 1.

A child subreaper takes the role of PID 1.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import pty
import resource
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any, Dict, List, Set

import pytest

from testkit.waiting import until
from weightd_common import process_start

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
IMPORTS = "import os, resource, signal, subprocess, sys, time\nfrom weightd_common import process_start\n"


def start(program: str, *arguments: object, **settings: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", IMPORTS + program, *map(str, arguments)]
    return subprocess.Popen(command, **{"stdout": subprocess.PIPE, "env": ENVIRONMENT, **settings})


def run(program: str, *arguments: object, **settings: Any) -> subprocess.CompletedProcess[bytes]:
    with start(program, *arguments, **settings) as process:
        output, errors = process.communicate(timeout=60)
    return subprocess.CompletedProcess([], process.returncode, output, errors)


def line(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout
    return int(process.stdout.readline())


def alive(pid: int) -> bool:
    """Return whether the process runs. A zombie does not count, because it may have no parent that reaps it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


# --- signals -------------------------------------------------------------------------------------------------------

# Sets the state that a parent could have left, starts, and prints pending, blocked and ignored signals.
INHERITS = """
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
if sys.argv[1:]:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
process_start.reset_signals(*(signal.Signals(int(each)) for each in sys.argv[1:]))
sys.stdout.write(open("/proc/self/status").read())
"""

# glibc's internal signals: posix_spawn, with which make starts programs, ignores them.
OF_LIBC = {32, 33}
KEPT = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


def signal_set(status: str, name: str) -> Set[int]:
    bits = int(status.partition(f"\n{name}:\t")[2].split()[0], 16)
    return {number for number in range(1, 65) if bits >> (number - 1) & 1} - OF_LIBC


@pytest.mark.parametrize(
    ("ignored", "ignores"),
    [((), KEPT | PYTHON), ((signal.SIGINT, signal.SIGTERM), KEPT | PYTHON | {signal.SIGTERM})],
)
def test_unblocks_signals_and_keeps_usual_ignored_ones(ignored: List[signal.Signals], ignores: Set[int]) -> None:
    status = run(INHERITS, *map(int, ignored)).stdout.decode()
    assert (signal_set(status, "SigBlk"), signal_set(status, "SigIgn")) == (set(), ignores)


def test_delivers_blocked_signal() -> None:
    program = "signal.pthread_sigmask(signal.SIG_BLOCK, {15}); os.kill(os.getpid(), 15); process_start.reset_signals()"
    assert run(program).returncode == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGCHLD])
def test_keeps_handlers(number: signal.Signals) -> None:
    program = (
        f"got = []; signal.signal({int(number)}, lambda *each: got.append(each)); "
        f"process_start.reset_signals(); os.kill(os.getpid(), {int(number)}); assert got"
    )
    assert run(program).returncode == 0


# --- core dumps and imports ----------------------------------------------------------------------------------------

# Enables core dumps first, because a test runner or a container may have disabled them.
CRASHES = """
_, hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
open("/proc/self/coredump_filter", "w").write("0x33")
if sys.argv[1] == "disabled":
    process_start.disable_core_dumps()
print(resource.getrlimit(resource.RLIMIT_CORE) == (0, hard), open("/proc/self/coredump_filter").read(), flush=True)
os.abort()
"""


def test_crash_leaves_no_core_dump(tmp_path: Path) -> None:
    assert run(CRASHES, "enabled", cwd=str(tmp_path)).stdout == b"False 00000033\n\n"
    for left in tmp_path.iterdir():
        left.unlink()
    # A program to which the kernel pipes the dump gets no memory either.
    assert run(CRASHES, "disabled", cwd=str(tmp_path)).stdout == b"True 00000000\n\n"
    assert list(tmp_path.iterdir()) == []


def test_kernel_without_core_dumps(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    try:
        process_start.disable_core_dumps(str(tmp_path / "none" / "coredump_filter"))
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)


@pytest.mark.parametrize("fails", [False, True])
def test_enables_garbage_collector_after_import(fails: bool) -> None:
    try:
        with process_start.gc_disabled():
            assert not gc.isenabled()
            kept = [None]
            if fails:
                raise ImportError
    except ImportError:
        assert fails
    assert gc.isenabled()
    assert not any(each is kept for each in gc.get_objects())


# --- child and parent ----------------------------------------------------------------------------------------------

CHILD = """
process_start.die_with_parent(int(sys.argv[1]))
print("up", flush=True)
time.sleep(600)
"""
# Starts the child and prints its pid.
PARENT = f"""
child = subprocess.Popen([sys.executable, "-c", {IMPORTS + CHILD!r}, str(os.getpid())], stdout=subprocess.PIPE)
assert child.stdout.readline() == b"up\\n"
print(child.pid, flush=True)
sys.stdin.readline()
"""
# A background job of a shell ignores SIGINT, so the script restores the handler.
INTERRUPTED = f"""
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.kill(os.getpid(), signal.SIGINT)
process_start.reset_signals(signal.SIGINT)
{CHILD}"""


def test_child_dies_with_its_parent() -> None:
    with start(PARENT, stdin=subprocess.PIPE) as parent:
        pid = line(parent)
        assert alive(pid)
        parent.kill()
    try:
        until(lambda: not alive(pid), "the end of the child")
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_exits_with_unexpected_parent() -> None:
    done = run(CHILD, 1, stderr=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode() == f"expected to be a child of 1, but the parent is {os.getpid()}\n"


def test_ignores_early_sigint() -> None:
    with process_start.sigint_blocked():
        child = start(INTERRUPTED, os.getpid())
    assert child.stdout
    with child, child.stdout:
        try:
            assert child.stdout.readline() == b"up\n"
            status = Path(f"/proc/{child.pid}/status").read_text("ascii")
            assert signal.SIGINT not in signal_set(status, "SigBlk")
            assert signal.SIGINT in signal_set(status, "SigIgn")
            assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        finally:
            child.kill()


# --- init of a container -------------------------------------------------------------------------------------------

BEGIN = """
import ctypes
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
first = os.getpid()
process_start.reset_signals()
process_start.serve_as_init()
assert os.getppid() == first != os.getpid()
"""

WAITS = "print(os.getpid(), flush=True); time.sleep(600)"

# Prints each signal in a line. The script waits for signals, because a handler runs only after the call before which
# its signal arrived, and that call would be the endless sleep.
NOTES = """
numbers = set(map(int, sys.argv[1:]))
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
print(os.getpid(), flush=True)
while True:
    print(int(signal.sigwait(numbers)), flush=True)
"""


def test_process_without_orphans_does_not_fork() -> None:
    with start("process_start.serve_as_init(); print(os.getpid())") as process:
        assert line(process) == process.pid
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("program", "status"),
    [("sys.exit(0)", 0), ("sys.exit(78)", 78), ("os.kill(os.getpid(), signal.SIGKILL)", 137)],
)
def test_exit_status_of_program(program: str, status: int) -> None:
    assert run(BEGIN + program).returncode == status


def test_reaps_orphans_but_not_the_programs_children() -> None:
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
    with start(BEGIN + program) as process:
        orphan = line(process)
        fields = Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()
        assert int(fields[1]) == process.pid
        os.kill(orphan, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{orphan}").exists(), "it is reaped")
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM


def test_forwards_signals() -> None:
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGWINCH]
    with start(BEGIN + NOTES, *map(int, numbers)) as process:
        line(process)
        for number in numbers:
            process.send_signal(number)
            assert line(process) == number
        process.kill()


def test_program_ends_with_its_init() -> None:
    with start(BEGIN + WAITS) as process:
        child = line(process)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    until(lambda: not alive(child), "the kernel ends it")


def test_terminal_key_sends_one_signal() -> None:
    master, slave = pty.openpty()

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    settings: Dict[str, Any] = {"stdin": slave, "preexec_fn": own_terminal}
    with start(BEGIN + NOTES, int(signal.SIGINT), int(signal.SIGUSR1), **settings) as process:
        child = line(process)
        # The init must get the signal after the program, or the kernel could merge a forwarded signal with the pending
        # one.
        process.send_signal(signal.SIGSTOP)
        os.write(master, b"\x03")
        first = line(process)
        # This signal follows any signal that the init forwards: the lowest pending signal is delivered first.
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGCONT)
        second = line(process)
        os.kill(child, signal.SIGKILL)
    assert (first, second) == (signal.SIGINT, signal.SIGUSR1)
    os.close(master)
    os.close(slave)


def test_passes_listen_fds_to_program() -> None:
    # According to sd_listen_fds(3), the pid is the pid of the process itself.
    environment = 'os.environ.update(LISTEN_PID=str(os.getpid()), WATCHDOG_PID="1")\n'
    program = """
assert (os.environ["LISTEN_PID"], os.environ["WATCHDOG_PID"]) == (str(os.getpid()), "1")
os.close(int(sys.argv[1]))
print(0, flush=True)
time.sleep(600)
"""
    reading, writing = os.pipe()
    with start(environment + BEGIN + program, writing, pass_fds=[writing]) as process:
        os.close(writing)
        assert line(process) == 0
        assert os.read(reading, 1) == b""
        process.terminate()
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        process.kill()
