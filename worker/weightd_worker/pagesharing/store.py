"""Page store: a file with memory pages, and with the hashes by which equal pages are found.

Format::

    page 0       header: magic, format version, size of a page, number n of pages; all other bytes are zero
    pages 1..n   the memory pages
    after them   n hashes of 64 bits, in the order of the pages

All numbers are little-endian. The header is written last, so a store without a header is incomplete. The number of
pages in the header determines the size of the file, so a truncated store is detected. Only one user may access a store:
another user must not read it, because it is a copy of a process's memory, and must not write to it, because it becomes
the memory of other processes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .libc import PAGE, Libc, PageSharingUnavailable, libc
from .memory import view

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC = b"weightd\x9d"
VERSION = 1

_HEADER = struct.Struct("<8sIIQ")
_HASH_BYTES = 8
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_FINISHED_MODE = 0o400  # mode of a complete store: read-only, to prevent accidental writes


def size_of(page_count: int) -> int:
    """Return the size in bytes of a store of ``page_count`` pages."""
    return offset_of(page_count) + page_count * _HASH_BYTES


def offset_of(page: int) -> int:
    """Return the offset of a memory page in the file. Memory pages are numbered from 0, after the header."""
    return PAGE + page * PAGE


def encode_header(page_count: int) -> bytes:
    """Return the header of a complete store with ``page_count`` pages."""
    return _HEADER.pack(MAGIC, VERSION, PAGE, page_count)


def decode_header(header: bytes, file_size: int) -> int:
    """Check a header and return the number of pages. Raise PageSharingUnavailable if the header is invalid."""
    if len(header) < _HEADER.size:
        raise PageSharingUnavailable("the store has no header: the file is truncated or is not a page store")
    magic, version, page, page_count = _HEADER.unpack_from(header)
    if not any(header[: _HEADER.size]):
        raise PageSharingUnavailable("the store is incomplete")
    if magic != MAGIC:
        raise PageSharingUnavailable("the file is not a page store")
    if version != VERSION:
        raise PageSharingUnavailable(f"the store has format version {version}, this is {VERSION}")
    if page != PAGE:
        raise PageSharingUnavailable(f"the store has pages of {page} bytes, this machine {PAGE}")
    if size_of(page_count) != file_size:
        raise PageSharingUnavailable(
            f"expected a store of {size_of(page_count)} bytes, got {file_size}; the file may be truncated"
        )
    return int(page_count)


class NewStore:
    """A page store that is being written. Pages that are written can already be mapped from ``fd``."""

    def __init__(self, path: str, pages: int) -> None:
        """Create the file, which must not exist yet, and reserve disk space for it if possible."""
        self.path = path
        self.page_count = pages
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
        try:
            self._reserve()
        except BaseException:
            self.discard()
            raise

    def _reserve(self) -> None:
        # Reserve space only on disk. On a file system in memory, all reserved space would take memory at once. Without
        # a reservation, the file takes memory block by block, while the private pages that it replaces are freed.
        if is_on_disk(self.path):
            try:
                os.posix_fallocate(self.fd, 0, size_of(self.page_count))
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
        os.ftruncate(self.fd, size_of(self.page_count))

    def write_pages(self, page: int, address: int, length: int) -> None:
        """Write the memory from ``address`` on to the store, as consecutive pages from number ``page`` on."""
        self._write(view(address, length), offset_of(page))

    def finish(self, hashes: NDArray[np.uint64]) -> None:
        """Write the hashes of all pages, then the header, and close the file."""
        self._write(memoryview(hashes.tobytes()), offset_of(self.page_count))
        self._write(memoryview(encode_header(self.page_count)), 0)
        os.fchmod(self.fd, _FINISHED_MODE)
        os.close(self.fd)

    def discard(self) -> None:
        """Close and remove the file. Existing mappings of the file stay valid."""
        os.close(self.fd)
        Path(self.path).unlink()

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(self.fd, data, offset)
            data = data[written:]
            offset += written


class OpenStore:
    """A complete page store that is open and mapped read-only. Closing it does not affect replaced pages."""

    def __init__(self, path: str, c: Libc) -> None:
        """Open, check and map the store. Raise PageSharingUnavailable if the store is not valid."""
        self._libc = c
        self.fd = open_store(path)
        try:
            self._size = os.fstat(self.fd).st_size
            self.page_count = decode_header(os.pread(self.fd, _HEADER.size, 0), self._size)
            self.address = c.map_file(self.fd, self._size)
        except BaseException:
            os.close(self.fd)
            raise

    def read_hashes(self) -> NDArray[np.uint64]:
        """Return a copy of the hashes of all pages in the store."""
        index = view(self.address + offset_of(self.page_count), self.page_count * _HASH_BYTES)
        return np.frombuffer(index, dtype=np.uint64).copy() if self.page_count else np.empty(0, dtype=np.uint64)

    def close(self) -> None:
        """Unmap and close the store."""
        self._libc.unmap(self.address, self._size)
        os.close(self.fd)


def open_store(path: str) -> int:
    """Open a store for reading and return the descriptor.

    Raise PageSharingUnavailable unless the store is a regular file that only this user can access.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _FLAGS)  # O_NONBLOCK: opening a named pipe must not block
    except OSError as error:
        raise PageSharingUnavailable(f"cannot open the store: {error}") from error
    try:
        check_owner(os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_owner(status: os.stat_result) -> None:
    """Raise PageSharingUnavailable unless ``status`` describes a regular file that only this user can access."""
    if not stat.S_ISREG(status.st_mode):
        raise PageSharingUnavailable("the store is not a regular file")
    if status.st_uid != os.geteuid():
        raise PageSharingUnavailable(f"expected a store of user {os.geteuid()}, got one of user {status.st_uid}")
    if status.st_mode & 0o077:
        raise PageSharingUnavailable(
            f"expected a store that only its owner can access, got mode {stat.S_IMODE(status.st_mode):o}"
        )


def is_on_disk(path: str) -> bool:
    """Return whether a store at ``path`` is on disk and not on a file system in memory, such as tmpfs.

    Only pages on disk can be removed from memory. The file need not exist yet.
    """
    existing = Path(path) if Path(path).exists() else Path(path).parent
    return not libc().is_memory_file_system(str(existing))


def evict(path: str) -> None:
    """Write the store to disk, and free the memory of its pages that no process uses. This may take seconds.

    The kernel reads the pages from disk when a process uses them again. On tmpfs the function has no effect.
    """
    fd = open_store(path)
    try:
        os.fsync(fd)  # the kernel frees the memory of pages only after they are written to disk
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise PageSharingUnavailable(f"cannot write the store out: {error}") from error
    finally:
        os.close(fd)


def prefetch(path: str) -> None:
    """Make the kernel start to read the store's pages that are only on disk, and return at once.

    This is faster than reading each page when it is used first. Errors are ignored.
    """
    try:
        fd = open_store(path)
    except PageSharingUnavailable:
        return
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
    os.close(fd)


def resident_bytes(path: str) -> int:
    """Return how many bytes of the store are in memory, whether or not a process uses them."""
    c = libc()
    fd = open_store(path)
    try:
        size = os.fstat(fd).st_size
        if not size:
            return 0
        address = c.map_file(fd, size)
        try:
            return c.resident_pages(address, size) * PAGE
        finally:
            c.unmap(address, size)
    except OSError as error:
        raise PageSharingUnavailable(f"cannot determine how much of the store is in memory: {error}") from error
    finally:
        os.close(fd)
