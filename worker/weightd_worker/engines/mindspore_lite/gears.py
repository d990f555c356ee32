"""The sizes that a model was converted for, as the converter has recorded them.

Two texts of the model: input_shape, "x:-1,3,224,224;y:-1,77", and dynamic_dims, "1,1;8,8": each gear gives the sizes of
all -1 in the order of input_shape.
"""

from __future__ import annotations

import re
from typing import Dict, List, Sequence, Tuple

from weightd_protocol import limits
from weightd_protocol.messages.inference import TensorSignature
from weightd_worker.engines.engine import Gears

DimPosition = Tuple[str, int]

_SIZE = re.compile(r"[0-9]{1,9}")


def parse_gears(inputs: Sequence[TensorSignature], dynamic_dims: str, input_shape: str) -> Gears:
    """Return the gears; none where the texts are not understood, or not about these inputs: then the card decides."""
    model_dims = [(each.name, axis) for each in inputs for axis, dim in enumerate(each.shape or ()) if dim == -1]
    recorded_dims = _free_dims(input_shape)
    if not dynamic_dims or sorted(recorded_dims) != sorted(model_dims):
        return ()
    gears: List[Tuple[int, ...]] = []
    for text in dynamic_dims.strip("\"' ;").split(";"):
        sizes = [each.strip(" []") for each in text.split(",")]
        if len(sizes) != len(recorded_dims) or not all(map(_is_size, sizes)):
            return ()
        size_by_dim: Dict[DimPosition, int] = dict(zip(recorded_dims, map(int, sizes)))
        gears.append(tuple(size_by_dim[each] for each in model_dims))
    too_many = len(gears) > limits.MAX_GEARS or len(model_dims) > limits.MAX_GEAR_DIMS
    return () if too_many else tuple(gears)


def _is_size(text: str) -> bool:
    return _SIZE.fullmatch(text) is not None and 0 < int(text) <= limits.MAX_GEAR_SIZE


def _free_dims(input_shape: str) -> List[DimPosition]:
    free_dims: List[DimPosition] = []
    for text in filter(None, input_shape.strip("\"' ;").split(";")):
        name, _, dims = text.rpartition(":")
        free_dims += [(name.strip(), axis) for axis, dim in enumerate(dims.split(",")) if dim.strip(" []") == "-1"]
    return free_dims
