from __future__ import annotations

import ctypes
import mmap
import os
from typing import List

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_worker.pagesharing import PageSharingUnavailable, chunks
from weightd_worker.pagesharing.chunks import AddressRange, Pagemap
from weightd_worker.pagesharing.libc import PAGE
from weightd_worker.pagesharing.memory import ProcessMemoryReader


@pytest.mark.parametrize(
    ("line", "region"),
    [
        (b"7f0000000000-7f0000100000 rw-p 00000000 00:00 0 ", AddressRange(0x7F0000000000, 0x7F0000100000, True)),
        (b"1000-2000 rw-p 00000000 00:00 0                  [anon:x y]", AddressRange(0x1000, 0x2000, True)),
        (b"1000-2000 rw-p 00000000 00:00 0                  [heap]", AddressRange(0x1000, 0x2000, False)),
        (b"1000-2000 rw-p 00003000 fe:00 77                 /a file (deleted)", AddressRange(0x1000, 0x2000, False)),
        (
            b"1000-2000 rw-p 00003000 00:0f 77                 /anon_hugepage (deleted)",
            AddressRange(0x1000, 0x2000, False),
        ),
        (b"1000-2000 rw-s 00000000 00:00 0 ", None),
        (b"1000-2000 r--p 00000000 00:00 0 ", None),
        (b"1000-2000 rwxp 00000000 00:00 0 ", None),
    ],
)
def test_parses_line_of_maps(line: bytes, region: object) -> None:
    assert chunks.parse_region(line + b"\n") == region


def test_rejects_too_many_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MAX_REGIONS", 5)
    line = b"1000-2000 rw-p 00000000 00:00 0 \n"
    assert len(chunks.parse_regions([line] * 5)) == 5
    with pytest.raises(PageSharingUnavailable, match="more than 5 memory regions"):
        chunks.parse_regions([line] * 6)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3))))
def test_spans_end_at_gaps(steps: List[List[int]]) -> None:
    regions: List[AddressRange] = []
    position = 0
    for gap, length in steps:
        regions.append(AddressRange(position + gap, position + gap + length, True))
        position += gap + length
    spans = list(chunks.contiguous_spans(regions))
    assert [region for span in spans for region in span] == regions
    assert all(one.end == other.start for span in spans for one, other in zip(span, span[1:]))
    assert all(one[-1].end < other[0].start for one, other in zip(spans, spans[1:]))


def test_reads_own_regions() -> None:
    with mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[3 * PAGE] = 1
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert any(r.start <= start and start + 8 * PAGE <= r.end and r.is_anonymous for r in chunks.read_own_regions())
        pagemap = Pagemap()
        populated = pagemap.populated(start, start + 8 * PAGE)
        pagemap.close()
        assert np.flatnonzero(populated).tolist() == [3]
        assert 0 < chunks.count_mappings() < chunks.mapping_limit()


def test_rejects_short_read_of_pagemap(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_entry(fd: int, length: int, offset: int) -> bytes:
        return bytes(8)

    pagemap = Pagemap()
    monkeypatch.setattr(os, "pread", one_entry)
    with pytest.raises(PageSharingUnavailable, match="does not cover all of the memory"):
        pagemap.populated(0, 2 * PAGE)
    pagemap.close()


def test_reading_unmapped_memory_does_not_crash() -> None:
    memory_reader = ProcessMemoryReader()
    with mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:4] = b"here"
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert memory_reader.read(address, 4) == b"here"
    assert memory_reader.read(0, 4) is None
    memory_reader.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        memory_reader.read(0, 4)
