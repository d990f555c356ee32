"""Calls to the functions of the C library that page sharing needs. A failed call raises OSError.

Importing this module does not load the C library, so that the package can be imported on any platform and can report
why pages cannot be shared there.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import platform
import sys
from typing import NamedTuple, Optional

import numpy as np


class PageSharingUnavailable(Exception):
    """Pages cannot be shared in this process. The text is the reason, for an operator.

    After this exception, the memory of the process has the same bytes as before, and the caller can continue with
    private memory.
    """


PAGE = mmap.PAGESIZE
"""Size of a memory page in bytes: 4 KiB, or 16 or 64 KiB on some aarch64 kernels."""

READ = mmap.PROT_READ
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

_MACHINES = ("x86_64", "aarch64")  # both are 64-bit and little-endian, and have the following constants in common
_MAP_SHARED = 0x01
_MAP_PRIVATE = 0x02
_MAP_FIXED = 0x10
_MAP_ANONYMOUS = 0x20
_MAP_FIXED_NOREPLACE = 0x100000  # since Linux 4.17; older kernels ignore it and may map another address
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_DONTNEED = 4
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MEMORY_FILE_SYSTEMS = (0x01021994, 0x858458F6)  # tmpfs, ramfs
_STATFS_BYTES = 256  # size of the buffer for struct statfs, which has 120 bytes and begins with f_type

_MALLINFO_FIELDS = [
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
]

_address = ctypes.c_void_p
_size = ctypes.c_size_t
_int = ctypes.c_int


class MappedBlocks(NamedTuple):
    """malloc's counters of the blocks that it has put in separate mappings."""

    block_count: int
    total_bytes: int
    """The total size of these mappings in bytes, modulo ``modulus``."""
    modulus: int
    """2**64, or 2**32 in old versions of glibc, whose counters have only 32 bits."""


class _MallInfo(ctypes.Structure):
    """``struct mallinfo``: ten ints, of which this module uses hblks and hblkhd."""

    _fields_ = [(name, ctypes.c_uint) for name in _MALLINFO_FIELDS]


