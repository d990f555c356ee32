"""Memory of this process: retained free memory, unused library pages, and whether sharing is worth a holder.

The process retains memory that a predict has freed for the next predict, because getting new pages from the kernel
takes longer than filling them. The C library retains freed memory by default, but not large blocks that it has put in
separate mappings, as page sharing requires during a build.

The C library's own limit of retained memory is not sufficient. It counts only the free memory at the end of the heap,
although the free memory between used blocks may be many times larger, and it does not count memory that an engine's
allocator retains. So this module compares the private memory that the kernel reports with a limit, and releases
retained memory when the process is idle.

The module also drops pages of libraries that are needed only at the start or for a build. They then no longer count as
memory of the process, but stay in the kernel's page cache, from which the next use maps them again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from typing import Callable, Iterable, Iterator, Mapping, Tuple

import numpy as np

from weightd_worker.pagesharing import keep_blocks_in_heap
from weightd_worker.pagesharing.libc import PAGE, libc, unsupported_reason

# Maximum number of bytes by which retained memory may increase the private memory of the process.
MAX_RETAINED_BYTES = 64 * 1024 * 1024

# Minimum number of seconds between two releases in `limit_retained`. After a release, the next predict of a large model
# may have to allocate all its memory again, which can take as long as the predict itself.
_RELEASE_INTERVAL_S = 60.0


class MallocTuner:
    """Controls how much freed memory this process retains. It retains none until `retain_freed_memory` is called.

    Args:
        release_engine_memory: function that makes the engine release the memory that its allocator retains.
    """

    def __init__(self, release_engine_memory: Callable[[], None]) -> None:
        self._release_engine_memory = release_engine_memory
        self._is_retaining = False
        self._baseline_bytes = 0
        self._next_release_at = 0.0

    def retain_freed_memory(self) -> None:
        """Retain freed memory from now on. Call it after the weights are shared."""
        if not unsupported_reason():
            keep_blocks_in_heap()
            libc().set_trim_threshold(MAX_RETAINED_BYTES)
            self._is_retaining = True
            self._baseline_bytes = private_bytes()

    def limit_retained(self) -> None:
        """Release retained memory if it exceeds the limit. If private memory still exceeds it, raise the limit."""
        if (
            self._is_retaining
            and private_bytes() > self._baseline_bytes + MAX_RETAINED_BYTES
            and time.monotonic() >= self._next_release_at
        ):
            self.release_retained()
            self._baseline_bytes = max(self._baseline_bytes, private_bytes())
            self._next_release_at = time.monotonic() + _RELEASE_INTERVAL_S

    def release_retained(self) -> None:
        """Release the memory that the engine and the C library retain, if `retain_freed_memory` was called."""
        if self._is_retaining:
            self._release_engine_memory()
            self.trim()

    def trim(self) -> None:
        """Release the free memory of the C library, even if `retain_freed_memory` was not called."""
        if not unsupported_reason():
            libc().trim_heap()


def private_bytes() -> int:
    """Return the number of bytes of this process's resident memory that are not mapped from files."""
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - a path object costs as much as the reading
        resident, shared = file.read().split()[1:3]
    return (int(resident) - int(shared)) * PAGE


# List of this process's mappings. /proc/self/smaps would be slow, because the kernel counts every page of the model.
_MAPS = "/proc/self/maps"
_PAGEMAP = "/proc/self/pagemap"

# Index of the path in the words of a line of /proc/self/maps. A mapping without a file has no path.
_PATH_FIELD = 5

# Bits of a page's entry in /proc/self/pagemap: it is in memory; it is swapped out; it is a page of a file or shared.
_PRESENT, _SWAPPED, _FILE = 1 << 63, 1 << 62, 1 << 61


def drop_unchanged_pages() -> None:
    """Drop the pages of libraries' code and constants from this process. The kernel maps them again when they are used.

    Only mappings that are not writable and have no private page are dropped. The dynamic loader writes relocations to
    some pages before it makes them read-only. Dropping such private pages would break the library.
    """
    if unsupported_reason():
        return
    # Ignore errors: after an error, the pages only continue to count as memory of the process.
    with contextlib.suppress(OSError):
        with open(_MAPS, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - a path object costs memory
            mappings = list(library_mappings(file))
        with open(_PAGEMAP, "rb", buffering=0) as pagemap:  # noqa: PTH123 - a path object costs memory
            entries = [
                os.pread(pagemap.fileno(), (end - begin) // PAGE * 8, begin // PAGE * 8) for begin, end in mappings
            ]
        unchanged = list(map(is_unchanged, entries))  # a list: run numpy completely before its pages are dropped
        for begin, end in itertools.compress(mappings, unchanged):
            libc().drop_file_pages(begin, end - begin)


def library_mappings(lines: Iterable[str]) -> Iterator[Tuple[int, int]]:
    """Yield begin and end of each mapping in /proc/PID/maps, given as `lines`, of a library that is not writable."""
    for line in lines:
        words = line.split()
        if len(words) > _PATH_FIELD and "w" not in words[1] and ".so" in words[_PATH_FIELD]:
            begin, _, end = words[0].partition("-")
            yield int(begin, 16), int(end, 16)


def is_unchanged(entries: bytes) -> bool:
    """Return whether a mapping has no private page. `entries` are the entries of its pages in /proc/PID/pagemap."""
    flags = np.frombuffer(entries, np.uint64)
    is_present, is_swapped, is_of_file = ((flags & np.uint64(bit)) != 0 for bit in (_PRESENT, _SWAPPED, _FILE))
    return len(flags) > 0 and not bool((is_swapped | (is_present & ~is_of_file)).any())


HOLDER_COST_BYTES: Mapping[str, int] = {"spawned": 32 << 20, "forked": 8 << 20}
"""Private memory of a holder in bytes, by how the holder is started: measured with both CPU engines, plus a margin."""

_LARGE_MODEL_FACTOR = 8


def is_holder_worthwhile(nbytes: int, process_count: int, holder_cost_bytes: int) -> bool:
    """Return whether sharing the weights saves more memory than the holder process takes.

    This is the case if the sharing processes together save at least the holder's private memory. A holder that is much
    smaller than the model is always worthwhile: workers that are started later save memory as well, and sharing removes
    duplicate and empty pages of a model (with MindSpore Lite half of the pages, even for a single worker).

    Args:
        nbytes: the size of the built model in bytes.
        process_count: the number of processes that would share the model; 0 to use a holder in any case.
        holder_cost_bytes: the private memory of a holder in bytes.
    """
    return (
        not process_count
        or nbytes * (process_count - 1) >= holder_cost_bytes
        or nbytes >= _LARGE_MODEL_FACTOR * holder_cost_bytes
    )
