"""Files with the arrays of a self-test: a configured sample of the inputs, and the holder's answers."""

from __future__ import annotations

import struct
import tokenize
import zipfile
import zlib
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

from weightd_protocol import limits
from weightd_protocol.datatypes import NUMPY_DTYPE
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.worker_common import SelfTestCases
from weightd_protocol.schema import label
from weightd_worker.engines.engine import Arrays, BuildError, ModelSignature
from weightd_worker.selftest import selftest

# Maximum size of a file's arrays in bytes. Every process reads the file when it starts, and keeps the arrays in memory.
MAX_BYTES = 256 * 1024 * 1024

# Exceptions that zipfile and numpy raise for a malformed file, although they do not document them. An encrypted file
# causes a RuntimeError.
_MALFORMED_ERRORS = (
    ValueError,
    EOFError,
    AttributeError,
    LookupError,
    TypeError,
    ArithmeticError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


def load(path: str, signature: ModelSignature) -> Arrays:
    """Return the sample at `path`, an .npz with an array for each input of the model.

    Raises:
        BuildError: the file is not an .npz, or an array does not fit the model. The text names the file and the input.
    """
    arrays = _read(path, limits.MAX_TENSORS)
    names = [each.name for each in signature.inputs]
    if sorted(arrays) != sorted(names):
        raise BuildError(f"selftest: {path}: expected arrays {', '.join(names)}, got {', '.join(arrays)}")
    return {each.name: _validated_array(path, each, arrays[each.name]) for each in signature.inputs}


def load_with_answers(path: str, signature: ModelSignature) -> Tuple[Arrays, Arrays]:
    """Return the inputs and known outputs in the .npz file at `path`, which has an array for each input and output.

    Raises:
        BuildError: as `load`.
    """
    arrays = _read(path, 2 * limits.MAX_TENSORS)
    names = [each.name for tensors in signature for each in tensors]
    duplicates = [name for name in names if names.count(name) > 1]
    if duplicates:
        raise BuildError(
            f"selftest: {path}: {duplicates[0]} is an input and an output, so an array of this name is ambiguous"
        )
    if sorted(arrays) != sorted(names):
        raise BuildError(
            f"selftest: {path}: expected arrays {', '.join(names)}, the inputs and the correct outputs, "
            f"got {', '.join(arrays)}"
        )
    inputs, outputs = (
        {each.name: _validated_array(path, each, arrays[each.name]) for each in each_of} for each_of in signature
    )
    return inputs, outputs


def _validated_array(path: str, tensor: TensorSignature, array: Any) -> Any:
    expected = np.dtype(NUMPY_DTYPE[tensor.datatype])
    if array.dtype.newbyteorder("=") != expected.newbyteorder("="):
        raise BuildError(f"selftest: {path}: {tensor.name}: expected {expected.name}, got {array.dtype}")
    return np.array(array, expected.newbyteorder("="), order="C")


def save_answers(path: str, answers: Sequence[Arrays]) -> None:
    """Write the holder's answers to the self-test to a file, which other processes read by `load_answers`.

    Raises:
        BuildError: the file cannot be written.
    """
    arrays = [(f"{case} {name}", array) for case, outputs in enumerate(answers) for name, array in outputs.items()]
    try:
        with open(path, "xb") as file:  # noqa: PTH123 - savez would add a suffix to a path
            np.savez(file, **dict(arrays))
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror or error}") from None


def load_answers(path: str, cases: SelfTestCases) -> selftest.SelfTestRun:
    """Return the run of the self-test whose answers the holder has written to the file at `path`.

    Raises:
        BuildError: the file cannot be read, or contains an answer to a case that is not in `cases`.
    """
    answers: List[Dict[str, Any]] = [{} for _ in cases]
    for key, array in _read(path, limits.MAX_TENSORS * limits.MAX_SELFTEST_CASES).items():
        case, _, name = key.partition(" ")
        if not case.isdigit() or int(case) >= len(cases):
            raise BuildError(f"{path}: expected answers to {len(cases)} inputs, got {key!r}")
        answers[int(case)][name] = array
    return selftest.from_answers(cases, answers)


def _read(path: str, max_arrays: int) -> Dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            _check_size(path, [(each.filename, each.file_size) for each in archive.infolist()], max_arrays)
        # Forbid pickled objects in the file, because unpickling them could run any code.
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except OSError as error:
        raise BuildError(f"selftest: {path}: {error.strerror or error}") from None
    except _MALFORMED_ERRORS as error:
        raise BuildError(f"selftest: {path}: expected an .npz of plain arrays: {error}") from None
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy returns a member of the archive that is no .npy file as bytes
            raise BuildError(f"selftest: {path}: expected an .npz of plain arrays, got {label(name)} in it")
    return arrays


def _check_size(path: str, members: List[Tuple[str, int]], max_arrays: int) -> None:
    if len(members) > max_arrays:
        raise BuildError(f"selftest: {path}: expected at most {max_arrays} arrays, got {len(members)}")
    nbytes = sum(size for _, size in members)
    if nbytes > MAX_BYTES:
        raise BuildError(f"selftest: {path}: expected at most {MAX_BYTES} bytes, got {nbytes}")
