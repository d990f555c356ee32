"""The daemon's children: started, watched, killed and waited for."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weightd_daemon.platform import exit_watch, process_spawner
from weightd_daemon.platform.resource_limits import with_limit_hint

# Of a log that may be long, this much tells the cause.
_TAIL_BYTES = 4096
_TAIL_LINES = 6

# How Python's faulthandler begins a dump.
_DUMP_PREFIX = "Fatal Python error"

# PF_EXITING of the kernel's include/linux/sched.h, in the seventh field after the name in /proc/PID/stat.
_PF_EXITING = 0x4
_FLAGS_FIELD = 6


@dataclass(frozen=True)
class ChildProcess:
    """A child, of this process or of its shim.

    Attributes:
        pid: of the process.
        pidfd: becomes readable when it has exited: a pidfd, or what `exitwatch` has in its place.
        log: where its stdout and stderr go.
        wait: waits for its end, once; returns its exit status (negative: the signal), None if nobody knows it.
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
    """Start a child in a session of its own, so that a terminal's Ctrl-C reaches the daemon alone.

    It is born with SIGINT blocked: see `process_start.sigint_blocked`.

    Args:
        argv: the command, which every user of the host may read.
        log: where its output goes.
        environment: all of it; None for that of this process.
        stdout: a descriptor that it has as its stdout; None for the log.
        stdin_data: what it reads from stdin.

    Raises:
        OSError: it cannot be started.
    """
    with log.open("ab") as output, stdin_memfd(stdin_data) as stdin:
        descriptors = stdin, output.fileno() if stdout is None else stdout, output.fileno()
        pid = process_spawner.spawn(argv, os.environ if environment is None else environment, descriptors)
    return adopt(pid, log)


@contextlib.contextmanager
def stdin_memfd(stdin_data: bytes) -> Generator[int, None, None]:
    """Yield a descriptor from which a child reads these bytes, and then the end.

    Raises:
        OSError: there is no memory for them, or no descriptor is left.
    """
    with os.fdopen(os.memfd_create("weightd-order", os.MFD_CLOEXEC), "r+b") as file:
        file.write(stdin_data)
        file.seek(0)
        yield file.fileno()


def adopt(pid: int, log: Path) -> ChildProcess:
    """Return a child that was not started by this process, and has not been waited for.

    Raises:
        OSError: it is no child of this process, or no descriptors are left.
    """
    # As long as it has not been waited for, its pid is its own; and nobody else can.
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    try:
        pidfd = exit_watch.watch_exit(pid)
    except OSError:
        # Nobody could watch it.
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return ChildProcess(pid, pidfd, log, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def kill(process: ChildProcess, number: signal.Signals = signal.SIGKILL) -> None:
    """Send the child a signal, unless it has exited; its pidfd becomes readable when it is gone."""
    exit_watch.send_signal(process.pidfd, process.pid, number)


def is_alive(process: ChildProcess) -> bool:
    """Return whether the child is neither gone nor going.

    A process that exits gives its memory and its descriptors back first, and its pidfd tells afterwards: on a busy
    machine many milliseconds later. Whoever depends on what it held has to know before, and the kernel marks it before.
    """
    is_exiting = False
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        pass  # no descriptor is left to ask with: the pidfd has to do
    else:
        # The name, in parentheses, may hold anything.
        is_exiting = bool(int(stat[stat.rindex(b")") + 2 :].split()[_FLAGS_FIELD]) & _PF_EXITING)
    # Asked last: as long as it has not been waited for, its pid is its own.
    return not is_exiting and not exit_watch.has_exited(process.pidfd)


def reap(process: ChildProcess) -> int | None:
    """Wait for a child whose pidfd is readable; return its exit status (negative: the signal), None if nobody knows."""
    os.close(process.pidfd)
    return process.wait()


def log_tail(process: ChildProcess) -> str:
    """Return the end of the child's log, on one line; first the limit of the system that it tells of, if it does."""
    try:
        with process.log.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    # The last lines tell most; of a dump of stacks it is the first ones that tell where it was.
    dump = next((index for index, line in enumerate(lines) if line.startswith(_DUMP_PREFIX)), len(lines))
    return with_limit_hint(" | ".join(lines[:dump][-_TAIL_LINES:] + lines[dump:][:_TAIL_LINES]))
