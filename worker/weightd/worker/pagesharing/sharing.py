"""The verbs of page sharing: hold writes pages of this process to a store, join takes equal ones from it."""

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
from .errors import Unavailable
from .hashing import ZERO_PAGE, hash_pages
from .libc import PAGE, Libc, libc, unsupported
from .maps import Pagemap
from .remap import BLOCK, Remapper, ZeroDropper, affordable_exchanges
from .runs import Run
from .store import NewStore, OpenStore, offset_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LEAST_ZERO_PAGES = 16
"""Fewer zero pages in a row are treated as any other page: to leave them out would cut a mapping in three."""


@dataclass(frozen=True)
class Sharing:
    """What a hold or a join has done."""

    shared_bytes: int
    """Bytes of this process that are now mapped from the store."""
    zero_bytes: int
    """Bytes that were all zeros and were given back."""
    examined_bytes: int
    """Bytes of this process that were looked at."""
    seconds: float


class Pages(NamedTuple):
    """Pages of this process that may be exchanged, by ascending address, and the hashes of their contents."""

    addresses: NDArray[np.uint64]
    hashes: NDArray[np.uint64]


def prepare() -> None:
    """Have the C library allocate large blocks such that they can be shared: call it before loading the engine.

    By itself malloc may put them into its heap, among everything else. The same can be had from outside with
    the environment variable ``MALLOC_MMAP_THRESHOLD_=1048576``. Where pages cannot be shared it does nothing.
    """
    if not unsupported():
        libc().give_own_mappings_from(chunks.LARGE)


def begin() -> Optional[chunks.Starts]:
    """Have the C library give smaller blocks mappings of their own, too, until `hold` or `join`: before each build.

    Always would be too dear: blocks that each predict takes and frees would be mapped each time.

    Returns:
        What `hold` and `join` are to be given, so that they look at these blocks.
    """
    if unsupported():
        return None
    try:
        before = chunks.starts()
    except OSError:
        return None
    libc().give_own_mappings_from(chunks.LEAST)
    return before


def block_bytes() -> Optional[int]:
    """Return the size from which blocks get mappings of their own by now; None where the C library decides."""
    return None if unsupported() else libc().block_bytes


def restore(size: Optional[int]) -> None:
    """Set what `block_bytes` has returned earlier."""
    if size is not None:
        libc().give_own_mappings_from(size)


def hold(store: str, before: Optional[chunks.Starts] = None) -> Sharing:
    """Write the large private memory of this process to a new store, and use the store's pages from then on.

    Each piece is mapped from the store as soon as it is written, so there is never a second copy of it all.
    Nothing is forced to disk here: see ``evict``.

    Args:
        store: path of the store; no file may be there.
        before: what `begin` returned.

    Raises:
        Unavailable: if that cannot be done. The process is as correct as before, and there is no store.
    """
    started = time.perf_counter()
    with _still():
        c = libc()
        pages, zero_bytes = _eligible(c, before)
        examined = len(pages.addresses) * PAGE + zero_bytes
        shared = _write_store(c, store, pages)
        c.give_back_free_memory()
    return Sharing(shared, zero_bytes, examined, time.perf_counter() - started)


def join(store: str, before: Optional[chunks.Starts] = None) -> Sharing:
    """Use the store's pages in the place of own pages that are equal to them.

    Args:
        store: path of a store that another process of the same user has made by ``hold``.
        before: what `begin` returned.

    Raises:
        Unavailable: if that cannot be done. The process is as correct as before.
    """
    started = time.perf_counter()
    with _still():
        c = libc()
        opened = OpenStore(store, c)
        try:
            os.posix_fadvise(opened.fd, 0, 0, os.POSIX_FADV_WILLNEED)  # read from disk while we hash
            pages, zero_bytes = _eligible(c, before)
            examined = len(pages.addresses) * PAGE + zero_bytes
            shared = _map_equal(c, opened, pages)
        finally:
            opened.close()
        c.give_back_free_memory()
    return Sharing(shared, zero_bytes, examined, time.perf_counter() - started)


