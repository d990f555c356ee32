"""The memory of this process, as the kernel counts it, for who can open no file any more."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource

# Only glibc has it.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


# Less than a holder's (`weightd.shared.oom`, which is not imported, to stay small): it is there again at once.
_ABOVE_DAEMON = 100
_SCORE = "/proc/self/oom_score_adj"


def go_before_the_daemon() -> None:
    """When memory runs out, have the kernel choose this process rather than the daemon."""
    with contextlib.suppress(OSError, ValueError), open(_SCORE, "rb+", 0) as file:
        score = min(int(file.read()) + _ABOVE_DAEMON, 1000)
        file.seek(0)
        file.write(b"%d\n" % score)


class Memory:
    """Asks the kernel, over a descriptor that was opened in time."""

    def __init__(self) -> None:
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def mapped_bytes(self) -> int:
        """Return how much is mapped, whether it is used or not."""
        return self._pages()[0] * resource.getpagesize()

    def private_bytes(self) -> int:
        """Return how much is used that is no file's."""
        _, resident, shared = self._pages()
        return (resident - shared) * resource.getpagesize()

    def _pages(self) -> tuple[int, int, int]:
        mapped, resident, shared, *_ = map(int, os.pread(self._statm, 128, 0).split())
        return mapped, resident, shared

    def trim(self) -> None:
        """Give memory that was freed back to the kernel; takes a few milliseconds for each 50 MiB."""
        if _malloc_trim is not None:
            _malloc_trim(0)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._statm)
