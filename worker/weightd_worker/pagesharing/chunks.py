"""Which memory may be exchanged: large blocks of glibc's malloc, and pools that came with the model.

/proc/self/maps lists the mappings of this process: where each begins and ends, what may be done with it, and of which
file it is, if of any. /proc/self/pagemap has 64 bits for each page of the address space.

glibc's malloc gives a large block a mapping of its own. Such a mapping begins with two 64-bit words: the
bytes before the block in its mapping (0), and the size of the mapping, whose lowest three bits are flags:
"has its own mapping" is 2, and for such a block the other two are 0. We look for these words at the beginning
of each page of the private memory. (A block with a special alignment has a second header further in; the first
one stays. If it is resized the first one is out of date, and the sums below do not come out.)

Data could look like such a header. So the mappings that were found, all of them, small ones too, must be as
many as malloc itself says that it has, and have as many bytes in total: one that is none, or a missed one,
and nothing is touched. And it is tried out, on a block of our own, that malloc is glibc's, that it writes
headers like this, and that it counts.

What is done here must not find its own memory. So nothing in this file holds an object of
``LARGE_BLOCK_BYTES`` bytes, and nothing that this package allocates afterwards can lie in memory that was in use by
then.

Blocks below ``LARGE_BLOCK_BYTES`` are looked at only if it is known that they came with the model: malloc gives them
mappings of their own only between ``start_build`` and the exchange, and those that were there before are left out. What
the interpreter may have allocated meanwhile are tables of its own containers; nothing is put into one between the
comparison of a page and its exchange, and the first page, with its count of references, is left out.
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
"""More regions than this are refused: the list of them must stay below 1 MiB, see above. (The kernel's
usual limit is 65,530.)"""

_MAPS = Path("/proc/self/maps")
_ENTRY_BYTES = 8
_IN_MEMORY_OR_SWAP = np.uint64(0b11 << 62)


class AddressRange(NamedTuple):
    """A piece of the address space that is private to this process and that it may read and write."""

    start: int
    end: int
    is_anonymous: bool
    """Whether it is plain memory, of no file, and not the heap or a stack."""


def parse_region(line: bytes) -> Optional[AddressRange]:
    """Read one line of /proc/self/maps; None for a mapping that is shared, or not readable and writable.

    The line is ``start-end permissions offset device inode [path]``.
    """
    fields = line.split(None, 5)
    if fields[1] != b"rw-p":
        return None
    start, end = (int(address, 16) for address in fields[0].split(b"-"))
    path = fields[5].strip() if len(fields) > 5 else b""
    # a kernel may let a program give names to its memory: "[anon:...]"
    return AddressRange(start, end, fields[4] == b"0" and (not path or path.startswith(b"[anon:")))


def parse_regions(lines: Iterable[bytes]) -> List[AddressRange]:
    """Read /proc/self/maps, or lines like it; only what ``parse_region`` takes."""
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
    """Count all mappings of this process, as the kernel does against its limit."""
    with _MAPS.open("rb") as lines:
        return sum(1 for _ in lines)


def mapping_limit() -> int:
    """How many mappings a process may have."""
    return int(Path("/proc/sys/vm/max_map_count").read_text())


def contiguous_spans(found: Iterable[AddressRange]) -> Iterator[List[AddressRange]]:
    """Group regions that follow each other without a gap: what one malloc block may lie in."""
    span: List[AddressRange] = []
    for region in found:
        if span and span[-1].end != region.start:
            yield span
            span = []
        span.append(region)
    if span:
        yield span


class Pagemap:
    """Which pages exist: a page that was never written takes no memory, and reading it would be a waste."""

    def __init__(self) -> None:
        """Open /proc/self/pagemap."""
        self._fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)

    def populated(self, start: int, end: int) -> NDArray[np.bool_]:
        """For each page from ``start`` to ``end``: does it exist, in memory or in swap space?"""
        wanted = (end - start) // PAGE * _ENTRY_BYTES
        entries = os.pread(self._fd, wanted, start // PAGE * _ENTRY_BYTES)
        if len(entries) != wanted:
            raise PageSharingUnavailable("/proc/self/pagemap says nothing about a part of the memory")
        exists: NDArray[np.bool_] = (np.frombuffer(entries, dtype=np.uint64) & _IN_MEMORY_OR_SWAP) != 0
        return exists


POOL_BYTES = 256 << 20
"""MindSpore Lite's runner takes memory from the kernel itself, by libnuma, in pieces of so many bytes, and packs
weights into them. Such a piece that came with the model, and is just that, is the library's: malloc takes none so, no
stack is as large, and what lies beside other memory is not told from it and left alone."""

LARGE_BLOCK_BYTES = 1 << 20
"""Blocks from this many bytes on are looked at in any case: the interpreter has none."""

MIN_BLOCK_BYTES = 128 << 10
"""Blocks below this many bytes are left alone: what they would save, their first pages and mappings cost."""

_IS_MMAPPED = 2
_HEADER = struct.Struct("<QQ")
# The size from which blocks get a mapping adapts to what is freed, up to 32 MiB: this is beyond.
_PROBE_BYTES = (32 << 20) + 1
_SCAN_WINDOW_BYTES = 8192 * PAGE  # looked at in one go: numpy then needs 64 KiB, which malloc takes from its heap

Extent = Tuple[int, int]
"""Start and end of a piece of memory, at page boundaries."""

MappingStarts = FrozenSet[int]
"""Where the mappings are that malloc had made before a model was built."""


class Chunk(NamedTuple):
    """A mapping that malloc has made for one block."""

    start: int
    size: int


class MemoryReader(NamedTuple):
    """How memory is looked at: in tests, memory that does not exist."""

    populated: Callable[[int, int], NDArray[np.bool_]]
    """(start, end) -> for each page, whether it exists."""
    read_header: Callable[[int, int], Optional[bytes]]
    """(address, length) -> the bytes there, if there are any."""


def find_extents(libc: Libc, starts_before: Optional[MappingStarts] = None) -> List[Extent]:
    """Return the anonymous memory in the large malloc blocks of this process, less their first pages.

    Given the blocks that were there `starts_before` the model, blocks from ``MIN_BLOCK_BYTES`` on that are not among
    them count, too.

    The first page of a block has malloc's header, and the header of the Python object if the block is one (its
    reference count is written at any time).

    Raises:
        PageSharingUnavailable: if it is not certain which memory that is.
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
    """Return where malloc's mappings are now, and perhaps what only looks like one; and pools."""
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
    """Try out, on a block of our own, all that is assumed about malloc."""
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
                "malloc does not map large blocks as glibc's does by default: another malloc, or tuned?"
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
    """Raise PageSharingUnavailable unless what was found is just what malloc says that it has."""
    if count != malloc_count.block_count or total % malloc_count.modulus != malloc_count.total_bytes:
        raise PageSharingUnavailable(
            f"found {count} malloc mappings of {total % malloc_count.modulus} bytes, "
            f"malloc counts {malloc_count.block_count} of {malloc_count.total_bytes}"
        )


