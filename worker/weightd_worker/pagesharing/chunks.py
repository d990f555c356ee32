"""Finds the memory whose pages may be replaced: large blocks of glibc's malloc, and pools that the build has added.

/proc/self/maps lists the mappings of this process: where each begins and ends, its permissions, and its file, if it has
one. /proc/self/pagemap has 64 bits for each page of the address space.

glibc's malloc puts a large block in a separate mapping. Such a mapping begins with two 64-bit words: the number of
bytes before the block in its mapping (0), and the size of the mapping, whose lowest three bits are flags. The flag for
a separate mapping is 2, and the other two are 0 for such a block. This module looks for these words at the beginning of
each page of private memory. (A block with a special alignment has a second header further in; the first one stays. If
the block is resized, the first one is out of date, and the check below fails.)

Data could look like such a header. So the mappings that were found, including small ones, must have the count and the
total size that malloc itself reports: with one too many or too few, no memory is used. A test block shows that malloc
is glibc's, writes headers like this, and counts its mappings.

The search must not find memory of this package. So nothing in this file holds an object of ``LARGE_BLOCK_BYTES`` bytes,
and memory that the package allocates later cannot be where memory was in use at the time of the search.

Blocks below ``LARGE_BLOCK_BYTES`` are used only if they are known to be from the build: malloc gives them separate
mappings only between ``start_build`` and the replacement, and mappings that existed before are left out. The
interpreter may have put tables of its containers into such blocks. It writes nothing to them between the comparison of
a page and its replacement, and the first page, which has the reference count, is left out.
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
"""A process with more regions is not supported: the list of them must stay below 1 MiB, see above. (The kernel's usual
limit is 65,530.)"""

_MAPS = Path("/proc/self/maps")
_ENTRY_BYTES = 8
_IN_MEMORY_OR_SWAP = np.uint64(0b11 << 62)


class AddressRange(NamedTuple):
    """A range of addresses that is private to this process, readable and writable."""

    start: int
    end: int
    is_anonymous: bool
    """Whether it is plain memory: not of a file, the heap or a stack."""


def parse_region(line: bytes) -> Optional[AddressRange]:
    """Parse one line of /proc/self/maps; None for a mapping that is shared, or not readable and writable.

    The line is ``start-end permissions offset device inode [path]``.
    """
    fields = line.split(None, 5)
    if fields[1] != b"rw-p":
        return None
    start, end = (int(address, 16) for address in fields[0].split(b"-"))
    path = fields[5].strip() if len(fields) > 5 else b""
    # A kernel may let a program give names to its memory: "[anon:...]".
    return AddressRange(start, end, fields[4] == b"0" and (not path or path.startswith(b"[anon:")))


def parse_regions(lines: Iterable[bytes]) -> List[AddressRange]:
    """Parse lines of /proc/self/maps; return the mappings for which ``parse_region`` does not return None."""
    found: List[AddressRange] = []
    for line in lines:
        region = parse_region(line)
        if region is not None:
            found.append(region)
        if len(found) > MAX_REGIONS:
            raise PageSharingUnavailable(f"the process has more than {MAX_REGIONS} memory regions")
    return found


def read_own_regions() -> List[AddressRange]:
    """Return the regions of this process."""
    with _MAPS.open("rb") as lines:
        return parse_regions(lines)


def count_mappings() -> int:
    """Count all mappings of this process, as the kernel does for its limit."""
    with _MAPS.open("rb") as lines:
        return sum(1 for _ in lines)


def mapping_limit() -> int:
    """Return how many mappings a process may have."""
    return int(Path("/proc/sys/vm/max_map_count").read_text())


def contiguous_spans(found: Iterable[AddressRange]) -> Iterator[List[AddressRange]]:
    """Group regions that follow each other without a gap. A malloc block lies within one group."""
    span: List[AddressRange] = []
    for region in found:
        if span and span[-1].end != region.start:
            yield span
            span = []
        span.append(region)
    if span:
        yield span


class Pagemap:
    """Shows which pages exist. A page that was never written takes no memory, and need not be read."""

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
"""The size of a pool. MindSpore Lite's runner allocates pools from the kernel, by libnuma, and packs weights into them.
A region of exactly this size (or a multiple) that the build has added is the library's: malloc makes none of this size,
and no stack is as large. A pool beside other memory cannot be recognized and is not used."""

LARGE_BLOCK_BYTES = 1 << 20
"""Blocks of at least this size in bytes are always used, because the interpreter has none."""

MIN_BLOCK_BYTES = 128 << 10
"""Blocks below this size in bytes are not used: their first pages and mappings would cost what they save."""

_IS_MMAPPED = 2
_HEADER = struct.Struct("<QQ")
# malloc adapts the threshold for separate mappings, up to 32 MiB. A block of this size is above any threshold.
_PROBE_BYTES = (32 << 20) + 1
_SCAN_WINDOW_BYTES = 8192 * PAGE  # scanned at once: numpy then needs 64 KiB, which malloc takes from its heap

Extent = Tuple[int, int]
"""Start and end of a range of memory, at page boundaries."""

MappingStarts = FrozenSet[int]
"""Start addresses of malloc's mappings, and of pools, before a model was built."""


