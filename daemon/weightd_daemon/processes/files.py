"""The files of snapshots and generations, each in a private directory that is removed when nobody needs it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from weightd_daemon.platform.directories import make_directory


@dataclass(frozen=True)
class SnapshotFiles:
    """Where the immutable copy of a model is."""

    directory: Path

    @property
    def model_dir(self) -> Path:
        """The model file that every process loads, and what belongs to it. Made by the snapshot process."""
        return self.directory / "model"

    def slice_dir(self, rank: int) -> Path:
        """Where a rank's slice is, and what belongs to it. As `model_dir`."""
        return self.directory / f"rank{rank}"

    @property
    def weights(self) -> Path:
        """The arrays that every process loads over the model's weights, if there are any."""
        return self.directory / "weights.npz"

    @property
    def sample(self) -> Path:
        """The inputs that the self-test runs on, if they are configured."""
        return self.directory / "selftest.npz"

    def group_info(self, rank: int) -> Path:
        """What a rank is told of the groups of ranks within the model, if that is configured."""
        return self.directory / f"group_info{rank}"

    def rank_table(self, group: int) -> Path:
        """The rank table of a group, if it is configured."""
        return self.directory / f"rank_table{group}.json"

    @property
    def copy_progress(self) -> Path:
        """How much of it has been copied."""
        return self.directory / "copied"

    @property
    def log(self) -> Path:
        """What the processes say that take the snapshot."""
        return self.directory / "log"

    def create(self) -> None:
        """Make the directory; nothing of an earlier attempt is left in it.

        Raises:
            PathInUse: it cannot be made.
        """
        self.remove()
        # Somebody may have removed all of the cache.
        make_directory(self.directory.parent, mode=0o700)
        make_directory(self.directory, mode=0o700)

    def remove(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.directory, ignore_errors=True)


@dataclass(frozen=True)
class GenerationFiles:
    """Where a generation's page store, rank table and logs are."""

    directory: Path

    @property
    def store(self) -> Path:
        """The page store that the holder may write."""
        return self.directory / "pages"

    @property
    def rank_table(self) -> Path:
        """The rank table that is written for it."""
        return self.directory / "rank_table.json"

    def log(self, child: str) -> Path:
        """Where a child's stdout and stderr go."""
        return self.directory / f"{child}.log"

    def create(self, rank_table: str = "") -> None:
        """Make the directory, with this rank table in it if there is one.

        Raises:
            PathInUse: the directory cannot be made.
            OSError: the table cannot be written.
        """
        # Somebody may have removed all of the cache.
        make_directory(self.directory.parent, mode=0o700)
        make_directory(self.directory, mode=0o700)
        if rank_table:
            self.rank_table.write_text(rank_table, "ascii")

    def remove(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.directory, ignore_errors=True)
