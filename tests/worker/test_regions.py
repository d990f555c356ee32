"""Tests of client memory: inputs are copied before use, and outputs are written only within their bounds."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
import threading
import time
from pathlib import Path
from typing import Any, Iterator, List

import numpy as np
import pytest

from weightd_common import memfd
from weightd_protocol.errors import Internal, InvalidArgument
from weightd_protocol.messages.inference import TensorSpec
from weightd_protocol.tensors import frame_of, from_frame, to_wire
from weightd_worker import regions as module
from weightd_worker.regions import RegionTable, UserFaults

_BYTES = 1 << 16

_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2


@pytest.fixture
def memory() -> Iterator[int]:
    """Return the client's descriptor of a memfd that the client has filled."""
    descriptor = memfd.create(_BYTES)
    os.pwrite(descriptor, bytes(_BYTES), 0)
    yield descriptor
    os.close(descriptor)


def punch(descriptor: int, offset: int, nbytes: int) -> None:
    """Punch a hole into a memfd."""
    function = ctypes.CDLL(None).fallocate
    mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
    assert function(descriptor, mode, ctypes.c_long(offset), ctypes.c_long(nbytes)) == 0


def allocated(descriptor: int) -> int:
    """Return how many bytes of a memfd are allocated."""
    return os.fstat(descriptor).st_blocks * 512


@pytest.fixture
def regions(memory: int) -> RegionTable:
    """Return a table with the client's memory as region 7."""
    regions = RegionTable()
    regions.map(7, os.dup(memory))
    return regions


def _read(regions: RegionTable, spec: TensorSpec, number: int, offset: int) -> Any:
    return from_frame(spec, regions.read(number, offset, spec.nbytes))


def _u8(count: int, datatype: str = "UINT8") -> TensorSpec:
    return TensorSpec("x", datatype, (count,))


@pytest.mark.parametrize("offset", [0, 1, 64, _BYTES - 24])
def test_reads_tensor_at_any_offset(regions: RegionTable, memory: int, offset: int) -> None:
    values = np.arange(6, dtype="<f4").reshape(2, 3)
    os.pwrite(memory, values.tobytes(), offset)
    array = _read(regions, TensorSpec("x", "FP32", (2, 3)), 7, offset)
    assert (array == values).all()
    assert array.flags.aligned


def test_reads_empty_tensor_at_the_end(regions: RegionTable) -> None:
    assert _read(regions, _u8(0), 7, _BYTES).shape == (0,)


def test_reads_tensor_across_holes(regions: RegionTable, memory: int) -> None:
    os.pwrite(memory, b"\1" * _BYTES, 0)
    page = mmap.PAGESIZE
    punch(memory, 2 * page, page)
    assert _read(regions, _u8(3 * page), 7, page + 5).tobytes() == b"\1" * (page - 5) + bytes(page) + b"\1" * (page + 5)
    assert _read(regions, _u8(5), 7, 4 * page).tobytes() == b"\1" * 5


def test_copies_what_it_reads(regions: RegionTable, memory: int) -> None:
    os.pwrite(memory, b"\1" * 100, 0)
    array = _read(regions, _u8(100, "BOOL"), 7, 0)
    os.pwrite(memory, b"\2" * 100, 0)
    assert (array.view(np.uint8) == 1).all()


def test_reads_hole_as_zeros(regions: RegionTable, memory: int) -> None:
    os.pwrite(memory, b"\1" * _BYTES, 0)
    punch(memory, 0, _BYTES)
    assert not _read(regions, _u8(_BYTES), 7, 0).any()
    assert allocated(memory) == 0


def test_does_not_write_to_holes(regions: RegionTable, memory: int) -> None:
    page = mmap.PAGESIZE
    punch(memory, 2 * page, page)
    present = allocated(memory)
    frame = frame_of(np.full(2 * page, 5, np.uint8))
    assert not regions.write(frame, 7, page, 2 * page)
    assert not regions.write(frame, 7, 2 * page + 1, 2 * page)
    assert allocated(memory) == present
    # After that the region rejects every write; another mapping of the same memory does not.
    assert not regions.write(frame, 7, 3 * page, 2 * page)
    regions.map(8, os.dup(memory))
    assert regions.write(frame, 8, 3 * page, 2 * page)
    assert os.pread(memory, 2 * page, 3 * page) == bytes(frame)
    assert allocated(memory) == present


