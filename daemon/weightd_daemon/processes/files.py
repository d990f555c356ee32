"""Files of snapshots and generations. Each snapshot and each generation has a private directory."""

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
    """Paths of the files in a snapshot, the immutable copy of a model."""

    directory: Path

    @property
    def model_dir(self) -> Path:
        """The directory of the copied model file and of the copied files that it names. The snapshotter creates it."""
        return self.directory / "model"

    def slice_dir(self, rank: int) -> Path:
        """Return the directory that the snapshotter creates for the copy of one rank's slice."""
        return self.directory / f"rank{rank}"

    @property
    def weights(self) -> Path:
        """The path of the copied arrays that replace weights of the model. It exists only if there are such arrays."""
        return self.directory / "weights.npz"

    @property
    def sample(self) -> Path:
        """The path of the copied inputs of the self-test. It exists only if the model's `selftest` names a file."""
        return self.directory / "selftest.npz"

    def group_info(self, rank: int) -> Path:
        """Return the path of one rank's copied file of communication groups, if such a file is configured."""
        return self.directory / f"group_info{rank}"

    def rank_table(self, group: int) -> Path:
        """Return the path of one rank group's copied rank table. It exists only if a rank table is configured."""
        return self.directory / f"rank_table{group}.json"

    @property
    def copy_progress(self) -> Path:
        """The path of the file to which `CopyProgressFile` writes the progress of the copy."""
        return self.directory / "copied"

    @property
    def log(self) -> Path:
        """The path of the log, to which the snapshotter and the later queries of the cards write their stderr."""
        return self.directory / "log"

    def create(self) -> None:
        """Create an empty directory, after removing the files of an earlier attempt.

        Raises:
            PathInUse: the directory cannot be created.
        """
        self.remove()
        # The parent directory may be missing, because an operator may have removed the whole cache directory.
        make_directory(self.directory.parent, mode=0o700)
        make_directory(self.directory, mode=0o700)

    def remove(self) -> None:
        """Remove the directory with all its files."""
        shutil.rmtree(self.directory, ignore_errors=True)


@dataclass(frozen=True)
class GenerationFiles:
    """Paths of a generation's page store, rank table and logs."""

    directory: Path

    @property
    def store(self) -> Path:
        """The path of the page store, which only the holder writes."""
        return self.directory / "pages"

    @property
    def rank_table(self) -> Path:
        """The path of the rank table that weightd has generated for this generation."""
        return self.directory / "rank_table.json"

    def log(self, child: str) -> Path:
        """Return the path of a child's log, to which the child writes its stdout and stderr."""
        return self.directory / f"{child}.log"

    def create(self, rank_table: str = "") -> None:
        """Create the directory, and write the rank table into it unless `rank_table` is empty.

        Raises:
            PathInUse: the directory cannot be created.
            OSError: the rank table cannot be written.
        """
        # The parent directory may be missing, because an operator may have removed the whole cache directory.
        make_directory(self.directory.parent, mode=0o700)
        make_directory(self.directory, mode=0o700)
        if rank_table:
            self.rank_table.write_text(rank_table, "ascii")

    def remove(self) -> None:
        """Remove the directory with all its files."""
        shutil.rmtree(self.directory, ignore_errors=True)


class FileFingerprint:
    """The size and modification time of a file when this object was created, for a cheap check for changes.

    The check detects every write and truncation by a process, because they change the modification time. It does not
    detect data that a failing disk has changed.

    Attributes:
        descriptor: a descriptor of the file, until `close` is called.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._initial = self._current()

    @property
    def value(self) -> tuple[int, int]:
        """The size in bytes and the modification time in ns of the file when this object was created."""
        return self._initial

    def is_intact(self) -> bool:
        """Return whether the file was neither written nor truncated since this object was created."""
        return self._current() == self._initial

    def close(self) -> None:
        """Close the descriptor of the file."""
        os.close(self.descriptor)

    def _current(self) -> tuple[int, int]:
        status = os.fstat(self.descriptor)
        return status.st_size, status.st_mtime_ns


def fingerprint_of(path: Path) -> FileFingerprint | None:
    """Return the fingerprint of the file at `path`, or None if the file cannot be opened."""
    with contextlib.suppress(OSError):
        return FileFingerprint(path)
    return None


class GenerationStorage:
    """The files of all generations, and the fingerprints that their page stores had after the builds.

    Args:
        directory: a directory private to the daemon, with a subdirectory for each generation.

    Attributes:
        files: the files of each generation, by the label of the generation.
        fingerprints: the fingerprints of the page stores, by the label of the generation; a generation without a page
            store has none.
    """

    def __init__(self, directory: Path) -> None:
        self.files: dict[str, GenerationFiles] = {}
        self._directory = directory
        self.fingerprints: dict[str, FileFingerprint] = {}

    def open(self, generation: GenerationBase) -> GenerationFiles:
        """Return the paths of a generation's files, whether or not the files exist."""
        return self.files.setdefault(generation.label, GenerationFiles(self._directory / generation.label))

    def create(self, generation: GenerationBase, rank_table: str = "") -> GenerationFiles:
        """Return the paths of a generation's files, and create its directory if necessary.

        Raises:
            PathInUse: the directory cannot be created.
            OSError: the rank table cannot be written.
        """
        files = self.open(generation)
        if not files.directory.is_dir():
            files.create(rank_table)
        return files

    def on_exported(self, generation: GenerationBase) -> None:
        """Record the fingerprint of the page store, if the holder has written a page store."""
        files = self.files.get(generation.label)
        fingerprint = fingerprint_of(files.store) if files and generation.label not in self.fingerprints else None
        if fingerprint is not None:
            self.fingerprints[generation.label] = fingerprint

    def seal_record(self, generation: GenerationBase) -> SealRecord | None:
        """Return the size and modification time that the page store had after the build; None without a page store."""
        fingerprint = self.fingerprints.get(generation.label)
        return SealRecord(*fingerprint.value) if fingerprint is not None else None

    def is_store_intact(self, generation: GenerationBase) -> bool:
        """Return whether the page store is unchanged since the build; True if the generation has no page store."""
        fingerprint = self.fingerprints.get(generation.label)
        return fingerprint is None or fingerprint.is_intact()

    def find_missing_file(
        self, generation: GenerationBase, paths: Iterable[str], *, needs_store: bool
    ) -> tuple[MissingFile, str]:
        """Check whether the files exist that a child needs; return the kind of a missing file and an error text.

        If every file exists, return `MissingFile.NONE` and an empty text.

        Args:
            generation: the generation of the child.
            paths: the files of the snapshot that the child loads; empty paths are ignored.
            needs_store: whether the child attaches to the page store, if the generation has one.
        """
        for path in filter(None, paths):
            if not os.path.lexists(path):
                return MissingFile.SNAPSHOT, f"the copy of the model in the cache directory is missing: {path}"
        if needs_store and generation.label in self.fingerprints:
            store = self.files[generation.label].store
            if not os.path.lexists(store):
                return MissingFile.STORE, f"the shared weights in the cache directory are missing: {store}"
        return MissingFile.NONE, ""

    def remove_files(self, generation: GenerationBase) -> None:
        """Remove the files of a generation whose processes have all exited."""
        files = self.files.pop(generation.label, None)
        if files is not None:
            files.remove()
        fingerprint = self.fingerprints.pop(generation.label, None)
        if fingerprint is not None:
            fingerprint.close()
