"""What processes really occupy: PSS, the proportional set size.

A private page counts in full, a page that k processes map counts 1/k in each. So the sum over the processes
of a service is the memory it takes from the machine, shared pages counted once. RSS would count them k times.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def pss(pid: int) -> int:
    """PSS of one process, in bytes; ProcessLookupError when it is gone."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    for line in rollup.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has no memory: it has exited and waits to be reaped")


def pss_total(pids: Iterable[int]) -> int:
    """PSS of several processes together, in bytes: what they take from the machine."""
    return sum(pss(pid) for pid in pids)
