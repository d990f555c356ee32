"""What an ONNX file says of its tensors that ONNX Runtime does not pass on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, FrozenSet, Iterator

from weightd.shared.protobuf import Malformed, Span, fields

# Field numbers of onnx.proto.
_GRAPH = 7  # in a model
_INPUT, _OUTPUT = 11, 12  # in a graph
_NAME, _TYPE = 1, 2  # in an input or output
_TENSOR = 1  # in its type
_SHAPE = 2  # in that of a tensor


def scalars(path: Path) -> FrozenSet[str]:
    """Return the names of the inputs and outputs that the file says are scalars.

    Of them the library says [], as of those whose rank the file leaves open. A file that is no ONNX says it of none.
    """
    try:
        with path.open("rb") as file:
            model = 0, os.fstat(file.fileno()).st_size
            return frozenset(_scalars(file, model))
    except (OSError, Malformed):
        return frozenset()


def _scalars(file: BinaryIO, model: Span) -> Iterator[str]:
    for graph in _parts(file, model, _GRAPH):
        for tensor in _parts(file, graph, _INPUT, _OUTPUT):
            shapes = [
                shape
                for each in _parts(file, tensor, _TYPE)
                for kind in _parts(file, each, _TENSOR)
                for shape in _parts(file, kind, _SHAPE)
            ]
            # Its fields are the dimensions.
            if shapes and all(start == end for start, end in shapes):
                for start, end in _parts(file, tensor, _NAME):
                    file.seek(start)
                    yield file.read(end - start).decode("utf-8", "replace")


def _parts(file: BinaryIO, message: Span, *numbers: int) -> Iterator[Span]:
    return (value for number, value in fields(file, *message) if number in numbers and isinstance(value, tuple))
