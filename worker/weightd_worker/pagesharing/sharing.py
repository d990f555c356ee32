"""Operations of page sharing: `export_pages` writes pages to a page store, `attach_pages` uses the store's pages."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import tracemalloc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generator, List, NamedTuple, Optional, Tuple

import numpy as np

from . import chunks, runs
from .chunks import Pagemap
from .libc import PAGE, Libc, PageSharingUnavailable, libc, unsupported_reason
from .memory import ZERO_PAGE, hash_pages
from .remap import BLOCK_BYTES, Remapper, ZeroDropper, affordable_exchanges
from .runs import Run
from .store import NewStore, OpenStore, offset_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_MMAP_THRESHOLD_BYTES = 32 << 20
"""The largest size that glibc before 2.35 accepts as the size from which malloc puts blocks in separate mappings."""

_MIN_ZERO_PAGES = 16
"""Minimum number of consecutive pages of zeros that are freed. Shorter runs of such pages are shared like other pages,
because leaving them out would split a mapping in two."""


@dataclass(frozen=True)
class PageSharingResult:
    """Result of `export_pages` or `attach_pages`."""

    shared_bytes: int
    """Number of bytes of this process's memory that are now mapped from the store."""
    zero_bytes: int
    """Number of bytes in pages of zeros that were freed."""
    examined_bytes: int
    """Number of bytes of this process's memory that were examined."""
    duration_s: float


class Pages(NamedTuple):
    """Addresses and hashes of the pages of this process that may be replaced, in ascending order of the addresses."""

    addresses: NDArray[np.uint64]
    hashes: NDArray[np.uint64]


def prepare() -> None:
    """Make malloc put large blocks in separate mappings, so that their pages can be shared.

    Call this function before an engine is loaded. By default malloc may put large blocks into its heap, between small
    blocks. The environment variable ``MALLOC_MMAP_THRESHOLD_=1048576`` has the same effect. If this platform does not
    support page sharing, the function does nothing.
    """
    if not unsupported_reason():
        libc().set_mmap_threshold(chunks.LARGE_BLOCK_BYTES)


# The mappings that a fork server had before its forks; None in other processes.
_inherited_starts: Optional[chunks.MappingStarts] = None


def prepare_fork() -> None:
    """Record the mappings of this process, so that processes that are forked from it need not search for them.

    In a forked process, `start_build` returns these mappings. This is sufficient, because until the build malloc puts
    blocks below `LARGE_BLOCK_BYTES` in its heap, so all separate mappings of smaller blocks are from the build.
    """
    global _inherited_starts  # noqa: PLW0603 - the forked processes find the value here
    _inherited_starts = _mapping_starts()


def start_build() -> Optional[chunks.MappingStarts]:
    """Make malloc also put smaller blocks in separate mappings until `export_pages` or `attach_pages` is called.

    Call this function before each build. Smaller blocks must not stay in separate mappings after the build, because
    each predict would then map and unmap the blocks that it allocates and frees.

    Returns:
        The mappings that exist now or that `prepare_fork` has recorded, for `export_pages` and `attach_pages`; None if
        they cannot be read.
    """
    starts = _mapping_starts() if _inherited_starts is None else _inherited_starts
    if starts is not None:
        libc().set_mmap_threshold(chunks.MIN_BLOCK_BYTES)
    return starts


def _mapping_starts() -> Optional[chunks.MappingStarts]:
    if unsupported_reason():
        return None
    try:
        return chunks.mapping_starts()
    except OSError:
        return None


def keep_blocks_in_heap() -> None:
    """Make malloc put blocks in its heap, whose freed memory it uses again, instead of in separate mappings.

    A build allocates and frees several blocks for each weight, and the kernel clears each page of a new mapping.
    Without such mappings, ONNX Runtime builds a model of 192 MiB in half the time. Its pages cannot be shared.
    """
    if not unsupported_reason():
        libc().set_mmap_threshold(MAX_MMAP_THRESHOLD_BYTES)


def mmap_threshold_bytes() -> Optional[int]:
    """Return the size from which malloc puts blocks in separate mappings; None if this package has not set it."""
    return None if unsupported_reason() else libc().mmap_threshold_bytes


def restore_mmap_threshold(threshold_bytes: Optional[int]) -> None:
    """Set the size from which malloc puts blocks in separate mappings back to a result of `mmap_threshold_bytes`.

    If the argument is None, do nothing.
    """
    if threshold_bytes is not None:
        libc().set_mmap_threshold(threshold_bytes)


def export_pages(store_path: str, starts_before: Optional[chunks.MappingStarts] = None) -> PageSharingResult:
    """Write the pages of this process's large blocks to a new page store, and replace them by mappings of the store.

    Each block is replaced as soon as it is written, so that there are never two complete copies in memory. The function
    does not wait until the store is on disk, see `evict`.

    Args:
        store_path: path of the new store. No file may exist at this path.
        starts_before: the result of `start_build`.

    Raises:
        PageSharingUnavailable: the pages cannot be shared. The memory has the same bytes as before, and the incomplete
            store is removed.
    """
    started = time.perf_counter()
    with _quiesce():
        c = libc()
        pages, zero_bytes = _hash_eligible_pages(c, starts_before)
        examined = len(pages.addresses) * PAGE + zero_bytes
        shared = _write_store(c, store_path, pages)
        c.trim_heap()
    return PageSharingResult(shared, zero_bytes, examined, time.perf_counter() - started)


