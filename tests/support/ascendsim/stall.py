"""Waiting as native code does: without the GIL, and without letting Python's signal handlers run."""

from __future__ import annotations

import ctypes
import time


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_MUTEX_BYTES = 128
_FOREVER_S = 10 * 365 * 24 * 3600.0


def stall(seconds: float = _FOREVER_S) -> None:
    """Wait for a mutex that nobody lets go of: unlike a sleep, no signal interrupts that."""
    if seconds <= 0:
        return
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    libc.pthread_mutex_lock(mutex)
    end = time.time() + seconds
    libc.pthread_mutex_timedlock(mutex, ctypes.byref(_TimeSpec(int(end), int(end % 1 * 1e9))))
