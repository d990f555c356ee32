"""Reader for the inputs and outputs in a MindIR file. It uses no library and skips the weights.

The file is a `ModelProto` of MindSpore's mind_ir.proto, which resembles ONNX's. Two programs write such files:

- MindSpore exports them. Inputs have the names of the arguments, preceded by their function and a colon:
  ``3_1_net_Slice_construct_3:x`` is ``x``. Outputs have no names, only the number of a node, which differs in each
  export: this module names ``3_1_net_Slice_construct_3:CNode_14:15`` ``output_0`` if it is the first. In tuples, also
  nested ones, each tensor is an output.
- MindSpore Lite's Converter writes them with the names of the original model.
"""

from __future__ import annotations

import itertools
import os
from typing import BinaryIO, Iterator, NamedTuple, Optional, Sequence, Tuple

from weightd_common.modelfiles.protobuf import Malformed, Span, fields
from weightd_protocol import limits
from weightd_protocol.datatypes import ITEM_BYTES

# Field numbers of mind_ir.proto.
_PRODUCER, _GRAPH = 2, 7  # in a model
_INPUT, _OUTPUT = 5, 6  # in a graph
_NAME, _TENSOR, _TUPLE = 1, 2, 5  # in an input or output
_TENSORS, _VALUES = 12, 17  # in a tuple, whose values are nested tuples
_DIMS, _DATATYPE = 1, 2  # in a tensor

# By the numbers of TensorProto.DataType. A type without a datatype in the protocol has its name there, in lower case.
_DATATYPES = (
    *("undefined", "FP32", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "string", "BOOL", "FP16", "FP64"),
    *("UINT32", "UINT64", "complex64", "complex128", "bfloat16", "FP64", "qint4x2"),
)

_SIGN_BIT = 2**63
_MAX_VARINT_BYTES = 10
_MINDSPORE = "MindSpore"

# Nesting of tuples. No program writes deeper ones.
_MAX_DEPTH = 16


class MindIrTensor(NamedTuple):
    """An input or output.

    Attributes:
        name: the name. An overlong name may be truncated, but stays longer than the limit.
        datatype: the datatype in the protocol, or else the file's type name in lower case.
        shape: the dimensions, of which -1 is free; None for any rank. A tensor with too many dimensions has one more
            than the limit.
    """

    name: str
    datatype: str
    shape: Optional[Tuple[int, ...]]


class MindIr(NamedTuple):
    """Inputs and outputs of a file. If there are too many, the tuples have one more than the limit.

    Attributes:
        is_mindspore_export: whether MindSpore itself has written the file, not the Converter.
    """

    inputs: Tuple[MindIrTensor, ...]
    outputs: Tuple[MindIrTensor, ...]
    is_mindspore_export: bool


def read(file: BinaryIO) -> MindIr:
    """Read an open file.

    Raises:
        Malformed: the file is not a MindIR, or is incomplete.
        OSError: the file cannot be read.
    """
    model: Span = (0, os.fstat(file.fileno()).st_size)
    producer = next((_text(file, each) for each in _field_spans(file, model, _PRODUCER)), "")
    graph = next(_field_spans(file, model, _GRAPH), None)
    if graph is None:
        raise Malformed
    inputs, outputs = (tuple(_tensors(file, graph, number)) for number in (_INPUT, _OUTPUT))
    if not outputs:
        raise Malformed
    exported = producer == _MINDSPORE
    if exported:
        inputs = tuple(each._replace(name=each.name.rpartition(":")[2]) for each in inputs)
        outputs = tuple(each._replace(name=f"output_{index}") for index, each in enumerate(outputs))
    return MindIr(inputs, outputs, exported)


