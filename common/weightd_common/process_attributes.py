"""Attributes of this process in the kernel: its OOM score, its CPU priority, and the title shown by `ps`.

When memory runs out, the kernel should kill workers before their holder, and the holder before the daemon, because the
daemon can start new workers and holders. When the kernel chooses the process to kill, it adds the OOM score adjustment
of a process, in thousandths of all memory, to the memory that the process uses, see proc_pid_oom_score_adj(5).

A load must not delay the requests of other models, so a process has a lower CPU priority while it loads a model. On a
host whose cores are all busy, a process that wakes up for a request would otherwise wait until the loading process has
used its time slice. A process may return to its previous priority only if its limit RLIMIT_NICE allows this or it has
the capability CAP_SYS_NICE, see setpriority(2). Otherwise the priority is not lowered.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
from pathlib import Path
from typing import Any, Optional, Sequence

_log = logging.getLogger("weightd.protocol")

# Amounts by which each role's OOM score adjustment exceeds the daemon's. A worker's is higher than a holder's,
# because a lost worker is replaced alone, whereas a lost holder on a card costs the whole generation. All ranks have
# the same value, because the loss of any rank costs the whole rank group.
SCORES_ABOVE_DAEMON = {"holder": 200, "broker": 200, "worker": 400, "rank": 400}

_MAX_SCORE = 1000

_OOM_SCORE = Path("/proc/self/oom_score_adj")


# prctl(2)
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_NO_FILE = 0xFFFFFFFF

# Members of `_Map` that are fields of /proc/self/stat, with the index of the field after the process name. The other
# members are not in that file.
_STAT_FIELDS = (
    *(("start_code", 23), ("end_code", 24), ("start_data", 42), ("end_data", 43), ("start_brk", 44)),
    *(("start_stack", 25), ("arg_start", 45), ("arg_end", 46), ("env_start", 47), ("env_end", 48)),
)


def current_score(file: Path = _OOM_SCORE) -> Optional[int]:
    """Return the OOM score adjustment of this process, or None if it cannot be read.

    In a child that has just been started, this is the daemon's OOM score adjustment, which the child has inherited.

    Args:
        file: the file with the score.
    """
    try:
        return int(file.read_text("ascii"))
    except (OSError, ValueError) as error:
        _log.debug("cannot read oom_score_adj: %s", error)
        return None


def raise_score(role: str, file: Path = _OOM_SCORE, *, daemon_score: Optional[int] = None) -> None:
    """Raise the OOM score, so that the kernel kills this process before the daemon.

    Raising the score needs no privilege. If the score cannot be raised, the process continues without an error.

    Args:
        role: a key of SCORES_ABOVE_DAEMON.
        file: the file with the score.
        daemon_score: the daemon's score; None if this process still has the daemon's score. Pass it in a forked
            process, which may have inherited a raised score.
    """
    score = current_score(file) if daemon_score is None else daemon_score
    if score is None:
        return
    try:
        file.write_text(f"{min(score + SCORES_ABOVE_DAEMON[role], _MAX_SCORE)}\n", "ascii")
    except OSError as error:
        _log.debug("cannot raise oom_score_adj: %s", error)


# Amount by which the nice value of a loading process exceeds the daemon's. On two cores of Linux 6.18 with two busy
# processes, the 99th percentile of a round trip between two others was 3.9 ms with 0, 2.4 ms with 3, 0.6 ms with 5 and
# 0.12 ms with 7 (medians of 8 runs). With 7, a loading process still gets a sixth of a busy core.
_LOAD_NICE = 7

# The value of RLIMIT_NICE that allows the nice value 0, and the number of the capability that allows any value.
_NICE_LIMIT_OF_0 = 20
_CAP_SYS_NICE = 23

_STATUS = Path("/proc/self/status")


def current_nice() -> int:
    """Return the nice value of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, 0)


