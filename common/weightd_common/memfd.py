"""Memory as a descriptor: made so that it keeps its size, and looked at before it is trusted to.

A file that somebody shortens while others have it mapped kills them with SIGBUS when they touch what is gone. A memfd
that is sealed against that cannot be shortened by anybody, ever. Its content may change at any moment: who has to rely
on it copies first and looks then.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os

# Of linux/fcntl.h and linux/memfd.h: Python has them since 3.8.
_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_SEALS = {0x0002: "F_SEAL_SHRINK", 0x0004: "F_SEAL_GROW"}
_FIXED_SIZE = sum(_SEALS)
_MFD_CLOEXEC = 0x0001
_MFD_ALLOW_SEALING = 0x0002
_MFD_NOEXEC_SEAL = 0x0008


class NotShareable(Exception):
    """A descriptor is not what memory may be shared by; the text says what was expected and what came."""


def create(nbytes: int, name: str = "weightd") -> int:
    """Return a descriptor of memory of this size, which nobody can change any more.

    It takes memory where it is written to, and is freed with the last descriptor and mapping.

    Raises:
        OSError: it cannot be had, or this system has none.
    """
    try:
        # An executable one, which nobody needs here, may be forbidden (vm.memfd_noexec).
        descriptor = _memfd_create(name, _MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Linux before 6.3 does not know the flag.
        descriptor = _memfd_create(name, _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _FIXED_SIZE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_memory(descriptor: int) -> bool:
    """Return whether a descriptor is a memfd or another file in memory; no file system of a user is asked for that."""
    try:
        fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:
        return False
    return True


def checked_size(descriptor: int) -> int:
    """Return the size of the memory that somebody else has sent, once it is sure that it stays so.

    Nothing here waits for a file system of whoever sent it. A close may: one that is refused is closed where nobody
    else waits.

    Raises:
        NotShareable: it is something else.
    """
    try:
        # First: the kernel answers this by itself, and only for memory.
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:
        raise NotShareable("expected a memfd, got a descriptor of something else") from None
    missing = [name for seal, name in _SEALS.items() if not seals & seal]
    if missing:
        raise NotShareable(f"expected a memfd sealed with {' and '.join(_SEALS.values())}, {missing[0]} is missing")
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
        raise NotShareable("expected a memfd that can be read, got one that is open for writing only")
    page = os.fstatvfs(descriptor).f_bsize
    if page != mmap.PAGESIZE:
        # Its pages come from a pool that may be empty when they are touched, which is a SIGBUS, too.
        raise NotShareable(f"expected a memfd of pages of {mmap.PAGESIZE} bytes, got pages of {page}")
    nbytes = os.fstat(descriptor).st_size
    if not nbytes:
        raise NotShareable("expected a memfd of at least 1 byte, got an empty one")
    return nbytes


def _memfd_create(name: str, flags: int) -> int:
    """As of `os`, which has it since Python 3.8."""
    try:
        function = ctypes.CDLL(None, use_errno=True).memfd_create
    except AttributeError:
        raise OSError(errno.ENOSYS, "the C library has no memfd_create") from None
    descriptor: int = function(name.encode(), flags)
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor
