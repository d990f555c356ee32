"""Arrays from .npy and .npz files, and outputs as text, as JSON and into .npy files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, BinaryIO, Dict, List, Mapping, Tuple

import numpy as np

from weightd.ctl.text import WIDTH, clean
from weightd.ctl.verb import BadInput, BadOutput
from weightd.protocol.tensors import spec_of

_MAGIC = b"\x93NUMPY"

# As numpy.savez writes it: a zip archive, empty ones included.
NPZ = (b"PK\x03\x04", b"PK\x05\x06")

# Longer arrays are shown by their corners.
_MAX_SHOWN = 64


def load(path: str) -> Any:
    """Return the array of a .npy file.

    Raises:
        BadInput: there is no such file, or it is another kind of file.
    """
    try:
        with Path(path).open("rb") as file:
            start = file.read(len(_MAGIC))
            if start != _MAGIC:
                raise BadInput(f"{path}: expected a .npy file, as numpy.save writes it, got {_kind(start)}")
            file.seek(0)
            return _parse(path, file)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None


def load_several(path: str) -> Dict[str, Any]:
    """Return the arrays of an .npz file by their names.

    Raises:
        BadInput: there is no such file, or it is another kind of file.
    """
    try:
        with Path(path).open("rb") as file:
            if file.read(4) not in NPZ:
                raise BadInput(f"{path}: expected an .npz of arrays, as numpy.savez writes it")
            file.seek(0)
            archive = _parse(path, file)
            return {name: _member(path, archive, name) for name in archive.files}
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None


def _member(path: str, archive: Any, name: str) -> Any:
    try:
        return archive[name]
    except Exception as error:  # noqa: BLE001 - as below
        raise BadInput(f"{path}: {clean(name)} is damaged, or no array of numbers: {clean(str(error))}") from None


def _parse(path: str, file: BinaryIO) -> Any:
    try:
        # Never a pickle: to read one is to run it.
        return np.load(file, allow_pickle=False)
    except Exception as error:  # noqa: BLE001 - numpy reads the header as Python, and raises whatever that can
        if "allow_pickle" in str(error):
            raise BadInput(f"{path}: it holds Python objects; expected an array of numbers") from None
        raise BadInput(f"{path}: it is damaged or incomplete: {clean(str(error))}") from None


def _kind(start: bytes) -> str:
    if not start:
        return "an empty file"
    if start.startswith(b"PK"):
        return "a .npz or zip archive"
    if start.startswith(b"\x80"):
        return "a pickle, which is never loaded"
    return f"a file that starts with {start!r}"


def as_text(name: str, array: Any) -> str:
    """Return an output for people: what it is, and its values or their corners."""
    values = np.array2string(array, threshold=_MAX_SHOWN, max_line_width=WIDTH)
    return f"{heading(name, array)}\n{values}"


def heading(name: str, array: Any) -> str:
    """Return name, datatype and shape."""
    return f"{clean(name)}: {spec_of(name, array).datatype} {list(array.shape)}"


def as_json(name: str, array: Any) -> Dict[str, Any]:
    """Return an output as the Open Inference Protocol's JSON has it: data is flat, in C order."""
    data = array.reshape(-1).tolist()
    if array.dtype.kind == "f":
        data = [_json_number(value) for value in data]
    return {**describe(name, array), "data": data}


def describe(name: str, array: Any) -> Dict[str, Any]:
    """Return name, datatype and shape for JSON."""
    return {"name": name, "datatype": spec_of(name, array).datatype, "shape": list(array.shape)}


def _json_number(value: float) -> Any:
    """JSON has no word for these three; protobuf's JSON mapping writes them as text."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def save(directory: str, outputs: Mapping[str, Any]) -> Dict[str, str]:
    """Write each output to NAME.npy in `directory`, which is made where it is missing; return the paths by name.

    Raises:
        BadOutput: a file cannot be written.
    """
    paths: Dict[str, str] = {}
    for name, path in _paths(Path(directory), list(outputs)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(str(path), outputs[name], allow_pickle=False)
        except OSError as error:
            raise BadOutput(f"{path}: {error.strerror or error}") from None
        paths[name] = str(path)
    return paths


def _paths(directory: Path, names: List[str]) -> List[Tuple[str, Path]]:
    """A file for each name. A name comes from the model: it must not choose the directory too."""
    taken: Dict[str, Path] = {}
    for name in names:
        stem = "".join("_" if each == "/" or not each.isprintable() else each for each in name)
        path = directory / f"{stem}.npy"
        if path in taken.values():
            path = directory / f"{stem}.{len(taken)}.npy"
        taken[name] = path
    return list(taken.items())
