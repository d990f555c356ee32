"""The tensor datatypes of the wire and the size of their elements.

The names are those of the Open Inference Protocol v2. BYTES and BF16 are not part of wire v2:
their elements have no fixed size, or no numpy dtype.
"""

from __future__ import annotations

from typing import Dict

ITEM_BYTES: Dict[str, int] = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "FP32": 4,
    "FP64": 8,
}
