"""Published models on this host: one copy of each, whose digest is checked each time that it is taken.

::

    BASE/models/lock            held while a model is looked at, fetched, or removed
    BASE/models/SHA256/model    the name of the model's own file
    BASE/models/SHA256/lock     locked, with others, by whoever uses it
    BASE/models/SHA256/files/   its files
    BASE/models/staging         one that is being fetched
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

from weightd_common.modelfiles.files import ModelFileError, digest
from weightd_daemon.platform.directories import make_directory
from weightd_protocol import limits
from weightd_protocol.errors import FailedPrecondition
from weightd_ray.work_dirs import file_lock

# Models that nobody uses are kept for who comes next, so many of them; a rolling update goes back and forth.
MAX_UNUSED = 4

# A model of more has been put together by nobody who means it.
MAX_FILES = 65536

_MODE = 0o700


class PublishedFile(NamedTuple):
    """A file of a published model.

    Attributes:
        name: relative to the model's directory.
        nbytes: its size.
    """

    name: str
    nbytes: int


class PublishedModel(Protocol):
    """Where a model is published."""

    def files(self) -> Sequence[PublishedFile]:
        """Return its files, the model's own first.

        Raises:
            RequestError: they cannot be had.
        """
        ...

    def chunks(self, index: int) -> Iterator[Any]:
        """Return what is in one of them, in pieces of bytes.

        Raises:
            RequestError: they cannot be had.
        """
        ...


class CachedModel:
    """A model that is used, and stays until it is released, or until this process ends.

    Args:
        path: of the model's own file.
        lock_fd: the descriptor of the lock.

    Attributes:
        path: as above.
    """

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    def release(self) -> None:
        """Use it no more."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


class ModelCache:
    """The models of a directory.

    Args:
        base: the directory for the files of replicas.
    """

    def __init__(self, base: Path) -> None:
        self._models = base / "models"
        self._staging = self._models / "staging"

    def take(self, sha256: str, source: PublishedModel) -> CachedModel:
        """Return a model of this digest; it is fetched where there is none here, or where that is damaged.

        This waits for others on this host that do the same.

        Raises:
            FailedPrecondition: what is published is something else, or there is no room for it.
            RequestError: it cannot be had now.
        """
        make_directory(self._models.parent, _MODE)
        make_directory(self._models, _MODE)
        directory = self._models / sha256
        with file_lock(self._models / "lock"):
            # Of who was killed while it fetched.
            shutil.rmtree(self._staging, ignore_errors=True)
            if _digest_of(directory) != sha256:
                shutil.rmtree(directory, ignore_errors=True)
                self._fetch(sha256, source, directory)
            os.utime(directory)
            lock_fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock_fd, fcntl.LOCK_SH)
            self._remove_unused(MAX_UNUSED)
        return CachedModel(_model_file(directory), lock_fd)

    def _fetch(self, sha256: str, source: PublishedModel, directory: Path) -> None:
        files = source.files()
        _check_files(files)
        self._free_space(sum(each.nbytes for each in files))
        try:
            for index, file in enumerate(files):
                path = self._staging / "files" / file.name
                path.parent.mkdir(parents=True, exist_ok=True)
                _write(path, source.chunks(index), file.nbytes)
            (self._staging / "model").write_text(files[0].name)
            found = _digest_of(self._staging)
            if found != sha256:
                raise FailedPrecondition(f"expected a published model with sha256 {sha256}, got {found or 'none'}")
            self._staging.rename(directory)
        except OSError as error:
            raise FailedPrecondition(f"{error.filename or self._staging}: {error.strerror}") from None
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)

    def _free_space(self, nbytes: int) -> None:
        for max_kept in range(MAX_UNUSED - 1, -1, -1):
            if shutil.disk_usage(self._models).free >= nbytes:
                return
            self._remove_unused(max_kept)

    def _remove_unused(self, max_kept: int) -> None:
        """Remove what nobody uses, but for so many that were used last."""
        entries = sorted(self._models.glob("?" * 64), key=lambda each: each.stat().st_mtime, reverse=True)
        unused = [each for each in entries if not _is_used(each)]
        for each in unused[max_kept:]:
            shutil.rmtree(each, ignore_errors=True)


def _check_files(files: Sequence[PublishedFile]) -> None:
    """See to it that names stay in the directory, and that there is a model at all.

    Raises:
        FailedPrecondition: they do not.
    """
    if not 0 < len(files) <= MAX_FILES:
        raise FailedPrecondition(f"expected 1 to {MAX_FILES} files of a published model, got {len(files)}")
    for each in files:
        path = PurePosixPath(each.name)
        is_inside = path.parts and not path.is_absolute() and ".." not in path.parts
        if not (is_inside and each.name.isprintable() and len(each.name) <= limits.MAX_PATH_BYTES):
            raise FailedPrecondition(f"expected names of files inside the model's directory, got {each.name!r}")


def _write(path: Path, chunks: Iterable[Any], nbytes: int) -> None:
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            if file.tell() > nbytes:
                raise FailedPrecondition(f"{path.name}: expected {nbytes} bytes of a published model, got more")


def _digest_of(directory: Path) -> str:
    """Return the digest of what is there, "" if that is no model."""
    try:
        return digest(_model_file(directory))
    except (OSError, ModelFileError):
        return ""


def _model_file(directory: Path) -> Path:
    return directory / "files" / (directory / "model").read_text()


def _is_used(directory: Path) -> bool:
    try:
        lock_fd = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock_fd)
    return False
