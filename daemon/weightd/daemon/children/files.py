"""The files of snapshots and generations, each in a private directory that is removed when nobody needs it."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from weightd.daemon.host.directories import make_directory


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


@dataclass(frozen=True)
class SnapshotFiles:
    """Where the immutable copy of a model is."""

    directory: Path

    @property
    def model_dir(self) -> Path:
        """The model file that every process loads, and what belongs to it. Made by the snapshot process."""
        return self.directory / "model"

    @property
    def weights(self) -> Path:
        """The arrays that every process loads over the model's weights, if there are any."""
        return self.directory / "weights.npz"

    @property
    def sample(self) -> Path:
        """The inputs that the canary asks, if they are configured."""
        return self.directory / "canary.npz"

    @property
    def log(self) -> Path:
        """What the processes say that take the snapshot."""
        return self.directory / "log"

    def create(self) -> None:
        """Make the directory."""
        make_directory(self.directory, mode=0o700)

    def remove(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.directory, ignore_errors=True)


@dataclass(frozen=True)
class GenerationFiles:
    """Where a generation's page store and logs are."""

    directory: Path

    @property
    def store(self) -> Path:
        """The page store that the holder may write."""
        return self.directory / "pages"

    def log(self, child: str) -> Path:
        """Where a child's stdout and stderr go."""
        return self.directory / f"{child}.log"

    def create(self) -> None:
        """Make the directory."""
        make_directory(self.directory, mode=0o700)

    def remove(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.directory, ignore_errors=True)
