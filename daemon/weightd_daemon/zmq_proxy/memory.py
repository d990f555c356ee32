"""The memory of this process."""

from __future__ import annotations

import contextlib
import ctypes
import resource

# Only glibc has it.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

# Less than a holder's (`weightd_common.process_attributes`, not imported, to stay small): it is there again at once.
_OOM_SCORE_INCREMENT = 100
_OOM_SCORE_PATH = "/proc/self/oom_score_adj"


def raise_oom_score() -> None:
    """When memory runs out, have the kernel choose this process rather than the daemon."""
    with contextlib.suppress(OSError, ValueError), open(_OOM_SCORE_PATH, "rb+", 0) as file:
        score = min(int(file.read()) + _OOM_SCORE_INCREMENT, 1000)
        file.seek(0)
        file.write(b"%d\n" % score)


def mapped_bytes() -> int:
    """Return how much is mapped, whether it is used or not."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def trim_heap() -> None:
    """Give memory that was freed back to the kernel; this takes a few milliseconds for each 50 MiB."""
    if _malloc_trim is not None:
        _malloc_trim(0)