@pytest.mark.parametrize("replaced", [_BYTES, mmap.PAGESIZE])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_drops_mapping_after_missing_page(
    memory: int, kind: str, replaced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REPLACE_CHUNK_BYTES", replaced)
    window = UserFaults().map(memory, _BYTES)
    copy = window.read if kind == "read" else window.write
    array = np.ones(_BYTES, np.uint8)
    assert copy(0, array)
    punch(memory, _BYTES // 2, 1)  # This range lies within a page and makes no hole.
    assert copy(0, array)
    punch(memory, 0, mmap.PAGESIZE)
    punch(memory, _BYTES // 2, _BYTES // 2)
    present = allocated(memory)
    assert not copy(0, array)
    assert not copy(0, array[:1])
    assert allocated(memory) == present


def test_allocates_no_page_while_client_punches_holes(regions: RegionTable) -> None:
    """After the last hole the client writes nothing, so a page that has memory then was allocated by the worker."""
    nbytes = 1 << 20
    memory = memfd.create(nbytes)
    regions.map(8, os.dup(memory))
    content, frame = bytes(nbytes), frame_of(np.ones(nbytes, np.uint8))
    try:
        for _ in range(30):
            os.pwrite(memory, content, 0)
            puncher = threading.Thread(target=punch, args=(memory, 0, nbytes))
            puncher.start()
            while puncher.is_alive():
                regions.read(8, 0, nbytes)
                regions.write(frame, 8, 0, nbytes)
            puncher.join()
            assert allocated(memory) == 0
    finally:
        os.close(memory)


def test_only_reads_without_userfaultfd(
    memory: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused() -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(module, "UserFaults", refused)
    module._user_faults.cache_clear()
    regions = RegionTable()
    try:
        for number in (7, 8):
            regions.map(number, os.dup(memory))
            assert not regions.write(frame_of(np.ones(8, np.uint8)), number, 0, 8)
            assert not _read(regions, _u8(8), number, 0).any()
    finally:
        module._user_faults.cache_clear()
    assert len(caplog.records) == 1
    assert "no userfaultfd for shared memory of clients: [Errno 1] Operation not permitted" in caplog.text


def test_rejects_invalid_bool_that_changes(regions: RegionTable, memory: int) -> None:
    stop = threading.Event()

    def scribble() -> None:
        while not stop.is_set():
            os.pwrite(memory, bytes([random.choice([0, 1, 2])]), 5000)

    scribbler = threading.Thread(target=scribble)
    scribbler.start()
    verdicts: List[bool] = []
    deadline = time.monotonic() + 30
    try:
        while len(verdicts) < 2000 or (len({*verdicts}) < 2 and time.monotonic() < deadline):
            try:
                assert _read(regions, _u8(10_000, "BOOL"), 7, 0).view(np.uint8).max() <= 1
                verdicts.append(True)
            except InvalidArgument:
                verdicts.append(False)
    finally:
        stop.set()
        scribbler.join()
    assert {*verdicts} == {True, False}


def test_tensors_may_overlap(regions: RegionTable, memory: int) -> None:
    os.pwrite(memory, bytes(range(100)), 0)
    one, other = _read(regions, _u8(60), 7, 0), _read(regions, _u8(60), 7, 30)
    assert regions.write(frame_of(one), 7, 20, 60)
    assert (one[30:] == other[:30]).all()
    assert os.pread(memory, 60, 20) == bytes(range(60))


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 5)])
@pytest.mark.parametrize("dtype", ["<f4", "|b1", ">f8"])
def test_writes_output_only_within_bounds(regions: RegionTable, memory: int, shape: Any, dtype: str) -> None:
    array = to_wire(np.ones(shape, dtype))
    frame = frame_of(array)
    assert regions.write(frame, 7, 1001, array.nbytes)
    assert os.pread(memory, array.nbytes + 2, 1000) == b"\0" + array.tobytes() + b"\0"
    if array.nbytes:
        assert not regions.write(frame, 7, 3000, array.nbytes - 1)
        assert os.pread(memory, 100, 3000) == bytes(100)


def test_only_reads_memory_sealed_later(memory: int) -> None:
    os.pwrite(memory, b"\5", 0)
    fcntl.fcntl(memory, 1033, 8)
    regions = RegionTable()
    regions.map(7, os.dup(memory))
    array = _read(regions, _u8(1), 7, 0)
    assert array[0] == 5
    assert not regions.write(frame_of(array), 7, 0, 1)


def test_unreadable_region_fails_its_request(regions: RegionTable, memory: int) -> None:
    regions.map(8, os.open(f"/proc/self/fd/{memory}", os.O_WRONLY))
    regions.unmap(7)
    for number in (7, 8, 9):
        with pytest.raises(Internal, match="cannot be read"):
            _read(regions, _u8(1), number, 0)
    for number in (7, 9):
        with pytest.raises(Internal, match="cannot be read"):
            regions.write(b"\1", number, 0, 1)


def test_unmapped_region_leaves_nothing(regions: RegionTable, memory: int) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text("ascii").count(f" {os.fstat(memory).st_ino} ")

    def descriptors() -> int:
        return len([*Path("/proc/self/fd").iterdir()])

    before = descriptors()
    regions.map(8, os.dup(memory))
    assert mapped() == 2
    assert descriptors() == before + 1
    regions.unmap(8)
    regions.clear()
    assert mapped() == 0
    assert descriptors() <= before
