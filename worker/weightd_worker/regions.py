"""Tensors in shared memory of a client: copied in before anything looks at them, and written out.

The client may write to that memory, and punch holes in it, at any moment. So nothing that was checked is read there
again: an index that changes after it was found to be in range would be read somewhere else in this process. And no
access here allocates a page of it (`userfault`): it would be charged to weightd for as long as the client keeps the
memory. Once a hole was met in a region, its inputs are read by system calls, which allocate nothing, and nothing is
written to it.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any, Dict, Optional

import numpy as np

from weightd_protocol.errors import Internal
from weightd_worker.userfault import ProtectedMapping, UserFaults

_log = logging.getLogger("weightd.worker")

# What the widest instruction of an engine wants.
_ALIGNMENT = 64

_NOT_READABLE = "a region of shared memory cannot be read by this worker"


class RegionTable:
    """The regions that this worker has, by the numbers that the daemon has for them.

    The daemon has checked that each keeps its size, and that what a request names lies within.
    """

    def __init__(self) -> None:
        self._regions: Dict[int, _Region] = {}

    def map(self, number: int, descriptor: int) -> None:
        """Add a region, which has the descriptor from now on; what fails shows when a request names the region."""
        self._regions[number] = _Region(descriptor)

    def unmap(self, number: int) -> None:
        """Forget a region."""
        self._regions.pop(number, None)

    def clear(self) -> None:
        """Forget all: another daemon has other numbers."""
        self._regions.clear()

    def read(self, number: int, offset: int, nbytes: int) -> Any:
        """Return a copy of so many bytes, aligned.

        Raises:
            Internal: this worker does not have the region, or cannot read it.
        """
        memory: Any = np.empty(nbytes + _ALIGNMENT, np.uint8)
        begin: int = -memory.__array_interface__["data"][0] % _ALIGNMENT
        copy = memory[begin : begin + nbytes]
        try:
            self._region(number).read(offset, copy)
        except OSError:
            raise Internal(_NOT_READABLE) from None
        return copy

    def write(self, frame: Any, number: int, offset: int, max_bytes: int) -> bool:
        """Write bytes, which are what `frame_of` returned, to a region; return False where that cannot be.

        It cannot be where there is not enough room, where the client has sealed the region or has not written to each
        page of the room before, and on a system without userfaultfd.

        Raises:
            Internal: this worker does not have the region.
        """
        region = self._region(number)
        if len(frame) > max_bytes:
            return False
        return not frame or region.write(offset, np.frombuffer(frame, np.uint8))

    def _region(self, number: int) -> _Region:
        region = self._regions.get(number)
        if region is None:
            raise Internal(_NOT_READABLE)
        return region


class _Region:
    """One region. Its descriptor is closed when nothing refers to this."""

    __slots__ = ("_descriptor", "_mapping")

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mapping = _map_protected(descriptor)

    def read(self, offset: int, into: Any) -> None:
        """Fill an array of bytes.

        Raises:
            OSError: the region cannot be read.
        """
        window = self._mapping
        done = len(into) if window is not None and window.read(offset, into) else 0
        while done < len(into):
            count = os.preadv(self._descriptor, [into[done:]], offset + done)
            if not count:
                raise OSError("the region is shorter than its size")
            done += count

    def write(self, offset: int, source: Any) -> bool:
        """Write an array of bytes; return False where that cannot be."""
        window = self._mapping
        return window is not None and window.write(offset, source)

    def __del__(self) -> None:
        os.close(self._descriptor)


def _map_protected(descriptor: int) -> Optional[ProtectedMapping]:
    user_faults = _user_faults()
    try:
        return None if user_faults is None else user_faults.map(descriptor, os.fstat(descriptor).st_size)
    except OSError:
        # The client has forbidden to write there, in whichever way.
        return None


@functools.lru_cache(maxsize=None)
def _user_faults() -> Optional[UserFaults]:
    try:
        return UserFaults()
    except (OSError, RuntimeError) as error:
        # RuntimeError: no thread can be started.
        _log.warning("large tensors are slower: no userfaultfd for shared memory of clients: %s", error)
        return None
