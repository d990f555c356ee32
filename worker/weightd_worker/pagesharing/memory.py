"""Reads memory of this process by its address, and computes a hash of each page.

The hash is only used to find pages that may be equal, so it can be simple and fast. Pages are compared byte for byte
before one is replaced.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING, Optional

import numpy as np

from .libc import PAGE

if TYPE_CHECKING:
    from numpy.typing import NDArray

ZERO_PAGE = 0
"""The hash of a page of zeros. Another page may rarely have the same hash."""

_BLOCK_PAGES = (16 << 20) // PAGE
_WORD_BYTES = 8

_PYBUF_READ = 0x100
_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_from_memory.restype = ctypes.py_object


def view(address: int, length: int) -> memoryview:
    """Return a read-only view of memory, without a copy. The view does not keep the memory alive."""
    result: memoryview = _from_memory(address, length, _PYBUF_READ)
    return result


def words(address: int, length: int) -> NDArray[np.uint64]:
    """Return memory as a read-only array of 64-bit words, without a copy; see `view`."""
    return np.frombuffer(view(address, length), dtype=np.uint64)


class ProcessMemoryReader:
    """Reads memory that may not be mapped. Reading unmapped memory through ``view`` would crash the process."""

    def __init__(self) -> None:
        """Open /proc/self/mem."""
        self._fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def read(self, address: int, length: int) -> Optional[bytes]:
        """Return a copy of the bytes at ``address``, or None if the address is not mapped."""
        try:
            return os.pread(self._fd, length, address)
        except OSError as error:
            if error.errno == errno.EIO:
                return None
            raise


def multipliers(count: int) -> NDArray[np.uint64]:
    """Return constant pseudo-random odd numbers for `hash_pages`: splitmix64 of 1, 2, 3 ...

    They are part of the format of the page store, so they must not change.
    """
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd: NDArray[np.uint64] = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return odd


_MULTIPLIERS = multipliers(PAGE // _WORD_BYTES)


def hash_pages(address: int, hashes: NDArray[np.uint64]) -> None:
    """Compute the hashes of consecutive pages from ``address`` on and store them in ``hashes``.

    The hash of a page is the sum of its 64-bit words, each times its multiplier, modulo 2**64.
    """
    for first in range(0, len(hashes), _BLOCK_PAGES):
        part = hashes[first : first + _BLOCK_PAGES]
        block = words(address + first * PAGE, len(part) * PAGE).reshape(len(part), -1)
        block.dot(_MULTIPLIERS, out=part)