class Chunk(NamedTuple):
    """A mapping that malloc has made for one block."""

    start: int
    size: int


class MemoryReader(NamedTuple):
    """The functions that read memory. Tests replace them by functions on memory that does not exist."""

    populated: Callable[[int, int], NDArray[np.bool_]]
    """(start, end) -> for each page, whether it exists."""
    read_header: Callable[[int, int], Optional[bytes]]
    """(address, length) -> the bytes, or None if they are not mapped."""


def find_extents(libc: Libc, starts_before: Optional[MappingStarts] = None) -> List[Extent]:
    """Return the anonymous memory in the large malloc blocks of this process, without their first pages.

    If `starts_before`, the mappings from before the build, is given, the result also has later blocks of at least
    ``MIN_BLOCK_BYTES``, and later pools.

    The first page of a block has malloc's header and, if the block is a Python object, the object's header, whose
    reference count may be written at any time.

    Raises:
        PageSharingUnavailable: it is not certain which memory that is.
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
    """Return the start addresses of malloc's mappings and of pools, perhaps with data that looks like a mapping."""
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
    """Check on a test block all assumptions about malloc; raise PageSharingUnavailable if one is wrong."""
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
    """Raise PageSharingUnavailable unless count and total size of the mappings equal malloc's counters."""
    if count != malloc_count.block_count or total % malloc_count.modulus != malloc_count.total_bytes:
        raise PageSharingUnavailable(
            f"found {count} malloc mappings of {total % malloc_count.modulus} bytes, "
            f"malloc counts {malloc_count.block_count} of {malloc_count.total_bytes}"
        )


def find_chunks(span: Sequence[AddressRange], reader: MemoryReader) -> Iterator[Chunk]:
    """Find the malloc mappings in regions that follow each other without a gap, in order and without overlap."""
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
    """Find the regions that consist of one or more pools, and overlap no malloc mapping."""
    chunk_ranges = sorted((chunk.start, chunk.start + chunk.size) for chunk in found)
    for span in spans:
        for region in span:
            if region.is_anonymous and (region.end - region.start) % POOL_BYTES == 0:
                after = bisect.bisect_left(chunk_ranges, (region.end, 0))
                if not after or chunk_ranges[after - 1][1] <= region.start:
                    yield region.start, region.end


def mapping_size(header: Optional[bytes]) -> int:
    """Return the size in the header of a malloc mapping; 0 if the bytes are not such a header."""
    if header is None or len(header) != _HEADER.size:
        return 0
    before, size = _HEADER.unpack(header)
    # One comparison checks that the flags are right and that the size is a multiple of a page.
    if before != 0 or size % PAGE != _IS_MMAPPED:
        return 0
    return int(size) - _IS_MMAPPED


def anonymous_parts(span: Sequence[AddressRange], start: int, end: int) -> Iterator[Extent]:
    """Yield the parts of a range within a span that are anonymous, not mapped from a file by now."""
    first = max(bisect.bisect_right(span, (start, end, True)) - 1, 0)
    for region in span[first:]:
        if region.start >= end:
            return
        low, high = max(start, region.start), min(end, region.end)
        if region.is_anonymous and low < high:
            yield low, high
