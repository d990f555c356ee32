"""Tests of arrays in shared memory: the owner of each block, and its lifetime."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from testkit.examples import examples
from weightd import shm_arena as arenas
from weightd.shm_arena import ALIGNMENT, Block, FreeList, ShmArena

_PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True)
def _small_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "_MIN_REGION_BYTES", 2 * _PAGE)


class ArenaMachine(RuleBasedStateMachine):
    """State machine of arrays in an arena: each array keeps its contents while it exists."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = ShmArena(8 * _PAGE)
        self.held: List[Tuple[Any, int]] = []
        self.written = 0

    @rule(count=st.integers(0, 3 * _PAGE), dtype=st.sampled_from(["<f4", "|u1", "<i8"]))
    def cut(self, count: int, dtype: str) -> None:
        """Allocate an array, in a region or outside."""
        array = self.arena.empty((count // np.dtype(dtype).itemsize,), dtype)
        self.written = (self.written + 1) % 128
        array[...] = self.written
        self.held.append((array, self.written))

    @rule(nbytes=st.integers(1, 3 * _PAGE))
    def take(self, nbytes: int) -> None:
        """Allocate a block for an output."""
        block = self.arena.take(nbytes)
        if block is not None:
            block.region.populate(block.offset, nbytes)
            assert os.lseek(block.region.descriptor, block.offset, os.SEEK_HOLE) >= block.offset + nbytes
            self.held.append((block.array((nbytes,), np.dtype(np.uint8)), 0))
            self.held[-1][0][...] = 0

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        """Replace an array by a view of it."""
        index = data.draw(st.integers(0, len(self.held) - 1))
        array, value = self.held[index]
        self.held[index] = array[len(array) // 2 :], value

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """Drop an array."""
        del self.held[data.draw(st.integers(0, len(self.held) - 1))]

    @rule()
    def retire(self) -> None:
        """Retire all regions, as after a lost connection."""
        self.arena.retire(self.arena.regions)

    @invariant()
    def keeps_contents(self) -> None:
        """Check that no two arrays overlap."""
        for array, value in self.held:
            assert (array == value).all()

    @invariant()
    def finds_array_by_address(self) -> None:
        """Check that a lookup by address finds the memory of the array, aligned."""
        for array, _ in self.held:
            found = self.arena.find(array)
            if found is not None and array.nbytes:
                region, offset = found
                assert os.pread(region.descriptor, array.nbytes, offset) == array.tobytes()

    @invariant()
    def keeps_its_bound(self) -> None:
        """Check the limit on all regions together."""
        assert sum(region.nbytes for region in self.arena.regions) <= 8 * _PAGE


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=examples(30), deadline=None)


def _block(arena: ShmArena, nbytes: int) -> Block:
    block = arena.take(nbytes)
    assert block is not None
    return block


def test_reuses_block_after_its_last_view() -> None:
    arena = ShmArena()
    array = arena.empty((4, 4), np.float32)
    assert array.flags.aligned
    assert array.__array_interface__["data"][0] % ALIGNMENT == 0
    view = array[1:].T
    del array
    assert _block(arena, 64).offset == ALIGNMENT
    del view
    # The most recently freed block is used first; for another size, the first block that fits.
    assert _block(arena, 64).offset == 0
    assert _block(arena, 1).offset == 0


def test_grows_and_releases_small_regions() -> None:
    arena = ShmArena()
    small = _block(arena, _PAGE)
    large = _block(arena, 5 * _PAGE + 1)
    assert [region.nbytes for region in arena.regions] == [2 * _PAGE, 6 * _PAGE]
    del small
    _block(arena, 100 * _PAGE)
    assert [region.nbytes for region in arena.regions] == [6 * _PAGE, 100 * _PAGE]
    del large


def test_closes_descriptor_with_last_array() -> None:
    arena = ShmArena()
    array = arena.empty((_PAGE,), np.uint8)
    descriptor = arena.regions[0].descriptor
    del arena
    array[:] = 7
    assert os.pread(descriptor, 1, 0) == b"\7"
    del array
    gc.collect()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


@pytest.mark.parametrize("nbytes", [1, _PAGE - 64, _PAGE, _PAGE + 1])
def test_populates_only_the_pages_of_a_block(nbytes: int) -> None:
    arena = ShmArena()
    blocks = [_block(arena, each) for each in (_PAGE, 64, nbytes, 3 * _PAGE)]
    region, offset = blocks[2].region, blocks[2].offset
    assert os.fstat(region.descriptor).st_blocks == 0
    region.populate(offset, nbytes)
    pages = (offset + nbytes - 1) // _PAGE - offset // _PAGE + 1
    assert os.fstat(region.descriptor).st_blocks * 512 == pages * _PAGE


@pytest.mark.parametrize("dtype", [object, "S3", "<c8", [("x", "<i4")]])
def test_does_not_share_unsupported_datatypes(dtype: Any) -> None:
    arena = ShmArena()
    assert arena.empty((3,), dtype).shape == (3,)
    assert not arena.regions


def test_uses_normal_arrays_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("weightd_common.memfd.create", refuse)
    arena = ShmArena()
    array = arena.empty((4096,), np.int8)
    assert array.shape == (4096,)
    assert arena.find(array) is None


def test_fork_keeps_arrays() -> None:
    arena = ShmArena()
    array = arena.empty((_PAGE,), np.uint8)
    array[:] = 1
    ready_read, ready_write = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(ready_read, 1)
        os._exit(int(array.sum()) != _PAGE)
    del array
    arena.empty((_PAGE,), np.uint8)[:] = 2
    os.write(ready_write, b"x")
    assert os.waitpid(pid, 0)[1] == 0
    os.close(ready_read)
    os.close(ready_write)


def test_fork_separates_new_arrays() -> None:
    arena = ShmArena()
    arena.empty((_PAGE,), np.uint8)[:] = 0
    assert arena.regions[0].is_unused
    pid = os.fork()
    if not pid:
        arena.empty((_PAGE,), np.uint8)[:] = 1
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not arena.empty((_PAGE,), np.uint8).any()


def test_fork_blocks_allocation_in_other_threads() -> None:
    arena = ShmArena()
    arena.before_fork()
    thread = threading.Thread(target=arena.empty, args=((_PAGE,), np.uint8))
    thread.start()
    thread.join(0.05)
    assert not arena.regions
    arena.after_fork(in_child=False)
    thread.join()
    assert arena.regions


def test_threads_never_share_a_block() -> None:
    arena = ShmArena()
    wrong: List[int] = []

    def work(value: int) -> None:
        for _ in range(200):
            array = arena.empty((100,), np.uint8)
            array[:] = value
            if not (array == value).all():
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


_NBYTES = 16 * ALIGNMENT


class FreeListMachine(RuleBasedStateMachine):
    """State machine that compares a free list with the owner of each byte."""

    def __init__(self) -> None:
        super().__init__()
        self.space = FreeList(_NBYTES)
        self.taken: Dict[int, int] = {}

    def units(self) -> str:
        """Return one letter per unit of memory: taken or free."""
        return "".join(
            "x" if any(begin <= at < begin + size for begin, size in self.taken.items()) else "."
            for at in range(0, _NBYTES, ALIGNMENT)
        )

    @rule(nbytes=st.integers(0, _NBYTES + 1))
    def take(self, nbytes: int) -> None:
        """Allocate at the first fit, if there is one."""
        size = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        expected = self.units().find("." * (size // ALIGNMENT))
        begin = self.space.take(nbytes)
        assert begin == (None if expected < 0 else expected * ALIGNMENT)
        if begin is not None:
            self.taken[begin] = size

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        """Free any block."""
        begin = data.draw(st.sampled_from(sorted(self.taken)))
        self.space.release(begin)
        del self.taken[begin]

    @invariant()
    def reports_whether_it_is_free(self) -> None:
        """Check that the list reports whether all memory is free; only then a region may be released."""
        assert self.space.is_unused == (not self.taken)


TestFreeList = FreeListMachine.TestCase
