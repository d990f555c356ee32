"""Reader of numbers and byte strings from an input; beyond its end they are zero or empty."""

from __future__ import annotations


class Reader:
    """Splits an input. Every input can be split in every way."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        """Return the next bytes, at most `size`."""
        piece = self._data[self._at : self._at + size]
        self._at += len(piece)
        return piece

    def number(self, size: int = 1) -> int:
        """Return the next bytes as an unsigned little-endian number."""
        return int.from_bytes(self.take(size), "little")

    def left(self) -> int:
        """Return the number of remaining bytes."""
        return len(self._data) - self._at

    def rest(self) -> bytes:
        """Return all remaining bytes."""
        return self.take(self.left())