def allow_load_priority() -> None:
    """Raise RLIMIT_NICE of this process and its children as far as `leave_load_priority` needs, if possible."""
    needed, (_, hard) = _NICE_LIMIT_OF_0 - current_nice(), resource.getrlimit(resource.RLIMIT_NICE)
    if hard != resource.RLIM_INFINITY:
        try:
            resource.setrlimit(resource.RLIMIT_NICE, (needed, max(needed, hard)))
        except (OSError, ValueError) as error:
            _log.debug("loads have the CPU priority of requests: cannot raise RLIMIT_NICE: %s", error)


def enter_load_priority(daemon_nice: int) -> None:
    """Lower the CPU priority of this thread, and of all threads that it will start, until `leave_load_priority`.

    Args:
        daemon_nice: the nice value of the daemon.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    if soft == resource.RLIM_INFINITY or soft >= _NICE_LIMIT_OF_0 - daemon_nice or _has_nice_capability():
        _set_nice(0, daemon_nice + _LOAD_NICE)


def leave_load_priority(daemon_nice: int) -> None:
    """Give all threads of this process the CPU priority of the daemon again.

    Args:
        daemon_nice: the nice value of the daemon.
    """
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - path objects take memory
        _set_nice(int(thread), daemon_nice)


def keep_load_priority() -> None:
    """Lower the CPU priority of this process for good: it exits after the load."""
    _set_nice(0, current_nice() + _LOAD_NICE)


def _has_nice_capability() -> bool:
    lines = _STATUS.read_text("ascii", "replace").splitlines()
    return any(int(line.split()[1], 16) >> _CAP_SYS_NICE & 1 for line in lines if line.startswith("CapEff:"))


def _set_nice(thread: int, nice: int) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, thread, nice)
    except OSError as error:
        _log.debug("cannot set the nice value %d: %s", nice, error)


class ProcessTitle:
    """Sets the command line that `ps` shows for this process, or for a process forked from it.

    Attributes:
        first_word: the first word of the original command line: the name under which the program was started.
    """

    def __init__(self) -> None:
        self.first_word = os.fsdecode(Path("/proc/self/cmdline").read_bytes().partition(b"\0")[0])
        self._libc = ctypes.CDLL(None)
        self._libc.sbrk.restype = ctypes.c_void_p
        try:
            self._map: Any = _map()
        except (OSError, ValueError, IndexError):
            self._map = None
        # Memory with the new command line. The kernel refers to it, so it must live as long as the process.
        self._title_buffer: Any = None

    def set_title(self, words: Sequence[str]) -> None:
        """Replace the command line that `ps` shows.

        If the kernel allows it, the process registers a new buffer. Otherwise the words overwrite the original command
        line, truncated to its size. If neither is possible, the command line stays unchanged.
        """
        if self._map is None:
            return
        line = b"".join(os.fsencode(word) + b"\0" for word in words)
        begin, end = int(self._map.arg_start), int(self._map.arg_end)
        buffer = ctypes.create_string_buffer(line, len(line))
        self._map.arg_start = ctypes.addressof(buffer)
        self._map.arg_end = self._map.arg_start + len(line)
        if self._set_kernel_map():
            self._title_buffer = buffer
        else:
            self._map.arg_start, self._map.arg_end = begin, end
            # The last byte must remain NUL. Otherwise the kernel also shows the memory after the command line.
            ctypes.memmove(begin, line[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)

    def _set_kernel_map(self) -> bool:
        # Of all members, only the end of the heap may have changed since `_map` was filled.
        self._map.brk = self._libc.sbrk(0)
        words = [
            ctypes.c_ulong(_PR_SET_MM_MAP),
            ctypes.byref(self._map),
            ctypes.c_ulong(ctypes.sizeof(self._map)),
            ctypes.c_ulong(0),
        ]
        return int(self._libc.prctl(_PR_SET_MM, *words)) == 0


class _Map(ctypes.Structure):
    """``struct prctl_mm_map``: the members of the kernel's memory map that a process may change."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        *((name, ctypes.c_uint32) for name in ("auxv_size", "exe_fd")),
    ]


def _map() -> _Map:
    fields = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    return _Map(exe_fd=_NO_FILE, **{name: int(fields[address]) for name, address in _STAT_FIELDS})
