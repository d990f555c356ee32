"""Attributes of this process that the kernel keeps: its OOM score, and the title that `ps` shows.

When memory runs out, the kernel kills workers before their holder, and the holder before the daemon, which can replace
both. See proc_pid_oom_score_adj(5): a process counts as if it took so many thousandths of all memory in addition.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path
from typing import Any, Optional, Sequence

_log = logging.getLogger("weightd.protocol")

# Above the daemon's own. A worker is replaced alone; with a holder on a card a whole generation is lost.
# With any process of a unit all of it is lost; one rank gives back no more than another one does.
SCORES_ABOVE_DAEMON = {"holder": 200, "broker": 200, "worker": 400, "rank": 400}

_MAX_SCORE = 1000

_OOM_SCORE = Path("/proc/self/oom_score_adj")


# prctl(2)
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_NO_FILE = 0xFFFFFFFF

# Of /proc/self/stat, after the name. The other members are no numbers that it has.
_STAT_FIELDS = (
    *(("start_code", 23), ("end_code", 24), ("start_data", 42), ("end_data", 43), ("start_brk", 44)),
    *(("start_stack", 25), ("arg_start", 45), ("arg_end", 46), ("env_start", 47), ("env_end", 48)),
)


def current_score(file: Path = _OOM_SCORE) -> Optional[int]:
    """Return the score that this process has: of one that was just started, the daemon's. None if it cannot be had.

    Args:
        file: where the score is.
    """
    try:
        return int(file.read_text("ascii"))
    except (OSError, ValueError) as error:
        _log.debug("cannot read oom_score_adj: %s", error)
        return None


def raise_score(role: str, file: Path = _OOM_SCORE, *, daemon_score: Optional[int] = None) -> None:
    """Have the kernel choose this process rather than the daemon.

    Raising the score needs no privilege; where it fails nevertheless, nothing else does.

    Args:
        role: a key of SCORES_ABOVE_DAEMON.
        file: where the score is.
        daemon_score: the daemon's score; None: it is what this process has. One that was forked may have a raised one.
    """
    score = current_score(file) if daemon_score is None else daemon_score
    if score is None:
        return
    try:
        file.write_text(f"{min(score + SCORES_ABOVE_DAEMON[role], _MAX_SCORE)}\n", "ascii")
    except OSError as error:
        _log.debug("cannot raise oom_score_adj: %s", error)


class ProcessTitle:
    """The command line that `ps` shows of this process, or of one that is forked from it.

    Attributes:
        first_word: what the program was called by who started it.
    """

    def __init__(self) -> None:
        self.first_word = os.fsdecode(Path("/proc/self/cmdline").read_bytes().partition(b"\0")[0])
        self._libc = ctypes.CDLL(None)
        self._libc.sbrk.restype = ctypes.c_void_p
        try:
            self._map: Any = _map()
        except (OSError, ValueError, IndexError):
            self._map = None
        # What the kernel shows stays where it is for the life of the process.
        self._title_buffer: Any = None

    def set_title(self, words: Sequence[str]) -> None:
        """Have the words be the command line of this process.

        Where the kernel lets it, it is told where they are. Else they take the place of those before, which keeps its
        size: what finds no room there is cut off. Where neither can be, nothing is done.
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
            # It ends with a NUL as before: without one the kernel shows what lies behind, too.
            ctypes.memmove(begin, line[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)

    def _set_kernel_map(self) -> bool:
        # Of all that it is told this alone may be another meanwhile.
        self._map.brk = self._libc.sbrk(0)
        words = [
            ctypes.c_ulong(_PR_SET_MM_MAP),
            ctypes.byref(self._map),
            ctypes.c_ulong(ctypes.sizeof(self._map)),
            ctypes.c_ulong(0),
        ]
        return int(self._libc.prctl(_PR_SET_MM, *words)) == 0


class _Map(ctypes.Structure):
    """``struct prctl_mm_map``: the members of the kernel's own that it lets a process change."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        *((name, ctypes.c_uint32) for name in ("auxv_size", "exe_fd")),
    ]


def _map() -> _Map:
    fields = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    return _Map(exe_fd=_NO_FILE, **{name: int(fields[address]) for name, address in _STAT_FIELDS})
