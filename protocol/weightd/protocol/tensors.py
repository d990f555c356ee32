"""numpy arrays to tensor frames and back. The only module of the protocol that needs numpy."""

from __future__ import annotations

from typing import Any, Dict

import numpy as np

from weightd.protocol.errors import InvalidArgument
from weightd.protocol.messages import TensorSpec

NUMPY_DTYPE: Dict[str, str] = {
    "BOOL": "|b1",
    "UINT8": "|u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "|i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
_DATATYPE: Dict[str, str] = {dtype: name for name, dtype in NUMPY_DTYPE.items()}


def to_wire(array: Any) -> Any:
    """Return `array` as the wire wants it: C order, little-endian. A copy only where it is not so already.

    Raises:
        InvalidArgument: the dtype has no name on the wire (object, string, complex, structured ...).
    """
    array = np.asarray(array)
    dtype = array.dtype.newbyteorder("<")
    if dtype.str not in _DATATYPE:
        raise InvalidArgument(f"dtype {array.dtype} has no datatype on the wire; expected one of {', '.join(NUMPY_DTYPE)}")
    # Not ascontiguousarray: it turns a scalar into shape (1,).
    return np.asarray(array, dtype=dtype, order="C")


def spec_of(name: str, array: Any) -> TensorSpec:
    """Return the description of `array`, which is what `to_wire` returned."""
    return TensorSpec(name, _DATATYPE[array.dtype.str], tuple(array.shape))


def frame_of(array: Any) -> memoryview:
    """Return the bytes of `array`, which is what `to_wire` returned, without a copy."""
    return memoryview(array.reshape(-1).view(np.uint8))


def from_frame(spec: TensorSpec, frame: Any) -> Any:
    """Return the tensor of a frame whose length the decoder has checked: a view, writable if the frame is."""
    return np.frombuffer(frame, dtype=NUMPY_DTYPE[spec.datatype]).reshape(spec.shape)
