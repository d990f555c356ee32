"""What `ps` shows of a process that was forked: a command line that nobody has typed."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any, Sequence

_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_NO_FILE = 0xFFFFFFFF

# Of /proc/self/stat, after the name. The other members are no numbers that it has.
_STAT_FIELDS = (
    *(("start_code", 23), ("end_code", 24), ("start_data", 42), ("end_data", 43), ("start_brk", 44)),
    *(("start_stack", 25), ("arg_start", 45), ("arg_end", 46), ("env_start", 47), ("env_end", 48)),
)


class _Map(ctypes.Structure):
    """``struct prctl_mm_map``: the members of the kernel's own that it lets a process change."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        *((name, ctypes.c_uint32) for name in ("auxv_size", "exe_fd")),
    ]


class ProcessTitle:
    """That of this process, or of one that is forked from it.

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


def _map() -> _Map:
    fields = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    return _Map(exe_fd=_NO_FILE, **{name: int(fields[address]) for name, address in _STAT_FIELDS})
