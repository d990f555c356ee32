"""What a program does first: its signals, the end of its parent, core dumps, and the duties of PID 1.

A child subreaper stands for PID 1.
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
    """Whether it runs; a zombie, which nobody may be there to reap, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


# --- Signals -------------------------------------------------------------------------------------------------------

# Does to itself what a parent would have done; then it begins, and says what is pending, blocked and ignored.
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

# glibc's own: posix_spawn, by which make starts programs, has them ignored.
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
def test_a_program_blocks_nothing_and_ignores_what_shells_python_and_itself_ignore(
    ignored: List[signal.Signals], ignores: Set[int]
) -> None:
    status = run(INHERITS, *map(int, ignored)).stdout.decode()
    assert (signal_set(status, "SigBlk"), signal_set(status, "SigIgn")) == (set(), ignores)


def test_a_signal_that_was_blocked_is_delivered() -> None:
    program = "signal.pthread_sigmask(signal.SIG_BLOCK, {15}); os.kill(os.getpid(), 15); process_start.reset_signals()"
    assert run(program).returncode == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGCHLD])
def test_a_handler_stays(number: signal.Signals) -> None:
    program = (
        f"got = []; signal.signal({int(number)}, lambda *each: got.append(each)); "
        f"process_start.reset_signals(); os.kill(os.getpid(), {int(number)}); assert got"
    )
    assert run(program).returncode == 0


# --- Core dumps, imports -------------------------------------------------------------------------------------------

# Allows core dumps first, which a test runner or a container may not.
CRASHES = """
_, hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
open("/proc/self/coredump_filter", "w").write("0x33")
if sys.argv[1] == "disabled":
    process_start.disable_core_dumps()
print(resource.getrlimit(resource.RLIMIT_CORE) == (0, hard), open("/proc/self/coredump_filter").read(), flush=True)
os.abort()
"""


def test_a_process_that_crashes_leaves_no_core(tmp_path: Path) -> None:
    assert run(CRASHES, "enabled", cwd=str(tmp_path)).stdout == b"False 00000033\n\n"
    for left in tmp_path.iterdir():
        left.unlink()
    # What a program gets to which the kernel pipes the dump has no memory either.
    assert run(CRASHES, "disabled", cwd=str(tmp_path)).stdout == b"True 00000000\n\n"
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_without_core_dumps(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    try:
        process_start.disable_core_dumps(str(tmp_path / "none" / "coredump_filter"))
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_is_back_whatever_the_import_does(fails: bool) -> None:
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


# --- Child and parent ----------------------------------------------------------------------------------------------

CHILD = """
process_start.die_with_parent(int(sys.argv[1]))
print("up", flush=True)
time.sleep(600)
"""
# Starts the child as its own, and tells its pid.
PARENT = f"""
child = subprocess.Popen([sys.executable, "-c", {IMPORTS + CHILD!r}, str(os.getpid())], stdout=subprocess.PIPE)
assert child.stdout.readline() == b"up\\n"
print(child.pid, flush=True)
sys.stdin.readline()
"""
# Whoever runs the tests in the background has them ignore SIGINT.
INTERRUPTED = f"""
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.kill(os.getpid(), signal.SIGINT)
process_start.reset_signals(signal.SIGINT)
{CHILD}"""


def test_the_child_dies_with_its_parent() -> None:
    with start(PARENT, stdin=subprocess.PIPE) as parent:
        pid = line(parent)
        assert alive(pid)
        parent.kill()
    try:
        until(lambda: not alive(pid), "the end of the child")
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_with_another_parent_than_expected_it_ends_at_once_and_says_why() -> None:
    done = run(CHILD, 1, stderr=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode() == f"expected to be a child of 1, but the parent is {os.getpid()}\n"


def test_ctrl_c_is_left_to_the_parent_even_if_it_came_before_the_child_could_say_so() -> None:
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


# --- The init of a container ---------------------------------------------------------------------------------------

BEGIN = """
import ctypes
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
first = os.getpid()
process_start.reset_signals()
process_start.serve_as_init()
assert os.getppid() == first != os.getpid()
"""

WAITS = "print(os.getpid(), flush=True); time.sleep(600)"

# Each signal that comes, in a line. They are waited for: a handler runs only after the call that its signal came just
# before, and this call would be the endless sleep.
NOTES = """
numbers = set(map(int, sys.argv[1:]))
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
print(os.getpid(), flush=True)
while True:
    print(int(signal.sigwait(numbers)), flush=True)
"""


def test_a_process_that_adopts_nobody_stays_what_it_is() -> None:
    with start("process_start.serve_as_init(); print(os.getpid())") as process:
        assert line(process) == process.pid
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("program", "status"),
    [("sys.exit(0)", 0), ("sys.exit(78)", 78), ("os.kill(os.getpid(), signal.SIGKILL)", 137)],
)
def test_the_exit_status_is_that_of_the_program(program: str, status: int) -> None:
    assert run(BEGIN + program).returncode == status


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
    with start(BEGIN + program) as process:
        orphan = line(process)
        fields = Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()
        assert int(fields[1]) == process.pid
        os.kill(orphan, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{orphan}").exists(), "it is reaped")
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM


def test_signals_are_passed_on() -> None:
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGWINCH]
    with start(BEGIN + NOTES, *map(int, numbers)) as process:
        line(process)
        for number in numbers:
            process.send_signal(number)
            assert line(process) == number
        process.kill()


def test_the_program_ends_with_its_init() -> None:
    with start(BEGIN + WAITS) as process:
        child = line(process)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    until(lambda: not alive(child), "the kernel ends it")


def test_a_key_at_the_terminal_is_one_signal() -> None:
    master, slave = pty.openpty()

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    settings: Dict[str, Any] = {"stdin": slave, "preexec_fn": own_terminal}
    with start(BEGIN + NOTES, int(signal.SIGINT), int(signal.SIGUSR1), **settings) as process:
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
    # As sd_listen_fds(3) has it: the pid is that of the process itself.
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
