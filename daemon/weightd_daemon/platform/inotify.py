"""Notifications of the kernel about changes in directories: inotify(7), called by ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

# From <sys/inotify.h>.
_IN_MODIFY, _IN_ATTRIB, _IN_CLOSE_WRITE = 0x2, 0x4, 0x8
_IN_MOVED_FROM, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE, _IN_DELETE_SELF = 0x40, 0x80, 0x100, 0x200, 0x400
_IN_ONLYDIR = 0x01000000
_CHANGES = (
    *(_IN_MODIFY, _IN_ATTRIB, _IN_CLOSE_WRITE),
    *(_IN_MOVED_FROM, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE, _IN_DELETE_SELF),
)

_READ_BYTES = 64 * 1024


class DirectoryWatch:
    """Reports that something has changed in the watched directories, but not what.

    Raises:
        OSError: the kernel has no inotify instance left for this user.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def watch(self, directories: Iterable[Path]) -> None:
        """Watch further directories, except directories that the kernel refuses to watch."""
        for each in directories:
            self._libc.inotify_add_watch(self._descriptor, os.fsencode(each), sum(_CHANGES) | _IN_ONLYDIR)

    def fileno(self) -> int:
        """Return the descriptor, which is readable after a change until `clear`."""
        return self._descriptor

    def clear(self) -> None:
        """Discard the reported changes."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._descriptor, _READ_BYTES):
                pass

    def close(self) -> None:
        """Stop watching."""
        os.close(self._descriptor)
