"""What page stores were when their holders had exported them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.persisted import SealRecord


class FileFingerprint:
    """What a file was when this was made; whether it still is that is cheap to ask, for each answer.

    It tells every write and every truncation by any process (they set the time of the last change), not what a failing
    disk does.

    Raises:
        OSError: there is no such file.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._initial = self._current()

    @property
    def value(self) -> tuple[int, int]:
        """What it was: the size, and the time of the last change in ns."""
        return self._initial

    def is_intact(self) -> bool:
        """Return whether nobody has written to the file or truncated it."""
        return self._current() == self._initial

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._descriptor)

    def _current(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns


def fingerprint_of(path: Path) -> FileFingerprint | None:
    """Return the seal of the file at `path`, or None if there is none."""
    with contextlib.suppress(OSError):
        return FileFingerprint(path)
    return None


class StoreIntegrity:
    """The seals of page stores, by the labels of their generations."""

    def __init__(self) -> None:
        self._fingerprints: dict[str, FileFingerprint] = {}

    def add(self, label: str, store: Path) -> None:
        """Remember what the page store is now, if there is one, and if nothing is remembered of it."""
        fingerprint = fingerprint_of(store) if label not in self._fingerprints else None
        if fingerprint is not None:
            self._fingerprints[label] = fingerprint

    def is_intact(self, generation: GenerationBase) -> bool:
        """Return whether the page store, if there is one, is still what it was then."""
        fingerprint = self._fingerprints.get(generation.label)
        return fingerprint is None or fingerprint.is_intact()

    def find(self, label: str) -> SealRecord | None:
        """Return what the page store was, if there is one."""
        fingerprint = self._fingerprints.get(label)
        return SealRecord(*fingerprint.value) if fingerprint is not None else None

    def remove(self, label: str) -> None:
        """The page store goes."""
        fingerprint = self._fingerprints.pop(label, None)
        if fingerprint is not None:
            fingerprint.close()
