"""Memory of this process, by address: as Python objects, and a number for the content of each page.

By that number equal pages are looked for. It is fast and no more than a key: content is compared byte for byte before
anything is done with it.
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
"""The hash of a page that is all zeros (and, rarely, of another one)."""

_BLOCK_PAGES = (16 << 20) // PAGE
_WORD_BYTES = 8

_PYBUF_READ = 0x100
_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_from_memory.restype = ctypes.py_object


def view(address: int, length: int) -> memoryview:
    """Return bytes of memory, to be read. Nothing is copied, and nothing keeps it alive."""
    result: memoryview = _from_memory(address, length, _PYBUF_READ)
    return result


def words(address: int, length: int) -> NDArray[np.uint64]:
    """Return memory as 64-bit words, to be read; the same goes for it."""
    return np.frombuffer(view(address, length), dtype=np.uint64)


class ProcessMemoryReader:
    """Reads memory that may be gone meanwhile: where ``view`` would be a crash, this is None."""

    def __init__(self) -> None:
        """Open /proc/self/mem."""
        self._fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)

    def read(self, address: int, length: int) -> Optional[bytes]:
        """Copy a few bytes."""
        try:
            return os.pread(self._fd, length, address)
        except OSError as error:
            if error.errno == errno.EIO:
                return None
            raise


def multipliers(count: int) -> NDArray[np.uint64]:
    """Return fixed odd numbers without a pattern, splitmix64 of 1, 2, 3 ...; the store's format has them."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd: NDArray[np.uint64] = (state ^ (state >> np.uint64(31))) | np.uint64(1)
    return odd


_MULTIPLIERS = multipliers(PAGE // _WORD_BYTES)


def hash_pages(address: int, hashes: NDArray[np.uint64]) -> None:
    """Hash consecutive pages into ``hashes``: the sum of a page's words times the multipliers, mod 2**64."""
    for first in range(0, len(hashes), _BLOCK_PAGES):
        part = hashes[first : first + _BLOCK_PAGES]
        block = words(address + first * PAGE, len(part) * PAGE).reshape(len(part), -1)
        block.dot(_MULTIPLIERS, out=part)