def attach_pages(store_path: str, starts_before: Optional[chunks.MappingStarts] = None) -> PageSharingResult:
    """Replace pages of this process by equal pages of a page store.

    Args:
        store_path: path of a store that another process of the same user has written by `export_pages`.
        starts_before: the result of `start_build`.

    Raises:
        PageSharingUnavailable: the pages cannot be shared. The memory has the same bytes as before.
    """
    started = time.perf_counter()
    with _quiesce():
        c = libc()
        store = OpenStore(store_path, c)
        try:
            os.posix_fadvise(store.fd, 0, 0, os.POSIX_FADV_WILLNEED)  # read the store while the pages are hashed
            pages, zero_bytes = _hash_eligible_pages(c, starts_before)
            examined = len(pages.addresses) * PAGE + zero_bytes
            shared = _map_equal(c, store, pages)
        finally:
            store.close()
        c.trim_heap()
    return PageSharingResult(shared, zero_bytes, examined, time.perf_counter() - started)


@contextlib.contextmanager
def _quiesce() -> Generator[None, None, None]:
    """Collect garbage, and disable the garbage collector in the block.

    An OSError or MemoryError in the block is converted to PageSharingUnavailable.
    """
    # Make malloc put smaller blocks into the heap again: the model is built, so memory that is allocated from here on
    # does not belong to it.
    prepare()
    if tracemalloc.is_tracing():
        raise PageSharingUnavailable("tracemalloc is on, which writes to memory at any time")
    collecting = gc.isenabled()
    # In the block, the garbage collector must not free old objects, because memory of this package could then get the
    # addresses of memory that the search has found.
    gc.collect()
    gc.disable()
    try:
        yield
    except (OSError, MemoryError) as error:
        raise PageSharingUnavailable(f"sharing pages failed: {str(error) or 'out of memory'}") from error
    finally:
        if collecting:
            gc.enable()


def _hash_eligible_pages(c: Libc, starts_before: Optional[chunks.MappingStarts]) -> Tuple[Pages, int]:
    """Free long runs of pages of zeros. Return all other pages that may be replaced, and the number of freed bytes."""
    addresses = _populated_pages(chunks.find_extents(c, starts_before))
    hashes = np.empty(len(addresses), dtype=np.uint64)
    starts = runs.run_starts(addresses, PAGE)
    for begin, end in _run_bounds(starts, len(addresses)):
        hash_pages(int(addresses[begin]), hashes[begin:end])
    zero = runs.keep_long_runs(hashes == ZERO_PAGE, starts, _MIN_ZERO_PAGES)
    zero_bytes = _drop_zeros(c, addresses[zero])
    return Pages(addresses[~zero], hashes[~zero]), zero_bytes


def _populated_pages(extents: List[chunks.Extent]) -> NDArray[np.uint64]:
    """Return the addresses of the pages in these ranges that exist, see `Pagemap`."""
    pagemap = Pagemap()
    try:
        parts = [
            np.flatnonzero(pagemap.populated(start, end)).astype(np.uint64) * np.uint64(PAGE) + np.uint64(start)
            for start, end in extents
        ]
    finally:
        pagemap.close()
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)


def _drop_zeros(c: Libc, addresses: NDArray[np.uint64]) -> int:
    dropper = ZeroDropper(c)
    try:
        return sum(
            dropper.drop(int(addresses[begin]), (end - begin) * PAGE)
            for begin, end in _run_bounds(runs.run_starts(addresses, PAGE), len(addresses))
        )
    finally:
        dropper.close()


def _write_store(c: Libc, path: str, pages: Pages) -> int:
    runs_to_store = _select_runs(pages.addresses)
    count = sum(run.page_count for run in runs_to_store)
    hashes = [pages.hashes[run.first_page : run.first_page + run.page_count] for run in runs_to_store]
    store = NewStore(path, count)
    try:
        shared = _write_and_share(c, store, runs_to_store)
        store.finish(np.concatenate([pages.hashes[:0], *hashes]))
    except BaseException:
        store.discard()
        raise
    return shared


def _select_runs(addresses: NDArray[np.uint64]) -> List[Run]:
    """Return all runs of consecutive pages, or only the longest ones if the kernel does not allow as many mappings.

    In the result, ``Run.first_page`` is an index into ``addresses`` and not yet the number of a page in the store.
    """
    all_runs = [
        Run(int(addresses[begin]), begin, end - begin)
        for begin, end in _run_bounds(runs.run_starts(addresses, PAGE), len(addresses))
    ]
    return runs.longest_runs(all_runs, affordable_exchanges())


def _write_and_share(c: Libc, store: NewStore, runs_to_store: List[Run]) -> int:
    size = offset_of(store.page_count)
    mapping_address = c.map_file(store.fd, size)
    try:
        remapper = Remapper(c, store.fd, mapping_address)
        shared = page = 0
        for run in runs_to_store:
            for done in range(0, run.page_count * PAGE, BLOCK_BYTES):
                length = min(BLOCK_BYTES, run.page_count * PAGE - done)
                store.write_pages(page, run.address + done, length)
                shared += remapper.share(run.address + done, offset_of(page), length)
                page += length // PAGE
        return shared
    finally:
        c.unmap(mapping_address, size)


def _map_equal(c: Libc, store: OpenStore, pages: Pages) -> int:
    found = runs.find_matches(pages.addresses, pages.hashes, store.read_hashes(), PAGE)
    remapper = Remapper(c, store.fd, store.address)
    return sum(
        remapper.share(run.address, offset_of(run.first_page), run.page_count * PAGE)
        for run in runs.longest_runs(list(found), affordable_exchanges())
    )


def _run_bounds(starts: NDArray[np.intp], length: int) -> List[Tuple[int, int]]:
    """Return the bounds of each run as pairs: the index of its first page, and the index after its last page.

    Args:
        starts: the indices at which the runs begin.
        length: the number of pages in all runs.
    """
    begins = [int(start) for start in starts]
    return list(zip(begins, [*begins[1:], length]))
