"""Conversion between numpy arrays and tensor frames. No other module of this package imports numpy."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

import numpy as np

from weightd_protocol import limits
from weightd_protocol.datatypes import NUMPY_DTYPE
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSpec
from weightd_protocol.schema import label

# Created once, because parsing the name of a dtype takes numpy longer than inspecting an array.
_DTYPES: Dict[str, Any] = {name: np.dtype(dtype) for name, dtype in NUMPY_DTYPE.items()}
_WIRE_DTYPES = frozenset(_DTYPES.values())
_DATATYPES_BY_DTYPE: Dict[str, str] = {dtype: name for name, dtype in NUMPY_DTYPE.items()}


def to_wire(array: Any) -> Any:
    """Return `array` in the format of the protocol: C order, little-endian. Copy it only if it has another format.

    Raises:
        InvalidArgument: `array` is not an array, its dtype has no datatype in the protocol (object, string, complex,
            structured ...), it has too many dimensions, or it is too large for a frame.
    """
    # Fast path: one expression recognizes an array that already has the right format.
    if (
        type(array) is np.ndarray
        and array.dtype in _WIRE_DTYPES
        and array.flags.c_contiguous
        and array.nbytes <= limits.MAX_FRAME_BYTES
        and array.ndim <= limits.MAX_RANK
    ):
        return array
    try:
        array = np.asarray(array)
    except MemoryError:
        raise
    except Exception as error:
        # numpy may run code of the given object, which may raise any exception. Tensors of PyTorch raise RuntimeError.
        raise InvalidArgument(f"expected an array: {str(error) or type(error).__name__}") from error
    dtype = array.dtype.newbyteorder("<")
    if dtype.str not in _DATATYPES_BY_DTYPE:
        names = ", ".join(NUMPY_DTYPE)
        raise InvalidArgument(f"dtype {array.dtype} is not a supported datatype; expected one of {names}")
    _check_size(array)
    # `np.ascontiguousarray` is not used, because it would change the shape of a scalar from () to (1,).
    return np.asarray(array, dtype=dtype, order="C")


def _check_size(array: Any) -> None:
    if array.ndim > limits.MAX_RANK:
        raise InvalidArgument(f"expected at most {limits.MAX_RANK} dimensions, got {array.ndim}")
    if array.nbytes > limits.MAX_FRAME_BYTES:
        raise InvalidArgument(f"expected at most {limits.MAX_FRAME_BYTES} bytes, got {array.nbytes}")


def describe_request(
    model: str, arrays: Mapping[str, Any], outputs: Optional[Sequence[str]] = None
) -> RequestDescription:
    """Return the description of a request whose inputs are `arrays`, which `to_wire` has returned.

    Equal names, dtypes and shapes yield the same description object.
    """
    return _request_description(model, _shapes(arrays), None if outputs is None else tuple(outputs))


def describe_response(model: str, arrays: Mapping[str, Any]) -> ResponseDescription:
    """Return the description of a response whose outputs are `arrays`, which `to_wire` has returned.

    Equal names, dtypes and shapes yield the same description object.
    """
    return _response_description(model, _shapes(arrays))


def spec_of(name: str, array: Any) -> TensorSpec:
    """Return the description of one array, which `to_wire` has returned."""
    return _specs(_shapes({name: array}))[0]


# Name, dtype and shape of each array of a message.
_Shapes = Tuple[Tuple[str, Any, Tuple[int, ...]], ...]


def _shapes(arrays: Mapping[str, Any]) -> _Shapes:
    return tuple([(name, array.dtype, array.shape) for name, array in arrays.items()])


@functools.lru_cache(maxsize=256)
def _request_description(model: str, shapes: _Shapes, outputs: Optional[Tuple[str, ...]]) -> RequestDescription:
    return RequestDescription(model, _specs(shapes), outputs)


@functools.lru_cache(maxsize=256)
def _response_description(model: str, shapes: _Shapes) -> ResponseDescription:
    return ResponseDescription(model, _specs(shapes))


def _specs(shapes: _Shapes) -> Tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, _DATATYPES_BY_DTYPE[dtype.str], tuple(shape)) for name, dtype, shape in shapes)


def frame_of(array: Any) -> memoryview:
    """Return the bytes of an array that `to_wire` has returned, without copying them."""
    # `cast` raises an error for an array without elements.
    return memoryview(array).cast("B") if array.size else memoryview(b"")


def from_frame(spec: TensorSpec, frame: Any) -> Any:
    """Return the tensor in a frame as an array, without copying it. The array is writable if the frame is writable.

    The decoder must have checked the length of the frame.

    Raises:
        InvalidArgument: a byte of a BOOL tensor is neither 0 nor 1. numpy and the engines compute nonsense with such
            bytes.
    """
    array = np.ndarray(spec.shape, _DTYPES[spec.datatype], frame)
    if spec.datatype == "BOOL":
        _check_bool(spec, array)
    return array


def from_memory(spec: TensorSpec, array: Callable[[Tuple[int, ...], Any], Any]) -> Any:
    """Return the tensor in shared memory as an array. `array(shape, dtype)` returns an array on this memory.

    Raises:
        InvalidArgument: as `from_frame`.
    """
    tensor = array(spec.shape, _DTYPES[spec.datatype])
    if spec.datatype == "BOOL":
        _check_bool(spec, tensor)
    return tensor


def _check_bool(spec: TensorSpec, array: Any) -> None:
    if array.size and array.view(np.uint8).max() > 1:
        raise InvalidArgument(f"{label(spec.name)}: expected 0 or 1 in each byte of a BOOL")
