"""Who a simulated process is, and whether it still lives.

Each process holds a record lock (fcntl) on a file of its own. The kernel lets go of it when the process ends, however
it ends, before its parent can see that; a forked child does not inherit it.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

_PID = "ASCENDSIM_PID"


class Identity:
    """This process, as the driver knows it.

    Attributes:
        pid: the driver's number for it (aclrtDeviceGetBareTgid).
        os_pid: its own number for itself.
        start: when it started, in seconds since the machine did.
        token: names it for ever, also when its pid is given to another process.
    """

    def __init__(self, directory: Path, pid_offset: int) -> None:
        self.os_pid = os.getpid()
        self.pid = int(os.environ.get(_PID) or self.os_pid + pid_offset)
        self.start = _start_time()
        self.token = f"{self.pid}-{self.os_pid}-{time.monotonic_ns()}"
        # Never closed: closing any descriptor of the file would let go of the lock.
        self._lock = os.open(_path(directory, self.token), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.lockf(self._lock, fcntl.LOCK_EX)


def pid_of(token: str) -> int:
    """The driver's number for the process of `token`."""
    return int(token.partition("-")[0])


def is_alive(directory: Path, token: str) -> bool:
    """Whether the process of `token`, which is not this one, has not ended."""
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
    """Forget a process that has ended."""
    path = _path(directory, token)
    if path.exists():
        path.unlink()


def now() -> float:
    """Seconds since the machine started, on the clock of `Identity.start`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _path(directory: Path, token: str) -> Path:
    return directory / "processes" / token


def _start_time() -> float:
    # The name of the program, in parentheses, may hold blanks; the 22nd field is the 20th after it.
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    ticks = int(fields[19])
    # The kernel tells the tick it started in, so it was not later than the next, and not later than its first Python.
    return min((ticks + 1) / os.sysconf("SC_CLK_TCK"), _seen[-1])


_seen = [now()]
# A forked process may be on a list, and import, before the tick it started in has ended.
os.register_at_fork(after_in_child=lambda: _seen.append(now()))
