"""Files of a model on disk: the model file, the external files that it names, and the digest of all of them.

The daemon identifies a model by this digest, and each child process reports the digest of its model in its HELLO
message. Daemon and child must compute the digest in the same way, so the digest is part of the protocol.

- ONNX: tensors may be in external files, named by a relative `location` in the model
  (https://onnx.ai/onnx/repo-docs/ExternalData.html).
- A MindIR of more than 1 GB is `X_graph.mindir` with the directory `X_variables/` beside it.

A location must be inside the model's directory after links are resolved. If the model file is a link, the directory of
its target is allowed as well: caches such as Hugging Face's consist of links to files in one directory. A user who
has named a file, in the model or by a link, must be able to read it: see `safe_open`.

A file may be replaced or truncated at any time while it is read. Therefore this module maps no files: reading beyond
the end of a mapped file that has shrunk kills the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Generator, List, NamedTuple, Sequence, Tuple

from weightd_common.modelfiles.protobuf import MAX_DEPTH, Malformed, TooDeep, mindir_locations, onnx_locations
from weightd_common.safe_open import OPERATOR, AccessDenied, Grant, SafePathWalker
from weightd_common.transient import is_transient
from weightd_protocol.errors import WeightdError

_BLOCK = 1024 * 1024
_MINDIR_GRAPH = "_graph.mindir"

# Maximum number of unreadable files that an error text names.
_MAX_LISTED_FILES = 10

# A file that was modified within this number of seconds may be incomplete, because another program may still copy it.
_SETTLE_S = 60.0


class ModelFileError(WeightdError):
    """The model cannot be read. The text has a line for each affected file, with its name and the problem.

    Attributes:
        transient: whether the cause of the error may disappear by itself.
    """

    def __init__(self, text: str, *, transient: bool = False) -> None:
        super().__init__(text)
        self.transient = transient


class ModelFile(NamedTuple):
    """A file of a model at the time when the model was opened.

    Attributes:
        name: the path relative to the model's directory.
        path: the path of the file.
        nbytes: the size of the file in bytes.
        identity: device, inode, mtime and ctime of the file. Writing or replacing the file always changes the identity,
            because no program can set the ctime.
    """

    name: str
    path: Path
    nbytes: int
    identity: Tuple[int, int, int, int]

    @property
    def changed_ns(self) -> int:
        """The later of mtime and ctime: when the file was last changed, in nanoseconds since the epoch."""
        return max(self.identity[2:])


class OpenModel:
    """Context manager that opens the model at `path` for reading and finds all of the model's files.

    In the `with` block, `open` returns the files that were found, or fails if a file was replaced after the model was
    opened.

    Args:
        path: the path of the model file.
        is_own_copy: whether the model is a copy made by the daemon. No other user can have named files in it, so that
            the rights of users are not checked.
        grant: the user that has named the path, and so must be able to read the files.

    Attributes:
        files: the model file, followed by the other files sorted by name.

    Raises:
        ModelFileError: a file is missing, unreadable, not a regular file, empty, outside of the directory, or named by
            a user who may not read it; or an ONNX file is invalid.
    """

    def __init__(self, path: Path, *, is_own_copy: bool = False, grant: Grant = OPERATOR) -> None:
        self._path = path
        self._is_own_copy = is_own_copy
        self._grant = grant
        self.files: List[ModelFile] = []
        with contextlib.ExitStack() as stack:
            self._find_files(stack)
            self._open_files = stack.pop_all()

    def __enter__(self) -> OpenModel:
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.close()

    def open(self, file: ModelFile) -> BinaryIO:
        """Open one of `files` for reading.

        Raises:
            ModelFileError: the file can no longer be read, or was replaced after the model was opened.
        """
        if file is self.files[0]:
            descriptor = os.dup(self._file.fileno())
            os.lseek(descriptor, 0, os.SEEK_SET)
            return os.fdopen(descriptor, "rb")
        reader = self._open_external(file.name)
        if _stat_file(file.name, file.path, reader) != file:
            reader.close()
            raise self._changed_error()
        return reader

    def check_same(self, files: Sequence[ModelFile]) -> None:
        """Check that the files of a copy have the names and sizes of this model's files.

        Raises:
            ModelFileError: names or sizes differ, because the model changed while it was copied.
        """
        if [(file.name, file.nbytes) for file in files] != [(file.name, file.nbytes) for file in self.files]:
            raise self._changed_error()

    def check_unchanged(self) -> None:
        """Check that the model file at the path, and the external files that it names, have not changed since opening.

        Raises:
            ModelFileError: a file was written, replaced, added or removed.
        """
        try:
            with OpenModel(self._path, is_own_copy=self._is_own_copy, grant=self._grant) as now:
                same = now.files == self.files
        except ModelFileError:
            same = False
        if not same:
            raise self._changed_error()

    def _changed_error(self) -> ModelFileError:
        text = f"{self._path}: changed while it was copied; load it again once it is complete"
        return ModelFileError(text, transient=True)

    def _find_files(self, stack: contextlib.ExitStack) -> None:
        path = self._path
        walker = stack.enter_context(SafePathWalker(is_trusting=self._is_own_copy, grant=self._grant))
        with _reading(path):
            start, rest = walker.starting_directory(str(path.absolute()))
            parent = walker.open_directory(start, str(PurePosixPath(rest).parent))
            self._file, real = walker.open_file(parent, path.name)
            stack.enter_context(self._file)
            self._allowed_directories = (parent, real)
            self._directory = parent.with_authors(os.fstat(self._file.fileno()).st_uid, *real.authors)
        self.files.append(_stat_file(path.name, path, self._file))
        if path.name.endswith(_MINDIR_GRAPH):
            names = self._mindir_variables(walker)
        elif path.suffix == ".onnx":
            names = _onnx_locations(path, self._file)
        else:
            names = []
        if path.suffix == ".mindir" and not self._is_own_copy:
            _check_mindir(path, self._file)
        problems: List[ModelFileError] = []
        for name in sorted({*names} - {path.name}):
            try:
                with self._open_external(name) as file:
                    self.files.append(_stat_file(name, path.parent / name, file))
            except ModelFileError as error:
                problems.append(error)
        if problems:
            summary = (
                [f"{path}: {len(problems) - _MAX_LISTED_FILES} more files cannot be read"]
                if len(problems) > _MAX_LISTED_FILES
                else []
            )
            text = "\n".join([*map(str, problems[:_MAX_LISTED_FILES]), *summary])
            raise ModelFileError(text, transient=all(each.transient for each in problems))

    def _open_external(self, name: str) -> BinaryIO:
        with _reading(self._path.parent / name), SafePathWalker(
            is_trusting=self._is_own_copy, grant=self._grant
        ) as reach:
            file, real = reach.open_file(self._directory, name)
            if real.is_within(self._allowed_directories):
                return file
            file.close()
        raise ModelFileError(
            f"{self._path.parent / name}: a link out of the model's directory; expected a file, or a link to "
            "a file below that directory or, if the model is a link, below the directory of the model's target"
        )

    def _mindir_variables(self, walker: SafePathWalker) -> List[str]:
        path = self._path
        directory = path.parent / (path.name[: -len(_MINDIR_GRAPH)] + "_variables")
        try:
            variables = walker.open_directory(self._directory, directory.name)
        except (FileNotFoundError, NotADirectoryError):
            text = f"{path}: expected its weights in {directory}/, which is not a directory"
            raise ModelFileError(text, transient=True) from None
        except (OSError, AccessDenied) as error:
            raise _read_error(directory, error) from None
        with _reading(directory), variables.scan() as entries:
            return [str(PurePosixPath(directory.name, entry.name)) for entry in entries if entry.is_file()]


def model_files(path: Path, *, is_own_copy: bool = False) -> List[ModelFile]:
    """Return the files of the model at `path`.

    Raises:
        ModelFileError: as `OpenModel`, which also explains `is_own_copy`.
    """
    with OpenModel(path, is_own_copy=is_own_copy) as model:
        return model.files


def open_file(path: Path, grant: Grant = OPERATOR) -> BinaryIO:
    """Open a single file of a model for reading, such as a weights file.

    Args:
        path: the path of the file.
        grant: the user that has named the path, and so must be able to read the file.

    Raises:
        ModelFileError: the file is missing, unreadable, not a regular file, or named by a user who may not read it.
    """
    with _reading(path), SafePathWalker(grant=grant) as reach:
        return reach.open_file(*reach.starting_directory(str(path.absolute())))[0]


def digest(path: Path, *, is_own_copy: bool = False) -> str:
    """Return the sha256 in hex that identifies the content of the model at `path`.

    For a model of one file it equals the output of `sha256sum`. For several files it is the sha256 of the lines that
    `sha256sum` prints for them, in the order of `model_files`.

    Raises:
        ModelFileError: as `OpenModel`, which also explains `is_own_copy`.
    """
    with OpenModel(path, is_own_copy=is_own_copy) as model:
        return combine_digests(model.files, [_sha256(file.path, model.open(file)) for file in model.files])


def combine_digests(files: Sequence[ModelFile], digests: Sequence[str]) -> str:
    """Return the digest of a model, computed from the names and sha256 digests of its files."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256(b"".join(map(_sha256sum_line, digests, files))).hexdigest()


