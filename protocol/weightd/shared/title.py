"""What `ps` shows of a process that was forked: a command line that nobody has typed."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any, List, Sequence

_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_NO_FILE = 0xFFFFFFFF

# Of /proc/self/stat, after the name. The other members are no numbers that it has.
_PLACES = (
    *(("start_code", 23), ("end_code", 24), ("start_data", 42), ("end_data", 43), ("start_brk", 44)),
    *(("start_stack", 25), ("arg_start", 45), ("arg_end", 46), ("env_start", 47), ("env_end", 48)),
)

# What the kernel shows stays where it is for the life of the process.
_shown: List[Any] = []


class _Map(ctypes.Structure):
    """``struct prctl_mm_map``: the members of the kernel's own that it lets a process change."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        *((name, ctypes.c_uint32) for name in ("auxv_size", "exe_fd")),
    ]


def first_word() -> str:
    """Return what the program was called by who started it."""
    return os.fsdecode(Path("/proc/self/cmdline").read_bytes().partition(b"\0")[0])


def write(words: Sequence[str]) -> None:
    """Have the words be the command line of this process.

    Where the kernel lets it, it is told where they are. Else they take the place of those before, which keeps its size:
    what finds no room there is cut off. Where neither can be, nothing is done.
    """
    line = b"".join(os.fsencode(word) + b"\0" for word in words)
    try:
        known = _known()
    except (OSError, ValueError, IndexError):
        return
    begin, room = int(known.arg_start), int(known.arg_end - known.arg_start)
    buffer = ctypes.create_string_buffer(line, len(line))
    known.arg_start = ctypes.addressof(buffer)
    known.arg_end = known.arg_start + len(line)
    if _tell(known):
        _shown[:] = [buffer]
    else:
        # It ends with a NUL as before: without one the kernel shows what lies behind, too.
        ctypes.memmove(begin, line[: room - 1].ljust(room, b"\0"), room)


def _tell(known: Any) -> bool:
    words = [
        ctypes.c_ulong(_PR_SET_MM_MAP),
        ctypes.byref(known),
        ctypes.c_ulong(ctypes.sizeof(known)),
        ctypes.c_ulong(0),
    ]
    return int(ctypes.CDLL(None).prctl(_PR_SET_MM, *words)) == 0


def _known() -> Any:
    fields = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    sbrk = ctypes.CDLL(None).sbrk
    sbrk.restype = ctypes.c_void_p
    return _Map(exe_fd=_NO_FILE, brk=sbrk(0), **{name: int(fields[place]) for name, place in _PLACES})
