"""Returns freed memory to the kernel: the C library keeps it where a request, or a flood, has taken much at once."""

from __future__ import annotations

import asyncio
import ctypes
import resource
from pathlib import Path

# Seconds between two looks.
WATCH_S = 2.0

# Growth of the resident memory since the last time after which freed memory is returned.
GROWTH_BYTES = 16 * 1024 * 1024

# Arenas of the C library: threads of gRPC's library have one each by default, which all keep what was freed.
_MOST_ARENAS = 2
_M_ARENA_MAX = -8

_STATM = Path("/proc/self/statm")

_libc = ctypes.CDLL(None)


def limit_arenas() -> None:
    """Limit how many arenas the C library makes; this has to come before other threads."""
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _MOST_ARENAS)


class Growth:
    """Decides when freed memory is to be returned. Pure."""

    def __init__(self) -> None:
        self._least: int | None = None

    def is_due(self, resident: int) -> bool:
        """Return whether the resident memory, in bytes, has grown much since it was smallest or memory was returned."""
        if self._least is None or resident < self._least:
            self._least = resident
        return resident > self._least + GROWTH_BYTES

    def returned(self, resident: int) -> None:
        """Note the resident memory after freed memory has been returned: what is left is in use."""
        self._least = resident


async def watch() -> None:
    """Return freed memory whenever the process has grown, until the task is cancelled."""
    trim = getattr(_libc, "malloc_trim", None)
    growth = Growth()
    while trim is not None:
        if growth.is_due(_resident()):
            # It takes a while for a large heap, and needs no lock of Python.
            await asyncio.to_thread(trim, 0)
            growth.returned(_resident())
        await asyncio.sleep(WATCH_S)


def _resident() -> int:
    return int(_STATM.read_text("ascii").split()[1]) * resource.getpagesize()
