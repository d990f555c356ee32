"""Memory of this process: retained free memory, unused library pages, and whether sharing is worth a holder.

Memory that a predict has freed is retained for the next one, because fresh pages cost more time than most engines need
to fill them. The C library retains freed memory by default, but not where it maps large blocks separately, which makes
weights shareable. Its limit counts only the free memory at the end of the heap, although holes may be
many times larger, and does not count what an engine's allocator retains. So this module limits the retained memory by
the kernel's numbers, and releases it when the process is idle.

The module also drops library pages that only the start or a build needs: they no longer count as memory of the process,
and stay in the page cache, from where they return on the next use.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from typing import Callable, Iterable, Iterator, Mapping, Tuple

import numpy as np

from weightd_worker.pagesharing.libc import PAGE, libc, unsupported_reason

# Larger blocks are mapped, and get fresh pages each time. glibc before 2.35 accepts no larger threshold.
_MMAP_THRESHOLD_BYTES = 32 * 1024 * 1024

# Limit of retained memory, in addition to the private memory of the process when it began to retain any.
MAX_RETAINED_BYTES = 64 * 1024 * 1024

# The next predict of a large model may have to allocate all of it again, which takes as long as that predict itself.
_RELEASE_INTERVAL_S = 60.0


class MallocTuner:
    """Controls how much freed memory this process retains: none before `retain_freed_memory` is called.

    Args:
        release_engine_memory: makes the engine release the memory that its allocator retains.
    """

    def __init__(self, release_engine_memory: Callable[[], None]) -> None:
        self._release_engine_memory = release_engine_memory
        self._is_retaining = False
        self._baseline_bytes = 0
        self._next_release_at = 0.0

    def retain_freed_memory(self) -> None:
        """Retain freed memory from now on. To be called when all memory that is to be shared is shared."""
        if not unsupported_reason():
            libc().set_mmap_threshold(_MMAP_THRESHOLD_BYTES)
            libc().set_trim_threshold(MAX_RETAINED_BYTES)
            self._is_retaining = True
            self._baseline_bytes = private_bytes()

    def limit_retained(self) -> None:
        """Release retained memory if it exceeds the limit. Memory that remains raises the limit."""
        if (
            self._is_retaining
            and private_bytes() > self._baseline_bytes + MAX_RETAINED_BYTES
            and time.monotonic() >= self._next_release_at
        ):
            self.release_retained()
            self._baseline_bytes = max(self._baseline_bytes, private_bytes())
            self._next_release_at = time.monotonic() + _RELEASE_INTERVAL_S

    def release_retained(self) -> None:
        """Release the retained memory of the engine and the C library, if any is retained."""
        if self._is_retaining:
            self._release_engine_memory()
            self.trim()

    def trim(self) -> None:
        """Release the free memory of the C library, even before `retain_freed_memory`."""
        if not unsupported_reason():
            libc().trim_heap()


def private_bytes() -> int:
    """Return how many bytes of this process's resident memory belong to no file."""
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - a path object costs as much as the reading
        resident, shared = file.read().split()[1:3]
    return (int(resident) - int(shared)) * PAGE


# Not smaps: for that, the kernel counts every page of the model, too.
_MAPS = "/proc/self/maps"
_PAGEMAP = "/proc/self/pagemap"

# Index of the path in a line of maps. A mapping without a file has no path.
_PATH_FIELD = 5

# Bits of a page in the pagemap: it is in memory, it is swapped out, it belongs to a file or is shared.
_PRESENT, _SWAPPED, _FILE = 1 << 63, 1 << 62, 1 << 61


def drop_unchanged_pages() -> None:
    """Drop the pages of libraries that this process cannot change and has not changed: their code and constants.

    A loader writes private pages, for relocations, before it protects them; dropping these would break the library.
    """
    if unsupported_reason():
        return
    # A failure only means that the pages still count as memory of the process.
    with contextlib.suppress(OSError):
        with open(_MAPS, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - a path object costs memory
            mappings = list(library_mappings(file))
        with open(_PAGEMAP, "rb", buffering=0) as pagemap:  # noqa: PTH123 - a path object costs memory
            entries = [
                os.pread(pagemap.fileno(), (end - begin) // PAGE * 8, begin // PAGE * 8) for begin, end in mappings
            ]
        unchanged = list(map(is_unchanged, entries))  # before any page of numpy is dropped
        for begin, end in itertools.compress(mappings, unchanged):
            libc().drop_file_pages(begin, end - begin)


def library_mappings(lines: Iterable[str]) -> Iterator[Tuple[int, int]]:
    """Yield begin and end of each library mapping that is not writable; `lines`: /proc/PID/maps."""
    for line in lines:
        words = line.split()
        if len(words) > _PATH_FIELD and "w" not in words[1] and ".so" in words[_PATH_FIELD]:
            begin, _, end = words[0].partition("-")
            yield int(begin, 16), int(end, 16)


def is_unchanged(entries: bytes) -> bool:
    """Return whether no page of a mapping is private, from the entries of its pages in the pagemap."""
    flags = np.frombuffer(entries, np.uint64)
    is_present, is_swapped, is_of_file = ((flags & np.uint64(bit)) != 0 for bit in (_PRESENT, _SWAPPED, _FILE))
    return len(flags) > 0 and not bool((is_swapped | (is_present & ~is_of_file)).any())


HOLDER_COST_BYTES: Mapping[str, int] = {"spawned": 32 << 20, "forked": 8 << 20}
"""The private memory of a holder in bytes, by its origin: measured with both engines, with a margin."""

_LARGE_MODEL_FACTOR = 8


def is_holder_worthwhile(nbytes: int, process_count: int, holder_cost_bytes: int) -> bool:
    """Return whether a holder saves enough memory to be worth its own.

    It does if the sharing processes together save at least the holder's cost. A holder that is small beside the model
    is worth its cost in any case: workers that are started later save memory, too, and sharing also saves the pages
    that an engine has twice or leaves empty (with MindSpore Lite half of its pages, even for one worker).

    Args:
        nbytes: the size of the built model, in bytes.
        process_count: how many processes would share it; 0: a holder is used in any case.
        holder_cost_bytes: the private memory of a holder, in bytes.
    """
    return (
        not process_count
        or nbytes * (process_count - 1) >= holder_cost_bytes
        or nbytes >= _LARGE_MODEL_FACTOR * holder_cost_bytes
    )
