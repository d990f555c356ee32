"""What page stores were when their holders had exported them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from weightd.daemon.generations.life import Life
from weightd.daemon.generations.records import SealRecord


class Seal:
    """What a file was when this was made; whether it still is that is cheap to ask, for each answer.

    It tells every write and every truncation by any process (they set the time of the last change), not what a failing
    disk does.

    Raises:
        OSError: there is no such file.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._was = self._is()

    @property
    def value(self) -> tuple[int, int]:
        """What it was: the size, and the time of the last change in ns."""
        return self._was

    def intact(self) -> bool:
        """Return whether nobody has written to the file or truncated it."""
        return self._is() == self._was

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._descriptor)

    def _is(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns


def seal(path: Path) -> Seal | None:
    """Return the seal of the file at `path`, or None if there is none."""
    with contextlib.suppress(OSError):
        return Seal(path)
    return None


class Seals:
    """The seals of page stores, by the labels of their generations."""

    def __init__(self) -> None:
        self._all: dict[str, Seal] = {}

    def add(self, label: str, store: Path) -> None:
        """Remember what the page store is now, if there is one, and if nothing is remembered of it."""
        sealed = seal(store) if label not in self._all else None
        if sealed is not None:
            self._all[label] = sealed

    def intact(self, generation: Life) -> bool:
        """Return whether the page store, if there is one, is still what it was then."""
        sealed = self._all.get(generation.label)
        return sealed is None or sealed.intact()

    def find(self, label: str) -> SealRecord | None:
        """Return what the page store was, if there is one."""
        sealed = self._all.get(label)
        return SealRecord(*sealed.value) if sealed is not None else None

    def forget(self, label: str) -> None:
        """The page store goes."""
        sealed = self._all.pop(label, None)
        if sealed is not None:
            sealed.close()
