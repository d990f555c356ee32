"""Memory that a client shares with the daemon's workers, and the arrays that are allocated in this memory.

A region is a memfd that is mapped into this process. An array occupies a block of a region and keeps block and region
alive. When the array and all of its views are gone, the block can be reused. Code that has sent the location of an
array to another process must keep the array alive as long as that process may access the memory.
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

# Alignment of blocks in bytes: the size of a cache line, and the alignment of the widest vector instructions.
ALIGNMENT = 64

# Minimum size of a new region. A large region costs nothing, because the kernel allocates its pages on first use.
_MIN_REGION_BYTES = 16 * 1024 * 1024

# Maximum total size of a client's regions. Tensors that do not fit are sent in frames.
MAX_BYTES = 2 * 1024 * 1024 * 1024

# Number of most recently returned blocks among which `take` looks for a block of the requested size. A few blocks
# suffice, because requests have few different sizes.
_RECENT_BLOCKS = range(4)


class MemfdRegion:
    """A memfd that is mapped into this process.

    Attributes:
        descriptor: the file descriptor of the memfd, open as long as this object exists.
        nbytes: the size of the region in bytes.
        start_address: the address at which the region is mapped in this process.
        returned_blocks: offsets and sizes of blocks that are no longer used. The next allocation frees them. A block is
            not freed when its last view is collected, because the garbage collector may run anywhere, even within
            `take`.
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
        # For each page, whether the kernel is known to have allocated memory for it. The kernel charges this memory to
        # the client's process.
        self._is_populated: Any = np.zeros(-(-nbytes // mmap.PAGESIZE), np.bool_)

    @property
    def is_unused(self) -> bool:
        """Whether no block of the region is in use."""
        self._reclaim_returned()
        return self._free_list.is_unused

    def take(self, nbytes: int) -> Optional[Block]:
        """Return a block of `nbytes` bytes. Return None if the region has no free range of this size."""
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
        """Make the kernel allocate each page of a range, because a worker writes outputs only to allocated pages."""
        end = offset + nbytes
        pages = self._is_populated[offset // mmap.PAGESIZE : -(-end // mmap.PAGESIZE)]
        if not pages.all():
            # Reading one byte of each page makes the kernel allocate the page. A write could overwrite the data of
            # another process.
            self._bytes[offset : end : mmap.PAGESIZE].max()
            self._bytes[end - 1].max()
            pages[:] = True

    def write(self, offset: int, array: Any) -> None:
        """Copy the elements of an array to the region, from `offset` on. The array must be in C order."""
        self._bytes[offset : offset + array.nbytes] = array.reshape(-1).view(_BYTE)

    def offset_of(self, address: int, nbytes: int) -> Optional[int]:
        """Return the offset of the `nbytes` bytes at `address`, or None if not all of them lie in this region."""
        offset = address - self.start_address
        return offset if offset >= 0 and offset + nbytes <= self.nbytes else None

    def _reclaim_returned(self) -> None:
        while self.returned_blocks:
            offset, _ = self.returned_blocks.popleft()
            self._free_list.release(offset)


class Block:
    """A part of a region that is in use. When this object is collected, the part can be reused."""

    __slots__ = ("__array_interface__", "nbytes", "offset", "region")

    def __init__(self, region: MemfdRegion, offset: int, nbytes: int) -> None:
        self.region = region
        self.offset = offset
        self.nbytes = nbytes

    def array(self, shape: Tuple[int, ...], dtype: Any) -> Any:
        """Return an array in the memory of this block. The array and all of its views keep the block alive."""
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
        max_bytes: maximum total size of the regions in bytes.

    Attributes:
        regions: the regions in which the client allocates. Each change creates a new tuple, so the operator `is`
            detects a change.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self.regions: Tuple[MemfdRegion, ...] = ()
        # The hooks that run at a fork find the arena in this set. They retire its regions, because parent and child
        # have the same memory after a fork, and the parent cannot know how long the child uses an array.
        with _fork_lock:
            _arenas.add(self)

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Return an uninitialized array in a region, or in ordinary memory if no region has room.

        Raises:
            InvalidArgument: the shape or the dtype is invalid, or numpy cannot create an array of this shape and dtype.
        """
        sizes = arguments.parse_shape("shape", shape)
        try:
            numpy_dtype: Any = np.dtype(dtype)
        except Exception as error:
            # `np.dtype` may run code of the given object, which may raise any exception.
            raise InvalidArgument(f"dtype: expected a numpy dtype, got {describe_value(dtype)}: {error}") from error
        nbytes: int = numpy_dtype.itemsize
        for dim in sizes:
            nbytes *= dim
        # Share only booleans, integers and floats. An array of objects contains addresses, which are valid in one
        # process only.
        block = self.take(nbytes) if nbytes and numpy_dtype.kind in "biuf" else None
        try:
            return np.empty(sizes, numpy_dtype) if block is None else block.array(sizes, numpy_dtype)
        except (ValueError, OverflowError) as error:
            raise InvalidArgument(
                f"shape: expected the shape of an array, got {describe_value(shape)}: {error}"
            ) from None

    def take(self, nbytes: int) -> Optional[Block]:
        """Return a block of a region. Create a region if no region has room.

        Args:
            nbytes: the size of the block in bytes, at least 1.

        Returns:
            The block. None if the limit of the arena is reached or the kernel refuses a new region.
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
        """Return the region in which an array lies, and its offset there. Return None if it lies in no region.

        The array must be in C order.
        """
        if self.regions:
            address = array.__array_interface__["data"][0]
            for region in self.regions:
                offset = region.offset_of(address, array.nbytes)
                if offset is not None:
                    return region, offset
        return None

    def retire(self, regions: Tuple[MemfdRegion, ...]) -> None:
        """Stop allocating in these regions, because it is unknown how long other processes will use their blocks."""
        with self._lock:
            self._retire(regions)

    def before_fork(self) -> None:
        """Before a fork: retire all regions, and make allocations of all threads wait until `after_fork`."""
        self._lock.acquire()
        self._retire(self.regions)

    def after_fork(self, *, in_child: bool) -> None:
        """After a fork: allow allocations again. The child starts without regions, so parent and child share none."""
        if in_child:
            self.regions = ()
        self._lock.release()

    def _retire(self, regions: Tuple[MemfdRegion, ...]) -> None:
        # Never allocate in a region with blocks in use again: another process may write to these blocks even after this
        # process has freed them.
        retired = [region for region in regions if not region.is_unused]
        self.regions = tuple(region for region in self.regions if region not in retired)

    def _drop_unused(self) -> None:
        """Drop the regions that have no block in use, because they are too small.

        The caller then creates a larger region.
        """
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
    """First-fit allocator of ranges of a region. It prefers low offsets and merges adjacent free ranges.

    Args:
        nbytes: the size of the region in bytes.
    """

    def __init__(self, nbytes: int) -> None:
        # Free ranges, sorted.
        self._free_starts: List[int] = [0]
        self._free_ends: List[int] = [nbytes]
        # The end offset of each allocation, by its start offset.
        self._allocated: Dict[int, int] = {}

    @property
    def is_unused(self) -> bool:
        """Whether nothing is allocated."""
        return not self._allocated

    def take(self, nbytes: int) -> Optional[int]:
        """Return the aligned start offset of a new allocation. Return None if no free range is large enough."""
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

# A thread holds this lock while the process forks and while `_arenas` changes.
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
