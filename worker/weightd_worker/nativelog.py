"""The cause of a native failure, from what the engine's library wrote to stderr.

The daemon gives each child a log file as its stderr, so the child can read back what the library has just written
there, without redirecting anything.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import List, Optional, Pattern, Type

_STDERR = 2
_MAX_READ_BYTES = 64 * 1024
_MAX_LINES = 4

# The log is cut when it has grown over this, so that a library which logs on every predict cannot fill the disk.
_MAX_LOG_BYTES = 4 * 1024 * 1024


class NativeLog:
    """Finds error lines in the log that stderr goes to. Where stderr is not a file, there is no cause to find.

    Args:
        error_line: matches a line that tells an error, with its text in the group ``text``.
    """

    def __init__(self, error_line: Pattern[str]) -> None:
        self._error_line = error_line

    def translate_errors(self, error: Type[Exception]) -> _ErrorTranslator:
        """Turn a RuntimeError of the block into an `error` whose text has the cause that the log tells."""
        return _ErrorTranslator(self, error)

    @staticmethod
    def size() -> int:
        """Return how many bytes the log has, -1 where there is none."""
        return _size()

    def errors_since(self, start: int) -> List[str]:
        """Return the first errors that the log tells beyond its first `start` bytes, without repetitions."""
        size = self.size()
        if size < 0:
            return []
        # Reading through /proc opens the file anew: stderr itself is open for writing only.
        try:
            with Path(f"/proc/self/fd/{_STDERR}").open("rb") as log:
                log.seek(max(start, size - _MAX_READ_BYTES))
                lines = log.read(_MAX_READ_BYTES).decode("utf-8", "replace").splitlines()
        except OSError:
            return []
        found = [match.group("text").strip() for match in map(self._error_line.match, lines) if match]
        # The first line is the root, the others are its callers.
        return list(dict.fromkeys(found))[:_MAX_LINES]


class _ErrorTranslator:
    """What `NativeLog.translate_errors` returns: around each predict a generator would cost more than all else here."""

    __slots__ = ("_error", "_log", "_start")

    def __init__(self, log: NativeLog, error: Type[Exception]) -> None:
        self._log = log
        self._error = error

    def __enter__(self) -> None:
        try:
            self._start = os.fstat(_STDERR).st_size
        except OSError:
            self._start = 0

    def __exit__(self, kind: object, failure: Optional[BaseException], traceback: object) -> None:
        if isinstance(failure, RuntimeError):
            causes = self._log.errors_since(self._start)
            text = " ".join(str(failure).split())
            raise self._error(f"{text}: {' | '.join(causes)}" if causes else text) from None


def _size() -> int:
    """The size of the file behind stderr, or -1 if it is not a file."""
    try:
        status = os.fstat(_STDERR)
    except OSError:
        return -1
    return status.st_size if stat.S_ISREG(status.st_mode) else -1


def truncate_if_too_large() -> None:
    """Empty the log if it has grown too large."""
    if _size() > _MAX_LOG_BYTES:
        os.ftruncate(_STDERR, 0)
