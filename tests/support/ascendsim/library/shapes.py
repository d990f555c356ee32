"""Input sizes that a model accepts on a card, and its reports of them (model_process.cc, dyn_shape_process.cc)."""

from __future__ import annotations

from typing import List, Sequence

import numpy as np

from ascendsim.modelfile import Floats, ModelFile, TensorSpec

Shapes = Sequence[Sequence[int]]


def refusal(model: ModelFile, shapes: Shapes) -> str:
    """Return the first log line of a rejected resize, or "" if the card accepts it. A rejected resize changes nothing.

    For gears of the batch size, only the first free input is checked (input_data_idx_). A model that accepts any size
    also accepts invalid shapes, and fails in the next predict.
    """
    if not model.gears:
        return "" if any(-1 in spec.shape for spec in model.inputs) else "Not support dynamic input"
    free = [dim for spec, shape in zip(model.inputs, shapes) for own, dim in zip(spec.shape, shape) if own == -1]
    if len(model.gears[0]) == len(free) > 1:
        return "" if free in [list(gear) for gear in model.gears] else "aclmdlSetInputDynamicDims failed."
    spec, shape = next((spec, shape) for spec, shape in zip(model.inputs, shapes) if -1 in spec.shape)
    if len(shape) != len(spec.shape):
        return f"Cur shape size {len(shape)} is not equal with original shape size {len(spec.shape)}"
    if list(shape[1:]) != spec.shape[1:]:
        return f"Shape Conflict: Original Shape:[{_text(spec.shape)}], Current Shape:[{_text(shape)}]"
    is_gear = [shape[0]] in [list(gear) for gear in model.gears]
    return "" if is_gear else f"Current batch size {shape[0]} is invalid, please check device info of context"


def as_the_card_reads(model: ModelFile, arrays: List[Floats]) -> List[Floats]:
    """Return the inputs that a model with gears computes with: all have the batch of the first one."""
    if not model.gears or len({len(each) for each in arrays}) < 2:
        return arrays
    batch = len(arrays[0])
    return [np.resize(each, (batch, *each.shape[1:])) for each in arrays]


def reported_shape(model: ModelFile, output: TensorSpec) -> List[int]:
    """Return the output shape that a card reports before the first predict: with gears, the shape of the largest."""
    return [model.largest if model.gears and dim == -1 else dim for dim in output.shape]


def _text(shape: Sequence[int]) -> str:
    return ",".join(map(str, shape))
