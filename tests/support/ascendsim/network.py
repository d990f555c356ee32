"""Slice of a network that one rank computes, in steps, some of which need the other ranks.

A step is a list: ["matmul", rows, columns] with the next weights, ["relu"], ["all_reduce", group],
["send", group, rank], ["receive", group, rank, width], ["broadcast", group, root, width], ["part", index, count] (of
dimension 0), ["useless", width] (an output without a meaning).
"""

from __future__ import annotations

from typing import Any, Generator, List, NamedTuple, Sequence, Tuple

import numpy as np

from ascendsim.modelfile import Floats, ModelFile

WORLD = "hccl_world_group"
"""The group of all ranks; others need a `group_info_file`."""

SLICE = "slice"
"""`ModelFile.kind` of a slice."""

_COLLECTIVES = ("all_reduce", "send", "receive", "broadcast")

Run = Generator["Collective", Floats, List[Floats]]


class Collective(NamedTuple):
    """Input of this rank to a collective operation, in the shape of its result.

    `peer` is the other rank; for a broadcast, the root.
    """

    operation: str
    group: str
    data: Floats
    peer: int = -1


def groups(model: ModelFile) -> List[str]:
    """Return the groups of the collective operations of a model."""
    return sorted({step[1] for step in model.steps if step[0] in _COLLECTIVES})


def parameters(model: ModelFile) -> List[Tuple[str, int]]:
    """Return the name and the number of elements of each weight, in order."""
    sizes = [step[1] * step[2] for step in model.steps if step[0] == "matmul"]
    if model.kind != SLICE:
        sizes = [model.width**2] * model.layers or [model.width]
    return [(f"w{index}", size) for index, size in enumerate(sizes)]


def run(model: ModelFile, weights: Floats, inputs: Sequence[Floats]) -> Run:
    """Compute the slice; yield each `Collective` and receive its result. Raises ValueError before the first of them."""
    value, used = inputs[0], 0
    rows = len(value)
    for step in model.steps:
        if step[0] == "part" and rows % step[2]:
            raise ValueError(f"{rows} rows cannot be split over {step[2]} ranks")
    for step in model.steps:
        if step[0] == "matmul":
            size = step[1] * step[2]
            value = product(value, weights[used : used + size].reshape(step[1], step[2]))
            used += size
        elif step[0] == "relu":
            value = np.maximum(value, np.float32(0))
        elif step[0] == "part":
            count = rows // step[2]
            value = value[step[1] * count : (step[1] + 1) * count]
        elif step[0] == "useless":
            value = np.zeros((rows, step[1]), np.float32)
        else:
            value = yield _collective(step, value, rows)
    return [value]


def product(x: Floats, matrix: Floats) -> Floats:
    """Return x @ matrix, computed row by row for the same bits in every process and in every batch."""
    total: Floats = np.zeros((len(x), matrix.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for k in range(matrix.shape[0]):
            total += x[:, k : k + 1] * matrix[k]
    return total


def _collective(step: Sequence[Any], value: Floats, rows: int) -> Collective:
    if step[0] == "all_reduce":
        return Collective(step[0], step[1], value)
    if step[0] == "send":
        return Collective(step[0], step[1], value, step[2])
    shape = (rows, step[3])
    return Collective(step[0], step[1], value if value.shape == shape else np.zeros(shape, np.float32), step[2])
