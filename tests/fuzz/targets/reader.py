"""Numbers and pieces out of an input, from its beginning; what is not there is zero or empty."""

from __future__ import annotations


class Reader:
    """Takes an input apart. Every input can be taken apart in every way."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        """The next bytes: as many as asked for, or as there are."""
        piece = self._data[self._at : self._at + size]
        self._at += len(piece)
        return piece

    def number(self, size: int = 1) -> int:
        """The next bytes as a number, little-endian, without a sign."""
        return int.from_bytes(self.take(size), "little")

    def left(self) -> int:
        """How many bytes are left."""
        return len(self._data) - self._at

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(self.left())
