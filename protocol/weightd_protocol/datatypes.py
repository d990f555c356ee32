"""Tensor datatypes of the protocol: names, element sizes and numpy dtypes.

The names are taken from the Open Inference Protocol v2. Protocol version 2 has no BYTES, whose elements have no fixed
size, and no BF16, which has no numpy dtype.

To add a datatype, add it here and in every other place that names datatypes:

- each engine of the worker: `engines/onnxruntime.py`, `engines/mindspore.py`, `engines/mindspore_lite/model.py`
- readers of model files: `engines/onnxruntime.py` of the daemon, `modelfiles/mindir.py` of common
- the gateway: typed contents in `grpc/requests.py`; datatypes that JSON cannot carry in `tensors.py`
- random inputs: `doctor/selftest/sharing.py` of the daemon, `rowtest/rows.py` of common
- the table in docs/protocol.md
"""

from __future__ import annotations

from typing import Dict

# The numpy dtype of each datatype, as a string of numpy's array interface: byte order, kind and element size in bytes.
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
