"""Memory of this process, by address, as Python objects. Nothing is copied, and nothing keeps it alive."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PYBUF_READ = 0x100
_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_from_memory.restype = ctypes.py_object


def view(address: int, length: int) -> memoryview:
    """Return bytes of memory, to be read."""
    result: memoryview = _from_memory(address, length, _PYBUF_READ)
    return result


def words(address: int, length: int) -> NDArray[np.uint64]:
    """Return memory as 64-bit words, to be read."""
    return np.frombuffer(view(address, length), dtype=np.uint64)
