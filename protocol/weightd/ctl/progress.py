"""A line that says how far a verb is, for who sits before a terminal."""

from __future__ import annotations

import sys
from typing import TextIO

_ERASE = "\r\x1b[K"


class Progress:
    """One line on stderr, written again and again; nothing, where that is no terminal. Gone after the block."""

    def __enter__(self) -> Progress:
        self._stream: TextIO = sys.stderr
        self._shows = self._stream.isatty()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shows:
            self._stream.write(_ERASE)
            self._stream.flush()

    def say(self, text: str) -> None:
        """Show this in the place of what was shown."""
        if self._shows:
            self._stream.write(f"{_ERASE}{text}")
            self._stream.flush()
