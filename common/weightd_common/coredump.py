"""Core dumps: a process that has weights or clients' inputs in memory leaves neither on a disk when it crashes."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

_FILTER = Path("/proc/self/coredump_filter")


def disable_core_dumps(file: Path = _FILTER) -> None:
    """Have this process, and each that it starts, leave no core file, and no memory in any other core dump.

    A limit of 0 prevents a core file. The kernel ignores the limit where core(5) has the dump piped to a program or
    sent to a socket, and not every such program heeds it: the filter of the process leaves all memory out of any dump.
    Both are soft: for debugging they can be raised from outside, with prlimit(1) and in /proc/PID/coredump_filter.

    Args:
        file: the filter of this process, see core(5).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    # A kernel without core dumps has no such file.
    with contextlib.suppress(OSError):
        file.write_text("0\n", "ascii")
