"""Tensors in memory that a client has passed on: copied in before anything looks at them, and written out.

The client may write to that memory at any moment. So nothing that was checked is read there again: an index that
changes after it was found to be in range would be read somewhere else in this process.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, Dict, cast

import numpy as np

from weightd.protocol.errors import Internal

# What the widest instruction of an engine wants.
_ALIGNMENT = 64

_NOT_MAPPED = "a region of shared memory cannot be mapped by this worker"


class Regions:
    """The regions that are mapped here, by the numbers that the daemon has for them.

    It has checked that each keeps its size, and that what a request names lies within.
    """

    def __init__(self) -> None:
        # None: it could not be mapped.
        self._regions: Dict[int, Any] = {}

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

    def read(self, number: int, offset: int, nbytes: int) -> Any:
        """Return a copy of so many bytes, aligned.

        Raises:
            Internal: the region is not mapped.
        """
        view = self.view(number, offset, nbytes)
        memory: Any = np.empty(nbytes + _ALIGNMENT, np.uint8)
        begin: int = -memory.__array_interface__["data"][0] % _ALIGNMENT
        copy = memory[begin : begin + nbytes]
        copy[:] = view
        return copy

    def view(self, number: int, offset: int, nbytes: int) -> Any:
        """Return so many bytes as they are there: they are to be copied before anything looks at them.

        Raises:
            Internal: the region is not mapped.
        """
        region = self._regions.get(number)
        if region is None:
            raise Internal(_NOT_MAPPED)
        return region[offset : offset + nbytes]

    def write(self, frame: Any, number: int, offset: int, room: int) -> bool:
        """Write bytes, which are what `frame_of` returned, to a region; return False where they do not fit there.

        Raises:
            Internal: the region is not mapped.
        """
        region = self._regions.get(number)
        if region is None:
            raise Internal(_NOT_MAPPED)
        nbytes = len(frame)
        if nbytes > room or not region.flags.writeable:
            return False
        if nbytes:
            region[offset : offset + nbytes] = np.frombuffer(frame, np.uint8)
        return True


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
