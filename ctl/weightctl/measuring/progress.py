"""A line that says how far a command is, for who sits before a terminal."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_ERASE = "\r\x1b[K"

# Nobody reads faster, and what is measured is not to wait for a terminal.
_MIN_INTERVAL_S = 0.1


class ProgressLine:
    """One line on stderr, written again and again; nothing, where that is no terminal. Gone after the block."""

    def __enter__(self) -> ProgressLine:
        self._stream: TextIO = sys.stderr
        self._is_terminal = self._stream.isatty()
        self._next_at = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            self._stream.write(_ERASE)
            self._stream.flush()

    def show(self, text: str) -> None:
        """Show this in the place of what was shown, unless that is new, too."""
        if self._is_terminal and time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + _MIN_INTERVAL_S
            self._stream.write(f"{_ERASE}{text}")
            self._stream.flush()
