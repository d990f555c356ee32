"""What a process holds: descriptors, threads, mappings, memory; and whether that has grown."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from testkit import memory

MIB = 1024 * 1024


@dataclass(frozen=True)
class Usage:
    """Of one process; memory in bytes."""

    fds: int
    threads: int
    maps: int
    rss: int
    pss: int

    def __str__(self) -> str:
        return (
            f"{self.fds} fds, {self.threads} threads, {self.maps} mappings, "
            f"RSS {self.rss / MIB:.1f} MiB, PSS {self.pss / MIB:.1f} MiB"
        )


def usage(pid: int) -> Usage:
    """Measure a process now.

    Raises:
        ProcessLookupError: it is gone.
    """
    proc = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        fds = sum(1 for _ in (proc / "fd").iterdir())
        maps = len((proc / "maps").read_text().splitlines())
        rss = int(status["VmRSS"].split()[0]) * 1024
    except (FileNotFoundError, KeyError):
        raise ProcessLookupError(f"no process {pid}") from None
    return Usage(fds, int(status["Threads"]), maps, rss, memory.pss(pid))


def growth(before: Usage, after: Usage, tolerance: Usage) -> list[str]:
    """Return what has grown by more than is tolerated."""
    grown: list[str] = []
    for name, most in dataclasses.asdict(tolerance).items():
        least, now = getattr(before, name), getattr(after, name)
        if now - least > most:
            grown.append(f"{name} grew from {least} to {now}, {most} more are tolerated")
    return grown
