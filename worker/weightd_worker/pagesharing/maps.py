"""What the kernel says about the memory of this process: its regions, and which of their pages exist.

/proc/self/maps lists the mappings: where each begins and ends, what may be done with it, and of which file it
is, if of any. /proc/self/pagemap has 64 bits for each page of the address space.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Iterable, Iterator, List, NamedTuple, Optional

import numpy as np

from .errors import PageSharingUnavailable
from .libc import PAGE

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_REGIONS = 100000
"""More regions than this are refused: the list of them must stay below 1 MiB, see chunks.py. (The kernel's
usual limit is 65,530.)"""

_MAPS = Path("/proc/self/maps")
_ENTRY_BYTES = 8
_IN_MEMORY_OR_SWAP = np.uint64(0b11 << 62)


class AddressRange(NamedTuple):
    """A piece of the address space that is private to this process and that it may read and write."""

    start: int
    end: int
    is_anonymous: bool
    """Whether it is plain memory, of no file, and not the heap or a stack."""


def parse_region(line: bytes) -> Optional[AddressRange]:
    """Read one line of /proc/self/maps; None for a mapping that is shared, or not readable and writable.

    The line is ``start-end permissions offset device inode [path]``.
    """
    fields = line.split(None, 5)
    if fields[1] != b"rw-p":
        return None
    start, end = (int(address, 16) for address in fields[0].split(b"-"))
    path = fields[5].strip() if len(fields) > 5 else b""
    # a kernel may let a program give names to its memory: "[anon:...]"
    return AddressRange(start, end, fields[4] == b"0" and (not path or path.startswith(b"[anon:")))


def parse_regions(lines: Iterable[bytes]) -> List[AddressRange]:
    """Read /proc/self/maps, or lines like it; only what ``parse_region`` takes."""
    found: List[AddressRange] = []
    for line in lines:
        region = parse_region(line)
        if region is not None:
            found.append(region)
        if len(found) > MAX_REGIONS:
            raise PageSharingUnavailable(f"the process has more than {MAX_REGIONS} memory regions")
    return found


def read_own_regions() -> List[AddressRange]:
    """Return the regions of this process."""
    with _MAPS.open("rb") as lines:
        return parse_regions(lines)


def count_mappings() -> int:
    """Count all mappings of this process, as the kernel does against its limit."""
    with _MAPS.open("rb") as lines:
        return sum(1 for _ in lines)


def mapping_limit() -> int:
    """How many mappings a process may have."""
    return int(Path("/proc/sys/vm/max_map_count").read_text())


def contiguous_spans(found: Iterable[AddressRange]) -> Iterator[List[AddressRange]]:
    """Group regions that follow each other without a gap: what one malloc block may lie in."""
    span: List[AddressRange] = []
    for region in found:
        if span and span[-1].end != region.start:
            yield span
            span = []
        span.append(region)
    if span:
        yield span


class Pagemap:
    """Which pages exist: a page that was never written takes no memory, and reading it would be a waste."""

    def __init__(self) -> None:
        """Open /proc/self/pagemap."""
        self._fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)

    def populated(self, start: int, end: int) -> NDArray[np.bool_]:
        """For each page from ``start`` to ``end``: does it exist, in memory or in swap space?"""
        wanted = (end - start) // PAGE * _ENTRY_BYTES
        entries = os.pread(self._fd, wanted, start // PAGE * _ENTRY_BYTES)
        if len(entries) != wanted:
            raise PageSharingUnavailable("/proc/self/pagemap says nothing about a part of the memory")
        exists: NDArray[np.bool_] = (np.frombuffer(entries, dtype=np.uint64) & _IN_MEMORY_OR_SWAP) != 0
        return exists