def find_problems(what: str, tensors: Sequence[MindIrTensor]) -> Iterator[str]:
    """Yield the reasons why the protocol cannot carry these inputs or outputs, one line each."""
    if len(tensors) > limits.MAX_TENSORS:
        yield f"expected at most {limits.MAX_TENSORS} {what}s"
    for name in sorted({each.name for each in tensors if sum(each.name == other.name for other in tensors) > 1}):
        yield f"{what} {name!r}: there are two of this name"
    for each in tensors:
        if not 0 < len(each.name.encode("utf-8", "surrogateescape")) <= limits.MAX_NAME_BYTES:
            yield f"an {what}: expected a name of 1 to {limits.MAX_NAME_BYTES} bytes"
        elif each.datatype not in ITEM_BYTES:
            expected = ", ".join(ITEM_BYTES)
            yield f"{what} {each.name!r}: {each.datatype} is not a supported datatype; expected one of {expected}"
        elif len(each.shape or ()) > limits.MAX_RANK:
            yield f"{what} {each.name!r}: expected at most {limits.MAX_RANK} dimensions"
        elif max(each.shape or (), default=0) > limits.MAX_DIM:
            yield f"{what} {each.name!r}: a dimension of {max(each.shape or ())}; expected at most {limits.MAX_DIM}"


def _tensors(file: BinaryIO, graph: Span, number: int) -> Iterator[MindIrTensor]:
    found = (
        _read_tensor(file, name, described)
        for each in _field_spans(file, graph, number)
        for name in [next((_text(file, name) for name in _field_spans(file, each, _NAME)), "")]
        for described in _tensor_spans(file, each)
    )
    return itertools.islice(found, limits.MAX_TENSORS + 1)


def _tensor_spans(file: BinaryIO, value: Span) -> Iterator[Span]:
    """Return the tensors of an input or output: a single one, or the tensors of a tuple in order."""
    leaves = (each for tree in _field_spans(file, value, _TUPLE) for each in _tuple_spans(file, tree))
    found = list(itertools.islice(leaves, limits.MAX_TENSORS + 1))
    found = found or list(itertools.islice(_field_spans(file, value, _TENSOR), 1))
    if not found:
        raise Malformed
    return iter(found)


def _tuple_spans(file: BinaryIO, tree: Span, depth: int = 0) -> Iterator[Span]:
    if depth > _MAX_DEPTH:
        raise Malformed
    for number, value in fields(file, *tree):
        if isinstance(value, tuple) and number == _VALUES:
            yield from _tuple_spans(file, value, depth + 1)
        elif isinstance(value, tuple) and number == _TENSORS:
            yield value


def _read_tensor(file: BinaryIO, name: str, span: Span) -> MindIrTensor:
    datatype_number = 0
    dims: Tuple[int, ...] = ()
    for number, value in fields(file, *span):
        if number == _DIMS and len(dims) <= limits.MAX_RANK:
            dims += (value,) if isinstance(value, int) else tuple(_unpack_varints(file, value, limits.MAX_RANK + 1))
            dims = dims[: limits.MAX_RANK + 1]
        elif number == _DATATYPE and isinstance(value, int):
            datatype_number = value
    datatype = _DATATYPES[datatype_number] if datatype_number < len(_DATATYPES) else f"datatype {datatype_number}"
    sizes = tuple(each if each < _SIGN_BIT else each - 2 * _SIGN_BIT for each in dims)
    # An unknown rank is encoded as a single dimension of -2, a free dimension as -1.
    return MindIrTensor(name, datatype, None if sizes == (-2,) else tuple(max(each, -1) for each in sizes))


def _unpack_varints(file: BinaryIO, span: Span, max_count: int) -> Iterator[int]:
    """Yield at most `max_count` numbers of a packed field."""
    start, end = span
    file.seek(start)
    data = file.read(min(end - start, max_count * _MAX_VARINT_BYTES))
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield value & (2 * _SIGN_BIT - 1)
            value = shift = 0
        elif shift >= 7 * _MAX_VARINT_BYTES:
            raise Malformed


def _text(file: BinaryIO, span: Span) -> str:
    start, end = span
    file.seek(start)
    # Only the last part of a scoped name is used, and the scope may be longer than a name.
    return os.fsdecode(file.read(min(end - start, 16 * limits.MAX_NAME_BYTES)))


def _field_spans(file: BinaryIO, message: Span, number: int) -> Iterator[Span]:
    return (value for key, value in fields(file, *message) if key == number and isinstance(value, tuple))
