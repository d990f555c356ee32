"""What `ps` shows of a process that was forked: a command line that nobody has typed.

The kernel shows the memory in which it has put the words that a program was started with, and that keeps its size.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Sequence, Tuple

# A word that takes this much of it, for what comes to stand there.
ROOM = "." * 4096

# Of /proc/self/stat, after the name: arg_start and arg_end.
_BEGIN, _END = 45, 46


def first_word() -> str:
    """Return what the program was called by who started it."""
    return os.fsdecode(Path("/proc/self/cmdline").read_bytes().partition(b"\0")[0])


def write(words: Sequence[str]) -> None:
    """Have the words be the command line of this process; what finds no room is cut off. Nothing is said of a failure.

    One that has overwritten it ends as before, with a NUL: else the kernel shows what lies behind, too.
    """
    begin, end = _place()
    room = end - begin
    if room > 0:
        line = b"".join(os.fsencode(word) + b"\0" for word in words)[: room - 1]
        ctypes.memmove(begin, line.ljust(room, b"\0"), room)


def _place() -> Tuple[int, int]:
    try:
        fields = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        return int(fields[_BEGIN]), int(fields[_END])
    except (OSError, ValueError, IndexError):
        return 0, 0
