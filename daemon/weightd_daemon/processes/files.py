"""The files of snapshots and generations, each in a private directory that is removed when nobody needs it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.persisted import SealRecord
from weightd_daemon.platform.directories import make_directory
from weightd_daemon.platform.exit_cause import MissingFile


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


class GenerationStorage:
    """The files of all generations, and the fingerprints that their page stores had when their holders exported them.

    Args:
        directory: private to the daemon; each generation has a directory below it.

    Attributes:
        files: of each generation, by its label.
        fingerprints: of the page stores, by the label of the generation; a generation without one has no store.
    """

    def __init__(self, directory: Path) -> None:
        self.files: dict[str, GenerationFiles] = {}
        self._directory = directory
        self.fingerprints: dict[str, FileFingerprint] = {}

    def open(self, generation: GenerationBase) -> GenerationFiles:
        """Return the files of a generation, whether or not they exist."""
        return self.files.setdefault(generation.label, GenerationFiles(self._directory / generation.label))

    def create(self, generation: GenerationBase, rank_table: str = "") -> GenerationFiles:
        """Return the files of a generation after making its directory, unless that exists.

        Raises:
            PathInUse: the directory cannot be made.
            OSError: the rank table cannot be written.
        """
        files = self.open(generation)
        if not files.directory.is_dir():
            files.create(rank_table)
        return files

    def on_exported(self, generation: GenerationBase) -> None:
        """Remember the fingerprint of the page store, if the holder has written one."""
        files = self.files.get(generation.label)
        fingerprint = fingerprint_of(files.store) if files and generation.label not in self.fingerprints else None
        if fingerprint is not None:
            self.fingerprints[generation.label] = fingerprint

    def seal_record(self, generation: GenerationBase) -> SealRecord | None:
        """Return the fingerprint of the page store when it was exported; None without a page store."""
        fingerprint = self.fingerprints.get(generation.label)
        return SealRecord(*fingerprint.value) if fingerprint is not None else None

    def is_store_intact(self, generation: GenerationBase) -> bool:
        """Return whether the page store, if there is one, is what it was when it was exported."""
        fingerprint = self.fingerprints.get(generation.label)
        return fingerprint is None or fingerprint.is_intact()

    def find_missing_file(
        self, generation: GenerationBase, paths: Iterable[str], *, needs_store: bool
    ) -> tuple[MissingFile, str]:
        """Return which file has vanished that a child needs, with an error text; `MissingFile.NONE` if none has.

        Args:
            generation: of the child.
            paths: the files of the snapshot that the child loads; it ignores empty ones.
            needs_store: whether the child attaches to the page store, if there is one.
        """
        for path in filter(None, paths):
            if not os.path.lexists(path):
                return MissingFile.SNAPSHOT, f"the copy of the model in the cache folder is gone: {path}"
        if needs_store and generation.label in self.fingerprints:
            store = self.files[generation.label].store
            if not os.path.lexists(store):
                return MissingFile.STORE, f"the shared weights in the cache folder are gone: {store}"
        return MissingFile.NONE, ""

    def remove_files(self, generation: GenerationBase) -> None:
        """Remove the files of a generation that has no process any more."""
        files = self.files.pop(generation.label, None)
        if files is not None:
            files.remove()
        fingerprint = self.fingerprints.pop(generation.label, None)
        if fingerprint is not None:
            fingerprint.close()
