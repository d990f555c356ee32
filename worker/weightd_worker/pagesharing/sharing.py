"""Operations of page sharing: `export_pages` writes this process's pages to a store, `attach_pages` uses equal ones."""

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

_MIN_ZERO_PAGES = 16
"""Shorter runs of zero pages are treated like other pages, because leaving them out would split a mapping."""


@dataclass(frozen=True)
class PageSharingResult:
    """Result of `export_pages` or `attach_pages`."""

    shared_bytes: int
    """Bytes of this process that are now mapped from the store."""
    zero_bytes: int
    """Bytes that were all zeros and were freed."""
    examined_bytes: int
    """Bytes of this process that were examined."""
    duration_s: float


class Pages(NamedTuple):
    """Pages of this process that may be replaced, in ascending order of addresses, and their hashes."""

    addresses: NDArray[np.uint64]
    hashes: NDArray[np.uint64]


def prepare() -> None:
    """Make malloc put large blocks in separate mappings, so that they can be shared. Call this before an engine loads.

    By default malloc may put them into its heap, among all other blocks. The environment variable
    ``MALLOC_MMAP_THRESHOLD_=1048576`` has the same effect. If pages cannot be shared, the function does nothing.
    """
    if not unsupported_reason():
        libc().set_mmap_threshold(chunks.LARGE_BLOCK_BYTES)


def start_build() -> Optional[chunks.MappingStarts]:
    """Make malloc put smaller blocks in separate mappings, too, until `export_pages` or `attach_pages`.

    To be called before each build. This is not the default because the blocks that each predict allocates and frees
    would be mapped each time.

    Returns:
        The mappings that exist now, an argument of `export_pages` and `attach_pages`; None if they are not known.
    """
    if unsupported_reason():
        return None
    try:
        starts = chunks.mapping_starts()
    except OSError:
        return None
    libc().set_mmap_threshold(chunks.MIN_BLOCK_BYTES)
    return starts


def mmap_threshold_bytes() -> Optional[int]:
    """Return the size from which malloc puts blocks in separate mappings, as set here; None if malloc decides."""
    return None if unsupported_reason() else libc().mmap_threshold_bytes


def restore_mmap_threshold(threshold_bytes: Optional[int]) -> None:
    """Set a value that `mmap_threshold_bytes` has returned, unless it is None."""
    if threshold_bytes is not None:
        libc().set_mmap_threshold(threshold_bytes)


def export_pages(store_path: str, starts_before: Optional[chunks.MappingStarts] = None) -> PageSharingResult:
    """Write the large private memory of this process to a new store, and replace it by mappings of the store.

    Each part is mapped from the store as soon as it is written, so a second copy of all of it never exists. The store
    is not forced to disk, see ``evict``.

    Args:
        store_path: path of the store; no file may exist there.
        starts_before: the result of `start_build`.

    Raises:
        PageSharingUnavailable: that is not possible. The process works as before, and no store is left.
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
    """Replace pages of this process by equal pages of the store.

    Args:
        store_path: path of a store that another process of the same user has written by ``export_pages``.
        starts_before: the result of `start_build`.

    Raises:
        PageSharingUnavailable: that is not possible. The process works as before.
    """
    started = time.perf_counter()
    with _quiesce():
        c = libc()
        store = OpenStore(store_path, c)
        try:
            os.posix_fadvise(store.fd, 0, 0, os.POSIX_FADV_WILLNEED)  # read from disk during the hashing
            pages, zero_bytes = _hash_eligible_pages(c, starts_before)
            examined = len(pages.addresses) * PAGE + zero_bytes
            shared = _map_equal(c, store, pages)
        finally:
            store.close()
        c.trim_heap()
    return PageSharingResult(shared, zero_bytes, examined, time.perf_counter() - started)


@contextlib.contextmanager
def _quiesce() -> Generator[None, None, None]:
    """Collect garbage and disable its collection for a block; raise any failure as PageSharingUnavailable."""
    # Memory that is allocated from here on does not belong to the model, so small blocks go to the heap again.
    prepare()
    if tracemalloc.is_tracing():
        raise PageSharingUnavailable("tracemalloc is on, which writes to memory at any time")
    collecting = gc.isenabled()
    # Old objects must not be freed meanwhile, because memory of this package could then take their addresses.
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
    """Free runs of zero pages; return the other pages that may be replaced, and the number of freed bytes."""
    addresses = _populated_pages(chunks.find_extents(c, starts_before))
    hashes = np.empty(len(addresses), dtype=np.uint64)
    starts = runs.run_starts(addresses, PAGE)
    for begin, end in _run_bounds(starts, len(addresses)):
        hash_pages(int(addresses[begin]), hashes[begin:end])
    zero = runs.keep_long_runs(hashes == ZERO_PAGE, starts, _MIN_ZERO_PAGES)
    zero_bytes = _drop_zeros(c, addresses[zero])
    return Pages(addresses[~zero], hashes[~zero]), zero_bytes


def _populated_pages(extents: List[chunks.Extent]) -> NDArray[np.uint64]:
    """Return the addresses of the pages that exist."""
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
    """Return all runs of pages, or the longest ones if there are more than affordable mappings.

    ``first_page`` is an index into the pages of this process here. The selected runs get places in the store later.
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
    """Turn the first index of each run into pairs (first, one past the last)."""
    begins = [int(start) for start in starts]
    return list(zip(begins, [*begins[1:], length]))
