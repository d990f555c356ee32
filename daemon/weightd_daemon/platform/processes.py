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

# The part of a log that is searched for the cause of an exit.
_TAIL_BYTES = 4096
_TAIL_LINES = 6

# The start of a dump by Python's faulthandler.
_DUMP_PREFIX = "Fatal Python error"

# PF_EXITING of the kernel's include/linux/sched.h, in the seventh field after the name in /proc/PID/stat.
_PF_EXITING = 0x4
_FLAGS_FIELD = 6


@dataclass(frozen=True)
class ChildProcess:
    """A child of this process or of its shim.

    Attributes:
        pid: the process id.
        pidfd: a descriptor that becomes readable when the child has exited: a pidfd, or the pipe that `exit_watch` uses
            instead.
        log: the file with the child's stdout and stderr.
        wait: waits for the child and reaps it; call it once. Returns the exit status (negative: the signal), None if it
            is unknown.
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
        argv: the command, which every user of the host can read.
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
    """Yield a descriptor from which a child reads these bytes, followed by the end of the file.

    Raises:
        OSError: no memory or no descriptor is left.
    """
    with os.fdopen(os.memfd_create("weightd-order", os.MFD_CLOEXEC), "r+b") as file:
        file.write(stdin_data)
        file.seek(0)
        yield file.fileno()


def adopt(pid: int, log: Path) -> ChildProcess:
    """Return the handle of a child that this process did not start itself, and that has not been reaped.

    Raises:
        OSError: the process is not a child of this process; or no descriptor is left to watch it, and it was killed.
    """
    # The pid cannot be reused before this process, the only one that can, has reaped the child.
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    try:
        pidfd = exit_watch.watch_exit(pid)
    except OSError:
        # A child that cannot be watched must not run.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return ChildProcess(pid, pidfd, log, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def kill(process: ChildProcess, number: signal.Signals = signal.SIGKILL) -> None:
    """Send the child a signal, unless it has exited. Its pidfd becomes readable when the child has exited."""
    exit_watch.send_signal(process.pidfd, process.pid, number)


def is_alive(process: ChildProcess) -> bool:
    """Return whether the child has neither exited nor begun to exit.

    An exiting process first frees its memory and descriptors, and only then does its pidfd become readable: on a busy
    machine many milliseconds later. Code that depends on what the child held has to know earlier, so this function
    reads the kernel's flag for an exiting process.
    """
    is_exiting = False
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        pass  # no descriptor is left to read the file: rely on the pidfd
    else:
        # The name, in parentheses, may contain any character.
        is_exiting = bool(int(stat[stat.rindex(b")") + 2 :].split()[_FLAGS_FIELD]) & _PF_EXITING)
    # Check the pidfd last: until the child is reaped, the pid that was read above is the child's.
    return not is_exiting and not exit_watch.has_exited(process.pidfd)


def reap(process: ChildProcess) -> int | None:
    """Reap a child whose pidfd is readable; return its exit status (negative: the signal), None if it is unknown."""
    os.close(process.pidfd)
    return process.wait()


def log_tail(process: ChildProcess) -> str:
    """Return the end of the child's log on one line, after the system limit that the log shows was reached, if any."""
    try:
        with process.log.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    # Usually the last lines name the cause; of a stack dump, the first lines show where the process was.
    dump = next((index for index, line in enumerate(lines) if line.startswith(_DUMP_PREFIX)), len(lines))
    return with_limit_hint(" | ".join(lines[:dump][-_TAIL_LINES:] + lines[dump:][:_TAIL_LINES]))
