"""Decides which input shapes a built MindSpore Lite Model may compute.

On the CPU, MindSpore Lite 2.0.0 lets the first predict of a Model decide what later ones do. Measured on 2.0.0:

- An LSTM sizes its buffers in the first predict. A later predict of a larger shape writes past their end: its answer is
  wrong without an error, or the process crashes. After a first predict of the largest shape, every smaller shape had
  the bits that a new process gives.
- A convolution chooses its kernel in the first predict. A later predict of another height or width runs that kernel,
  too, and its answer differs in the last bits from that of a new process.
- A new Model in the same process gives the bits of a new process.

So a Model never computes a shape that its first one does not cover, and a model with a kernel that depends on the first
shape gets a new Model for each shape. Everything here is a pure function of shapes.
"""

from __future__ import annotations

from typing import List, Sequence, Tuple

Shape = Tuple[int, ...]

InputShapes = Tuple[Shape, ...]
"""The shapes of all inputs, in the order in which the model declares them."""

# The joined shape of two requests may be far larger than either, and its memory stays with the Model.
_MAX_GROWTH = 4


def covers(first: InputShapes, shapes: InputShapes) -> bool:
    """Return whether no dimension of `shapes` is larger than that of `first`."""
    return all(
        len(one) == len(other) and all(dim <= bound for dim, bound in zip(one, other))
        for one, other in zip(shapes, first)
    )


def grow_shapes(first: InputShapes, shapes: InputShapes, declared: Sequence[Shape]) -> InputShapes:
    """Return the shapes that a new Model computes first so that it covers `shapes`.

    They cover `first` as well, so that clients with different shapes do not take turns in causing builds. A number of
    rows is rounded up to a power of two, so that a client that asks for one more row each time causes few of them.

    Args:
        first: the first shapes of the Model that is replaced.
        shapes: the shapes of a request.
        declared: the shapes that the model declares; a free dimension is -1.
    """
    rows = {shape[0] for shape, known in zip(shapes, declared) if known[:1] == (-1,)}
    (count,) = rows if len(rows) == 1 else (0,)
    if any(known[:1] == (-1,) and shape[0] >= count for shape, known in zip(first, declared)):
        count = 0
    merged: List[Shape] = []
    for before, shape, known in zip(first, shapes, declared):
        dims = list(map(max, shape, before)) if len(before) == len(shape) else list(shape)
        if known[:1] == (-1,):
            dims[0] = max(dims[0], _power_of_two(count))
        merged.append(tuple(dims))
    max_elements = _MAX_GROWTH * max(_element_count(first), _element_count(shapes))
    return tuple(merged) if _element_count(tuple(merged)) <= max_elements else shapes


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length() if count > 0 else 0


def _element_count(shapes: InputShapes) -> int:
    total = 0
    for shape in shapes:
        count = 1
        for dim in shape:
            count *= dim
        total += count
    return total
