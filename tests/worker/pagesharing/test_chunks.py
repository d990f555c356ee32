from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Dict, List, Tuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_worker.pagesharing import PageSharingUnavailable, chunks
from weightd_worker.pagesharing.chunks import AddressRange, MemoryReader
from weightd_worker.pagesharing.libc import PAGE, Libc, MappedBlocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

Heads = Dict[int, Tuple[int, int]]


def reader(heads: Heads) -> MemoryReader:
    """Return memory in which only these pages exist, as a map from page number to its first two words."""

    def populated(start: int, end: int) -> NDArray[np.bool_]:
        return np.array([page in heads for page in range(start // PAGE, end // PAGE)], dtype=np.bool_)

    def head(address: int, length: int) -> bytes:
        assert length == 16
        return struct.pack("<QQ", *heads[address // PAGE])

    return MemoryReader(populated, head)


def region(first: int, last: int, anonymous: bool = True) -> AddressRange:
    return AddressRange(first * PAGE, last * PAGE, anonymous)


def walk(span: List[AddressRange], heads: Heads) -> List[Tuple[int, int]]:
    """Return the chunks that are found, in pages."""
    return [(chunk.start // PAGE, chunk.size // PAGE) for chunk in chunks.find_chunks(span, reader(heads))]


@pytest.mark.parametrize(
    ("before", "size", "is_header"),
    [
        (0, PAGE | 2, True),
        (0, (1 << 40) | 2, True),
        (PAGE, PAGE | 2, False),  # It is not the first block of its mapping.
        (0, PAGE, False),  # The flag is missing.
        (0, PAGE | 1, False),  # It is an ordinary block.
        (0, PAGE | 3, False),  # The flags exclude each other.
        (0, 2, False),  # The size is missing.
        (0, PAGE + 16 | 2, False),  # The size is not a multiple of the page size.
        (0, 0, False),
    ],
)
def test_recognizes_header(before: int, size: int, is_header: bool) -> None:
    assert chunks.mapping_size(struct.pack("<QQ", before, size)) == (size - 2 if is_header else 0)


def test_unmapped_memory_has_no_header() -> None:
    assert [chunks.mapping_size(gone) for gone in (None, bytes(8))] == [0, 0]


HEAD = (0, 4 * PAGE | 2)


@pytest.mark.parametrize(
    ("span", "heads", "found"),
    [
        # A chunk must fit into its span.
        ([region(10, 14)], {10: HEAD}, [(10, 4)]),
        ([region(10, 13)], {10: HEAD}, []),
        ([region(8, 20)], {17: HEAD}, []),
        # A chunk may cover parts that map a file, but does not begin in one.
        ([region(10, 11), region(11, 13, anonymous=False), region(13, 20)], {10: HEAD, 14: HEAD}, [(10, 4), (14, 4)]),
        ([region(10, 20, anonymous=False)], {10: HEAD}, []),
        # Bytes inside a chunk that resemble a header are data.
        ([region(0, 12)], {2: (0, 6 * PAGE | 2), 3: HEAD, 6: HEAD, 8: HEAD}, [(2, 6), (8, 4)]),
    ],
)
def test_finds_chunks(span: List[AddressRange], heads: Heads, found: List[Tuple[int, int]]) -> None:
    assert walk(span, heads) == found


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=8), st.integers(1, 4), st.data())
def test_finds_all_chunks_among_other_memory(layout: List[Tuple[int, int]], window: int, data: st.DataObject) -> None:
    heads: Heads = {}
    expected: List[Tuple[int, int]] = []
    position = 1
    for gap, size in layout:
        for page in range(position, position + gap):
            if data.draw(st.booleans()):
                heads[page] = data.draw(st.sampled_from([(0, 0), (1, 2), (0, PAGE | 1), (PAGE, PAGE | 2)]))
        position += gap
        heads[position] = (0, size * PAGE | 2)
        expected.append((position, size))
        for page in range(position + 1, position + size):
            if data.draw(st.booleans()):
                heads[page] = data.draw(st.sampled_from([(0, 0), (0, PAGE | 2), (7, 7)]))
        position += size
    borders = [1, *data.draw(st.lists(st.integers(2, position + 1), unique=True).map(sorted)), position + 2]
    span = [region(one, other) for one, other in zip(borders, borders[1:])]
    with mock.patch.object(chunks, "_SCAN_WINDOW_BYTES", window * PAGE):
        assert walk(span, heads) == expected


@pytest.mark.parametrize(
    ("span", "found", "pools"),
    [
        ([(1, True)], [], [(0, 1)]),
        ([(3, True), (1, False), (1, True)], [], [(0, 3), (4, 5)]),
        ([(0.5, True), (1, True)], [], [(0.5, 1.5)]),
        # A region is not a pool if it maps a file, contains a malloc mapping or begins inside one.
        ([(1.5, True)], [], []),
        ([(1, False)], [], []),
        ([(2, True), (1, True)], [(0.5, 0.1)], [(2, 3)]),
        ([(0.5, True), (1, True)], [(0.25, 0.5)], []),
        ([(0.5, True), (1, True)], [(0.25, 0.25)], [(0.5, 1.5)]),
    ],
)
def test_pools_have_an_exact_size(
    span: List[Tuple[float, bool]], found: List[Tuple[float, float]], pools: List[Tuple[float, float]]
) -> None:
    position = 0
    regions: List[AddressRange] = []
    for size, anonymous in span:
        regions.append(AddressRange(position, position + int(size * chunks.POOL_BYTES), anonymous))
        position = regions[-1].end
    mappings = [chunks.Chunk(int(start * chunks.POOL_BYTES), int(size * chunks.POOL_BYTES)) for start, size in found]
    expected = [(start * chunks.POOL_BYTES, end * chunks.POOL_BYTES) for start, end in pools]
    assert list(chunks.find_pools([regions], mappings)) == expected


@pytest.mark.parametrize(
    ("start", "end", "parts"),
    [(0, 30, [(10, 12), (14, 20)]), (11, 15, [(11, 12), (14, 15)]), (12, 14, []), (16, 17, [(16, 17)]), (15, 15, [])],
)
def test_anonymous_parts(start: int, end: int, parts: List[Tuple[int, int]]) -> None:
    span = [AddressRange(10, 12, True), AddressRange(12, 14, False), AddressRange(14, 20, True)]
    assert list(chunks.anonymous_parts(span, start, end)) == parts


def test_checks_number_and_bytes_of_blocks() -> None:
    chunks.check_counts(2, 3 * PAGE, MappedBlocks(2, 3 * PAGE, 2**64))
    chunks.check_counts(2, 2**32 + PAGE, MappedBlocks(2, PAGE, 2**32))
    for other in (MappedBlocks(1, 3 * PAGE, 2**64), MappedBlocks(3, 3 * PAGE, 2**64), MappedBlocks(2, PAGE, 2**64)):
        with pytest.raises(PageSharingUnavailable, match=r"found 2 malloc mappings of .* malloc counts"):
            chunks.check_counts(2, 3 * PAGE, other)


class OtherMalloc(Libc):
    """A malloc that places blocks elsewhere and without headers; glibc's counters return the given values."""

    def __init__(self, *counts: int) -> None:
        self.counts = [MappedBlocks(count, count * ((32 << 20) + PAGE), 2**64) for count in counts]
        self.memory = np.zeros(4 * PAGE, dtype=np.uint8)
        self.freed = 0

    def mapped_blocks(self) -> MappedBlocks:
        return self.counts.pop(0)

    def malloc(self, length: int) -> int:
        return (int(self.memory.ctypes.data) + PAGE) // PAGE * PAGE + 16

    def free(self, address: int) -> None:
        self.freed += 1


@pytest.mark.parametrize("after", [0, 1])
def test_detects_replaced_malloc(after: int) -> None:
    other = OtherMalloc(0, after)
    with pytest.raises(PageSharingUnavailable, match="it was replaced or tuned"):
        chunks.check_malloc(other)
    assert other.freed == 1
