"""Memory of processes and files, as the kernel counts it, and of the host."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import NamedTuple

from weightd_daemon.platform import cgroup

MIB = 1024 * 1024


class ProcessMemory(NamedTuple):
    """Memory of a process, in bytes.

    Attributes:
        pss_bytes: the proportional set size: the process's own pages, and its share of shared pages.
        private_bytes: pages that no other process has: the exit of the process would free them.
        anonymous_bytes: pages that belong to no file, even if they are shared: the memory that the process would need
            if it had not been forked.
    """

    pss_bytes: int
    private_bytes: int
    anonymous_bytes: int


def read_process_memory(pid: int) -> ProcessMemory | None:
    """Return the memory of a process; None if the process is gone or this user may not read it."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()[1:]
        sizes = {words[0]: int(words[1]) * 1024 for words in map(str.split, lines)}
        return ProcessMemory(sizes["Pss:"], sizes["Private_Clean:"] + sizes["Private_Dirty:"], sizes["Anonymous:"])
    except (OSError, ValueError, KeyError):
        return None


def host_memory_bytes() -> int:
    """Return the memory that this process can use at most: the host's memory, or the limit of its control group."""
    host = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    group = cgroup.memory()
    limits = [] if group is None else [each for each in (group.limit_bytes, group.high_bytes) if each is not None]
    return min([host, *limits])


def free_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return how much memory a new process could take now without pushing others out; 0 if it is unknown.

    Args:
        meminfo: the kernel's file with the memory figures of the host.
    """
    group = cgroup.free_bytes()
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text("ascii").splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return 0
    return available if group is None else min(available, group)


def trim_heap() -> None:
    """Return freed memory to the kernel; takes a few milliseconds for each 50 MiB.

    After large frames, the allocator would otherwise keep the memory. The alternative, M_MMAP_THRESHOLD, maps large
    blocks anew each time, and makes an echo of 8 MiB take three times as long.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


def resident_bytes(path: Path) -> int | None:
    """Return how many bytes of the file are in memory (mincore(2)); 0 if the file cannot be opened.

    Return None if the kernel does not report it: a service manager may forbid the system call.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            return _count_resident_bytes(file.fileno(), size) if size else 0
    except OSError:
        return 0


_libc = ctypes.CDLL(None, use_errno=True)
# Only glibc has this function.
_malloc_trim = getattr(_libc, "malloc_trim", None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_MAP_FAILED = ctypes.c_void_p(-1).value


def _count_resident_bytes(descriptor: int, size: int) -> int | None:
    # Python's mmap does not expose the address of a read-only mapping.
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
