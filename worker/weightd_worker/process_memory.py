"""The memory of this process: what the C library keeps, what libraries have mapped, and whether a holder is worth it.

Memory that a predict has freed is kept for the next one: its pages cost more than most engines take to fill them. Of
itself the C library does so, too; not where it was told to give large blocks mappings of their own, which is how
weights can be shared. It counts only what is free at the end of its heap, and holes may be many times that. And what
an engine's own allocator keeps, it does not count at all. So what is kept has a bound here, by what the kernel says,
and it is given back when nothing is asked.

Pages of libraries that only the start or a build needs are dropped: they do not count for the process, and stay in the
page cache, from where they come again when they are used.
"""

from __future__ import annotations

import contextlib
import time
from typing import Callable, Iterable, Iterator, Mapping, Tuple

from weightd_worker.pagesharing.libc import PAGE, libc, unsupported_reason

# Larger blocks are mapped, and cost their pages each time. Before 2.35 glibc takes no larger number.
_MMAP_THRESHOLD_BYTES = 32 * 1024 * 1024

# Beyond what the process had when it began to keep.
MAX_RETAINED_BYTES = 64 * 1024 * 1024

# A large model's next predict may take all of it anew, which costs as much again as that predict.
_RELEASE_INTERVAL_S = 60.0


class MallocTuner:
    """The freed memory of this process, of which nothing is kept before `retain_freed_memory`.

    Args:
        release_engine_memory: has the engine give back what it keeps by itself.
    """

    def __init__(self, release_engine_memory: Callable[[], None]) -> None:
        self._release_engine_memory = release_engine_memory
        self._is_retaining = False
        self._baseline_bytes = 0
        self._next_release_at = 0.0

    def retain_freed_memory(self) -> None:
        """Keep what is freed from now on: all that is shared is shared."""
        if not unsupported_reason():
            libc().set_mmap_threshold(_MMAP_THRESHOLD_BYTES)
            libc().set_trim_threshold(MAX_RETAINED_BYTES)
            self._is_retaining = True
            self._baseline_bytes = private_bytes()

    def limit_retained(self) -> None:
        """Give back what is kept if that is too much, as far as this can be told: what is left then is needed."""
        if (
            self._is_retaining
            and private_bytes() > self._baseline_bytes + MAX_RETAINED_BYTES
            and time.monotonic() >= self._next_release_at
        ):
            self.release_retained()
            self._baseline_bytes = max(self._baseline_bytes, private_bytes())
            self._next_release_at = time.monotonic() + _RELEASE_INTERVAL_S

    def release_retained(self) -> None:
        """Give back what is kept."""
        if self._is_retaining:
            self._release_engine_memory()
            self.trim()

    def trim(self) -> None:
        """Give back what the C library has, whether it is to keep anything or not."""
        if not unsupported_reason():
            libc().trim_heap()


def private_bytes() -> int:
    """Return how much memory of this process is in no file."""
    with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - a path object costs as much as the reading
        resident, shared = file.read().split()[1:3]
    return (int(resident) - int(shared)) * PAGE


_SMAPS = "/proc/self/smaps"

# A mapping without a file has no path.
_PATH_FIELD = 5


def drop_unchanged_pages() -> None:
    """Let go of each page of a library that this process has not changed and cannot: its code and its constants."""
    if unsupported_reason():
        return
    # Not to count less is no failure.
    with contextlib.suppress(OSError):
        with open(_SMAPS, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - a path object costs memory
            mappings = list(unchanged_mappings(file))
        for begin, end in mappings:
            libc().drop_file_pages(begin, end - begin)


def unchanged_mappings(lines: Iterable[str]) -> Iterator[Tuple[int, int]]:
    """Yield begin and end of each mapping of a library that cannot be written to, and has no page of its own.

    What a loader has put right before it was protected is such a page: without it the library would be of no use.

    Args:
        lines: of /proc/PID/smaps.
    """
    address_range, is_candidate = "", False
    for line in lines:
        words = line.split()
        if not words[0].endswith(":"):
            address_range, is_candidate = (
                words[0],
                "w" not in words[1] and len(words) > _PATH_FIELD and ".so" in words[_PATH_FIELD],
            )
        elif words[0] == "Anonymous:" and is_candidate and words[1] == "0":
            begin, _, end = address_range.partition("-")
            yield int(begin, 16), int(end, 16)


HOLDER_COST_BYTES: Mapping[str, int] = {"spawned": 32 << 20, "forked": 8 << 20}
"""What a holder takes for itself, in bytes, by its origin: measured with both engines, and some more."""

_LARGE_MODEL_FACTOR = 8


def is_holder_worthwhile(nbytes: int, process_count: int, holder_cost_bytes: int) -> bool:
    """Return whether others have less of their own by what a process costs that holds so many bytes for them.

    Where it costs little beside them it is also worth what it spares the next one that is needed, and the pages that an
    engine has twice or leaves empty: with MindSpore Lite half of them, even for one worker.

    Args:
        nbytes: that were built.
        process_count: how many processes would share them; 0 if that is not asked.
        holder_cost_bytes: what the holder costs, in bytes.
    """
    return (
        not process_count
        or nbytes * (process_count - 1) >= holder_cost_bytes
        or nbytes >= _LARGE_MODEL_FACTOR * holder_cost_bytes
    )