class _MallInfo2(ctypes.Structure):
    """``struct mallinfo2`` (since glibc 2.33): the same fields as ``struct mallinfo``, but of type size_t."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO_FIELDS]


class Libc:
    """Calls functions of glibc by ctypes. Addresses are plain ints, and lengths are in bytes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Declare the signatures of the functions of ``library`` that this class calls."""
        self.mmap_threshold_bytes: Optional[int] = None
        """Size from which malloc puts blocks in separate mappings; None if `set_mmap_threshold` was not called."""
        self._mmap = library.mmap
        self._mmap.argtypes = (_address, _size, _int, _int, _int, ctypes.c_long)
        self._mmap.restype = _address
        self._munmap = library.munmap
        self._munmap.argtypes = (_address, _size)
        self._madvise = library.madvise
        self._madvise.argtypes = (_address, _size, _int)
        self._mincore = library.mincore
        self._mincore.argtypes = (_address, _size, _address)
        self._memcmp = library.memcmp
        self._memcmp.argtypes = (_address, _address, _size)
        self._memcpy = library.memcpy
        self._memcpy.argtypes = (_address, _address, _size)
        self._memcpy.restype = _address
        self._statfs = library.statfs
        self._statfs.argtypes = (ctypes.c_char_p, _address)
        self._malloc = library.malloc
        self._malloc.argtypes = (_size,)
        self._malloc.restype = _address
        self._free = library.free
        self._free.argtypes = (_address,)
        self._free.restype = None
        self._trim = library.malloc_trim
        self._trim.argtypes = (_size,)
        self._mallopt = library.mallopt
        self._mallopt.argtypes = (_int, _int)
        self._has_64_bit_counts = hasattr(library, "mallinfo2")
        self._mallinfo = library.mallinfo2 if self._has_64_bit_counts else library.mallinfo
        self._mallinfo.argtypes = ()
        self._mallinfo.restype = _MallInfo2 if self._has_64_bit_counts else _MallInfo

    def map_file(self, fd: int, length: int) -> int:
        """Map the first ``length`` bytes of a file read-only, and return the address of the mapping."""
        return self._checked_mmap(None, length, READ, _MAP_SHARED, fd, 0)

    def map_zeros(self, length: int) -> int:
        """Map ``length`` zero bytes read-only, and return the address. The mapping takes no memory."""
        return self._checked_mmap(None, length, READ, _MAP_PRIVATE | _MAP_ANONYMOUS, -1, 0)

    def map_over(self, address: int, length: int, fd: int, offset: int) -> None:
        """Replace the memory at ``address`` by a private, writable mapping of a part of a file."""
        self._checked_mmap(address, length, READ_WRITE, _MAP_PRIVATE | _MAP_FIXED, fd, offset)

    def map_new(self, address: int, length: int) -> None:
        """Map new memory at ``address``. Raise OSError if the address is already mapped."""
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
        got = self._checked_mmap(address, length, READ_WRITE, flags, -1, 0)
        if got != address:  # a kernel before 4.17
            self.unmap(got, length)
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))

    def is_mapped(self, address: int, length: int) -> bool:
        """Return whether every page of a range of addresses is mapped."""
        try:
            self.resident_pages(address, length)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                return False
            raise
        return True

    def unmap(self, address: int, length: int) -> None:
        """Remove a whole mapping that this package has made."""
        self._checked(self._munmap(address, length))

    def drop_private_pages(self, address: int, length: int) -> None:
        """Free private anonymous pages. Reading them returns zeros from now on."""
        self._checked(self._madvise(address, length, _MADV_DONTNEED))

    def drop_file_pages(self, address: int, length: int) -> None:
        """Drop the pages of a file mapping from this process, with their private changes.

        The next access maps them from the file again.
        """
        self._checked(self._madvise(address, length, _MADV_DONTNEED))

    def resident_pages(self, address: int, length: int) -> int:
        """Return the number of pages of a file mapping that are in memory, whether or not a process uses them."""
        flags = np.empty(-(-length // PAGE), dtype=np.uint8)
        self._checked(self._mincore(address, length, flags.ctypes.data))
        return int(np.count_nonzero(flags & 1))

    def is_equal(self, one: int, other: int, length: int) -> bool:
        """Return whether two ranges of memory are equal byte for byte."""
        return bool(self._memcmp(one, other, length) == 0)

    def copy(self, target: int, source: int, length: int) -> None:
        """Copy memory between two ranges that do not overlap."""
        self._memcpy(target, source, length)

    def is_memory_file_system(self, path: str) -> bool:
        """Return whether an existing path is on a file system that keeps its files in memory, such as tmpfs."""
        buffer = ctypes.create_string_buffer(_STATFS_BYTES)
        self._checked(self._statfs(os.fsencode(path), ctypes.addressof(buffer)))
        return ctypes.c_long.from_buffer(buffer).value in _MEMORY_FILE_SYSTEMS

    def malloc(self, length: int) -> int:
        """Allocate memory by the malloc of the process, which may be another one than glibc's."""
        address = self._malloc(length)
        if address is None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return int(address)

    def free(self, address: int) -> None:
        """Free memory from ``malloc``."""
        self._free(address)

    def trim_heap(self) -> None:
        """Make malloc return free memory of its heap to the kernel."""
        self._trim(0)

    def set_mmap_threshold(self, length: int) -> None:
        """Make malloc put each new block of at least ``length`` bytes in a separate mapping."""
        self._mallopt(_M_MMAP_THRESHOLD, length)
        self.mmap_threshold_bytes = length

    def set_trim_threshold(self, length: int) -> None:
        """Make malloc keep up to ``length`` free bytes at the end of its heap, instead of returning them at once."""
        self._mallopt(_M_TRIM_THRESHOLD, length)

    def mapped_blocks(self) -> MappedBlocks:
        """Return malloc's counters of the blocks that it has put in separate mappings."""
        info = self._mallinfo()
        return MappedBlocks(int(info.hblks), int(info.hblkhd), 2**64 if self._has_64_bit_counts else 2**32)

    def _checked_mmap(self, *arguments: object) -> int:
        address = self._mmap(*arguments)
        if address is None or address == _MAP_FAILED:
            raise _error()
        return int(address)

    @staticmethod
    def _checked(result: int) -> None:
        if result != 0:
            raise _error()


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def unsupported_reason() -> str:
    """Return why page sharing cannot work on this platform, or an empty string if it can."""
    if sys.platform != "linux":
        return f"page sharing needs Linux, this is {sys.platform}"
    if platform.machine() not in _MACHINES:
        return f"page sharing needs x86_64 or aarch64, this is {platform.machine()}"
    if sys.maxsize <= 2**32 or sys.byteorder != "little":
        return "page sharing needs a 64-bit little-endian interpreter"
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        version = None
    if not version or not version.startswith("glibc"):
        return "page sharing needs glibc, this is another C library"
    return ""


def libc() -> Libc:
    """Return the C library, or raise PageSharingUnavailable if page sharing is not supported."""
    reason = unsupported_reason()
    if reason:
        raise PageSharingUnavailable(reason)
    return _load()


@functools.lru_cache(maxsize=None)
def _load() -> Libc:
    return Libc(ctypes.CDLL(None, use_errno=True))
