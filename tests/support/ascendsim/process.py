"""Identity of a simulated process, and the check whether the process still runs.

Each process holds a record lock (fcntl) on a private file. The kernel releases the lock at every kind of exit, before
the parent can detect the exit; a forked child does not inherit the lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

_PID = "ASCENDSIM_PID"


class Identity:
    """Identity of this process for the driver.

    Attributes:
        pid: the driver's pid of the process (aclrtDeviceGetBareTgid).
        os_pid: pid of the process in its namespace.
        start: start time in seconds since boot.
        token: unique name, which stays unique when the pid is reused.
    """

    def __init__(self, directory: Path, pid_offset: int) -> None:
        self.os_pid = os.getpid()
        self.pid = int(os.environ.get(_PID) or self.os_pid + pid_offset)
        self.start = _start_time()
        self.token = f"{self.pid}-{self.os_pid}-{time.monotonic_ns()}"
        # Never closed, because closing any descriptor of the file releases the lock.
        self._lock = os.open(_path(directory, self.token), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.lockf(self._lock, fcntl.LOCK_EX)


def pid_of(token: str) -> int:
    """Return the driver's pid of the process of `token`."""
    return int(token.partition("-")[0])


def is_alive(directory: Path, token: str) -> bool:
    """Return whether the process of `token`, another one than this, is running."""
    try:
        lock = os.open(_path(directory, token), os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def bury(directory: Path, token: str) -> None:
    """Remove the file of a process that has exited."""
    path = _path(directory, token)
    if path.exists():
        path.unlink()


def now() -> float:
    """Seconds since the machine started, on the clock of `Identity.start`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _path(directory: Path, token: str) -> Path:
    return directory / "processes" / token


def _start_time() -> float:
    # The name of the program, in parentheses, may contain spaces; the 22nd field is the 20th after it.
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    ticks = int(fields[19])
    # The kernel reports the tick of the start, so the process started before the next tick and before its first Python
    # code.
    return min((ticks + 1) / os.sysconf("SC_CLK_TCK"), _seen[-1])


_seen = [now()]
# A forked process may be listed, and may import, before the tick of its start has ended.
os.register_at_fork(after_in_child=lambda: _seen.append(now()))
