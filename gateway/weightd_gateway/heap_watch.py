"""Returns freed memory to the kernel; the C library would keep it after a large request or a burst of requests."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
from pathlib import Path

# Seconds between two checks.
WATCH_INTERVAL_S = 1.0

# Freed memory is returned once the process's resident memory exceeds its lowest value so far by this many bytes.
GROWTH_BYTES = 16 * 1024 * 1024

# Maximum number of checks that are skipped after attempts to return memory that have returned little.
_MAX_SKIPPED = 3

# Maximum number of arenas (heaps) of the C library. By default each thread of gRPC's library has its own arena, and
# each arena keeps its freed memory.
_MAX_ARENAS = 2
_M_ARENA_MAX = -8

_STATM = Path("/proc/self/statm")

_libc = ctypes.CDLL(None)


# The C library allocates a block of more bytes as a separate mapping, and unmaps it when the block is freed. By default
# glibc raises this threshold after it has freed a few such blocks.
_MMAP_THRESHOLD_BYTES = 1024 * 1024
_M_MMAP_THRESHOLD = -3


def set_up() -> None:
    """Configure the C library to keep less freed memory. Must be called before other threads start."""
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _MAX_ARENAS)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


class HeapGrowth:
    """Decides when freed memory should be returned. Pure: no I/O.

    While resident memory exceeds its lowest value by more than `GROWTH_BYTES`, each check starts an attempt to return
    memory. If an attempt returns little memory, the process is still using it. The next check then starts no attempt.
    If further attempts return little, `_MAX_SKIPPED` checks after each attempt start no attempt.
    """

    def __init__(self) -> None:
        self._min_bytes: int | None = None
        self._backoff = 0
        self._checks_to_skip = 0

    def is_due(self, resident_bytes: int) -> bool:
        """Return whether freed memory should be returned now, given the process's resident memory in bytes."""
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
        """Record how many bytes an attempt has returned to the kernel."""
        self._backoff = 0 if nbytes >= GROWTH_BYTES // 4 else min(2 * self._backoff + 1, _MAX_SKIPPED)
        self._checks_to_skip = self._backoff


async def watch() -> None:
    """Return freed memory to the kernel whenever the process has grown, until the task is cancelled."""
    # The objects that exist now are permanent. `freeze` excludes them from garbage collections, which block the event
    # loop.
    gc.collect()
    gc.freeze()
    trim = getattr(_libc, "malloc_trim", None)
    growth = HeapGrowth()
    while trim is not None:
        before = _resident_bytes()
        if growth.is_due(before):
            # First collect cycles of errors and the frames of their tracebacks, which keep bodies of requests in
            # memory.
            gc.collect()
            # Trimming a large heap takes long, but does not hold the GIL: the event loop continues in this thread.
            await asyncio.to_thread(trim, 0)
            growth.record_trimmed(before - _resident_bytes())
        await asyncio.sleep(WATCH_INTERVAL_S)


def _resident_bytes() -> int:
    return int(_STATM.read_text("ascii").split()[1]) * resource.getpagesize()
