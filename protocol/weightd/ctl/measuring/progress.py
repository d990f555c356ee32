"""A line that says how far a verb is, for who sits before a terminal."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_ERASE = "\r\x1b[K"

# Nobody reads faster, and what is measured is not to wait for a terminal.
_PAUSE_S = 0.1


class Progress:
    """One line on stderr, written again and again; nothing, where that is no terminal. Gone after the block."""

    def __enter__(self) -> Progress:
        self._stream: TextIO = sys.stderr
        self._shows = self._stream.isatty()
        self._next = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        if self._shows:
            self._stream.write(_ERASE)
            self._stream.flush()

    def say(self, text: str) -> None:
        """Show this in the place of what was shown, unless that is new, too."""
        if self._shows and time.monotonic() >= self._next:
            self._next = time.monotonic() + _PAUSE_S
            self._stream.write(f"{_ERASE}{text}")
            self._stream.flush()
