"""Memory that a predict has freed is kept for the next one: its pages cost more than most engines take to fill them.

Of itself the C library does so, too; not where it was told to give large blocks mappings of their own, which is how
weights can be shared. It counts only what is free at the end of its heap, and holes may be many times that. And what
an engine's own allocator keeps, it does not count at all. So what is kept has a bound here, by what the kernel says,
and it is given back when nothing is asked.
"""

from __future__ import annotations

import time
from typing import Callable

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
