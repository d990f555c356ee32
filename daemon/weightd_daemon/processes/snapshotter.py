"""The immutable copy of a model from which every process of a generation builds.

Runs as a process of its own, because copying and digesting gigabytes would stop the daemon's loop. Its argument is the
pid of its parent. It reads a `SnapshotOrder` in JSON from stdin: every user of the host may read a command line, and
the order names models. It answers on stdout, a pipe, with an object in JSON: the `snapshots`, each without its path,
or an `error`, whether its cause is `transient`, and status 1. What it leaves of a copy that has failed, the daemon
removes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, NamedTuple

from weightd_common import process_start
from weightd_common.modelfiles.files import (
    ModelFileError,
    OpenModel,
    check_locations,
    combine_digests,
    files_identity,
    model_files,
    open_file,
)
from weightd_common.process_attributes import raise_score
from weightd_common.process_start import die_with_parent
from weightd_common.safe_open import OPERATOR, Grant
from weightd_common.transient import is_transient

_FORMAT = struct.Struct("<QQ")


class CopyProgress(NamedTuple):
    """So many bytes of so many; of what is not open yet the size is a guess."""

    copied_bytes: int
    total_bytes: int


class CopyProgressFile:
    """Writes.

    Args:
        path: of the file; None to write nothing.
        model_count: how many are copied, of about the same size.
    """

    def __init__(self, path: Path | None = None, model_count: int = 1) -> None:
        self._model_count = model_count
        self._started_count = 0
        self._known_bytes = 0
        self._copied_bytes = 0
        self._descriptor: int | None = None
        if path is not None:
            # To copy without telling how far it is is better than not to copy.
            with contextlib.suppress(OSError):
                self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def start_model(self, nbytes: int) -> None:
        """The next model is so large."""
        self._started_count += 1
        self._known_bytes += nbytes

    def add_bytes(self, nbytes: int) -> None:
        """So much more was copied."""
        self._copied_bytes += nbytes
        if self._descriptor is not None:
            total_bytes = self._known_bytes * max(1, self._model_count) // max(1, self._started_count)
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, _FORMAT.pack(self._copied_bytes, total_bytes), 0)

    def close(self) -> None:
        """Give the descriptor back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_copy_progress(path: Path) -> CopyProgress | None:
    """Return what stands there; None where nothing does."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        copied_bytes, total_bytes = _FORMAT.unpack(os.pread(descriptor, _FORMAT.size, 0))
    except (OSError, struct.error):
        return None
    finally:
        os.close(descriptor)
    return CopyProgress(copied_bytes, total_bytes) if copied_bytes <= total_bytes else None


_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "import weightd_daemon.processes.snapshotter as this; this.main()"
)

# See ioctl_ficlone(2).
_FICLONE = 0x40049409

# Larger ones leave the processor's cache before they have been hashed; with smaller ones the threads wait more.
_BLOCK_BYTES = 1024 * 1024
_BLOCKS = 3


# A file that was changed so shortly before it was read may have been changed again in the same tick of a clock. And it
# may not be on the disk yet: to wait for that could take as long as to copy it.
_SETTLED_NS = 60 * 10**9

# tmpfs and ramfs, by the first word of struct statfs, which is 120 bytes.
_MEMORY_FILE_SYSTEMS = (0x01021994, 0x858458F6)
_STATFS_BYTES = 256


class SnapshotResult(NamedTuple):
    """A snapshot.

    Attributes:
        path: of the copy of the model file.
        sha256: of the model.
        nbytes: of all its files.
        identity: of the copy: another one as soon as it was written or replaced.
        source_identity: of what was copied; "" if that may change without being another one.
    """

    path: str
    sha256: str
    nbytes: int
    identity: str
    source_identity: str


class SnapshotRequest(NamedTuple):
    """A model of which a snapshot is to be taken.

    Attributes:
        model: the path of its file.
        directory: for the copy; it is made.
        previous: what was taken of the same file before, as a list of the fields of `SnapshotResult`.
        expected_sha256: the sha256 that the model has to have; "" for any.
        grant: the right by which the model is named, as a list of the fields of `Grant`.
    """

    model: str
    directory: str
    previous: Sequence[Any] | None = None
    expected_sha256: str = ""
    grant: Sequence[Any] = OPERATOR


class SingleFile(NamedTuple):
    """A single file that is to be copied.

    Attributes:
        path: of the file.
        copy: the path of the copy.
        grant: the right by which the file is named, as a list of the fields of `Grant`.
    """

    path: str
    copy: str
    grant: Sequence[Any] = OPERATOR


class SnapshotOrder(NamedTuple):
    """What the process has to do.

    Attributes:
        requests: the models.
        progress_path: the file to which it writes how far it is.
        files: further files.
    """

    requests: Sequence[SnapshotRequest]
    progress_path: str
    files: Sequence[SingleFile] = ()

    def json(self) -> bytes:
        """Return what `from_json` reads."""
        return json.dumps(self).encode()

    @classmethod
    def from_json(cls, content: bytes) -> SnapshotOrder:
        """Return the order."""
        requests, progress_path, files = json.loads(content)
        return cls([SnapshotRequest(*each) for each in requests], progress_path, [SingleFile(*each) for each in files])


class ModelChanged(ModelFileError):
    """The file is known not to be the model that is expected."""


def changed_message(path: object, expected_sha256: str, sha256: str) -> str:
    """Say that a file is not what it was."""
    return f"{path}: the file has changed since it was loaded: expected sha256 {expected_sha256:.12}, got {sha256:.12}"


def command() -> list[str]:
    """Return the command that starts the process as a child of this one.

    Isolated, and without site-packages: that saves half of its start.
    """
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps(sys.path), str(os.getpid())]


def take_snapshot(
    model: Path,
    directory: Path,
    previous: SnapshotResult | None = None,
    progress: CopyProgressFile | None = None,
    expected_sha256: str = "",
    grant: Grant = OPERATOR,
) -> SnapshotResult:
    """Copy the model's files into `directory`, read-only. Each is read once.

    If these are the very files of which a snapshot is `previous`, and that is what it was, its files get another name.
    If that was not the model that is `expected_sha256`, nothing is copied.

    Raises:
        ModelChanged: the model is known to have another digest than `expected_sha256`.
        ModelFileError: the model is not as `Model` wants it, or changes while it is copied.
        OSError: the copy cannot be written.
    """
    directory.mkdir(mode=0o700)
    progress = progress or CopyProgressFile()
    with OpenModel(model, grant=grant) as original:
        source_identity = files_identity(original.files) if _is_settled(original) else ""
        copy = directory / original.files[0].name
        is_same_source = previous is not None and source_identity and source_identity == previous.source_identity
        if previous is not None and is_same_source and expected_sha256 and previous.sha256 != expected_sha256:
            raise ModelChanged(changed_message(model, expected_sha256, previous.sha256))
        if previous is not None and is_same_source and _link_files(previous, copy):
            original.check_unchanged()
            return previous._replace(path=str(copy), identity=files_identity(model_files(copy, is_own_copy=True)))
        progress.start_model(sum(file.nbytes for file in original.files))
        digests = [_copy_file(original.open(file), directory / file.name, progress) for file in original.files]
        original.check_unchanged()
        # Whoever loads the copy goes by what the copy names, whatever the original has named.
        copies = model_files(copy, is_own_copy=True)
        original.check_same(copies)
        if copy.suffix == ".mindir":
            check_locations(copy)
        nbytes = sum(file.nbytes for file in copies)
        return SnapshotResult(
            str(copy), combine_digests(copies, digests), nbytes, files_identity(copies), source_identity
        )


def _is_settled(model: OpenModel) -> bool:
    """Whether each later write to its files shows in their times.

    One to a mapping shows where it is the first to a page since that was written to the disk: so all are.
    """
    newest = max(file.changed_ns for file in model.files)
    return time.time_ns() - newest > _SETTLED_NS and all(_sync_to_disk(model.open(file)) for file in model.files)


def _sync_to_disk(file: BinaryIO) -> bool:
    """Write a file to its disk, and close it; False if it has none, or that fails."""
    status = ctypes.create_string_buffer(_STATFS_BYTES)
    with file:
        try:
            os.fdatasync(file.fileno())
        except OSError:
            return False
        failed = ctypes.CDLL(None).fstatfs(file.fileno(), status)
    return not failed and ctypes.c_long.from_buffer(status).value not in _MEMORY_FILE_SYSTEMS


def _link_files(previous: SnapshotResult, copy: Path) -> bool:
    """Give the files of a snapshot that is there already these names, too; False if it is not what it was."""
    linked: list[Path] = []
    try:
        existing = model_files(Path(previous.path), is_own_copy=True)
        if files_identity(existing) != previous.identity:
            return False
        for file in existing:
            target = copy.parent / file.name
            target.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
            target.hardlink_to(file.path)
            linked.append(target)
    except (ModelFileError, OSError):
        # It is being removed, or this file system has no such links.
        for each in linked:
            each.unlink()
        return False
    return True


def _copy_file(source: BinaryIO, target: Path, progress: CopyProgressFile) -> str:
    """Copy what was opened, and close it; return the sha256 of the copy.

    The copy shares the original's blocks where the file system can do that.
    """
    target.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
    with source, FileIO(source.fileno(), closefd=False) as reader, FileIO(target, "x+") as writer:
        sha256 = (
            _hash_file(writer, progress) if _clone_file(reader, writer) else _copy_and_hash(reader, writer, progress)
        )
        os.fchmod(writer.fileno(), 0o400)
        return sha256


def _clone_file(reader: FileIO, writer: FileIO) -> bool:
    try:
        fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
    except OSError:
        return False
    return True


def _hash_file(file: FileIO, progress: CopyProgressFile) -> str:
    state = hashlib.sha256()
    block = memoryview(bytearray(_BLOCK_BYTES))
    while count := file.readinto(block):
        state.update(block[:count])
        progress.add_bytes(count)
    return state.hexdigest()


def _copy_and_hash(reader: FileIO, writer: FileIO, progress: CopyProgressFile) -> str:
    """Read and write here, and hash in a thread what has been read."""
    state = hashlib.sha256()
    empty: SimpleQueue[memoryview] = SimpleQueue()
    full: SimpleQueue[tuple[memoryview, int]] = SimpleQueue()

    def hash_all() -> None:
        while (there := full.get())[1]:
            block, count = there
            state.update(block[:count])
            empty.put(block)

    for _ in range(_BLOCKS):
        empty.put(memoryview(bytearray(_BLOCK_BYTES)))
    thread = threading.Thread(target=hash_all)
    thread.start()
    try:
        while count := reader.readinto(block := empty.get()):
            full.put((block, count))
            written = 0
            while written < count:
                written += writer.write(block[written:count])
            progress.add_bytes(count)
    finally:
        full.put((memoryview(b""), 0))
        thread.join()
    return state.hexdigest()


def run_requests(
    requests: Sequence[SnapshotRequest], files: Sequence[SingleFile] = (), progress: CopyProgressFile | None = None
) -> dict[str, Any]:
    """Take the snapshots, and copy the files; return what is answered."""
    progress = progress or CopyProgressFile()
    results: list[SnapshotResult] = []
    try:
        for model, directory, known, expected, grant in requests:
            before = None if known is None else SnapshotResult(*known)
            results.append(take_snapshot(Path(model), Path(directory), before, progress, expected, _grant(grant)))
        for path, copy, grant in files:
            _copy_file(open_file(Path(path), _grant(grant)), Path(copy), CopyProgressFile())
    except ModelChanged as error:
        return {"error": str(error), "transient": False, "changed": True}
    except ModelFileError as error:
        return {"error": str(error), "transient": error.transient}
    except OSError as error:
        model, directory, *_ = requests[min(len(results), len(requests) - 1)]
        what = error.filename if str(error.filename) in [each.path for each in files] else model
        text = f"cannot copy {what} to {directory}: {error.strerror}"
        return {"error": text, "transient": is_transient(error)}
    return {"snapshots": [each[1:] for each in results]}


def _grant(fields: Sequence[Any]) -> Grant:
    uid, gids, directories = fields
    return Grant(uid, tuple(gids), tuple(directories))


def main() -> None:
    """Be the process."""
    # Ctrl-C is the daemon's to act on.
    process_start.reset_signals(signal.SIGINT)
    die_with_parent(int(sys.argv[1]))
    raise_score("worker")
    order = SnapshotOrder.from_json(sys.stdin.buffer.read())
    reply = run_requests(order.requests, order.files, CopyProgressFile(Path(order.progress_path), len(order.requests)))
    print(json.dumps(reply))
    sys.exit(int("error" in reply))
