"""What an ONNX file says of its inputs and outputs, and why such a model could not be served. No engine is asked.

A file that passes may still be refused by the engine, which knows its own limits: `weightd check --load` finds that.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple

from weightd.protocol import limits
from weightd.protocol.datatypes import ITEM_BYTES
from weightd.protocol.schema import label
from weightd.shared.protobuf import Malformed, Span, fields

# Field numbers of onnx.proto.
_GRAPH = 7  # in a model
_INITIALIZER, _INPUT, _OUTPUT, _SPARSE_INITIALIZER = 5, 11, 12, 15  # in a graph
_NAME, _TYPE = 1, 2  # in an input or output
_KINDS: Mapping[int, str] = {4: "a sequence", 5: "a map", 7: "opaque", 8: "a sparse tensor", 9: "optional"}  # in a type
_TENSOR = 1  # the same
_ELEMENT, _SHAPE = 1, 2  # in the type of a tensor
_DIM = 1  # in a shape
_SIZE = 1  # in a dimension
_TENSOR_NAME = 8  # in an initializer
_VALUES = 1  # in a sparse one

# By the numbers of TensorProto.DataType; what came later is told by its number.
_DATATYPES: Sequence[str] = (
    *("undefined", "FP32", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "string", "BOOL", "FP16", "FP64"),
    *("UINT32", "UINT64", "complex64", "complex128", "BF16"),
    *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"),
    *("UINT4", "INT4", "FLOAT4E2M1", "FLOAT8E8M0", "UINT2", "INT2"),
)
_NOT_SENT = f"has no datatype on the wire; expected one of {', '.join(ITEM_BYTES)}"

# A size is an int64; below 0 it is unknown.
_SIGN = 2**63


class _Tensor(NamedTuple):
    """An input or output: what it is if it is no tensor that has a datatype ("" otherwise), and its dimensions."""

    name: str
    foreign: str
    dims: tuple[int, ...]


def problems(file: BinaryIO) -> list[str]:
    """Return why requests for the model in this file could not be answered, as far as it tells; a line each.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return list(_problems(file, (0, os.fstat(file.fileno()).st_size)))
    except Malformed:
        return ["expected an ONNX model; this is something else, or only a part of one"]


def _problems(file: BinaryIO, model: Span) -> Iterator[str]:
    for graph in _parts(file, model, _GRAPH):
        # Before IR version 4 each weight was an input, too.
        weights = set(_weights(file, graph))
        inputs = (each for each in _parts(file, graph, _INPUT) if _name(file, each, _NAME) not in weights)
        yield from _of("input", file, inputs)
        yield from _of("output", file, _parts(file, graph, _OUTPUT))


def _of(what: str, file: BinaryIO, spans: Iterator[Span]) -> Iterator[str]:
    # Of a model that is absurd the first ones tell enough.
    tensors = [_tensor(file, span) for span in itertools.islice(spans, limits.MAX_TENSORS)]
    others = sum(1 for _ in spans)
    if others:
        yield f"{len(tensors) + others} {what}s; expected at most {limits.MAX_TENSORS}"
    for name, group in itertools.groupby(sorted(each.name for each in tensors)):
        if len(list(group)) > 1:
            yield f"{what} {label(name)}: there are two of this name"
    for tensor in tensors:
        yield from (f"{what} {label(tensor.name)}: {problem}" for problem in _of_tensor(tensor))


def _of_tensor(tensor: _Tensor) -> Iterator[str]:
    if not 0 < len(tensor.name.encode("utf-8", "surrogateescape")) <= limits.MAX_NAME_BYTES:
        yield f"expected a name of 1 to {limits.MAX_NAME_BYTES} bytes"
    if tensor.foreign:
        yield f"{tensor.foreign} {_NOT_SENT}"
    if len(tensor.dims) > limits.MAX_RANK:
        yield f"expected at most {limits.MAX_RANK} dimensions"
    if any(limits.MAX_DIM < size < _SIGN for size in tensor.dims):
        yield f"a dimension of {max(tensor.dims)}; expected at most {limits.MAX_DIM}"


def _tensor(file: BinaryIO, span: Span) -> _Tensor:
    foreign = ""
    dims: tuple[int, ...] = ()
    for kind in _parts(file, span, _TYPE):
        for number, value in fields(file, *kind):
            foreign = _KINDS.get(number, foreign)
            if number == _TENSOR and isinstance(value, tuple):
                foreign = _foreign(next((each for key, each in fields(file, *value) if key == _ELEMENT), 0))
                shapes = _parts(file, value, _SHAPE)
                sizes = (_size(file, dim) for shape in shapes for dim in _parts(file, shape, _DIM))
                dims = tuple(itertools.islice(sizes, limits.MAX_RANK + 1))
    return _Tensor(_name(file, span, _NAME), foreign, dims)


def _foreign(element: object) -> str:
    name = _DATATYPES[element] if isinstance(element, int) and element < len(_DATATYPES) else f"datatype {element}"
    # The engine finds out what the file leaves open.
    return "" if name in ITEM_BYTES or element == 0 else name


def _size(file: BinaryIO, dim: Span) -> int:
    return next((value for number, value in fields(file, *dim) if number == _SIZE and isinstance(value, int)), 0)


def _weights(file: BinaryIO, graph: Span) -> Iterator[str]:
    for initializer in _parts(file, graph, _INITIALIZER):
        yield _name(file, initializer, _TENSOR_NAME)
    for initializer in _parts(file, graph, _SPARSE_INITIALIZER):
        for values in _parts(file, initializer, _VALUES):
            yield _name(file, values, _TENSOR_NAME)


def _name(file: BinaryIO, message: Span, number: int) -> str:
    """The name, cut behind the first byte that is too many."""
    name = ""
    for start, end in _parts(file, message, number):
        file.seek(start)
        name = os.fsdecode(file.read(min(end - start, limits.MAX_NAME_BYTES + 1)))
    return name


def _parts(file: BinaryIO, message: Span, number: int) -> Iterator[Span]:
    return (value for key, value in fields(file, *message) if key == number and isinstance(value, tuple))
