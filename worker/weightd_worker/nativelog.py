"""Finds the cause of a native failure in the error messages that the engine's library wrote to stderr.

The daemon gives each child a log file as its stderr. So the child can read the library's latest messages without
redirecting anything.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import List, Optional, Pattern, Type

_STDERR = 2
_MAX_READ_BYTES = 64 * 1024
_MAX_LINES = 4

# The log is emptied when it is larger, so that a library that logs in every predict cannot fill the disk.
_MAX_LOG_BYTES = 4 * 1024 * 1024


class NativeLog:
    """Finds error lines in the log that stderr writes to. If stderr is not a file, it finds none.

    Args:
        error_line: matches a line that reports an error, with the message in the group ``text``.
    """

    def __init__(self, error_line: Pattern[str]) -> None:
        self._error_line = error_line

    def translate_errors(self, error: Type[Exception]) -> _ErrorTranslator:
        """Return a context manager that turns a RuntimeError into `error`, with the causes from the log in its text."""
        return _ErrorTranslator(self, error)

    @staticmethod
    def size() -> int:
        """Return the size of the log in bytes, -1 if stderr is not a file."""
        return _size()

    def errors_since(self, start: int) -> List[str]:
        """Return the first error messages after the first `start` bytes of the log, without repetitions."""
        size = self.size()
        if size < 0:
            return []
        # Opening the file anew through /proc makes it readable: stderr itself is open for writing only.
        try:
            with Path(f"/proc/self/fd/{_STDERR}").open("rb") as log:
                log.seek(max(start, size - _MAX_READ_BYTES))
                lines = log.read(_MAX_READ_BYTES).decode("utf-8", "replace").splitlines()
        except OSError:
            return []
        found = [match.group("text").strip() for match in map(self._error_line.match, lines) if match]
        # The first line is the root cause, the later ones are from its callers.
        return list(dict.fromkeys(found))[:_MAX_LINES]


class _ErrorTranslator:
    """The context manager of `NativeLog.translate_errors`. A generator would cost each predict more time."""

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
    """Empty the log if it is too large."""
    if _size() > _MAX_LOG_BYTES:
        os.ftruncate(_STDERR, 0)
