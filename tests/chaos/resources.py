"""Resource use of a process (descriptors, threads, mappings and memory), and checks for its growth."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from testkit import memory

MIB = 1024 * 1024

_ARENA_BYTES = 64 * MIB


@dataclass(frozen=True)
class Usage:
    """Resource use of a process; memory in bytes."""

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
        ProcessLookupError: the process has exited.
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
    """Return a text for each resource that has grown by more than the tolerance."""
    grown: list[str] = []
    for name, most in dataclasses.asdict(tolerance).items():
        least, now = getattr(before, name), getattr(after, name)
        if now - least > most:
            grown.append(f"{name} grew from {least} to {now}, {most} more are allowed")
    return grown


def anonymous(pid: int) -> int:
    """Return the bytes of a process's memory that no file backs, shared with other processes or not.

    Raises:
        ProcessLookupError: the process has exited.
    """
    return memory.rollup(pid)["Anonymous"]


def own_by_mapping(pid: int) -> dict[str, int]:
    """Return the bytes that no other process has in memory, by kind of mapping, the largest first.

    Raises:
        ProcessLookupError: the process has exited.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text("utf-8", "replace").splitlines()
    except OSError:
        raise ProcessLookupError(f"no process {pid}") from None
    held: dict[str, int] = {}
    kind = ""
    for line in lines:
        words = line.split(None, 5)
        if not words[0].endswith(":"):
            kind = _kind(words[5] if len(words) == 6 else "", int(words[0].partition("-")[0], 16))
        elif words[0] in ("Private_Clean:", "Private_Dirty:"):
            held[kind] = held.get(kind, 0) + int(words[1]) * 1024
    return dict(sorted(held.items(), key=lambda each: -each[1]))


def _kind(name: str, address: int) -> str:
    if name.startswith("["):
        return name.strip("[]").partition(":")[0]
    if name.startswith("/memfd:"):
        return "regions"
    if name.endswith("/pages"):
        return "page store"
    if name:
        return "libraries" if ".so" in name else "files"
    # glibc aligns the heaps of its threads to this size; most other mappings are not aligned.
    return "anonymous" if address % _ARENA_BYTES else "arenas"
