"""The sizes that a model was converted for, as the converter has recorded them.

Two texts of the model: input_shape, "x:-1,3,224,224;y:-1,77", and dynamic_dims, "1,1;8,8": each gear gives the sizes of
all -1 in the order of input_shape.
"""

from __future__ import annotations

import re
from typing import Dict, List, Sequence, Tuple

from weightd.protocol import limits
from weightd.protocol.messages.data import TensorSignature
from weightd.worker.engines.engine import Gears

Place = Tuple[str, int]

_SIZE = re.compile(r"[0-9]{1,9}")


def recorded(inputs: Sequence[TensorSignature], dynamic_dims: str, input_shape: str) -> Gears:
    """Return the gears; none where the texts are not understood, or not about these inputs: then the card decides."""
    places = [(each.name, axis) for each in inputs for axis, dim in enumerate(each.shape or ()) if dim == -1]
    given = _free(input_shape)
    if not dynamic_dims or sorted(given) != sorted(places):
        return ()
    gears: List[Tuple[int, ...]] = []
    for text in dynamic_dims.strip("\"' ;").split(";"):
        sizes = [each.strip(" []") for each in text.split(",")]
        if len(sizes) != len(given) or not all(map(_is_size, sizes)):
            return ()
        of: Dict[Place, int] = dict(zip(given, map(int, sizes)))
        gears.append(tuple(of[place] for place in places))
    too_many = len(gears) > limits.MAX_GEARS or len(places) > limits.MAX_GEAR_DIMS
    return () if too_many else tuple(gears)


def _is_size(text: str) -> bool:
    return _SIZE.fullmatch(text) is not None and 0 < int(text) <= limits.MAX_GEAR_SIZE


def _free(input_shape: str) -> List[Place]:
    places: List[Place] = []
    for text in filter(None, input_shape.strip("\"' ;").split(";")):
        name, _, dims = text.rpartition(":")
        places += [(name.strip(), axis) for axis, dim in enumerate(dims.split(",")) if dim.strip(" []") == "-1"]
    return places
