"""What processes and page stores take of the host's memory, as the kernel counts it."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import NamedTuple

from weightd_daemon.platform import cgroup

MIB = 1024 * 1024


class ProcessMemory(NamedTuple):
    """What a process takes of memory, in bytes.

    Attributes:
        pss_bytes: its proportional set size: its own pages, and its share of pages that it shares.
        private_bytes: the pages that no other process has: what its end would give back.
        anonymous_bytes: the pages that are no file's, whoever else has them, too: what it would have alone if nothing
            were forked.
    """

    pss_bytes: int
    private_bytes: int
    anonymous_bytes: int


def read_process_memory(pid: int) -> ProcessMemory | None:
    """Return what the process takes; None when it is gone or not ours to look at."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()[1:]
        sizes = {words[0]: int(words[1]) * 1024 for words in map(str.split, lines)}
        return ProcessMemory(sizes["Pss:"], sizes["Private_Clean:"] + sizes["Private_Dirty:"], sizes["Anonymous:"])
    except (OSError, ValueError, KeyError):
        return None


def host_memory_bytes() -> int:
    """Return how much memory this process may hope for: the host's, or what its control group has of it."""
    host = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    group = cgroup.memory()
    limits = [] if group is None else [each for each in (group.limit_bytes, group.high_bytes) if each is not None]
    return min([host, *limits])


def free_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return how much memory a new process could take now without anybody being pushed out; 0 where that is not known.

    Args:
        meminfo: what the kernel says of the host.
    """
    group = cgroup.free_bytes()
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text("ascii").splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return 0
    return available if group is None else min(available, group)


def trim_heap() -> None:
    """Give memory that was freed back to the kernel; takes a few milliseconds for each 50 MiB.

    The allocator keeps it else, once it has had large frames. To have it map those each time (M_MMAP_THRESHOLD) makes
    an echo of 8 MiB take three times as long.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


def resident_bytes(path: Path) -> int | None:
    """Return how much of the file is in memory (mincore(2)); 0 when it is gone.

    None when the kernel does not tell: a service manager may forbid the call.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            return _count_resident_bytes(file.fileno(), size) if size else 0
    except OSError:
        return 0


_libc = ctypes.CDLL(None, use_errno=True)
# Only glibc has it.
_malloc_trim = getattr(_libc, "malloc_trim", None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_MAP_FAILED = ctypes.c_void_p(-1).value


def _count_resident_bytes(descriptor: int, size: int) -> int | None:
    # Python's own mmap gives no address of a read-only mapping.
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        return None
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    try:
        if _libc.mincore(address, size, pages) != 0:
            return None
        return pages.raw[: len(pages)].count(1) * mmap.PAGESIZE
    finally:
        _libc.munmap(address, size)
