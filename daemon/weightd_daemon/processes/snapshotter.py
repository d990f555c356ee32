"""The snapshotter: a helper process that makes the immutable copy of a model, from which a generation builds.

Copying and hashing gigabytes would block the daemon's event loop. The only argument is the pid of the parent. The
process reads a `SnapshotOrder` as JSON from stdin and not from its command line, which every user of the host can
read: the order names models. The snapshotter writes the results of `identify_files` and `run_requests` as JSON to
stdout, a pipe, and exits with status 1 after an error. The daemon removes the files of a failed copy.
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
    copy_identity,
    files_identity,
    model_files,
    open_file,
)
from weightd_common.process_attributes import keep_load_priority, raise_score
from weightd_common.process_start import die_with_parent
from weightd_common.safe_open import OPERATOR, Grant
from weightd_common.transient import is_transient

_FORMAT = struct.Struct("<QQ")


class CopyProgress(NamedTuple):
    """The number of bytes copied so far, and the total number of bytes.

    The total is an estimate until all models have been opened.
    """

    copied_bytes: int
    total_bytes: int


class CopyProgressFile:
    """Writes the progress of a copy to a file.

    Args:
        path: the path of the file; None to write no file.
        model_count: the number of models to copy. The total number of bytes is estimated as if all models had the same
            size.
    """

    def __init__(self, path: Path | None = None, model_count: int = 1) -> None:
        self._model_count = model_count
        self._started_count = 0
        self._known_bytes = 0
        self._copied_bytes = 0
        self._descriptor: int | None = None
        if path is not None:
            # The copy must not fail because its progress cannot be written.
            with contextlib.suppress(OSError):
                self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def start_model(self, nbytes: int) -> None:
        """Record that the copy of the next model starts, whose files have `nbytes` bytes."""
        self._started_count += 1
        self._known_bytes += nbytes

    def add_bytes(self, nbytes: int) -> None:
        """Record that `nbytes` more bytes were copied."""
        self._copied_bytes += nbytes
        if self._descriptor is not None:
            total_bytes = self._known_bytes * max(1, self._model_count) // max(1, self._started_count)
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, _FORMAT.pack(self._copied_bytes, total_bytes), 0)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_copy_progress(path: Path) -> CopyProgress | None:
    """Return the progress that a `CopyProgressFile` has written; None if the file is missing or invalid."""
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

# Bytes of a block that one thread copies and another thread hashes. Larger blocks leave the processor's cache before
# they are hashed; with smaller blocks, the threads wait more often.
_BLOCK_BYTES = 1024 * 1024
_BLOCKS = 3


# A model file counts as settled if its last change is more than this number of nanoseconds ago. Before that, a second
# change in the same tick of the file system's clock might leave the times of the file as they are. And a recently
# written file may not be on the disk yet; to wait for the disk could take as long as a copy.
_SETTLED_NS = 60 * 10**9

# The file system types of tmpfs and ramfs. `f_type` is the first word of struct statfs, which has 120 bytes.
_MEMORY_FILE_SYSTEMS = (0x01021994, 0x858458F6)
_STATFS_BYTES = 256


class SnapshotResult(NamedTuple):
    """A snapshot of one model file.

    Attributes:
        path: the path of the copied model file.
        sha256: the digest of the model.
        nbytes: the size of all files of the model together, in bytes.
        identity: a text that changes when a file of the copy is written or replaced.
        source_identity: a text that changes when an original file is written or replaced; "" if a write might not
            change the text.
    """

    path: str
    sha256: str
    nbytes: int
    identity: str
    source_identity: str


class SnapshotRequest(NamedTuple):
    """A model to copy.

    Attributes:
        model: the path of the model file.
        directory: the directory to create for the copy.
        previous: the latest snapshot of the same file, as a list of the fields of `SnapshotResult`, or None.
        expected_sha256: the digest that the model must have; "" for any.
        grant: the right of the user that named the model file, as a list of the fields of `Grant`.
    """

    model: str
    directory: str
    previous: Sequence[Any] | None = None
    expected_sha256: str = ""
    grant: Sequence[Any] = OPERATOR


class SingleFile(NamedTuple):
    """A file to copy that is not part of a model.

    Attributes:
        path: the path of the file.
        copy: the path of the copy.
        grant: the right of the user that named the file, as a list of the fields of `Grant`.
    """

    path: str
    copy: str
    grant: Sequence[Any] = OPERATOR


class SnapshotOrder(NamedTuple):
    """The input of the snapshotter process.

    Attributes:
        requests: the models to copy.
        progress_path: the path of the file to which the progress is written.
        files: the other files to copy.
    """

    requests: Sequence[SnapshotRequest]
    progress_path: str
    files: Sequence[SingleFile] = ()

    def json(self) -> bytes:
        """Return the order as JSON for `from_json`."""
        return json.dumps(self).encode()

    @classmethod
    def from_json(cls, content: bytes) -> SnapshotOrder:
        """Return the order that `json` has encoded."""
        requests, progress_path, files = json.loads(content)
        return cls([SnapshotRequest(*each) for each in requests], progress_path, [SingleFile(*each) for each in files])


class ModelChanged(ModelFileError):
    """The model file does not have the expected digest."""


def changed_message(path: object, expected_sha256: str, sha256: str) -> str:
    """Return the error text for a model file that has changed since the model was loaded."""
    return f"{path}: the file has changed since it was loaded: expected sha256 {expected_sha256:.12}, got {sha256:.12}"


def command() -> list[str]:
    """Return the command line that starts the snapshotter as a child of this process.

    Python runs isolated and without site-packages, which halves its start-up time.
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
    """Copy the files of a model into `directory`, read-only. Each file is read once.

    If the original files and the files of the snapshot `previous` are unchanged since that snapshot, this function
    creates hard links to the files of `previous` instead of copies.

    Raises:
        ModelChanged: the digest of the model is known without copying, because the model is unchanged since `previous`,
            and the digest is not `expected_sha256`.
        ModelFileError: the model is invalid or changes during the copy.
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
            return previous._replace(path=str(copy), identity=copy_identity(copy))
        progress.start_model(sum(file.nbytes for file in original.files))
        digests = [_copy_file(original.open(file), directory / file.name, progress) for file in original.files]
        original.check_unchanged()
        # A model file may name further files. The processes of a generation read these names in the copy of the model
        # file, so check that the copy names the same files as the original.
        copies = model_files(copy, is_own_copy=True)
        original.check_same(copies)
        if copy.suffix == ".mindir":
            check_locations(copy)
        nbytes = sum(file.nbytes for file in copies)
        return SnapshotResult(str(copy), combine_digests(copies, digests), nbytes, copy_identity(copy), source_identity)


def _is_settled(model: OpenModel) -> bool:
    """Return whether every later write to the model's files will change the times of these files.

    A write through a memory mapping changes the times of a file only if it is the first write to a page after the page
    was written to disk. Therefore this function first writes all pages to disk.
    """
    newest = max(file.changed_ns for file in model.files)
    return time.time_ns() - newest > _SETTLED_NS and all(_sync_to_disk(model.open(file)) for file in model.files)


def _sync_to_disk(file: BinaryIO) -> bool:
    """Write a file to its disk and close the file. Return False if the write fails or the file system is in memory."""
    status = ctypes.create_string_buffer(_STATFS_BYTES)
    with file:
        try:
            os.fdatasync(file.fileno())
        except OSError:
            return False
        failed = ctypes.CDLL(None).fstatfs(file.fileno(), status)
    return not failed and ctypes.c_long.from_buffer(status).value not in _MEMORY_FILE_SYSTEMS


def _link_files(previous: SnapshotResult, copy: Path) -> bool:
    """Create hard links to the files of an earlier snapshot. Return False if they have changed or cannot be linked."""
    linked: list[Path] = []
    try:
        if copy_identity(Path(previous.path)) != previous.identity:
            return False
        for file in model_files(Path(previous.path), is_own_copy=True):
            target = copy.parent / file.name
            target.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
            target.hardlink_to(file.path)
            linked.append(target)
    except (ModelFileError, OSError):
        # The earlier snapshot is being removed, or the file system has no hard links. Remove the links that exist
        # already, so that the caller can copy the files.
        for each in linked:
            each.unlink()
        return False
    return True


def _copy_file(source: BinaryIO, target: Path, progress: CopyProgressFile) -> str:
    """Copy an open file and close it; return the sha256 of the copy.

    The copy shares blocks with the original if the file system supports it.
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
    """Copy a file in this thread and hash it in another; return the sha256."""
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
    """Take the snapshots and copy the other files; return the result.

    The result has the key `snapshots`, with the fields of each `SnapshotResult` except its path; or the keys `error`,
    `transient` and, if the model does not have the expected digest, `changed`.
    """
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


