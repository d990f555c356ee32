"""What a model is on disk: its file, the external files it names, and the digest over all of them.

The daemon pins a model by this digest, and each process says in its HELLO which digest it would load: both sides
must compute it in one way, so it is part of the protocol.

- ONNX: tensors may lie in external files, named by a relative `location` inside the model
  (https://onnx.ai/onnx/repo-docs/ExternalData.html).
- MindIR over 1 GB is `X_graph.mindir` with the directory `X_variables/` beside it.

A location must stay inside the model's directory, but symbolic links are followed wherever they lead: the caches of
package managers consist of them.

A file may be exchanged or cut short at any time while it is read. That is why nothing is mapped here: reading beyond
the end of a mapped file that has shrunk kills the process.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Dict, Iterator, List, NamedTuple, cast

from weightd.protocol import limits
from weightd.protocol.errors import WeightdError
from weightd.protocol.protobuf import Malformed, Span, fields

_BLOCK = 1024 * 1024
_MINDIR_GRAPH = "_graph.mindir"


class ModelFileError(WeightdError):
    """The model cannot be read; the text names the file and what is wrong with it."""


class ModelFile(NamedTuple):
    """One file of a model: its name relative to the model's directory, and where it is."""

    name: str
    path: Path


def model_files(path: Path) -> List[ModelFile]:
    """Return the files of the model at `path`, the model file itself first, the others by name.

    Raises:
        ModelFileError: one of them is missing, unreadable, not a regular file, empty, or outside the directory, or an
            ONNX file is none.
    """
    _check_readable(path)
    if path.name.endswith(_MINDIR_GRAPH):
        names = _mindir_variables(path)
    elif path.suffix == ".onnx":
        names = _onnx_locations(path)
    else:
        names = []
    files = [ModelFile(path.name, path)]
    for name in sorted({*names} - {path.name}):
        file = ModelFile(name, path.parent / name)
        _check_readable(file.path)
        files.append(file)
    return files


def digest(path: Path) -> str:
    """Return the sha256, in hex, that names the content of the model at `path`.

    For a model of one file it is what `sha256sum` prints. For several it is the sha256 of the lines that
    `sha256sum` prints for them, in the order of `model_files`.

    Raises:
        ModelFileError: as `model_files`.
    """
    files = model_files(path)
    digests = [_sha256(file.path) for file in files]
    if len(files) == 1:
        return digests[0]
    return hashlib.sha256(b"".join(map(_sha256sum_line, digests, files))).hexdigest()


def _sha256sum_line(sha256: str, file: ModelFile) -> bytes:
    """What sha256sum prints: a name that would break the line is escaped, and the line then begins with a backslash."""
    escaped = file.name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    mark = "" if escaped == file.name else "\\"
    return os.fsencode(f"{mark}{sha256}  {escaped}\n")


def _check_readable(path: Path) -> None:
    try:
        status = path.stat()
        # Before it is opened: opening a pipe waits for its other end.
        if not stat.S_ISREG(status.st_mode):
            what = "directory" if stat.S_ISDIR(status.st_mode) else "special file"
            raise ModelFileError(f"{path}: expected a file, got a {what}")
        with path.open("rb"):
            pass
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    if status.st_size == 0:
        raise ModelFileError(f"{path}: the file is empty")


def _unreadable(path: Path, error: Exception) -> ModelFileError:
    # The only ValueError of a path; its words differ among the versions of Python.
    return ModelFileError(f"{path}: {error.strerror if isinstance(error, OSError) else 'the path holds a NUL'}")


def _sha256(path: Path) -> str:
    state = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while True:
                block = file.read(_BLOCK)
                if not block:
                    return state.hexdigest()
                state.update(block)
    except OSError as error:
        raise _unreadable(path, error) from None


def _mindir_variables(path: Path) -> List[str]:
    directory = path.parent / (path.name[: -len(_MINDIR_GRAPH)] + "_variables")
    try:
        if not directory.is_dir():
            raise ModelFileError(f"{path}: expected its weights in {directory}/, which is not a directory")
        with os.scandir(directory) as entries:
            return [str(PurePosixPath(directory.name, entry.name)) for entry in entries if entry.is_file()]
    except OSError as error:
        raise _unreadable(directory, error) from None


def _onnx_locations(path: Path) -> List[str]:
    try:
        with path.open("rb") as file:
            locations = list(_external_locations(file, "model", 0, os.fstat(file.fileno()).st_size))
    except OSError as error:
        raise _unreadable(path, error) from None
    except Malformed:
        # An engine that understands it all the same would load external files that nobody has pinned.
        raise ModelFileError(f"{path}: expected an ONNX model; this is something else, or only a part of one") from None
    for location in locations:
        pure = PurePosixPath(location)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise ModelFileError(
                f"{path}: names the external file {location!r}; expected a path inside the model's directory"
            )
    return [str(PurePosixPath(location)) for location in locations]


# --- A walk through ONNX's protobuf, only as far as external data needs -----------------------------------------
#
# Message to {field number: message}, from onnx.proto. Anything else is skipped by its length, so the walk costs
# the number of nodes, not the size of the weights.

_ONNX: Dict[str, Dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
_EXTERNAL_DATA, _DATA_LOCATION, _EXTERNAL = 13, 14, 1  # in a tensor
_KEY, _VALUE = 1, 2  # in an entry of external_data

# protobuf's own default: what nests deeper, no engine reads.
_MAX_DEPTH = 100


def _external_locations(file: BinaryIO, message: str, start: int, end: int, depth: int = 0) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        raise Malformed
    children = _ONNX[message]
    for number, value in fields(file, start, end):
        child = children.get(number)
        if child is None or not isinstance(value, tuple):
            continue
        if child == "tensor":
            yield from _tensor_locations(file, *value)
        else:
            yield from _external_locations(file, child, *value, depth=depth + 1)


def _tensor_locations(file: BinaryIO, start: int, end: int) -> Iterator[str]:
    entries: List[Span] = []
    external = False
    for number, value in fields(file, start, end):
        if number == _EXTERNAL_DATA and isinstance(value, tuple):
            entries.append(value)
        elif number == _DATA_LOCATION:
            external = value == _EXTERNAL
    for span in entries if external else ():
        entry = dict(fields(file, *span))
        if _text(file, entry.get(_KEY)) == "location":
            yield _text(file, entry.get(_VALUE))


def _text(file: BinaryIO, span: object) -> str:
    """Return a text as a file name: what is not UTF-8 is kept by surrogates, as everywhere in Python's file names."""
    if not isinstance(span, tuple):
        return ""
    start, end = cast(Span, span)
    if end - start > limits.MAX_PATH_BYTES:
        raise Malformed
    file.seek(start)
    return os.fsdecode(file.read(end - start))
