"""Attributes of this process in the kernel: its OOM score, and the title shown by `ps`.

When memory runs out, the kernel kills workers before their holder, and the holder before the daemon, which can replace
both. The OOM score counts thousandths of all memory in addition to the actual use, see proc_pid_oom_score_adj(5).
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path
from typing import Any, Optional, Sequence

_log = logging.getLogger("weightd.protocol")

# Added to the daemon's score. A worker can be replaced alone; losing a holder on a card loses its whole generation.
# Losing any process of a rank group loses the group, and one rank frees as much memory as another.
SCORES_ABOVE_DAEMON = {"holder": 200, "broker": 200, "worker": 400, "rank": 400}

_MAX_SCORE = 1000

_OOM_SCORE = Path("/proc/self/oom_score_adj")


# prctl(2)
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_NO_FILE = 0xFFFFFFFF

# Fields of /proc/self/stat after the process name. The other members of the structure are not in that file.
_STAT_FIELDS = (
    *(("start_code", 23), ("end_code", 24), ("start_data", 42), ("end_data", 43), ("start_brk", 44)),
    *(("start_stack", 25), ("arg_start", 45), ("arg_end", 46), ("env_start", 47), ("env_end", 48)),
)


def current_score(file: Path = _OOM_SCORE) -> Optional[int]:
    """Return the OOM score adjustment of this process, or None if it cannot be read.

    A process that was just started has the daemon's.

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

    Raising the score needs no privilege. If it fails nevertheless, the process continues.

    Args:
        role: a key of SCORES_ABOVE_DAEMON.
        file: the file with the score.
        daemon_score: the daemon's score; None if it is the present score of this process. A forked process may have
            inherited a raised score.
    """
    score = current_score(file) if daemon_score is None else daemon_score
    if score is None:
        return
    try:
        file.write_text(f"{min(score + SCORES_ABOVE_DAEMON[role], _MAX_SCORE)}\n", "ascii")
    except OSError as error:
        _log.debug("cannot raise oom_score_adj: %s", error)


class ProcessTitle:
    """The command line shown by `ps` for this process, or for a process forked from it.

    Attributes:
        first_word: the name under which the program was started.
    """

    def __init__(self) -> None:
        self.first_word = os.fsdecode(Path("/proc/self/cmdline").read_bytes().partition(b"\0")[0])
        self._libc = ctypes.CDLL(None)
        self._libc.sbrk.restype = ctypes.c_void_p
        try:
            self._map: Any = _map()
        except (OSError, ValueError, IndexError):
            self._map = None
        # The kernel refers to this buffer for the life of the process.
        self._title_buffer: Any = None

    def set_title(self, words: Sequence[str]) -> None:
        """Replace the command line that `ps` shows.

        If the kernel allows it, the process registers a new buffer. Otherwise the words overwrite the original command
        line, truncated to its size. If neither is possible, nothing happens.
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
            # The last byte must remain NUL. Otherwise the kernel also shows the memory after it.
            ctypes.memmove(begin, line[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)

    def _set_kernel_map(self) -> bool:
        # Only this member may have changed in the meantime.
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