def identify_files(order: SnapshotOrder) -> str:
    """Return a text that changes when a file of the order is written or replaced, or can be read no longer or again."""
    facts: list[object] = []
    for request in order.requests:
        try:
            with OpenModel(Path(request.model), grant=_grant(request.grant)) as model:
                facts.append(files_identity(model.files))
        except ModelFileError as error:
            facts += str(error), _stat(request.model)
    facts += [_stat(each.path) for each in order.files]
    return hashlib.sha256(repr(facts).encode("utf-8", "surrogateescape")).hexdigest()


def _stat(path: str) -> tuple[int, ...]:
    """Return the device, inode, size, mtime and ctime of a file; empty if there is no such file."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _grant(fields: Sequence[Any]) -> Grant:
    uid, gids, directories = fields
    return Grant(uid, tuple(gids), tuple(directories))


def main() -> None:
    """Run the process."""
    # The daemon handles Ctrl-C.
    process_start.reset_signals(signal.SIGINT)
    die_with_parent(int(sys.argv[1]))
    raise_score("worker")
    keep_load_priority()
    order = SnapshotOrder.from_json(sys.stdin.buffer.read())
    identity = identify_files(order)  # before the copy, so that a later change is noticed
    reply = run_requests(order.requests, order.files, CopyProgressFile(Path(order.progress_path), len(order.requests)))
    print(json.dumps({**reply, "identity": identity}))
    sys.exit(int("error" in reply))