def files_identity(files: Sequence[ModelFile]) -> str:
    """Return a text that changes whenever a file is written or replaced, even if the content stays the same."""
    facts = [(os.fsencode(file.name), file.nbytes, *file.identity) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def copy_identity(path: Path) -> str:
    """Return a text that changes whenever a file of a snapshot is written, replaced, added or removed.

    A snapshot is the daemon's copy of a model, in a directory with no other files. So, unlike for `model_files`, the
    model file need not be parsed, which would take as long as a predict of a small model.

    Args:
        path: the path of the snapshot's model file.

    Raises:
        OSError: the directory cannot be read.
    """
    root = str(path.parent)
    facts: List[Tuple[bytes, bytes, int, int, int, int, int]] = []
    for directory, _, names in os.walk(root, onerror=_raise):
        for name in names:
            status = os.lstat(os.path.join(directory, name))  # noqa: PTH118 - the walk has text, and bytes are hashed
            where = os.path.relpath(directory, root)
            facts.append((os.fsencode(where), os.fsencode(name), *_status_identity(status), status.st_size))
    return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()


def snapshot_digest(path: Path, snapshot_identity: str) -> str:
    """Return the digest of a snapshot.

    The content is read only if the snapshot's files have changed or `snapshot_identity` is "".

    Args:
        path: the path of the snapshot's model file.
        snapshot_identity: the `copy_identity` of the snapshot when the daemon made it, a colon, and its digest; or "".

    Raises:
        ModelFileError: as `OpenModel`.
    """
    expected, _, sha256 = snapshot_identity.partition(":")
    if sha256:
        with contextlib.suppress(OSError):
            if copy_identity(path) == expected:
                return sha256
    return digest(path, is_own_copy=True)


def _sha256sum_line(sha256: str, file: ModelFile) -> bytes:
    """Return the line that sha256sum prints for a file. It begins with a backslash if the name had to be escaped."""
    escaped = file.name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    mark = "" if escaped == file.name else "\\"
    return os.fsencode(f"{mark}{sha256}  {escaped}\n")


def _stat_file(name: str, path: Path, file: BinaryIO) -> ModelFile:
    status = os.fstat(file.fileno())
    if status.st_size == 0:
        raise ModelFileError(f"{path}: the file is empty", transient=_may_be_incomplete(status))
    return ModelFile(name, path, status.st_size, _status_identity(status))


def _status_identity(status: os.stat_result) -> Tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _raise(error: OSError) -> None:
    raise error


def _may_be_incomplete(status: os.stat_result) -> bool:
    """Return whether a file was written so recently that another program may still be copying it."""
    return abs(time.time() - status.st_mtime) < _SETTLE_S


@contextlib.contextmanager
def _reading(path: Path) -> Generator[None, None, None]:
    """Convert errors in the block, such as a missing file at `path`, to ModelFileError."""
    try:
        yield
    except (OSError, AccessDenied, ValueError) as error:
        raise _read_error(path, error) from None


def _read_error(path: Path, error: Exception) -> ModelFileError:
    if isinstance(error, AccessDenied):
        return ModelFileError(f"{path}: {error}")
    # Python raises ValueError for a path only if the path contains a NUL. Python's own text depends on its version.
    text = error.strerror if isinstance(error, OSError) else "the path contains a NUL"
    return ModelFileError(f"{path}: {text}", transient=is_transient(error))


def _sha256(path: Path, file: BinaryIO) -> str:
    state = hashlib.sha256()
    with _reading(path), file:
        while True:
            block = file.read(_BLOCK)
            if not block:
                return state.hexdigest()
            state.update(block)


def _onnx_locations(path: Path, file: BinaryIO) -> List[str]:
    try:
        with _reading(path):
            locations = list(onnx_locations(file))
    except Malformed:
        # Reject the file even if an engine might accept it: the engine could load external files that this parser has
        # not found, and which are therefore not part of the digest.
        text = f"{path}: expected an ONNX model; the file has another format or is truncated"
        raise ModelFileError(text, transient=_may_be_incomplete(os.fstat(file.fileno()))) from None
    for location, _ in locations:
        pure = PurePosixPath(location)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise _outside_error(path, location)
    return [str(PurePosixPath(location)) for location, is_used in locations if is_used]


def check_locations(path: Path) -> None:
    """Check that a MindIR names no file outside of its directory.

    MindSpore opens any location relative to the MindIR's directory, without a check. In a snapshot, all files in that
    directory are part of the model, so it is sufficient that no location leads out of the directory.

    Raises:
        ModelFileError: a location is outside of the directory, or the file cannot be read.
    """
    with _reading(path), open_file(path) as file:
        _check_mindir(path, file)


def _check_mindir(path: Path, file: BinaryIO) -> None:
    try:
        for location in mindir_locations(file):
            pure = PurePosixPath(location)
            if pure.is_absolute() or ".." in pure.parts:
                raise _outside_error(path, location)
    except TooDeep:
        raise ModelFileError(f"{path}: expected at most {MAX_DEPTH} levels of messages in messages") from None
    except Malformed:
        # Accept the file: the engine cannot read it either, and the engine's error text explains the reason better.
        pass


def _outside_error(path: Path, location: str) -> ModelFileError:
    return ModelFileError(f"{path}: names the external file {location!r}; expected a path inside the model's directory")
