"""Memory use of processes as PSS, the proportional set size.

A private page counts in full, and a page that k processes map counts 1/k in each. The sum over the processes of a
service therefore counts shared pages once; the sum of RSS would count them k times.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def pss(pid: int) -> int:
    """Return the PSS of a process, in bytes. Raises ProcessLookupError if the process has exited."""
    return rollup(pid)["Pss"]


def pss_anonymous(pid: int) -> int:
    """Return the anonymous part of the PSS, in bytes.

    Unrelated processes that map the same libraries reduce the file-backed part, but not this one.
    """
    return rollup(pid)["Pss_Anon"]


def pss_total(pids: Iterable[int]) -> int:
    """Return the total PSS of several processes, in bytes."""
    return sum(pss(pid) for pid in pids)


def rollup(pid: int) -> dict[str, int]:
    """Return the fields of /proc/PID/smaps_rollup, in bytes, by name."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    if not lines:
        raise ProcessLookupError(f"process {pid} has no memory: it has exited and waits to be reaped")
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in map(str.split, lines)}
