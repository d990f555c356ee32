"""How much of a snapshot has been copied: two numbers in a file, which the process that copies writes, and others read.

Nobody is told anything: who wants to know looks. Each number is aligned, and written at once, so none is half an old
one.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path
from typing import NamedTuple

_FORMAT = struct.Struct("<QQ")


class CopyProgress(NamedTuple):
    """So many bytes of so many; of what is not open yet the size is a guess."""

    copied_bytes: int
    total_bytes: int


class CopyProgressFile:
    """Writes.

    Args:
        path: of the file; None to write nothing.
        model_count: how many are copied, of about the same size.
    """

    def __init__(self, path: Path | None = None, model_count: int = 1) -> None:
        self._model_count = model_count
        self._started_count = 0
        self._known_bytes = 0
        self._copied_bytes = 0
        self._descriptor: int | None = None
        if path is not None:
            # To copy without telling how far it is is better than not to copy.
            with contextlib.suppress(OSError):
                self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def start_model(self, nbytes: int) -> None:
        """The next model is so large."""
        self._started_count += 1
        self._known_bytes += nbytes

    def add_bytes(self, nbytes: int) -> None:
        """So much more was copied."""
        self._copied_bytes += nbytes
        if self._descriptor is not None:
            total_bytes = self._known_bytes * max(1, self._model_count) // max(1, self._started_count)
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, _FORMAT.pack(self._copied_bytes, total_bytes), 0)

    def close(self) -> None:
        """Give the descriptor back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read(path: Path) -> CopyProgress | None:
    """Return what stands there; None where nothing does."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        copied_bytes, total_bytes = _FORMAT.unpack(os.pread(descriptor, _FORMAT.size, 0))
    except (OSError, struct.error):
        return None
    finally:
        os.close(descriptor)
    return CopyProgress(copied_bytes, total_bytes) if copied_bytes <= total_bytes else None
