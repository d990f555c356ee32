"""What processes really occupy: PSS, the proportional set size.

A private page counts in full, a page that k processes map counts 1/k in each. So the sum over the processes
of a service is the memory it takes from the machine, shared pages counted once. RSS would count them k times.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def pss(pid: int) -> int:
    """PSS of one process, in bytes; ProcessLookupError when it is gone."""
    return rollup(pid)["Pss"]


def pss_anonymous(pid: int) -> int:
    """The part of PSS that is in no file; which, unlike that of libraries, no stranger's process makes smaller."""
    return rollup(pid)["Pss_Anon"]


def pss_total(pids: Iterable[int]) -> int:
    """PSS of several processes together, in bytes: what they take from the machine."""
    return sum(pss(pid) for pid in pids)


def rollup(pid: int) -> dict[str, int]:
    """The sums over all mappings of a process, in bytes, by their names."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    if not lines:
        raise ProcessLookupError(f"process {pid} has no memory: it has exited and waits to be reaped")
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in map(str.split, lines)}