@contextlib.contextmanager
def _still() -> Generator[None, None, None]:
    """Keep this process from moving memory about for a while, and give every failure one name."""
    # What is allocated from here on is no model.
    prepare()
    if tracemalloc.is_tracing():
        raise Unavailable("tracemalloc is on: it writes to its tables at any time")
    collecting = gc.isenabled()
    # Nothing old may be freed meanwhile: its address could then be used for something of ours.
    gc.collect()
    gc.disable()
    try:
        yield
    except (OSError, MemoryError) as error:
        raise Unavailable(f"sharing pages failed: {str(error) or 'out of memory'}") from error
    finally:
        if collecting:
            gc.enable()


def _eligible(c: Libc, before: Optional[chunks.Starts]) -> Tuple[Pages, int]:
    """Hash the pages that may be exchanged; drop those that are zero, and count these bytes."""
    addresses = _populated(chunks.find(c, before))
    hashes = np.empty(len(addresses), dtype=np.uint64)
    starts = runs.run_starts(addresses, PAGE)
    for begin, end in _bounds(starts, len(addresses)):
        hash_pages(int(addresses[begin]), hashes[begin:end])
    zero = runs.long_runs_of(hashes == ZERO_PAGE, starts, _LEAST_ZERO_PAGES)
    zero_bytes = _drop_zeros(c, addresses[zero])
    return Pages(addresses[~zero], hashes[~zero]), zero_bytes


def _populated(extents: List[chunks.Extent]) -> NDArray[np.uint64]:
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
            for begin, end in _bounds(runs.run_starts(addresses, PAGE), len(addresses))
        )
    finally:
        dropper.close()


def _write_store(c: Libc, path: str, pages: Pages) -> int:
    wanted = _worth_storing(pages.addresses)
    count = sum(run.pages for run in wanted)
    hashes = [pages.hashes[run.first : run.first + run.pages] for run in wanted]
    store = NewStore(path, count)
    try:
        shared = _write_and_share(c, store, wanted)
        store.finish(np.concatenate([pages.hashes[:0], *hashes]))
    except BaseException:
        store.discard()
        raise
    return shared


def _worth_storing(addresses: NDArray[np.uint64]) -> List[Run]:
    """All runs of pages, or the longest of them if there are more than mappings to be had.

    ``first`` is the index among the own pages here: places in the store are given to the runs that stay.
    """
    every = [
        Run(int(addresses[begin]), begin, end - begin)
        for begin, end in _bounds(runs.run_starts(addresses, PAGE), len(addresses))
    ]
    return runs.longest(every, affordable_exchanges())


def _write_and_share(c: Libc, store: NewStore, wanted: List[Run]) -> int:
    size = offset_of(store.pages)
    mapped_at = c.map_file(store.fd, size)
    try:
        remapper = Remapper(c, store.fd, mapped_at)
        shared = page = 0
        for run in wanted:
            for done in range(0, run.pages * PAGE, BLOCK):
                length = min(BLOCK, run.pages * PAGE - done)
                store.write_page(page, run.address + done, length)
                shared += remapper.share(run.address + done, offset_of(page), length)
                page += length // PAGE
        return shared
    finally:
        c.unmap(mapped_at, size)


def _map_equal(c: Libc, store: OpenStore, pages: Pages) -> int:
    found = runs.match(pages.addresses, pages.hashes, store.hashes(), PAGE)
    remapper = Remapper(c, store.fd, store.address)
    return sum(
        remapper.share(run.address, offset_of(run.first), run.pages * PAGE)
        for run in runs.longest(list(found), affordable_exchanges())
    )


def _bounds(starts: NDArray[np.intp], length: int) -> List[Tuple[int, int]]:
    """Turn the first index of each run into pairs (first, one past the last)."""
    begins = [int(start) for start in starts]
    return list(zip(begins, [*begins[1:], length]))
