"""Tensors in memory that a client has passed on: copied in before anything looks at them, and written out.

The client may write to that memory at any moment. So nothing that was checked is read there again: an index that
changes after it was found to be in range would be read somewhere else in this process.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, Dict, List, cast

import numpy as np

from weightd.protocol.errors import Internal
from weightd.protocol.messages.data import TensorSpec
from weightd.protocol.tensors import frame_of, from_frame

# What the widest instruction of an engine wants.
_ALIGNMENT = 64

# Memory for copies that is kept for the next request: fresh pages cost ten times the copy.
_MOST_KEPT_BYTES = 64 * 1024 * 1024


class Buffers:
    """Memory of this process, used again once nobody has a view of it.

    Args:
        most_bytes: that are kept.
    """

    def __init__(self, most_bytes: int = _MOST_KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        # Of which nobody has a view. The one that was used last is the last.
        self._free: List[Any] = []

    @property
    def kept_bytes(self) -> int:
        """What is there that nobody has."""
        return sum(each.nbytes for each in self._free)

    def take(self, nbytes: int) -> Any:
        """Return so many bytes, aligned, of any content."""
        needed = nbytes + _ALIGNMENT
        # Not one that is much too large: it will be wanted for what fills it.
        fitting = [index for index, buffer in enumerate(self._free) if needed <= buffer.nbytes <= 2 * needed]
        buffer = self._free.pop(fitting[-1]) if fitting else np.empty(needed, np.uint8)
        while self._free and self.kept_bytes + buffer.nbytes > self._most_bytes:
            del self._free[0]
        return np.asarray(_Lent(self._free, buffer, nbytes))


class _Lent:
    """What numpy asks for the address of a buffer; every view refers to this, which gives it back."""

    __slots__ = ("__array_interface__", "_buffer", "_free")

    def __init__(self, free: List[Any], buffer: Any, nbytes: int) -> None:
        self._free = free
        self._buffer = buffer
        address: int = buffer.__array_interface__["data"][0]
        self.__array_interface__: Dict[str, Any] = {
            "data": (address + -address % _ALIGNMENT, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        self._free.append(self._buffer)


class Regions:
    """The regions that are mapped here, by the numbers that the daemon has for them.

    It has checked that each keeps its size, and that what a request names lies within.
    """

    def __init__(self) -> None:
        # None: it could not be mapped.
        self._regions: Dict[int, Any] = {}
        self._buffers = Buffers()

    def map(self, number: int, descriptor: int) -> None:
        """Map a region; what fails shows when a request names it. The descriptor is closed."""
        try:
            self._regions[number] = _mapped(descriptor)
        finally:
            os.close(descriptor)

    def unmap(self, number: int) -> None:
        """Forget a region."""
        self._regions.pop(number, None)

    def clear(self) -> None:
        """Forget all: another daemon has other numbers."""
        self._regions.clear()

    def read(self, spec: TensorSpec, number: int, offset: int) -> Any:
        """Return a copy of a tensor.

        Raises:
            InvalidArgument: a BOOL is neither 0 nor 1.
            Internal: the region is not mapped.
        """
        nbytes = spec.nbytes
        copy = self._buffers.take(nbytes)
        np.copyto(copy, self._region(number)[offset : offset + nbytes])
        return from_frame(spec, copy)

    def write(self, array: Any, number: int, offset: int, room: int) -> bool:
        """Write an array, which is what `to_wire` returned, to a region; return False where it does not fit there.

        Raises:
            Internal: the region is not mapped.
        """
        region = self._region(number)
        if array.nbytes > room or not region.flags.writeable:
            return False
        if array.size:
            region[offset : offset + array.nbytes] = np.frombuffer(frame_of(array), np.uint8)
        return True

    def _region(self, number: int) -> Any:
        region = self._regions.get(number)
        if region is None:
            raise Internal("a region of shared memory cannot be mapped by this worker")
        return region


def _mapped(descriptor: int) -> Any:
    nbytes = os.fstat(descriptor).st_size
    for protection in (mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ):
        try:
            # Where the client has forbidden to write there, in whichever way, it can still be read.
            mapping = mmap.mmap(descriptor, nbytes, prot=protection)
        except (OSError, ValueError):
            continue
        return cast(Any, np).frombuffer(mapping, np.uint8)
    return None
