"""Reader for the inputs and outputs in a MindIR file. It uses no library and skips the weights.

The file is a `ModelProto` of MindSpore's mind_ir.proto, which resembles ONNX's. Two programs write such files:

- MindSpore, when it exports a network. The name of an input is the argument's name after the name of its function and a
  colon: this module turns ``3_1_net_Slice_construct_3:x`` into ``x``. An output has only the number of a node, which
  differs in each export: this module names the first output ``output_0`` instead of
  ``3_1_net_Slice_construct_3:CNode_14:15``. If an output is a tuple, each tensor in it, also in nested tuples, becomes
  an output.
- MindSpore Lite's Converter, which keeps the names of the original model.
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
_NAME, _TENSOR, _TUPLE = 1, 2, 5  # field numbers in the message of an input or output
_TENSORS, _VALUES = 12, 17  # field numbers in the message of a tuple: its tensors, and its nested tuples
_DIMS, _DATATYPE = 1, 2  # in a tensor

# Datatypes in the order of the numbers of TensorProto.DataType. If weightd's protocol does not have the datatype, the
# entry is the name in TensorProto.DataType in lower case.
_DATATYPES = (
    *("undefined", "FP32", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "string", "BOOL", "FP16", "FP64"),
    *("UINT32", "UINT64", "complex64", "complex128", "bfloat16", "FP64", "qint4x2"),
)

_SIGN_BIT = 2**63
_MAX_VARINT_BYTES = 10
_MINDSPORE = "MindSpore"

# Maximum nesting depth of tuples. No program writes a MindIR with deeper tuples.
_MAX_DEPTH = 16


class MindIrTensor(NamedTuple):
    """An input or output tensor of the model in a MindIR file.

    Attributes:
        name: the name of the tensor. If it is longer than the protocol's limit, it may be truncated to a name that is
            still longer than the limit, so that `find_problems` reports it.
        datatype: the name of the datatype in weightd's protocol, or else the file's type name in lower case.
        shape: the dimensions, with -1 for a free dimension; None if the tensor may have any rank. If there are more
            dimensions than the protocol allows, the shape has one more dimension than allowed.
    """

    name: str
    datatype: str
    shape: Optional[Tuple[int, ...]]


class MindIr(NamedTuple):
    """Inputs and outputs of the model in a MindIR file.

    Attributes:
        inputs: the inputs. If there are more than the protocol allows, the tuple has one more than allowed.
        outputs: the outputs, limited in the same way.
        is_mindspore_export: whether MindSpore itself has written the file, not MindSpore Lite's Converter.
    """

    inputs: Tuple[MindIrTensor, ...]
    outputs: Tuple[MindIrTensor, ...]
    is_mindspore_export: bool


def read(file: BinaryIO) -> MindIr:
    """Return the inputs and outputs in an open MindIR file.

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
    """Yield the reasons why weightd's protocol cannot carry these inputs or outputs, one line of text for each reason.

    Args:
        what: "input" or "output", for the texts.
        tensors: the inputs or outputs.
    """
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
    """Return where the tensors of an input or output are in the file: a single tensor, or all tensors of a tuple."""
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
    # The file encodes an unknown rank as a single dimension of -2, and a free dimension as -1.
    return MindIrTensor(name, datatype, None if sizes == (-2,) else tuple(max(each, -1) for each in sizes))


def _unpack_varints(file: BinaryIO, span: Span, max_count: int) -> Iterator[int]:
    """Yield the first `max_count` numbers of a packed repeated field."""
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
    # Read more than MAX_NAME_BYTES: a name may be preceded by a long scope, which is removed later.
    return os.fsdecode(file.read(min(end - start, 16 * limits.MAX_NAME_BYTES)))


def _field_spans(file: BinaryIO, message: Span, number: int) -> Iterator[Span]:
    return (value for key, value in fields(file, *message) if key == number and isinstance(value, tuple))