def find_chunks(span: Sequence[AddressRange], reader: MemoryReader) -> Iterator[Chunk]:
    """Find the malloc mappings in regions that follow each other without a gap, in order, without overlap."""
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
    """Find the regions that are one or more pools; in none of them is a malloc mapping, or part of one."""
    chunk_ranges = sorted((chunk.start, chunk.start + chunk.size) for chunk in found)
    for span in spans:
        for region in span:
            if region.is_anonymous and (region.end - region.start) % POOL_BYTES == 0:
                after = bisect.bisect_left(chunk_ranges, (region.end, 0))
                if not after or chunk_ranges[after - 1][1] <= region.start:
                    yield region.start, region.end


def mapping_size(header: Optional[bytes]) -> int:
    """The size in the header of a malloc mapping; 0 if it is none."""
    if header is None or len(header) != _HEADER.size:
        return 0
    before, size = _HEADER.unpack(header)
    # one comparison says both: the flags are just right, and the size is whole pages
    if before != 0 or size % PAGE != _IS_MMAPPED:
        return 0
    return int(size) - _IS_MMAPPED


def anonymous_parts(span: Sequence[AddressRange], start: int, end: int) -> Iterator[Extent]:
    """Cut out of a part of a span what has been mapped from a file since."""
    first = max(bisect.bisect_right(span, (start, end, True)) - 1, 0)
    for region in span[first:]:
        if region.start >= end:
            return
        low, high = max(start, region.start), min(end, region.end)
        if region.is_anonymous and low < high:
            yield low, high
