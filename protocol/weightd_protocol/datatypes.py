"""The tensor datatypes of the wire: the one table from which names, element sizes and numpy dtypes are taken.

The names are those of the Open Inference Protocol v2. BYTES and BF16 are not part of wire v2:
their elements have no fixed size, or no numpy dtype.

To add a datatype, add it here, and then where something else names datatypes:

- each engine of the worker: `engines/onnxruntime.py`, `engines/mindspore.py`, `engines/mindspore_lite/model.py`
- readers of model files: `engines/onnxruntime.py` of the daemon, `modelfiles/mindir.py` of common
- the gateway: typed contents in `grpc/requests.py`; what JSON cannot carry in `tensors.py`
- random inputs of the doctor's self-test: `doctor/selftest/sharing.py`
"""

from __future__ import annotations

from typing import Dict

# As in numpy's array interface: byte order, kind, and bytes of an element.
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
ITEM_BYTES: Dict[str, int] = {name: int(dtype[2:]) for name, dtype in NUMPY_DTYPE.items()}
