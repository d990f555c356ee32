"""Memory shared with the daemon's workers, and the arrays that are allocated in it.

A region is a memfd that is mapped into this process. An array allocated in a region keeps the region and its block
alive until the last view of the array is gone; then the block can be reused. Code that has sent the location of an
array to another process must keep the array alive as long as that process may access it.
"""

from __future__ import annotations

import functools
import mmap
import os
import threading
import weakref
from bisect import bisect_left
from collections import deque
from typing import Any, Deque, Dict, List, Optional, Tuple, cast

import numpy as np

from weightd import arguments
from weightd_common import memfd
from weightd_protocol import limits
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.schema import describe_value

_BYTE = np.dtype(np.uint8)

# A cache line, which is also the alignment of the widest vector instructions.
ALIGNMENT = 64

# The kernel allocates pages of a region on first use, so a large region costs nothing.
_MIN_REGION_BYTES = 16 * 1024 * 1024

# Limit for all regions of a client. Tensors beyond it are sent in frames.
MAX_BYTES = 2 * 1024 * 1024 * 1024

# Number of recently returned blocks that are searched for the same size: requests and responses have few sizes.
_RECENT_BLOCKS = range(4)


class MemfdRegion:
    """A mapped memfd.

    Attributes:
        descriptor: the file descriptor of the memfd, open as long as this object exists.
        nbytes: the size in bytes.
        start_address: the address in this process.
        returned_blocks: offsets and sizes of blocks that are no longer needed. The next allocation frees them. They are
            not freed when the last view is collected, because that can happen anywhere, even within `take`.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.descriptor = memfd.create(nbytes)
        try:
            self._bytes = cast(Any, np).frombuffer(mmap.mmap(self.descriptor, nbytes), np.uint8)
        except BaseException:
            os.close(self.descriptor)
            raise
        weakref.finalize(self, os.close, self.descriptor)
        self._free_list = FreeList(nbytes)
        self.returned_blocks: Deque[Tuple[int, int]] = deque()
        self.start_address: int = self._bytes.__array_interface__["data"][0]
        # Whether each page is known to have memory, which is charged to this process.
        self._is_populated: Any = np.zeros(-(-nbytes // mmap.PAGESIZE), np.bool_)

    @property
    def is_unused(self) -> bool:
        """Whether no block of the region is in use."""
        self._reclaim_returned()
        return self._free_list.is_unused

    def take(self, nbytes: int) -> Optional[Block]:
        """Return a block of `nbytes` bytes, or None if the region has no room."""
        returned = self.returned_blocks
        for _ in _RECENT_BLOCKS if returned else ():
            offset, size = returned.pop()
            if size == nbytes:
                break
            returned.appendleft((offset, size))
        else:
            self._reclaim_returned()
            fitting = self._free_list.take(nbytes)
            if fitting is None:
                return None
            offset = fitting
        return Block(self, offset, nbytes)

    def populate(self, offset: int, nbytes: int) -> None:
        """Allocate memory for each page of a range: a worker writes no output to a page that has none."""
        end = offset + nbytes
        pages = self._is_populated[offset // mmap.PAGESIZE : -(-end // mmap.PAGESIZE)]
        if not pages.all():
            # Reading one byte of each page allocates it, and cannot overwrite the data of another process.
            self._bytes[offset : end : mmap.PAGESIZE].max()
            self._bytes[end - 1].max()
            pages[:] = True

    def write(self, offset: int, array: Any) -> None:
        """Write an array, which is in C order, at `offset`."""
        self._bytes[offset : offset + array.nbytes] = array.reshape(-1).view(_BYTE)

    def offset_of(self, address: int, nbytes: int) -> Optional[int]:
        """Return the offset of an address range in the region, or None if the range is not within it."""
        offset = address - self.start_address
        return offset if offset >= 0 and offset + nbytes <= self.nbytes else None

    def _reclaim_returned(self) -> None:
        while self.returned_blocks:
            offset, _ = self.returned_blocks.popleft()
            self._free_list.release(offset)


class Block:
    """A part of a region. It can be reused as soon as this object is collected."""

    __slots__ = ("__array_interface__", "nbytes", "offset", "region")

    def __init__(self, region: MemfdRegion, offset: int, nbytes: int) -> None:
        self.region = region
        self.offset = offset
        self.nbytes = nbytes

    def array(self, shape: Tuple[int, ...], dtype: Any) -> Any:
        """Return an array on this memory. The array and all of its views keep the block alive."""
        self.__array_interface__: Dict[str, Any] = {
            "data": (self.region.start_address + self.offset, False),
            "shape": shape,
            "typestr": dtype.str,
            "version": 3,
        }
        return np.asarray(self)

    def __del__(self) -> None:
        self.region.returned_blocks.append((self.offset, self.nbytes))


class ShmArena:
    """The regions of one client. Several threads may use it.

    Args:
        max_bytes: limit for the size of all regions together.

    Attributes:
        regions: the current regions; each change creates a new tuple.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self.regions: Tuple[MemfdRegion, ...] = ()
        # A forked process has the same memory, and this process cannot know how long the child needs an array.
        with _fork_lock:
            _arenas.add(self)

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Return an uninitialized array, in ordinary memory if no region has room.

        Raises:
            InvalidArgument: the shape or the dtype is invalid, or there cannot be such an array.
        """
        sizes = arguments.parse_shape("shape", shape)
        try:
            numpy_dtype: Any = np.dtype(dtype)
        except Exception as error:
            # numpy also calls code of the object itself, which may raise anything.
            raise InvalidArgument(f"dtype: expected a numpy dtype, got {describe_value(dtype)}: {error}") from error
        nbytes: int = numpy_dtype.itemsize
        for dim in sizes:
            nbytes *= dim
        # Only values that have the same meaning in every process may be shared: an object is an address.
        block = self.take(nbytes) if nbytes and numpy_dtype.kind in "biuf" else None
        try:
            return np.empty(sizes, numpy_dtype) if block is None else block.array(sizes, numpy_dtype)
        except (ValueError, OverflowError) as error:
            raise InvalidArgument(
                f"shape: expected the shape of an array, got {describe_value(shape)}: {error}"
            ) from None

    def take(self, nbytes: int) -> Optional[Block]:
        """Return a block of a region, creating a region if necessary.

        Args:
            nbytes: the size, at least 1.

        Returns:
            The block, or None if there is no room.
        """
        with self._lock:
            for region in self.regions:
                block = region.take(nbytes)
                if block is not None:
                    return block
            self._drop_unused()
            new_region = self._add_region(nbytes)
            return None if new_region is None else new_region.take(nbytes)

    def find(self, array: Any) -> Optional[Tuple[MemfdRegion, int]]:
        """Return the region and the offset of an array in C order, or None if it is in no region."""
        if self.regions:
            address = array.__array_interface__["data"][0]
            for region in self.regions:
                offset = region.offset_of(address, array.nbytes)
                if offset is not None:
                    return region, offset
        return None

    def retire(self, regions: Tuple[MemfdRegion, ...]) -> None:
        """Stop allocating in these regions, because it is unknown how long other processes use their blocks."""
        with self._lock:
            self._retire(regions)

    def before_fork(self) -> None:
        """Retire all regions, and block allocations of all threads until `after_fork`."""
        self._lock.acquire()
        self._retire(self.regions)

    def after_fork(self, *, in_child: bool) -> None:
        """Allow allocations again. The child starts without regions, so that no region serves both processes."""
        if in_child:
            self.regions = ()
        self._lock.release()

    def _retire(self, regions: Tuple[MemfdRegion, ...]) -> None:
        # Another process may still write to a block that is no longer in use here.
        retired = [region for region in regions if not region.is_unused]
        self.regions = tuple(region for region in self.regions if region not in retired)

    def _drop_unused(self) -> None:
        """Drop unused regions before a new one is created: they were too small."""
        self.regions = tuple(region for region in self.regions if not region.is_unused)

    def _add_region(self, nbytes: int) -> Optional[MemfdRegion]:
        total_bytes = sum(region.nbytes for region in self.regions)
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if total_bytes + nbytes > self._max_bytes or len(self.regions) >= limits.MAX_REGIONS:
            return None
        try:
            region = MemfdRegion(min(max(nbytes, total_bytes, _MIN_REGION_BYTES), self._max_bytes - total_bytes))
        except OSError:
            return None
        self.regions = (*self.regions, region)
        return region


class FreeList:
    """First-fit allocator for the offsets of a region. It reuses low offsets first and merges adjacent free ranges.

    Args:
        nbytes: the size of the region.
    """

    def __init__(self, nbytes: int) -> None:
        # Free ranges, sorted.
        self._free_starts: List[int] = [0]
        self._free_ends: List[int] = [nbytes]
        # End offset by start offset.
        self._allocated: Dict[int, int] = {}

    @property
    def is_unused(self) -> bool:
        """Whether nothing is allocated."""
        return not self._allocated

    def take(self, nbytes: int) -> Optional[int]:
        """Return the aligned start offset of a new allocation, or None if no free range is large enough."""
        nbytes = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        for index, begin in enumerate(self._free_starts):
            end = begin + nbytes
            if end <= self._free_ends[index]:
                if end == self._free_ends[index]:
                    del self._free_starts[index], self._free_ends[index]
                else:
                    self._free_starts[index] = end
                self._allocated[begin] = end
                return begin
        return None

    def release(self, begin: int) -> None:
        """Free the allocation that starts at `begin`."""
        end = self._allocated.pop(begin)
        index = bisect_left(self._free_starts, begin)
        if index and self._free_ends[index - 1] == begin:
            index -= 1
            self._free_ends[index] = end
        else:
            self._free_starts.insert(index, begin)
            self._free_ends.insert(index, end)
        if index + 1 < len(self._free_starts) and self._free_starts[index + 1] == end:
            self._free_ends[index] = self._free_ends.pop(index + 1)
            del self._free_starts[index + 1]


# --- fork ------------------------------------------------------------------------------------------------------------

_arenas: weakref.WeakSet[ShmArena] = weakref.WeakSet()

# Held while the process forks and while `_arenas` changes.
_fork_lock = threading.Lock()
_locked_arenas: List[ShmArena] = []


def _before_fork() -> None:
    _fork_lock.acquire()
    _locked_arenas.extend(_arenas)
    for arena in _locked_arenas:
        arena.before_fork()


def _after_fork(*, in_child: bool) -> None:
    while _locked_arenas:
        _locked_arenas.pop().after_fork(in_child=in_child)
    _fork_lock.release()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=functools.partial(_after_fork, in_child=False),
    after_in_child=functools.partial(_after_fork, in_child=True),
)
