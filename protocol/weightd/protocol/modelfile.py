"""What a model is on disk: its file, the external files it names, and the digest over all of them.

The daemon pins a model by this digest, and each process says in its HELLO which digest it would load: both sides
must compute it in one way, so it is part of the protocol.

- ONNX: tensors may lie in external files, named by a relative `location` inside the model
  (https://onnx.ai/onnx/repo-docs/ExternalData.html).
- MindIR over 1 GB is `X_graph.mindir` with the directory `X_variables/` beside it.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from pathlib import Path, PurePosixPath
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple, Union

from weightd.protocol.errors import WeightdError

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
        ModelFileError: one of them is missing, unreadable, not a regular file, empty, or outside the directory.
    """
    _check_readable(path)
    if path.name.endswith(_MINDIR_GRAPH):
        names = _mindir_variables(path)
    elif path.suffix == ".onnx":
        names = _onnx_locations(path)
    else:
        names = []
    files = [ModelFile(path.name, path)]
    for name in sorted(set(names)):
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
    lines = "".join(f"{each}  {file.name}\n" for each, file in zip(digests, files))
    return hashlib.sha256(lines.encode()).hexdigest()


def _check_readable(path: Path) -> None:
    try:
        status = path.stat()
        with path.open("rb"):
            pass
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ModelFileError(f"{path}: expected a file, got a {'directory' if path.is_dir() else 'special file'}")
    if status.st_size == 0:
        raise ModelFileError(f"{path}: the file is empty")


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
        raise ModelFileError(f"{path}: {error.strerror}") from None


def _mindir_variables(path: Path) -> List[str]:
    directory = path.parent / (path.name[: -len(_MINDIR_GRAPH)] + "_variables")
    if not directory.is_dir():
        raise ModelFileError(f"{path}: expected its weights in {directory}/, which is not a directory")
    return [
        str(PurePosixPath(directory.name, entry.name)) for entry in os.scandir(directory) if entry.is_file()
    ]


def _onnx_locations(path: Path) -> List[str]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            locations = list(_external_locations(data, "model", 0, len(data)))
        except (_Malformed, RecursionError):
            # Not ONNX, or truncated. The engine will say so; here it is one file with a digest.
            return []
    for location in locations:
        pure = PurePosixPath(location)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise ModelFileError(
                f"{path}: names the external file {location!r}; expected a path inside the model's directory"
            )
    return [str(PurePosixPath(location)) for location in locations]


# --- A walk through ONNX's protobuf, only as far as external data needs -----------------------------------------
#
# Message to {field number: message}, from onnx.proto3. Anything else is skipped by its length, so the walk costs
# the number of nodes, not the size of the weights.

_ONNX: Dict[str, Dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "external_data"},
}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


class _Malformed(Exception):
    """The bytes are not protobuf."""


_Field = Tuple[int, Union[int, Tuple[int, int]]]


def _external_locations(data: Any, message: str, start: int, end: int) -> Iterator[str]:
    children = _ONNX[message]
    for number, value in _fields(data, start, end):
        child = children.get(number)
        if child is None or not isinstance(value, tuple):
            continue
        if child == "external_data":
            entry = dict(_fields(data, *value))
            if _text(data, entry.get(1)) == "location":
                yield _text(data, entry.get(2))
        else:
            yield from _external_locations(data, child, *value)


def _fields(data: Any, start: int, end: int) -> Iterator[_Field]:
    """Yield (field number, value) for each field; bytes are given as (start, end)."""
    position = start
    while position < end:
        tag, position = _varint(data, position, end)
        wire_type = tag & 7
        if wire_type == _VARINT:
            value, position = _varint(data, position, end)
            yield tag >> 3, value
            continue
        if wire_type == _BYTES:
            length, position = _varint(data, position, end)
        elif wire_type in (_FIXED64, _FIXED32):
            length = 8 if wire_type == _FIXED64 else 4
        else:
            raise _Malformed
        if position + length > end:
            raise _Malformed
        if wire_type == _BYTES:
            yield tag >> 3, (position, position + length)
        position += length


def _varint(data: Any, position: int, end: int) -> Tuple[int, int]:
    value = 0
    for shift in range(0, 7 * _MAX_VARINT_BYTES, 7):
        if position >= end:
            raise _Malformed
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, position
    raise _Malformed


def _text(data: Any, span: object) -> str:
    if not isinstance(span, tuple):
        return ""
    start, end = span
    try:
        return str(data[start:end], "utf-8")
    except UnicodeDecodeError:
        raise _Malformed from None
