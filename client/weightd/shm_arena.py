"""Memory that the daemon's workers can see, and the arrays that are cut from it.

A region is a memfd that is mapped here. An array that is cut from one keeps it, and its own part of it, until the last
view of that array is gone: then that part may be given to another one. Whoever has told somebody else where an array
lies keeps the array as long as that other may still read or write there.
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

# A line of the cache, and what the widest instruction wants.
ALIGNMENT = 64

# A region takes memory where it was used, so one that is large costs nothing.
_MIN_REGION_BYTES = 16 * 1024 * 1024

# Of all regions of a client: what does not fit goes another way.
MAX_BYTES = 2 * 1024 * 1024 * 1024

# Among so many parts that were given back one of the same size is looked for: a request and its answer have few sizes.
_RECENT_BLOCKS = range(4)


class MemfdRegion:
    """One memfd, mapped.

    Attributes:
        descriptor: of it, open as long as this is.
        nbytes: its size.
        start_address: its address in this process.
        returned_blocks: parts that are not needed any more, with their sizes. They are given back by whoever cuts next,
            and not where the last view goes: that may be anywhere, in the middle of a `take` too.
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
        # Whether each page is known to have memory, which is then charged to this process.
        self._is_populated: Any = np.zeros(-(-nbytes // mmap.PAGESIZE), np.bool_)

    @property
    def is_unused(self) -> bool:
        """Whether nothing of it is needed any more."""
        self._reclaim_returned()
        return self._free_list.is_unused

    def take(self, nbytes: int) -> Optional[Block]:
        """Cut so many bytes from it, or return None."""
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
        """Have memory for each page of so many bytes: a worker writes no output to a page that has none."""
        end = offset + nbytes
        pages = self._is_populated[offset // mmap.PAGESIZE : -(-end // mmap.PAGESIZE)]
        if not pages.all():
            # To read a byte is enough, and disturbs nobody who writes there.
            self._bytes[offset : end : mmap.PAGESIZE].max()
            self._bytes[end - 1].max()
            pages[:] = True

    def write(self, offset: int, array: Any) -> None:
        """Write an array's bytes, which are in C order, from there on."""
        self._bytes[offset : offset + array.nbytes] = array.reshape(-1).view(_BYTE)

    def offset_of(self, address: int, nbytes: int) -> Optional[int]:
        """Return where these bytes of this process are in it; None where they are not."""
        offset = address - self.start_address
        return offset if offset >= 0 and offset + nbytes <= self.nbytes else None

    def _reclaim_returned(self) -> None:
        while self.returned_blocks:
            offset, _ = self.returned_blocks.popleft()
            self._free_list.release(offset)


class Block:
    """A part of a region, which is another's as soon as nobody refers to this."""

    __slots__ = ("__array_interface__", "nbytes", "offset", "region")

    def __init__(self, region: MemfdRegion, offset: int, nbytes: int) -> None:
        self.region = region
        self.offset = offset
        self.nbytes = nbytes

    def array(self, shape: Tuple[int, ...], dtype: Any) -> Any:
        """Return an array of its bytes; that and every view of it refer to this."""
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
    """The regions of one client. May be used by several threads.

    Args:
        max_bytes: of all regions together.

    Attributes:
        regions: all that there are; another tuple where those are others.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self.regions: Tuple[MemfdRegion, ...] = ()
        # A process that is forked has the same memory, and this one cannot know how long it needs an array.
        with _fork_lock:
            _arenas.add(self)

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Return an array of any content; not of a region, where there is none that has room.

        Raises:
            InvalidArgument: there is no such shape or dtype, or no array of it.
        """
        sizes = arguments.parse_shape("shape", shape)
        try:
            numpy_dtype: Any = np.dtype(dtype)
        except Exception as error:
            # numpy also asks the object itself, whose code may raise anything.
            raise InvalidArgument(f"dtype: expected one of numpy, got {describe_value(dtype)}: {error}") from error
        nbytes: int = numpy_dtype.itemsize
        for dim in sizes:
            nbytes *= dim
        # Only bytes that mean the same to everybody: an object is an address.
        block = self.take(nbytes) if nbytes and numpy_dtype.kind in "biuf" else None
        try:
            return np.empty(sizes, numpy_dtype) if block is None else block.array(sizes, numpy_dtype)
        except (ValueError, OverflowError) as error:
            raise InvalidArgument(
                f"shape: expected the shape of an array, got {describe_value(shape)}: {error}"
            ) from None

    def take(self, nbytes: int) -> Optional[Block]:
        """Cut so many bytes from a region, a new one if need be.

        Args:
            nbytes: at least 1.

        Returns:
            The bytes; None where there is no room.
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
        """Return where the bytes of an array, in C order, lie in a region; None where they do not."""
        if self.regions:
            address = array.__array_interface__["data"][0]
            for region in self.regions:
                offset = region.offset_of(address, array.nbytes)
                if offset is not None:
                    return region, offset
        return None

    def retire(self, regions: Tuple[MemfdRegion, ...]) -> None:
        """Cut nothing more from these: nobody can tell when others will be done with parts of them."""
        with self._lock:
            self._retire(regions)

    def before_fork(self) -> None:
        """Retire all regions, and let no other thread cut from any until `after_fork`."""
        self._lock.acquire()
        self._retire(self.regions)

    def after_fork(self, *, in_child: bool) -> None:
        """Go on: what is free is the parent's, and nothing is cut for both."""
        if in_child:
            self.regions = ()
        self._lock.release()

    def _retire(self, regions: Tuple[MemfdRegion, ...]) -> None:
        # Somebody may still write to a part of them that nobody here has.
        retired = [region for region in regions if not region.is_unused]
        self.regions = tuple(region for region in self.regions if region not in retired)

    def _drop_unused(self) -> None:
        """Before there is another one: those of which nothing is needed were too small."""
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
    """Parts are cut where they fit first, so that memory that was used before is used again; free neighbours are one.

    Args:
        nbytes: there are.
    """

    def __init__(self, nbytes: int) -> None:
        # Free stretches, in their order.
        self._free_starts: List[int] = [0]
        self._free_ends: List[int] = [nbytes]
        # End by begin.
        self._allocated: Dict[int, int] = {}

    @property
    def is_unused(self) -> bool:
        """Whether nothing is taken."""
        return not self._allocated

    def take(self, nbytes: int) -> Optional[int]:
        """Take so many bytes: return where they begin, aligned; None where they fit nowhere."""
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
        """Give back what `take` returned."""
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

# Held by a thread that forks, and whoever changes that set.
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
