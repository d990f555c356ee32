"""The C library calls that page sharing needs: their signatures, and errno turned into OSError.

Nothing is loaded at import, so that the package can be imported on any platform and say why it is of no use
there.
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
    """Pages cannot be shared here and now; ``str(error)`` is the reason, fit to be shown to an operator.

    Whenever it is raised the memory of the process is as it was, byte for byte: the caller goes on with
    private memory.
    """


PAGE = mmap.PAGESIZE
"""The size of a page of this machine: 4 KiB, or 16 or 64 KiB on some aarch64 kernels."""

READ = mmap.PROT_READ
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

_MACHINES = ("x86_64", "aarch64")  # 64 bits, little-endian, and the same numbers for the constants below
_MAP_SHARED = 0x01
_MAP_PRIVATE = 0x02
_MAP_FIXED = 0x10
_MAP_ANONYMOUS = 0x20
_MAP_FIXED_NOREPLACE = 0x100000  # Linux 4.17; older kernels take the address as a wish
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_DONTNEED = 4
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MEMORY_FILE_SYSTEMS = (0x01021994, 0x858458F6)  # tmpfs, ramfs
_STATFS_BYTES = 256  # struct statfs is 120 bytes on both machines; f_type is its first word

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
    """The mappings that malloc has made for single blocks, by its own count."""

    block_count: int
    total_bytes: int
    """Their bytes."""
    modulus: int
    """``total_bytes`` is known modulo this: the older call counts in 32 bits."""


class _MallInfo(ctypes.Structure):
    """``struct mallinfo``: ten ints, of which hblks and hblkhd matter here."""

    _fields_ = [(name, ctypes.c_uint) for name in _MALLINFO_FIELDS]


class _MallInfo2(ctypes.Structure):
    """``struct mallinfo2`` (glibc 2.33): the same in ten size_t."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO_FIELDS]


class Libc:
    """glibc, by way of ctypes. Addresses are plain ints; lengths are bytes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Declare the signatures of what is used of ``library``."""
        self.mmap_threshold_bytes: Optional[int] = None
        """The size from which malloc gives blocks mappings of their own; None: malloc decides."""
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
        """Map the first bytes of a file, to be read. Return the address."""
        return self._checked_mmap(None, length, READ, _MAP_SHARED, fd, 0)

    def map_zeros(self, length: int) -> int:
        """Map memory that is zero, to be read; it costs no page of memory. Return the address."""
        return self._checked_mmap(None, length, READ, _MAP_PRIVATE | _MAP_ANONYMOUS, -1, 0)

    def map_over(self, address: int, length: int, fd: int, offset: int) -> None:
        """Put a private, writable mapping of a part of a file in the place of what is at ``address``."""
        self._checked_mmap(address, length, READ_WRITE, _MAP_PRIVATE | _MAP_FIXED, fd, offset)

    def map_new(self, address: int, length: int) -> None:
        """Map new memory at ``address``, where nothing is mapped."""
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
        got = self._checked_mmap(address, length, READ_WRITE, flags, -1, 0)
        if got != address:  # a kernel before 4.17
            self.unmap(got, length)
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))

    def is_mapped(self, address: int, length: int) -> bool:
        """Whether something is mapped at each page of a piece of the address space."""
        try:
            self.resident_pages(address, length)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                return False
            raise
        return True

    def unmap(self, address: int, length: int) -> None:
        """Unmap a whole mapping that this package has made."""
        self._checked(self._munmap(address, length))

    def drop_private_pages(self, address: int, length: int) -> None:
        """Give private anonymous pages back; they read as zeros from now on."""
        self._checked(self._madvise(address, length, _MADV_DONTNEED))

    def drop_file_pages(self, address: int, length: int) -> None:
        """Have no page of a mapping of a file; those that are used come again from the file as it is."""
        self._checked(self._madvise(address, length, _MADV_DONTNEED))

    def resident_pages(self, address: int, length: int) -> int:
        """Count the pages of a mapping that are in memory, whoever brought them there."""
        flags = np.empty(-(-length // PAGE), dtype=np.uint8)
        self._checked(self._mincore(address, length, flags.ctypes.data))
        return int(np.count_nonzero(flags & 1))

    def is_equal(self, one: int, other: int, length: int) -> bool:
        """Compare two pieces of memory byte for byte."""
        return bool(self._memcmp(one, other, length) == 0)

    def copy(self, target: int, source: int, length: int) -> None:
        """Copy memory; the two pieces do not overlap."""
        self._memcpy(target, source, length)

    def is_memory_file_system(self, path: str) -> bool:
        """Whether the file system of an existing path keeps its files in memory."""
        buffer = ctypes.create_string_buffer(_STATFS_BYTES)
        self._checked(self._statfs(os.fsencode(path), ctypes.addressof(buffer)))
        return ctypes.c_long.from_buffer(buffer).value in _MEMORY_FILE_SYSTEMS

    def malloc(self, length: int) -> int:
        """Allocate by the malloc that the process uses, which need not be glibc's own."""
        address = self._malloc(length)
        if address is None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return int(address)

    def free(self, address: int) -> None:
        """Free what ``malloc`` returned."""
        self._free(address)

    def trim_heap(self) -> None:
        """Have malloc give back to the kernel what it keeps of freed memory."""
        self._trim(0)

    def set_mmap_threshold(self, length: int) -> None:
        """Have malloc give each block of at least ``length`` bytes a mapping of its own, from now on."""
        self._mallopt(_M_MMAP_THRESHOLD, length)
        self.mmap_threshold_bytes = length

    def set_trim_threshold(self, length: int) -> None:
        """Have malloc keep up to ``length`` bytes that are free at the end of its heap, from now on."""
        self._mallopt(_M_TRIM_THRESHOLD, length)

    def mapped_blocks(self) -> MappedBlocks:
        """Ask glibc's malloc how many blocks with a mapping of their own it has."""
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
    """Why page sharing cannot work on this platform, or an empty string."""
    if sys.platform != "linux":
        return f"page sharing needs Linux, this is {sys.platform}"
    if platform.machine() not in _MACHINES:
        return f"page sharing knows x86_64 and aarch64, this is {platform.machine()}"
    if sys.maxsize <= 2**32 or sys.byteorder != "little":
        return "page sharing needs a 64-bit little-endian interpreter"
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        version = None
    if not version or not version.startswith("glibc"):
        return "page sharing knows the malloc of glibc only, and this is another C library"
    return ""


def libc() -> Libc:
    """Return the C library, or raise PageSharingUnavailable where page sharing is not supported."""
    reason = unsupported_reason()
    if reason:
        raise PageSharingUnavailable(reason)
    return _load()


@functools.lru_cache(maxsize=None)
def _load() -> Libc:
    return Libc(ctypes.CDLL(None, use_errno=True))
