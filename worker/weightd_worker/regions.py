"""Shared memory of clients: copies input tensors from it before use, and writes output tensors to it.

A client may write to its shared memory, and punch holes in it, at any time. So this module reads each value only once
and copies it. Otherwise the client could change an index after the engine has checked it, and the engine would read
other memory of this process.

This module never allocates a page of the client's memory. If a process accesses a hole in a memfd, the kernel allocates
a page and charges it to the control group of this process as long as the page exists. So a client could use up
weightd's memory. Checking for holes before each access is not sufficient, because the client can punch a hole after the
check. Therefore each mapping of shared memory is registered with userfaultfd(2):

1. When a thread accesses a missing page, the kernel stops the thread.
2. Another thread replaces the mapping, from this page on, by anonymous memory, which is freed with the mapping, and
   wakes the stopped thread.
3. The mapping is never used again. Later inputs in the region are read by system calls, which allocate no pages, and no
   outputs are written to the region.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import logging
import mmap
import os
import platform
import struct
import threading
import weakref
from typing import Any, Dict, MutableMapping, Optional

import numpy as np

from weightd_protocol.errors import Internal

_log = logging.getLogger("weightd.worker")

# Alignment of copied tensors in bytes, as the widest vector instructions of an engine require.
_ALIGNMENT = 64
_NOT_READABLE = "a region of shared memory cannot be read by this worker"


class RegionTable:
    """The regions of shared memory that clients have registered, by the number that the daemon has assigned.

    The daemon has checked that no region can change its size, and that the tensors of each request are within a region.
    """

    def __init__(self) -> None:
        self._regions: Dict[int, _Region] = {}

    def map(self, number: int, descriptor: int) -> None:
        """Add a region and take ownership of its descriptor. If it cannot be read, requests that use it fail."""
        self._regions[number] = _Region(descriptor)

    def unmap(self, number: int) -> None:
        """Remove a region."""
        self._regions.pop(number, None)

    def clear(self) -> None:
        """Remove all regions. Call it after a restart of the daemon, which assigns new numbers."""
        self._regions.clear()

    def read(self, number: int, offset: int, nbytes: int) -> Any:
        """Return an aligned copy of `nbytes` bytes of a region, from `offset` on, as an array of uint8.

        Raises:
            Internal: this worker does not have the region, or cannot read it.
        """
        memory: Any = np.empty(nbytes + _ALIGNMENT, np.uint8)
        begin: int = -memory.__array_interface__["data"][0] % _ALIGNMENT
        copy = memory[begin : begin + nbytes]
        try:
            self._region(number).read(offset, copy)
        except OSError:
            raise Internal(_NOT_READABLE) from None
        return copy

    def write(self, frame: Any, number: int, offset: int, max_bytes: int) -> bool:
        """Write the bytes of an output, as returned by `frame_of`, to a region. Return whether they were written.

        The bytes are not written if there are more than `max_bytes`, if the client has sealed the region against
        writes, if a page at this place is missing because the client has never written to it, or if the system has no
        userfaultfd.

        Raises:
            Internal: this worker does not have the region.
        """
        region = self._region(number)
        if len(frame) > max_bytes:
            return False
        return not frame or region.write(offset, np.frombuffer(frame, np.uint8))

    def _region(self, number: int) -> _Region:
        region = self._regions.get(number)
        if region is None:
            raise Internal(_NOT_READABLE)
        return region


class _Region:
    """One region of shared memory. It owns a descriptor, which is closed when the object is garbage-collected."""

    __slots__ = ("_descriptor", "_mapping")

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._mapping = _map_protected(descriptor)

    def read(self, offset: int, into: Any) -> None:
        """Fill the array `into` with bytes of the region, from `offset` on.

        Raises:
            OSError: the region cannot be read.
        """
        window = self._mapping
        done = len(into) if window is not None and window.read(offset, into) else 0
        while done < len(into):
            count = os.preadv(self._descriptor, [into[done:]], offset + done)
            if not count:
                raise OSError("the region is shorter than its size")
            done += count

    def write(self, offset: int, source: Any) -> bool:
        """Write an array of bytes to the region from `offset` on. Return False if the region cannot be written."""
        window = self._mapping
        return window is not None and window.write(offset, source)

    def __del__(self) -> None:
        os.close(self._descriptor)


def _map_protected(descriptor: int) -> Optional[ProtectedMapping]:
    user_faults = _user_faults()
    try:
        return None if user_faults is None else user_faults.map(descriptor, os.fstat(descriptor).st_size)
    except OSError:
        # The client has forbidden writes, by a seal or by the mode of the descriptor.
        return None


@functools.lru_cache(maxsize=None)
def _user_faults() -> Optional[UserFaults]:
    try:
        return UserFaults()
    except (OSError, RuntimeError) as error:
        # Python raises RuntimeError if it cannot start a thread.
        _log.warning("large tensors are slower: no userfaultfd for shared memory of clients: %s", error)
        return None


# Constants of linux/userfaultfd.h, the same on all architectures.
_UFFD_USER_MODE_ONLY = 1
_UFFD_API = 0xAA
_UFFD_FEATURE_MISSING_SHMEM = 1 << 5
_UFFDIO_API = 0xC018AA3F
_UFFDIO_REGISTER = 0xC020AA00
_UFFDIO_WAKE = 0x8010AA02
_UFFDIO_REGISTER_MODE_MISSING = 1
_API = struct.Struct("=QQQ")
_REGISTER = struct.Struct("=QQQQ")
_RANGE = struct.Struct("=QQ")

# struct uffd_msg of a page fault: 32 bytes, with the address at offset 16.
_MESSAGE = struct.Struct("=16xQ8x")
_SYS_USERFAULTFD = {"x86_64": 323, "aarch64": 282}

# Maximum number of bytes of a mapping that are replaced after one page fault. The process may keep this memory until
# the mapping is removed.
_REPLACE_CHUNK_BYTES = 16 << 20
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class UserFaults:
    """Maps shared memory, and handles missing pages of all these mappings in one thread that never ends.

    Raises:
        OSError: the system has no userfaultfd, or this process may not use it.
    """

    def __init__(self) -> None:
        libc = self._libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        libc.mmap.restype = ctypes.c_void_p
        libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        # Copy by memcpy through ctypes, which releases the GIL during the call. If a missing page stops the copy, the
        # thread that handles it needs the GIL.
        libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        libc.memcpy.restype = ctypes.c_void_p
        self._mappings: MutableMapping[int, ProtectedMapping] = weakref.WeakValueDictionary()
        self._descriptor = self._open()
        try:
            fcntl.ioctl(self._descriptor, _UFFDIO_API, _API.pack(_UFFD_API, _UFFD_FEATURE_MISSING_SHMEM, 0))
            threading.Thread(target=self._handle_faults, name="userfaults", daemon=True).start()
        except BaseException:
            os.close(self._descriptor)
            raise

    def map(self, descriptor: int, nbytes: int) -> ProtectedMapping:
        """Map shared memory of `nbytes` bytes.

        Raises:
            OSError: the memory is sealed against writing, or cannot be mapped.
        """
        address = self._mmap(None, nbytes, mmap.MAP_SHARED, descriptor)
        mapping = ProtectedMapping(self, address, nbytes)
        pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._mappings[address] = mapping
        request = _REGISTER.pack(address, pages, _UFFDIO_REGISTER_MODE_MISSING, 0)
        fcntl.ioctl(self._descriptor, _UFFDIO_REGISTER, request)
        return mapping

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy bytes between two addresses."""
        self._libc.memcpy(to, source, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        """Remove a mapping."""
        self._libc.munmap(address, nbytes)

    def _handle_faults(self) -> None:
        while True:
            (address,) = _MESSAGE.unpack(os.read(self._descriptor, _MESSAGE.size))
            page = address // mmap.PAGESIZE * mmap.PAGESIZE
            for begin, window in [*self._mappings.items()]:
                if begin <= address < begin + window.nbytes:
                    window.is_intact = False
                    nbytes = min(begin + window.nbytes - page, _REPLACE_CHUNK_BYTES)
                    self._mmap(page, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1)
            fcntl.ioctl(self._descriptor, _UFFDIO_WAKE, _RANGE.pack(page, mmap.PAGESIZE))

    def _mmap(self, wanted_address: Any, nbytes: int, flags: int, descriptor: int) -> int:
        address: int = self._libc.mmap(wanted_address, nbytes, _READ_WRITE, flags, descriptor, 0)
        if address == _MAP_FAILED:
            raise _error()
        return address

    def _open(self) -> int:
        number = _SYS_USERFAULTFD.get(platform.machine())
        if number is None:
            raise OSError(errno.ENOSYS, "the system call number of userfaultfd on this machine is unknown")
        descriptor = -1
        for flags in (_UFFD_USER_MODE_ONLY, 0):
            descriptor = self._libc.syscall(ctypes.c_long(number), ctypes.c_int(os.O_CLOEXEC | flags))
            # Linux before 5.11 rejects the flag UFFD_USER_MODE_ONLY with EINVAL, and permits the call without it.
            if descriptor >= 0 or ctypes.get_errno() != errno.EINVAL:
                break
        if descriptor < 0:
            raise _error()
        return descriptor


class ProtectedMapping:
    """A mapping of shared memory, made by `UserFaults.map`. It is unmapped when the object is garbage-collected.

    Attributes:
        nbytes: the size of the mapping in bytes.
        is_intact: True until an access finds a missing page. Then the mapping must no longer be used.
    """

    __slots__ = ("__weakref__", "_address", "_faults", "is_intact", "nbytes")

    def __init__(self, faults: UserFaults, address: int, nbytes: int) -> None:
        self._faults = faults
        self._address = address
        self.nbytes = nbytes
        self.is_intact = True

    def read(self, offset: int, into: Any) -> bool:
        """Fill the array `into` with bytes of the mapping from `offset` on. Return False if a page was missing."""
        if self.is_intact:
            self._faults.copy(_address_of(into), self._address + offset, into.nbytes)
        return self.is_intact

    def write(self, offset: int, source: Any) -> bool:
        """Write an array of bytes to the mapping from `offset` on.

        Return False if a page was missing. In this case a part of the bytes may have been written.
        """
        if self.is_intact:
            self._faults.copy(self._address + offset, _address_of(source), source.nbytes)
        return self.is_intact

    def __del__(self) -> None:
        self._faults.unmap(self._address, self.nbytes)


def _address_of(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
