"""Returns freed memory to the kernel: the C library keeps it where a request, or a flood, has taken much at once."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
from pathlib import Path

# Seconds between two looks.
WATCH_INTERVAL_S = 1.0

# Growth of the resident memory beyond its least, from which on freed memory is returned.
GROWTH_BYTES = 16 * 1024 * 1024

# Looks without an attempt, after attempts in vain.
_MAX_SKIPPED = 3

# Arenas of the C library: threads of gRPC's library have one each by default, which all keep what was freed.
_MAX_ARENAS = 2
_M_ARENA_MAX = -8

_STATM = Path("/proc/self/statm")

_libc = ctypes.CDLL(None)


# Larger blocks have mappings of their own, which are returned when they are freed. By default glibc stops doing so
# after it has freed a few.
_MMAP_THRESHOLD_BYTES = 1024 * 1024
_M_MMAP_THRESHOLD = -3


def set_up() -> None:
    """Tell the C library how to keep less; this has to come before other threads."""
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _MAX_ARENAS)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


class HeapGrowth:
    """Decides when freed memory is to be returned. Pure.

    That is at each look while the process is much larger than it was when it was smallest. Where nothing comes of it,
    the memory is in use, and the next attempts are made less and less often.
    """

    def __init__(self) -> None:
        self._min_bytes: int | None = None
        self._backoff = 0
        self._checks_to_skip = 0

    def is_due(self, resident_bytes: int) -> bool:
        """Return whether freed memory is to be returned now, of so many bytes of resident memory."""
        if self._min_bytes is None or resident_bytes < self._min_bytes:
            self._min_bytes = resident_bytes
        if resident_bytes <= self._min_bytes + GROWTH_BYTES:
            self._backoff = self._checks_to_skip = 0
            return False
        if self._checks_to_skip:
            self._checks_to_skip -= 1
            return False
        return True

    def record_trimmed(self, nbytes: int) -> None:
        """Note how many bytes were returned."""
        self._backoff = 0 if nbytes >= GROWTH_BYTES // 4 else min(2 * self._backoff + 1, _MAX_SKIPPED)
        self._checks_to_skip = self._backoff


async def watch() -> None:
    """Return freed memory whenever the process has grown, until the task is cancelled."""
    # What is there now stays: collections need not look at it, which would hold up the loop.
    gc.collect()
    gc.freeze()
    trim = getattr(_libc, "malloc_trim", None)
    growth = HeapGrowth()
    while trim is not None:
        before = _resident_bytes()
        if growth.is_due(before):
            # An error and the frames that it passed through refer to each other, and these to the body of a request.
            gc.collect()
            # It takes a while for a large heap, and needs no lock of Python.
            await asyncio.to_thread(trim, 0)
            growth.record_trimmed(before - _resident_bytes())
        await asyncio.sleep(WATCH_INTERVAL_S)


def _resident_bytes() -> int:
    return int(_STATM.read_text("ascii").split()[1]) * resource.getpagesize()
