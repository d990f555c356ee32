"""Finds the cause of a failure in an engine's library in the error messages that the library has written to stderr.

The daemon starts each child with a log file as stderr. So the child can read the library's latest messages from this
file, and need not redirect stderr.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import List, Optional, Pattern, Type

_STDERR = 2
_MAX_READ_BYTES = 64 * 1024
_MAX_LINES = 4

# Size in bytes above which the log is emptied, so that a library that logs in every predict cannot fill the disk.
_MAX_LOG_BYTES = 4 * 1024 * 1024


class NativeLog:
    """Finds error messages in the log file of this process, which is its stderr.

    If stderr is not a file, no messages are found.

    Args:
        error_line: pattern that matches a line with an error. Its group ``text`` is the error message.
    """

    def __init__(self, error_line: Pattern[str]) -> None:
        self._error_line = error_line

    def translate_errors(self, error: Type[Exception]) -> _ErrorTranslator:
        """Return a context manager that converts a RuntimeError in its block to the exception type `error`.

        The text of the new exception also contains the error messages that were logged in the block.
        """
        return _ErrorTranslator(self, error)

    @staticmethod
    def size() -> int:
        """Return the size of the log file in bytes, or -1 if stderr is not a file."""
        return _size()

    def errors_since(self, start: int) -> List[str]:
        """Return the first error messages in the log file from the offset `start` on, without repetitions."""
        size = self.size()
        if size < 0:
            return []
        # stderr is open for writing only, so open the log file again through /proc for reading.
        try:
            with Path(f"/proc/self/fd/{_STDERR}").open("rb") as log:
                log.seek(max(start, size - _MAX_READ_BYTES))
                lines = log.read(_MAX_READ_BYTES).decode("utf-8", "replace").splitlines()
        except OSError:
            return []
        found = [match.group("text").strip() for match in map(self._error_line.match, lines) if match]
        # The first message describes the cause. Later messages are from the functions that called the failed function.
        return list(dict.fromkeys(found))[:_MAX_LINES]


class _ErrorTranslator:
    """Context manager of `NativeLog.translate_errors`.

    A generator function instead of this class would slow down each predict.
    """

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
    """Return the size of the file behind stderr, or -1 if it is not a file."""
    try:
        status = os.fstat(_STDERR)
    except OSError:
        return -1
    return status.st_size if stat.S_ISREG(status.st_mode) else -1


def truncate_if_too_large() -> None:
    """Empty the log file if it is larger than `_MAX_LOG_BYTES`."""
    if _size() > _MAX_LOG_BYTES:
        os.ftruncate(_STDERR, 0)
