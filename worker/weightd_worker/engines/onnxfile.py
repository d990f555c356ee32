"""What an ONNX file says of its model that ONNX Runtime does not pass on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, FrozenSet, Iterator

from weightd_common.modelfiles.protobuf import Malformed, Span, fields

# Field numbers of onnx.proto.
_GRAPH, _FUNCTION = 7, 25  # in a model
_GRAPH_NODE, _FUNCTION_NODE = 1, 7
_NODE_INPUT, _OP_TYPE, _ATTRIBUTE = 1, 4, 5  # in a node
_SUBGRAPH, _SUBGRAPHS = 6, 11  # in an attribute
_INPUT, _OUTPUT = 11, 12  # in a graph
_NAME, _TYPE = 1, 2  # in an input or output
_TENSOR = 1  # in its type
_SHAPE = 2  # in that of a tensor

# Beside those whose names begin with Random. A dropout does where its third input says that it is trained.
_RANDOM_OPS = ("Multinomial", "Bernoulli", "Sampling", "SampleOp")
_TRAINING_INPUT_COUNT = 3


def scalar_names(path: Path) -> FrozenSet[str]:
    """Return the names of the inputs and outputs that the file says are scalars.

    Of them the library says [], as of those whose rank the file leaves open. A file that is no ONNX says it of none.
    """
    try:
        with path.open("rb") as file:
            model = 0, os.fstat(file.fileno()).st_size
            return frozenset(_iter_scalar_names(file, model))
    except (OSError, Malformed):
        return frozenset()


def is_stochastic(path: Path) -> bool:
    """Return whether a node of the model draws at random, in a branch that is rarely taken, too. In doubt it does."""
    try:
        with path.open("rb") as file:
            model = 0, os.fstat(file.fileno()).st_size
            owners = ((_GRAPH, _GRAPH_NODE), (_FUNCTION, _FUNCTION_NODE))
            nodes = (
                node
                for owner, node_of in owners
                for each in _submessages(file, model, owner)
                for node in _submessages(file, each, node_of)
            )
            return any(_is_node_stochastic(file, node) for node in nodes)
    except (OSError, Malformed, RecursionError):
        return True


def _is_node_stochastic(file: BinaryIO, node: Span) -> bool:
    """Whether this node does, or one of the graphs that it runs."""
    # Of several the last one counts for who reads all of the file.
    for kind in [_read_text(file, each) for each in _submessages(file, node, _OP_TYPE)]:
        if kind.startswith("Random") or kind in _RANDOM_OPS:
            return True
        if kind.endswith("Dropout") and len([*_submessages(file, node, _NODE_INPUT)]) >= _TRAINING_INPUT_COUNT:
            return True
    attributes = _submessages(file, node, _ATTRIBUTE)
    graphs = (graph for each in attributes for graph in _submessages(file, each, _SUBGRAPH, _SUBGRAPHS))
    return any(_is_node_stochastic(file, each) for graph in graphs for each in _submessages(file, graph, _GRAPH_NODE))


def _read_text(file: BinaryIO, span: Span) -> str:
    start, end = span
    file.seek(start)
    return file.read(end - start).decode("utf-8", "replace")


def _iter_scalar_names(file: BinaryIO, model: Span) -> Iterator[str]:
    for graph in _submessages(file, model, _GRAPH):
        for tensor in _submessages(file, graph, _INPUT, _OUTPUT):
            shapes = [
                shape
                for each in _submessages(file, tensor, _TYPE)
                for kind in _submessages(file, each, _TENSOR)
                for shape in _submessages(file, kind, _SHAPE)
            ]
            # Its fields are the dimensions.
            if shapes and all(start == end for start, end in shapes):
                for name in _submessages(file, tensor, _NAME):
                    yield _read_text(file, name)


def _submessages(file: BinaryIO, message: Span, *numbers: int) -> Iterator[Span]:
    return (value for number, value in fields(file, *message) if number in numbers and isinstance(value, tuple))
