"""Memory of processes, files and the host, as the kernel reports it."""

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
        private_bytes: the pages that no other process maps. The exit of the process would free them.
        anonymous_bytes: the pages without a file, including pages that the process shares with the process from which
            it was forked. A process that was not forked would have all these pages for itself.
    """

    pss_bytes: int
    private_bytes: int
    anonymous_bytes: int


def read_process_memory(pid: int) -> ProcessMemory | None:
    """Return the memory of a process; None if the process has exited or this user may not read its memory figures."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()[1:]
        sizes = {words[0]: int(words[1]) * 1024 for words in map(str.split, lines)}
        return ProcessMemory(sizes["Pss:"], sizes["Private_Clean:"] + sizes["Private_Dirty:"], sizes["Anonymous:"])
    except (OSError, ValueError, KeyError):
        return None


def host_memory_bytes() -> int:
    """Return the maximum memory of this process in bytes: the host's memory, or a lower limit of the control group."""
    host = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    group = cgroup.memory()
    limits = [] if group is None else [each for each in (group.limit_bytes, group.high_bytes) if each is not None]
    return min([host, *limits])


def free_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return how many bytes a new process could allocate now without swapping or an OOM kill; 0 if unknown.

    Args:
        meminfo: the file with the host's memory figures, see proc_meminfo(5).
    """
    group = cgroup.free_bytes()
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text("ascii").splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return 0
    return available if group is None else min(available, group)


def trim_heap() -> None:
    """Return the free memory of the C allocator to the kernel. This takes a few milliseconds for each 50 MiB.

    Otherwise the allocator would keep the memory of large frames after they are freed. The alternative, the allocator's
    option M_MMAP_THRESHOLD, maps each large block anew, so that receiving and returning 8 MiB takes three times as
    long.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


def resident_bytes(path: Path) -> int | None:
    """Return how many bytes of a file are in the page cache (mincore(2)); 0 if the file cannot be opened.

    Return None if the number is unknown, for example because the service manager forbids the system call.
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
    # This calls mmap(2) directly, because Python's mmap does not expose the address of a read-only mapping.
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
