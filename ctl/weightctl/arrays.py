"""Reads arrays from .npy and .npz files, and writes outputs as text, as JSON, or to .npy and .npz files."""

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

# The first bytes of a file that `numpy.savez` has written: a zip archive, which may have no entries.
NPZ = (b"PK\x03\x04", b"PK\x05\x06")

# The accepted input formats, as error messages list them.
EXPECTED = "a .npy file of numpy.save, or an .npz, .json, .csv or image file"

STDIN = "-"

# Maximum size in bytes of one array with its .npy header, and of all arrays of a file together.
_MAX_BYTES = limits.MAX_FRAME_BYTES + 65536
_MAX_TOTAL_BYTES = 8 * _MAX_BYTES

# Maximum number of values of an array that are all shown. Of a larger array, only the first and last values of each
# dimension are shown.
_MAX_SHOWN_VALUES = 64


def open_input(path: str) -> BinaryIO:
    """Open a file for reading, and set its position to the beginning.

    A source that cannot seek, such as a pipe or stdin ("-"), is read into memory.

    Raises:
        BadInput: the file cannot be read, or is too large.
    """
    try:
        if path == STDIN:
            if not hasattr(sys.stdin, "buffer"):  # sys.stdin is None if the parent process has closed stdin
                raise BadInput("stdin: closed")
            return _read_all("stdin", sys.stdin.buffer)
        file = Path(path).open("rb")  # noqa: SIM115 - the caller closes the file
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
    """Return the array in a .npy file, whose position must be at the beginning. Error messages name the file `path`.

    Raises:
        BadInput: the file is not a valid .npy file.
    """
    start = file.read(len(_MAGIC))
    if start != _MAGIC:
        raise BadInput(f"{path}: expected {EXPECTED}, got {_describe_content(start)}")
    file.seek(0)
    return _parse(path, file)


def load_all(path: str, file: BinaryIO) -> Dict[str, Any]:
    """Return all arrays of an .npz file, by name.

    Raises:
        BadInput: the file is not a valid .npz file.
    """
    archive = _open_archive(path, file)
    return {name: _read_member(path, archive, name) for name in archive.files}


def load_one(path: str, file: BinaryIO, name: str) -> Any:
    """Return the array with this name from an .npz file.

    Raises:
        BadInput: the file is not a valid .npz file, or has no array with this name.
    """
    archive = _open_archive(path, file)
    if name not in archive.files:
        available = ", ".join(map(clean, archive.files)) or "none"
        raise BadInput(f"{path}: no array {name!r}; there are: {available}; select one with FILE.npz:ARRAY")
    return _read_member(path, archive, name)


def _open_archive(path: str, file: BinaryIO) -> Any:
    if file.read(4) not in NPZ:
        raise BadInput(f"{path}: expected an .npz file of numpy.savez")
    file.seek(0)
    archive = _parse(path, file)
    try:
        # Check the size of the arrays before they are read: a file of some kilobytes may decompress to a terabyte.
        nbytes = sum(each.file_size for each in archive.zip.infolist())
    except AttributeError:
        raise BadInput(f"{path}: expected an .npz file of numpy.savez") from None
    if nbytes > _MAX_TOTAL_BYTES:
        raise BadInput(f"{path}: expected arrays of at most {_MAX_TOTAL_BYTES:,} bytes together, got {nbytes:,}")
    return archive


def _read_member(path: str, archive: Any, name: str) -> Any:
    try:
        array: Any = archive[name]
    except Exception as error:  # noqa: BLE001 - as in `_parse`
        raise BadInput(f"{path}: {clean(name)} is damaged or not a numeric array: {clean(str(error))}") from None
    if type(array) is not np.ndarray:
        raise BadInput(f"{path}: {clean(name)}: expected an array")
    return array


def _parse(path: str, file: BinaryIO) -> Any:
    try:
        # `allow_pickle` is False because loading a pickle can execute any code.
        return np.load(file, allow_pickle=False)
    except Exception as error:  # noqa: BLE001 - numpy evaluates the header as Python and may raise anything
        if "allow_pickle" in str(error):
            raise BadInput(f"{path}: the file contains Python objects; expected an array of numbers") from None
        raise BadInput(f"{path}: file is damaged or truncated: {clean(str(error))}") from None


def _describe_content(start: bytes) -> str:
    if not start:
        return "an empty file"
    if start.startswith(b"PK"):
        return "a .npz or zip archive"
    if start.startswith(b"\x80"):
        return "a pickle, which weightctl does not load"
    return f"a file that starts with {start!r}"


def as_text(name: str, array: Any) -> str:
    """Return an output as text: a heading, followed by the values. Of a large output, only some values are shown."""
    values = np.array2string(array, threshold=_MAX_SHOWN_VALUES, max_line_width=WIDTH)
    return f"{heading(name, array)}\n{values}"


def heading(name: str, array: Any) -> str:
    """Return the heading of an output: its name, datatype and shape."""
    return f"{clean(name)}: {spec_of(name, array).datatype} {list(array.shape)}"


def as_json(name: str, array: Any) -> Dict[str, Any]:
    """Return an output in the JSON form of the Open Inference Protocol. Its values are a flat list in C order."""
    data = array.reshape(-1).tolist()
    if array.dtype.kind == "f":
        data = [json_number(value) for value in data]
    return {**describe(name, array), "data": data}


def describe(name: str, array: Any) -> Dict[str, Any]:
    """Return name, datatype and shape of an output, for JSON."""
    return {"name": name, "datatype": spec_of(name, array).datatype, "shape": list(array.shape)}


def json_number(value: float) -> Any:
    """Return a float for JSON. NaN and infinities, which JSON lacks, become texts as in protobuf's JSON mapping."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def save(directory: str, outputs: Mapping[str, Any]) -> Dict[str, str]:
    """Write each output to the file NAME.npy in `directory`. Return the paths of the files by output name.

    The directory is created if it is missing.

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
    """Write all outputs to one .npz file, under their names. Return the path of this file for each output name.

    Raises:
        BadOutput: the file cannot be written.
    """
    try:
        with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
            for name, array in outputs.items():
                # `numpy.savez` is not used: it takes names as keyword arguments, so it would misinterpret an output
                # named `file`.
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, array, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise BadOutput(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    return dict.fromkeys(outputs, path)


def _output_paths(directory: Path, names: List[str]) -> List[Tuple[str, Path]]:
    """Return a file path in `directory` for each output name.

    The model determines the names, so a name must not be able to choose another directory.
    """
    paths: Dict[str, Path] = {}
    for name in names:
        stem = "".join("_" if each == "/" or not each.isprintable() else each for each in name)
        path = directory / f"{stem}.npy"
        if path in paths.values():
            path = directory / f"{stem}.{len(paths)}.npy"
        paths[name] = path
    return list(paths.items())
