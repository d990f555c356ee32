"""The files of a generation: one private directory, removed when the daemon stops."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from weightd.daemon.claim import make_directory


@dataclass(frozen=True)
class GenerationFiles:
    """Where a generation's snapshot, page store and logs are."""

    directory: Path
    model_name: str

    @property
    def snapshot_dir(self) -> Path:
        """Made by the snapshot process."""
        return self.directory / "model"

    @property
    def snapshot(self) -> Path:
        """The model file that every process of the generation loads."""
        return self.snapshot_dir / self.model_name

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
