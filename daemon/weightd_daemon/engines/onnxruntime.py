"""ONNX Runtime, which runs models on the CPU: its specification, and the checks of ONNX files.

The checks do not use the library. The library has further limits and may reject a file that passes the checks; `weightd
check --load` finds such files.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple

from weightd_common.modelfiles.protobuf import Malformed, Span, fields
from weightd_daemon.engines.spec import EngineSpec
from weightd_protocol import limits
from weightd_protocol.datatypes import ITEM_BYTES
from weightd_protocol.schema import label

# Field numbers of onnx.proto.
_GRAPH = 7  # in a model
_INITIALIZER, _INPUT, _OUTPUT, _SPARSE_INITIALIZER = 5, 11, 12, 15  # in a graph
_NAME, _TYPE = 1, 2  # in an input or output
_NON_TENSOR_TYPES: Mapping[int, str] = {
    4: "a sequence",
    5: "a map",
    7: "opaque",
    8: "a sparse tensor",
    9: "optional",
}  # in a type
_TENSOR = 1  # in a type
_ELEM_TYPE, _SHAPE = 1, 2  # in the type of a tensor
_DIM = 1  # in a shape
_DIM_VALUE = 1  # in a dimension
_TENSOR_NAME = 8  # in an initializer
_VALUES = 1  # in a sparse initializer

# The names of data types by the numbers of TensorProto.DataType. Newer types are reported by number.
_DATATYPES: Sequence[str] = (
    *("undefined", "FP32", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "string", "BOOL", "FP16", "FP64"),
    *("UINT32", "UINT64", "complex64", "complex128", "BF16"),
    *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"),
    *("UINT4", "INT4", "FLOAT4E2M1", "FLOAT8E8M0", "UINT2", "INT2"),
)
_NO_WIRE_DATATYPE = f"is not a supported datatype; expected one of {', '.join(ITEM_BYTES)}"

# The file stores a negative int64 as an unsigned number of at least this value. A negative dimension is an unknown
# dimension.
_INT64_SIGN = 2**63


class _Tensor(NamedTuple):
    """An input or output with its dimensions; `unsupported_type` is its type if requests cannot carry it, else ""."""

    name: str
    unsupported_type: str
    dims: tuple[int, ...]


def problems(file: BinaryIO) -> list[str]:
    """Return the reasons why requests for the model in a file would fail, one line for each.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        return list(_problems(file, (0, os.fstat(file.fileno()).st_size)))
    except Malformed:
        return ["expected an ONNX model; the file has another format or is truncated"]


def _problems(file: BinaryIO, model: Span) -> Iterator[str]:
    for graph in _submessages(file, model, _GRAPH):
        # Ignore inputs that are weights: before IR version 4, a model listed each weight also as an input.
        weights = set(_weight_names(file, graph))
        inputs = (each for each in _submessages(file, graph, _INPUT) if _read_name(file, each, _NAME) not in weights)
        yield from _tensor_list_problems("input", file, inputs)
        yield from _tensor_list_problems("output", file, _submessages(file, graph, _OUTPUT))


def _tensor_list_problems(kind: str, file: BinaryIO, spans: Iterator[Span]) -> Iterator[str]:
    # If the model has too many tensors, examine only the first `MAX_TENSORS` of them.
    tensors = [_parse_tensor(file, span) for span in itertools.islice(spans, limits.MAX_TENSORS)]
    excess_count = sum(1 for _ in spans)
    if excess_count:
        yield f"{len(tensors) + excess_count} {kind}s; expected at most {limits.MAX_TENSORS}"
    for name, group in itertools.groupby(sorted(each.name for each in tensors)):
        if len(list(group)) > 1:
            yield f"{kind} {label(name)}: there are two of this name"
    for tensor in tensors:
        yield from (f"{kind} {label(tensor.name)}: {problem}" for problem in _tensor_problems(tensor))


def _tensor_problems(tensor: _Tensor) -> Iterator[str]:
    if not 0 < len(tensor.name.encode("utf-8", "surrogateescape")) <= limits.MAX_NAME_BYTES:
        yield f"expected a name of 1 to {limits.MAX_NAME_BYTES} bytes"
    if tensor.unsupported_type:
        yield f"{tensor.unsupported_type} {_NO_WIRE_DATATYPE}"
    if len(tensor.dims) > limits.MAX_RANK:
        yield f"expected at most {limits.MAX_RANK} dimensions"
    if any(limits.MAX_DIM < size < _INT64_SIGN for size in tensor.dims):
        yield f"a dimension of {max(tensor.dims)}; expected at most {limits.MAX_DIM}"


def _parse_tensor(file: BinaryIO, span: Span) -> _Tensor:
    unsupported_type = ""
    dims: tuple[int, ...] = ()
    for kind in _submessages(file, span, _TYPE):
        for number, value in fields(file, *kind):
            unsupported_type = _NON_TENSOR_TYPES.get(number, unsupported_type)
            if number == _TENSOR and isinstance(value, tuple):
                unsupported_type = _unsupported_datatype(
                    next((each for key, each in fields(file, *value) if key == _ELEM_TYPE), 0)
                )
                shapes = _submessages(file, value, _SHAPE)
                sizes = (_read_dim(file, dim) for shape in shapes for dim in _submessages(file, shape, _DIM))
                dims = tuple(itertools.islice(sizes, limits.MAX_RANK + 1))
    return _Tensor(_read_name(file, span, _NAME), unsupported_type, dims)


def _unsupported_datatype(element: object) -> str:
    name = _DATATYPES[element] if isinstance(element, int) and element < len(_DATATYPES) else f"datatype {element}"
    # A type that the file leaves undefined (0) is no error: the engine determines the type.
    return "" if name in ITEM_BYTES or element == 0 else name


def _read_dim(file: BinaryIO, dim: Span) -> int:
    return next((value for number, value in fields(file, *dim) if number == _DIM_VALUE and isinstance(value, int)), 0)


def _weight_names(file: BinaryIO, graph: Span) -> Iterator[str]:
    for initializer in _submessages(file, graph, _INITIALIZER):
        yield _read_name(file, initializer, _TENSOR_NAME)
    for initializer in _submessages(file, graph, _SPARSE_INITIALIZER):
        for values in _submessages(file, initializer, _VALUES):
            yield _read_name(file, values, _TENSOR_NAME)


def _read_name(file: BinaryIO, message: Span, number: int) -> str:
    """Return the name in field `number` of a message, cut to at most `limits.MAX_NAME_BYTES` + 1 bytes."""
    name = ""
    for start, end in _submessages(file, message, number):
        file.seek(start)
        name = os.fsdecode(file.read(min(end - start, limits.MAX_NAME_BYTES + 1)))
    return name


def _submessages(file: BinaryIO, message: Span, number: int) -> Iterator[Span]:
    return (value for key, value in fields(file, *message) if key == number and isinstance(value, tuple))


# Measured: a build takes 1.1 times the size of matrices in raw bytes. Weights that the library repacks, or reads from
# numeric fields, take twice their size.
SPEC = EngineSpec("onnxruntime", suffix=".onnx", build_factor=2.0, template_threads=1, find_problems=problems)
