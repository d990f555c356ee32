"""Cache of published models on a host: one copy of each model, whose digest is checked at each use.

::

    BASE/models/lock            locked while a model is checked, fetched or removed
    BASE/models/SHA256/model    contains the name of the model file
    BASE/models/SHA256/lock     locked in shared mode by each user of the model
    BASE/models/SHA256/files/   the files of the model
    BASE/models/staging         a model that is being fetched
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

# Maximum number of unused models that the cache keeps for later replicas, because a rolling update may return to a
# previous model.
MAX_UNUSED = 4

# Maximum number of files of a model; no real model has more.
MAX_FILES = 65536

_MODE = 0o700


class PublishedFile(NamedTuple):
    """A file of a published model.

    Attributes:
        name: the path relative to the model's directory.
        nbytes: the size in bytes.
    """

    name: str
    nbytes: int


class PublishedModel(Protocol):
    """The interface of a source from which a published model is fetched."""

    def files(self) -> Sequence[PublishedFile]:
        """Return the files, the model file first.

        Raises:
            RequestError: the source is not available.
        """
        ...

    def chunks(self, index: int) -> Iterator[Any]:
        """Yield the content of a file in parts.

        Raises:
            RequestError: the source is not available.
        """
        ...


class CachedModel:
    """A cached model in use, which stays on disk until it is released or this process exits.

    Args:
        path: the path of the model file.
        lock_fd: the descriptor of the shared lock.

    Attributes:
        path: as above.
    """

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    def release(self) -> None:
        """Release the model, so that the cache may remove it."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


class ModelCache:
    """A cache of published models in a directory.

    Args:
        base: the directory for the files of replicas.
    """

    def __init__(self, base: Path) -> None:
        self._models = base / "models"
        self._staging = self._models / "staging"

    def take(self, sha256: str, source: PublishedModel) -> CachedModel:
        """Return the model with this digest; fetch it first if the cached copy is missing or damaged.

        Blocks while another process on this host checks, fetches or removes a model.

        Raises:
            FailedPrecondition: the published model has another digest, or the disk is full.
            RequestError: the model cannot be fetched at the moment.
        """
        make_directory(self._models.parent, _MODE)
        make_directory(self._models, _MODE)
        directory = self._models / sha256
        with file_lock(self._models / "lock"):
            # Remove the files that a process left when it was killed while it fetched a model.
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
        """Remove unused models, except for the `max_kept` models that were used most recently."""
        entries = sorted(self._models.glob("?" * 64), key=lambda each: each.stat().st_mtime, reverse=True)
        unused = [each for each in entries if not _is_used(each)]
        for each in unused[max_kept:]:
            shutil.rmtree(each, ignore_errors=True)


def _check_files(files: Sequence[PublishedFile]) -> None:
    """Check that a model has files, and that the names of the files do not lead out of the model's directory.

    Raises:
        FailedPrecondition: the check fails.
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
    """Return the digest of the model in a directory; "" if there is no valid model."""
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
