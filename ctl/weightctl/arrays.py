"""Arrays from .npy and .npz files, and outputs as text, as JSON and into such files."""

from __future__ import annotations

import io
import math
import sys
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, Dict, List, Mapping, Tuple

import numpy as np

from weightctl.command import BadInput, BadOutput
from weightctl.text import WIDTH, clean
from weightd_protocol import limits
from weightd_protocol.tensors import spec_of

_MAGIC = b"\x93NUMPY"

# As numpy.savez writes it: a zip archive, empty ones included.
NPZ = (b"PK\x03\x04", b"PK\x05\x06")

# What `load` reads, and for people what may be in the place of that.
EXPECTED = "a .npy file, as numpy.save writes it, .npz, .json, .csv or a picture"

STDIN = "-"

# Of an array with its header, and of several in a file.
_MAX_BYTES = limits.MAX_FRAME_BYTES + 65536
_MAX_TOTAL_BYTES = 8 * _MAX_BYTES

# Longer arrays are shown by their corners.
_MAX_SHOWN_VALUES = 64


def open_input(path: str) -> BinaryIO:
    """Return a file at its beginning; of what cannot be read twice, such as stdin ("-") or a pipe, a copy in memory.

    Raises:
        BadInput: it cannot be read, or is too large.
    """
    try:
        if path == STDIN:
            if not hasattr(sys.stdin, "buffer"):  # it is None where the caller has closed it
                raise BadInput("stdin: it is closed")
            return _read_all("stdin", sys.stdin.buffer)
        file = Path(path).open("rb")  # noqa: SIM115 - who has called closes it
        if not file.seekable():
            with file:
                return _read_all(path, file)
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None
    if size > _MAX_TOTAL_BYTES:
        file.close()
        raise BadInput(f"{path}: expected a file of at most {_MAX_TOTAL_BYTES:,} bytes, got {size:,}")
    return file


def _read_all(path: str, file: BinaryIO) -> BinaryIO:
    content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise BadInput(f"{path}: expected at most {_MAX_BYTES:,} bytes")
    return io.BytesIO(content)


def load(path: str, file: BinaryIO) -> Any:
    """Return the array of a .npy file, which is open at its beginning; `path` is how it is called.

    Raises:
        BadInput: it is another kind of file.
    """
    start = file.read(len(_MAGIC))
    if start != _MAGIC:
        raise BadInput(f"{path}: expected {EXPECTED}, got {_describe_content(start)}")
    file.seek(0)
    return _parse(path, file)


def load_all(path: str, file: BinaryIO) -> Dict[str, Any]:
    """Return the arrays of an .npz file by their names.

    Raises:
        BadInput: it is another kind of file.
    """
    archive = _open_archive(path, file)
    return {name: _read_member(path, archive, name) for name in archive.files}


def load_one(path: str, file: BinaryIO, name: str) -> Any:
    """Return the array of this name of an .npz file.

    Raises:
        BadInput: it is another kind of file, or has no such array.
    """
    archive = _open_archive(path, file)
    if name not in archive.files:
        available = ", ".join(map(clean, archive.files)) or "none"
        raise BadInput(f"{path}: it has no array {name!r}; there are: {available}; FILE.npz:ARRAY names another one")
    return _read_member(path, archive, name)


def _open_archive(path: str, file: BinaryIO) -> Any:
    if file.read(4) not in NPZ:
        raise BadInput(f"{path}: expected an .npz of arrays, as numpy.savez writes it")
    file.seek(0)
    archive = _parse(path, file)
    try:
        # A few kilobytes can be unpacked to a terabyte.
        nbytes = sum(each.file_size for each in archive.zip.infolist())
    except AttributeError:
        raise BadInput(f"{path}: expected an .npz of arrays, as numpy.savez writes it") from None
    if nbytes > _MAX_TOTAL_BYTES:
        raise BadInput(f"{path}: expected arrays of at most {_MAX_TOTAL_BYTES:,} bytes together, got {nbytes:,}")
    return archive


def _read_member(path: str, archive: Any, name: str) -> Any:
    try:
        array: Any = archive[name]
    except Exception as error:  # noqa: BLE001 - as below
        raise BadInput(f"{path}: {clean(name)} is damaged, or no array of numbers: {clean(str(error))}") from None
    if type(array) is not np.ndarray:
        raise BadInput(f"{path}: {clean(name)}: expected an array, as numpy.savez writes it")
    return array


def _parse(path: str, file: BinaryIO) -> Any:
    try:
        # Never a pickle: to read one is to run it.
        return np.load(file, allow_pickle=False)
    except Exception as error:  # noqa: BLE001 - numpy reads the header as Python, and raises whatever that can
        if "allow_pickle" in str(error):
            raise BadInput(f"{path}: it holds Python objects; expected an array of numbers") from None
        raise BadInput(f"{path}: it is damaged or incomplete: {clean(str(error))}") from None


def _describe_content(start: bytes) -> str:
    if not start:
        return "an empty file"
    if start.startswith(b"PK"):
        return "a .npz or zip archive"
    if start.startswith(b"\x80"):
        return "a pickle, which is never loaded"
    return f"a file that starts with {start!r}"


def as_text(name: str, array: Any) -> str:
    """Return an output for people: what it is, and its values or their corners."""
    values = np.array2string(array, threshold=_MAX_SHOWN_VALUES, max_line_width=WIDTH)
    return f"{heading(name, array)}\n{values}"


def heading(name: str, array: Any) -> str:
    """Return name, datatype and shape."""
    return f"{clean(name)}: {spec_of(name, array).datatype} {list(array.shape)}"


def as_json(name: str, array: Any) -> Dict[str, Any]:
    """Return an output as the Open Inference Protocol's JSON has it: data is flat, in C order."""
    data = array.reshape(-1).tolist()
    if array.dtype.kind == "f":
        data = [json_number(value) for value in data]
    return {**describe(name, array), "data": data}


def describe(name: str, array: Any) -> Dict[str, Any]:
    """Return name, datatype and shape for JSON."""
    return {"name": name, "datatype": spec_of(name, array).datatype, "shape": list(array.shape)}


def json_number(value: float) -> Any:
    """Return a float for JSON, which has no word for three: protobuf's JSON mapping writes them as text."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def save(directory: str, outputs: Mapping[str, Any]) -> Dict[str, str]:
    """Write each output to NAME.npy in `directory`, which is made where it is missing; return the paths by name.

    Raises:
        BadOutput: a file cannot be written.
    """
    paths: Dict[str, str] = {}
    for name, path in _output_paths(Path(directory), list(outputs)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(str(path), outputs[name], allow_pickle=False)
        except OSError as error:
            raise BadOutput(f"{path}: {error.strerror or error}") from None
        paths[name] = str(path)
    return paths


def save_together(path: str, outputs: Mapping[str, Any]) -> Dict[str, str]:
    """Write all outputs to one .npz file, by their names; return its path by name.

    Raises:
        BadOutput: it cannot be written.
    """
    try:
        with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
            for name, array in outputs.items():
                # Not numpy.savez: it takes names as keywords, and `file` is one of its own.
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise BadOutput(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    return dict.fromkeys(outputs, path)


def _output_paths(directory: Path, names: List[str]) -> List[Tuple[str, Path]]:
    """A file for each name. A name comes from the model: it must not choose the directory too."""
    paths: Dict[str, Path] = {}
    for name in names:
        stem = "".join("_" if each == "/" or not each.isprintable() else each for each in name)
        path = directory / f"{stem}.npy"
        if path in paths.values():
            path = directory / f"{stem}.{len(paths)}.npy"
        paths[name] = path
    return list(paths.items())
