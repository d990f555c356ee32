"""Finds the memory whose pages may be replaced: large blocks of glibc's malloc, and pools that a build has allocated.

**Sources.** /proc/self/maps lists the memory mappings of this process: begin and end, permissions, and the mapped file,
if any. /proc/self/pagemap has a 64-bit entry for each page of the address space.

**Search.** glibc's malloc puts each large block in a separate mapping. Such a mapping begins with a header of two
64-bit words: the number of bytes before the block in its mapping (0), and the size of the mapping. The lowest three
bits of the size are flags: 2 for a separate mapping, and 0 for the other two flags. This module looks for such headers
at the beginning of each page of private memory. (A block with a special alignment has a second header further inside,
in addition to the first one. If such a block is resized, the first header is out of date, and the check below fails.)

**Check.** Other data could look like a header. So the number and the total size of all mappings that were found,
including small ones, must equal malloc's own counters. If they differ, no page is replaced. A test block shows whether
the process uses glibc's malloc, and whether it writes such headers and counts its mappings.

**Memory of this package.** The search must not find memory that this package itself uses. So no object in this module
has ``LARGE_BLOCK_BYTES`` bytes or more, and memory that the package allocates after the search cannot overlap memory
that was in use during the search.

**Smaller blocks.** Blocks below ``LARGE_BLOCK_BYTES`` are used only if they are from the build: malloc puts them in
separate mappings only between ``start_build`` and the replacement, and mappings that existed before the build are
excluded. Some of these blocks may be tables of the interpreter's containers. The interpreter does not write to them
between the comparison of a page and its replacement. The first page of a block, which may contain the reference count
of a Python object, is not used.
"""

from __future__ import annotations

import bisect
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Callable, FrozenSet, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from .libc import PAGE, Libc, MappedBlocks, PageSharingUnavailable
from .memory import ProcessMemoryReader, view

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_REGIONS = 100000
"""Maximum number of memory mappings of a process that can share pages. A list of more mappings would take a block of 1
MiB, which the search would find. The kernel's default limit is 65,530.
"""

_MAPS = Path("/proc/self/maps")
_ENTRY_BYTES = 8
_IN_MEMORY_OR_SWAP = np.uint64(0b11 << 62)


class AddressRange(NamedTuple):
    """A memory mapping that is private to this process, readable and writable."""

    start: int
    end: int
    is_anonymous: bool
    """Whether the mapping is anonymous memory, and not of a file, the heap or a stack."""


def parse_region(line: bytes) -> Optional[AddressRange]:
    """Parse one line of /proc/self/maps. Return None for a mapping that is not private, readable and writable.

    The line is ``start-end permissions offset device inode [path]``.
    """
    fields = line.split(None, 5)
    if fields[1] != b"rw-p":
        return None
    start, end = (int(address, 16) for address in fields[0].split(b"-"))
    path = fields[5].strip() if len(fields) > 5 else b""
    # Some kernels let a program name its anonymous memory. The path is then "[anon:NAME]".
    return AddressRange(start, end, fields[4] == b"0" and (not path or path.startswith(b"[anon:")))


def parse_regions(lines: Iterable[bytes]) -> List[AddressRange]:
    """Parse the lines of /proc/self/maps, and return the private, readable and writable mappings."""
    found: List[AddressRange] = []
    for line in lines:
        region = parse_region(line)
        if region is not None:
            found.append(region)
        if len(found) > MAX_REGIONS:
            raise PageSharingUnavailable(f"the process has more than {MAX_REGIONS} memory regions")
    return found


def read_own_regions() -> List[AddressRange]:
    """Return the private, readable and writable mappings of this process."""
    with _MAPS.open("rb") as lines:
        return parse_regions(lines)


def count_mappings() -> int:
    """Return the number of all mappings of this process, which the kernel limits."""
    with _MAPS.open("rb") as lines:
        return sum(1 for _ in lines)


def mapping_limit() -> int:
    """Return the kernel's limit of mappings per process (the sysctl vm.max_map_count)."""
    return int(Path("/proc/sys/vm/max_map_count").read_text())


def contiguous_spans(found: Iterable[AddressRange]) -> Iterator[List[AddressRange]]:
    """Yield groups of mappings that follow each other without a gap. Each malloc block is within one group."""
    span: List[AddressRange] = []
    for region in found:
        if span and span[-1].end != region.start:
            yield span
            span = []
        span.append(region)
    if span:
        yield span


