"""Memory of this process, by address, as Python objects."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING, Optional

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
