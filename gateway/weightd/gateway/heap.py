"""Returns freed memory to the kernel: the C library keeps it where a request, or a flood, has taken much at once."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
from pathlib import Path

# Seconds between two looks.
WATCH_S = 1.0

# Growth of the resident memory beyond its least, from which on freed memory is returned.
GROWTH_BYTES = 16 * 1024 * 1024

# Looks without an attempt, after attempts in vain.
_LONGEST_PAUSE = 3

# Arenas of the C library: threads of gRPC's library have one each by default, which all keep what was freed.
_MOST_ARENAS = 2
_M_ARENA_MAX = -8

_STATM = Path("/proc/self/statm")

_libc = ctypes.CDLL(None)


# Larger blocks have mappings of their own, which are returned when they are freed. By default glibc stops doing so
# after it has freed a few.
_MAPPED_BYTES = 1024 * 1024
_M_MMAP_THRESHOLD = -3


def set_up() -> None:
    """Tell the C library how to keep less; this has to come before other threads."""
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _MOST_ARENAS)
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


class Growth:
    """Decides when freed memory is to be returned. Pure.

    That is at each look while the process is much larger than it was when it was smallest. Where nothing comes of it,
    the memory is in use, and the next attempts are made less and less often.
    """

    def __init__(self) -> None:
        self._least: int | None = None
        self._pause = 0
        self._skip = 0

    def is_due(self, resident: int) -> bool:
        """Return whether freed memory is to be returned now, of so many bytes of resident memory."""
        if self._least is None or resident < self._least:
            self._least = resident
        if resident <= self._least + GROWTH_BYTES:
            self._pause = self._skip = 0
            return False
        if self._skip:
            self._skip -= 1
            return False
        return True

    def returned(self, nbytes: int) -> None:
        """Note how many bytes were returned."""
        self._pause = 0 if nbytes >= GROWTH_BYTES // 4 else min(2 * self._pause + 1, _LONGEST_PAUSE)
        self._skip = self._pause


async def watch() -> None:
    """Return freed memory whenever the process has grown, until the task is cancelled."""
    # What is there now stays: collections need not look at it, which would hold up the loop.
    gc.collect()
    gc.freeze()
    trim = getattr(_libc, "malloc_trim", None)
    growth = Growth()
    while trim is not None:
        before = _resident()
        if growth.is_due(before):
            # An error and the frames that it passed through refer to each other, and these to the body of a request.
            gc.collect()
            # It takes a while for a large heap, and needs no lock of Python.
            await asyncio.to_thread(trim, 0)
            growth.returned(before - _resident())
        await asyncio.sleep(WATCH_S)


def _resident() -> int:
    return int(_STATM.read_text("ascii").split()[1]) * resource.getpagesize()