class Pagemap:
    """Shows which pages exist. A page that was never written does not exist, takes no memory and need not be read."""

    def __init__(self) -> None:
        """Open /proc/self/pagemap."""
        self._fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def populated(self, start: int, end: int) -> NDArray[np.bool_]:
        """Return, for each page from ``start`` to ``end``, whether it exists in memory or swap space."""
        wanted = (end - start) // PAGE * _ENTRY_BYTES
        entries = os.pread(self._fd, wanted, start // PAGE * _ENTRY_BYTES)
        if len(entries) != wanted:
            raise PageSharingUnavailable("/proc/self/pagemap does not cover all of the memory")
        exists: NDArray[np.bool_] = (np.frombuffer(entries, dtype=np.uint64) & _IN_MEMORY_OR_SWAP) != 0
        return exists


POOL_BYTES = 256 << 20
"""Size of a memory pool of MindSpore Lite's runner in bytes. The runner allocates pools from the kernel by libnuma, and
puts rearranged weights into them. A mapping that did not exist before the build counts as a pool if its size is this
number or a multiple: malloc makes no mappings of this size, and no stack is as large. If a pool is adjacent to other
memory, /proc shows one larger mapping, and the pool is not used."""

LARGE_BLOCK_BYTES = 1 << 20
"""Minimum size in bytes of blocks that are always used. The interpreter allocates no blocks of this size."""

MIN_BLOCK_BYTES = 128 << 10
"""Minimum size in bytes of blocks from the build that are used. The first page of a block is not shared. In a smaller
block, this page and the additional mapping would take as much memory as sharing saves."""

_IS_MMAPPED = 2
_HEADER = struct.Struct("<QQ")
# Size of the test block in bytes. malloc adapts its threshold for separate mappings up to 32 MiB, so this block is
# always above the threshold.
_PROBE_BYTES = (32 << 20) + 1
_SCAN_WINDOW_BYTES = 8192 * PAGE  # bytes scanned at once: their 64 KiB of pagemap entries fit into malloc's heap

Extent = Tuple[int, int]
"""Start and end address of a range of memory, at page boundaries."""

MappingStarts = FrozenSet[int]
"""Start addresses of the mappings of malloc blocks and pools that existed before a build."""


class Chunk(NamedTuple):
    """A mapping that malloc has made for one large block: its start address and its size in bytes."""

    start: int
    size: int


class MemoryReader(NamedTuple):
    """The functions by which the search reads memory. Tests replace them by functions that read simulated memory."""

    populated: Callable[[int, int], NDArray[np.bool_]]
    """Function of start and end address that returns for each page whether it exists."""
    read_header: Callable[[int, int], Optional[bytes]]
    """Function of address and length that returns the bytes, or None if the address is not mapped."""


def find_extents(libc: Libc, starts_before: Optional[MappingStarts] = None) -> List[Extent]:
    """Return the ranges of this process's memory whose pages may be replaced.

    These are the large malloc blocks without their first pages. The first page of a block has malloc's header. If the
    block is a Python object, it also has the object's reference count, which the interpreter may change at any time.

    Args:
        libc: the C library.
        starts_before: the mappings that existed before the build. If given, the result also contains blocks of at least
            ``MIN_BLOCK_BYTES`` and pools that the build has allocated.

    Raises:
        PageSharingUnavailable: the blocks cannot be identified with certainty.
    """
    check_malloc(libc)
    pagemap = Pagemap()
    memory_reader = ProcessMemoryReader()
    try:
        spans = list(contiguous_spans(read_own_regions()))
        found = list(_find_all_chunks(spans, MemoryReader(pagemap.populated, memory_reader.read)))
        check_counts(len(found), sum(chunk.size for _, chunk in found), libc.mapped_blocks())
        extents = [
            extent
            for span, chunk in found
            if chunk.size >= LARGE_BLOCK_BYTES
            or (starts_before is not None and chunk.size >= MIN_BLOCK_BYTES and chunk.start not in starts_before)
            for extent in anonymous_parts(span, chunk.start + PAGE, chunk.start + chunk.size)
        ]
        if starts_before is not None:
            extents += [
                each for each in find_pools(spans, [chunk for _, chunk in found]) if each[0] not in starts_before
            ]
        return sorted(extents)
    finally:
        memory_reader.close()
        pagemap.close()


def mapping_starts() -> MappingStarts:
    """Return the start addresses of the mappings of malloc blocks and pools.

    The result is not checked by malloc's counters, so it may include addresses of data that looks like a header.
    """
    pagemap = Pagemap()
    memory_reader = ProcessMemoryReader()
    try:
        spans = list(contiguous_spans(read_own_regions()))
        found = [chunk for _, chunk in _find_all_chunks(spans, MemoryReader(pagemap.populated, memory_reader.read))]
        return frozenset([*(chunk.start for chunk in found), *(start for start, _ in find_pools(spans, found))])
    finally:
        memory_reader.close()
        pagemap.close()


def check_malloc(libc: Libc) -> None:
    """Check all assumptions about malloc with a test block. Raise PageSharingUnavailable if one of them is wrong."""
    before = libc.mapped_blocks()
    block = libc.malloc(_PROBE_BYTES)
    try:
        after = libc.mapped_blocks()
        grown = (after.total_bytes - before.total_bytes) % after.modulus
        expected = -(-(_PROBE_BYTES + _HEADER.size) // PAGE) * PAGE
        start = block - _HEADER.size
        fits = after.block_count == before.block_count + 1 and grown == expected and start % PAGE == 0
        if not fits or mapping_size(bytes(view(start, _HEADER.size))) != expected:
            raise PageSharingUnavailable(
                "malloc does not map large blocks as glibc's malloc does by default; it was replaced or tuned"
            )
    finally:
        libc.free(block)


def _find_all_chunks(
    spans: Sequence[Sequence[AddressRange]], reader: MemoryReader
) -> Iterator[Tuple[Sequence[AddressRange], Chunk]]:
    for span in spans:
        for chunk in find_chunks(span, reader):
            yield span, chunk


def check_counts(count: int, total: int, malloc_count: MappedBlocks) -> None:
    """Raise PageSharingUnavailable unless the number and total size of the mappings found equal malloc's counters."""
    if count != malloc_count.block_count or total % malloc_count.modulus != malloc_count.total_bytes:
        raise PageSharingUnavailable(
            f"found {count} malloc mappings of {total % malloc_count.modulus} bytes, "
            f"malloc counts {malloc_count.block_count} of {malloc_count.total_bytes}"
        )


def find_chunks(span: Sequence[AddressRange], reader: MemoryReader) -> Iterator[Chunk]:
    """Yield the mappings of malloc blocks in a group of adjacent mappings, in ascending order and without overlap."""
    position = span[0].start
    end = span[-1].end
    for region in span:
        if not region.is_anonymous:
            continue
        position = max(position, region.start)
        while position < region.end:
            stop = min(position + _SCAN_WINDOW_BYTES, region.end)
            begin = position
            for page in np.flatnonzero(reader.populated(begin, stop)).tolist():
                address = begin + page * PAGE
                size = 0 if address < position else mapping_size(reader.read_header(address, _HEADER.size))
                if size and address + size <= end:
                    yield Chunk(address, size)
                    position = address + size
            position = max(position, stop)


def find_pools(spans: Iterable[Sequence[AddressRange]], found: Iterable[Chunk]) -> Iterator[Extent]:
    """Yield the mappings that consist of one or more pools and overlap no mapping of a malloc block."""
    chunk_ranges = sorted((chunk.start, chunk.start + chunk.size) for chunk in found)
    for span in spans:
        for region in span:
            if region.is_anonymous and (region.end - region.start) % POOL_BYTES == 0:
                after = bisect.bisect_left(chunk_ranges, (region.end, 0))
                if not after or chunk_ranges[after - 1][1] <= region.start:
                    yield region.start, region.end


def mapping_size(header: Optional[bytes]) -> int:
    """Return the size in the header of a malloc block's mapping, or 0 if the bytes are not such a header."""
    if header is None or len(header) != _HEADER.size:
        return 0
    before, size = _HEADER.unpack(header)
    # The remainder is _IS_MMAPPED only if the flags are correct and the size itself is a multiple of the page size.
    if before != 0 or size % PAGE != _IS_MMAPPED:
        return 0
    return int(size) - _IS_MMAPPED


def anonymous_parts(span: Sequence[AddressRange], start: int, end: int) -> Iterator[Extent]:
    """Yield the anonymous parts of a range of addresses. The other parts are already mapped from a file.

    Args:
        span: a group of adjacent mappings that contains the range.
        start: the start address of the range.
        end: the end address of the range.
    """
    first = max(bisect.bisect_right(span, (start, end, True)) - 1, 0)
    for region in span[first:]:
        if region.start >= end:
            return
        low, high = max(start, region.start), min(end, region.end)
        if region.is_anonymous and low < high:
            yield low, high
