"""Shared memory as memfds: creates memfds with a sealed size, and validates memfds received from other processes.

If a process truncates a file that other processes have mapped, these die with SIGBUS when they access the missing
pages. A memfd with the right seals cannot be truncated by any process. Its content may still change at any time, so a
process must copy the content before it validates and uses the content.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os

# From linux/fcntl.h and linux/memfd.h. Python has these constants since 3.8.
_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_SEALS = {0x0002: "F_SEAL_SHRINK", 0x0004: "F_SEAL_GROW"}
_FIXED_SIZE = sum(_SEALS)
_MFD_CLOEXEC = 0x0001
_MFD_ALLOW_SEALING = 0x0002
_MFD_NOEXEC_SEAL = 0x0008


class NotShareable(Exception):
    """A descriptor cannot be used as shared memory. The text names the expected and the received descriptor."""


def create(nbytes: int, name: str = "weightd") -> int:
    """Return a memfd of `nbytes` bytes, sealed so that no process can change its size.

    The kernel allocates each page when it is first written, and frees the memory after the last descriptor is closed
    and the last mapping is removed.

    Raises:
        OSError: the memfd cannot be created, or the system does not support memfds.
    """
    try:
        # Without MFD_NOEXEC_SEAL the call may fail, because the sysctl vm.memfd_noexec can forbid executable memfds.
        descriptor = _memfd_create(name, _MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Linux before 6.3 does not support MFD_NOEXEC_SEAL.
        descriptor = _memfd_create(name, _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _FIXED_SIZE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_memory(descriptor: int) -> bool:
    """Return whether a descriptor is a memfd or another file in memory.

    The check never blocks, not even on the descriptor of a file on a FUSE file system of a user.
    """
    try:
        fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:
        return False
    return True


def checked_size(descriptor: int) -> int:
    """Return the size of received shared memory in bytes, after checking that the size cannot change.

    This function never blocks, even if the sender passes the descriptor of a file on its own FUSE file system. But
    closing such a rejected descriptor may block, so the caller must close the descriptor where a delay affects no
    other client.

    Raises:
        NotShareable: the descriptor is not a suitable memfd.
    """
    try:
        # Query the seals before anything else: the query succeeds only for files in memory, and never calls the file
        # system of another file, which could block.
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
        # Huge pages come from a pool. If the pool is empty when a process accesses such a page, the process dies with
        # SIGBUS. So reject huge pages.
        raise NotShareable(f"expected a memfd of pages of {mmap.PAGESIZE} bytes, got pages of {page}")
    nbytes = os.fstat(descriptor).st_size
    if not nbytes:
        raise NotShareable("expected a memfd of at least 1 byte, got an empty one")
    return nbytes


def _memfd_create(name: str, flags: int) -> int:
    """Equivalent of `os.memfd_create`, which Python has since 3.8."""
    try:
        function = ctypes.CDLL(None, use_errno=True).memfd_create
    except AttributeError:
        raise OSError(errno.ENOSYS, "the C library has no memfd_create") from None
    descriptor: int = function(name.encode(), flags)
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor
