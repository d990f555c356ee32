"""Child processes of the daemon: start, exit watch, signals and exit status."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weightd_daemon.platform import exit_watch, process_spawner
from weightd_daemon.platform.resource_limits import with_limit_hint

# Maximum size, in bytes and in lines, of the end of a log that is quoted as the cause of an exit.
_TAIL_BYTES = 4096
_TAIL_LINES = 6

# The beginning of the first line of a stack dump by Python's faulthandler.
_DUMP_PREFIX = "Fatal Python error"

# The flag PF_EXITING from the kernel's include/linux/sched.h, and the index of the field with the flags in
# /proc/PID/stat, counted from the field after the process name.
_PF_EXITING = 0x4
_FLAGS_FIELD = 6


@dataclass(frozen=True)
class ChildProcess:
    """Handle of a child process of the daemon or of its shim.

    Attributes:
        pid: the pid of the child.
        pidfd: a descriptor that becomes readable when the child has exited: a pidfd, or the pipe that `exit_watch` uses
            instead.
        log: the file with the child's stdout and stderr.
        wait: waits until the child exits, reaps it, and returns its exit status (negative: the signal) or None if the
            status is unknown. Call it once.
    """

    pid: int
    pidfd: int
    log: Path
    wait: Callable[[], int | None]


def start(
    argv: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    stdout: int | None = None,
    stdin_data: bytes = b"",
) -> ChildProcess:
    """Start a child in its own session, so that Ctrl-C in a terminal reaches only the daemon.

    The child starts with SIGINT blocked: see `process_start.sigint_blocked`.

    Args:
        argv: the command. It must not contain secrets, because every user of the host can read it.
        log: the file that gets the child's output.
        environment: the complete environment; None for the environment of this process.
        stdout: a descriptor for the child's stdout; None for the log.
        stdin_data: the data that the child reads from stdin.

    Raises:
        OSError: the child cannot be started.
    """
    with log.open("ab") as output, stdin_memfd(stdin_data) as stdin:
        descriptors = stdin, output.fileno() if stdout is None else stdout, output.fileno()
        pid = process_spawner.spawn(argv, os.environ if environment is None else environment, descriptors)
    return adopt(pid, log)


@contextlib.contextmanager
def stdin_memfd(stdin_data: bytes) -> Generator[int, None, None]:
    """Yield a descriptor for a child's stdin, from which the child reads these bytes and then the end of the file.

    Raises:
        OSError: no memory or no descriptor is left.
    """
    with os.fdopen(os.memfd_create("weightd-order", os.MFD_CLOEXEC), "r+b") as file:
        file.write(stdin_data)
        file.seek(0)
        yield file.fileno()


def adopt(pid: int, log: Path) -> ChildProcess:
    """Return the handle of a running or exited child that has not been reaped, given its pid.

    Raises:
        OSError: the process is not a child of this process, or it cannot be watched for lack of descriptors. In the
            second case, the process is killed.
    """
    # Check that the pid is an unreaped child. Only this process can reap it, so the pid is not reused meanwhile.
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    try:
        pidfd = exit_watch.watch_exit(pid)
    except OSError:
        # Kill the child: the daemon would not notice its exit.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return ChildProcess(pid, pidfd, log, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def kill(process: ChildProcess, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to the child, unless it has exited. Its `pidfd` becomes readable when the child has exited."""
    exit_watch.send_signal(process.pidfd, process.pid, number)


def is_alive(process: ChildProcess) -> bool:
    """Return whether the child has neither exited nor begun to exit.

    An exiting process first frees its memory and descriptors. Only then does its pidfd become readable, on a busy
    machine many milliseconds later. Callers that use memory or descriptors of the child have to detect its exit
    earlier, so this function also reads the kernel's flag for an exiting process.
    """
    is_exiting = False
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        pass  # no descriptor is left to read the file: check only the pidfd
    else:
        # The process name, in parentheses, may contain any character, so the fields are counted from the last ")".
        is_exiting = bool(int(stat[stat.rindex(b")") + 2 :].split()[_FLAGS_FIELD]) & _PF_EXITING)
    # Check the pidfd last: only if the child has not exited now, the file that was read above was about the child, and
    # not about a later process with the same pid.
    return not is_exiting and not exit_watch.has_exited(process.pidfd)


def reap(process: ChildProcess) -> int | None:
    """Reap a child whose pidfd is readable; return its exit status (negative: the signal), None if it is unknown."""
    os.close(process.pidfd)
    return process.wait()


def log_tail(process: ChildProcess) -> str:
    """Return the last lines of the child's log, joined into one line.

    If the log shows that a system limit was reached, the line begins with the limit and how to raise it.
    """
    try:
        with process.log.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    # Keep the last lines before a stack dump, which usually name the cause, and the first lines of the dump, which name
    # the functions that were running.
    dump = next((index for index, line in enumerate(lines) if line.startswith(_DUMP_PREFIX)), len(lines))
    return with_limit_hint(" | ".join(lines[:dump][-_TAIL_LINES:] + lines[dump:][:_TAIL_LINES]))
