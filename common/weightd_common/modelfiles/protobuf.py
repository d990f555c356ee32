"""Protobuf parser for model files of any size. It seeks past fields that are not needed instead of reading them.

The module also finds the names of external files in ONNX and MindIR files.
"""

from __future__ import annotations

import os
from typing import BinaryIO, Dict, Iterator, List, Tuple, Union, cast

from weightd_protocol import limits

_VARINT, _FIXED64, _BYTES, _GROUP, _END_GROUP, _FIXED32 = range(6)  # wire types
_MAX_VARINT_BYTES = 10

# For each kind of message, the fields that may contain external data: {field number: kind of message in the field}.
# From onnx.proto and mind_ir.proto. The parser skips all other fields by their length, so its run time depends on the
# number of nodes and not on the size of the weights.

_Messages = Dict[str, Dict[int, str]]

_ONNX: _Messages = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "onnx tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "onnx tensor", 6: "graph", 10: "onnx tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "onnx tensor", 2: "onnx tensor"},
}
_EXTERNAL_DATA, _DATA_LOCATION, _EXTERNAL = 13, 14, 1  # in a tensor
_KEY, _VALUE = 1, 2  # field numbers in an entry of an ONNX tensor's external_data

_MINDIR: _Messages = {
    "model": {7: "graph", 8: "graph", 12: "primitive"},
    "primitive": {3: "attribute"},
    "graph": {1: "node", 3: "tensor", 5: "value", 6: "value", 8: "attribute", 10: "map"},
    "map": {2: "attribute", 3: "tensor", 4: "tensor", 5: "tensor"},
    "node": {5: "attribute", 8: "attribute", 9: "attribute"},
    "value": {2: "tensor", 5: "attribute"},
    "attribute": {6: "tensor", 7: "graph", 12: "tensor", 13: "graph", 17: "attribute", 19: "functor"},
    "functor": {3: "attribute"},
    "tensor": {12: "mindir external", 17: "quantization"},
    "quantization": {2: "attribute"},
}
_LOCATION = 1  # field number in the external data of a MindIR tensor

# Maximum nesting depth of messages: the default limit of protobuf's parser, with which engines read models.
MAX_DEPTH = 100

Span = Tuple[int, int]
"""Position of bytes in a file: the offset of the first byte, and the offset after the last byte."""
Field = Tuple[int, Union[int, Span]]


class Malformed(Exception):
    """The content of a file is not the expected protobuf message."""


class TooDeep(Malformed):
    """The messages in a file are nested deeper than `MAX_DEPTH`."""


def fields(file: BinaryIO, start: int, end: int) -> Iterator[Field]:
    """Yield (field number, value) for each field of the message from `start` to `end` in the file.

    The value of a length-delimited field, such as bytes or a message, is its position in the file. The value of a
    fixed-size field is 0.

    Raises:
        Malformed: the bytes are not a protobuf message.
    """
    position = start
    groups: List[int] = []
    while position < end:
        # Seek for each field, because the consumer of this generator may have moved the file's position.
        file.seek(position)
        tag, size = _varint(file)
        position += size
        number, wire_type = tag >> 3, tag & 7
        value: Union[int, Span] = 0
        if wire_type == _VARINT:
            value, size = _varint(file)
        elif wire_type == _BYTES:
            length, size = _varint(file)
            value = (position + size, position + size + length)
            size += length
        elif wire_type in (_FIXED64, _FIXED32):
            size = 8 if wire_type == _FIXED64 else 4
        elif wire_type == _GROUP:
            # Skip groups, a deprecated kind of field, as the parsers of engines do.
            groups.append(number)
            size = 0
        elif wire_type == _END_GROUP and groups and groups.pop() == number:
            size = 0
        else:
            raise Malformed
        position += size
        # Field number 0 is invalid in protobuf. If it were accepted, a file of zeros would take long to parse.
        if position > end or number == 0:
            raise Malformed
        if not groups and wire_type not in (_GROUP, _END_GROUP):
            yield number, value
    if groups:
        raise Malformed


def onnx_locations(file: BinaryIO) -> Iterator[Tuple[str, bool]]:
    """Yield the location of each external file that an ONNX model names, and whether the engine will read it.

    Raises:
        Malformed: the file is not an ONNX model.
    """
    return _locations(file, _ONNX, "model", 0, os.fstat(file.fileno()).st_size)


def mindir_locations(file: BinaryIO) -> Iterator[str]:
    """Yield the location of each external file that a MindIR names.

    Raises:
        Malformed: the file is not a MindIR.
        TooDeep: messages are nested deeper than `MAX_DEPTH`.
    """
    return (location for location, _ in _locations(file, _MINDIR, "model", 0, os.fstat(file.fileno()).st_size))


def _varint(file: BinaryIO) -> Tuple[int, int]:
    """Read the variable-length integer at the file's position. Return the integer and its encoded length in bytes."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        byte = file.read(1)
        if not byte:
            raise Malformed
        value |= (byte[0] & 0x7F) << 7 * index
        if byte[0] < 0x80:
            return value, index + 1
    raise Malformed


def _locations(
    file: BinaryIO, messages: _Messages, message: str, start: int, end: int, depth: int = 0
) -> Iterator[Tuple[str, bool]]:
    """Yield the location of each external file in a message, and whether the engine will read the file.

    Args:
        file: the open model file.
        messages: `_ONNX` or `_MINDIR`.
        message: the kind of the message.
        start: the offset of the message in the file.
        end: the offset after the message.
        depth: the number of messages around the message.
    """
    if depth > MAX_DEPTH:
        raise TooDeep
    children = messages[message]
    for number, value in fields(file, start, end):
        child = children.get(number)
        if child is None or not isinstance(value, tuple):
            continue
        if child == "onnx tensor":
            yield from _tensor_locations(file, *value)
        elif child == "mindir external":
            for field, span in fields(file, *value):
                if field == _LOCATION:
                    yield _text(file, span), True
        else:
            yield from _locations(file, messages, child, *value, depth=depth + 1)


def _tensor_locations(file: BinaryIO, start: int, end: int) -> Iterator[Tuple[str, bool]]:
    """Yield each external location of an ONNX tensor, and whether this message says that the data is external.

    A location is yielded even if the message says that the data is not external, because every location must be
    permitted: an engine merges several messages of the same tensor, so another message may say that the data at this
    location is external.
    """
    entries: List[Span] = []
    external = False
    for number, value in fields(file, start, end):
        if number == _EXTERNAL_DATA and isinstance(value, tuple):
            entries.append(value)
        elif number == _DATA_LOCATION and isinstance(value, int):
            external = value & 0xFFFFFFFF == _EXTERNAL
    for span in entries:
        entry = dict(fields(file, *span))
        if _text(file, entry.get(_KEY)) == "location":
            yield _text(file, entry.get(_VALUE)), external


def _text(file: BinaryIO, span: object) -> str:
    """Read a string field and return it as a file name. Bytes that are not UTF-8 become surrogates (os.fsdecode)."""
    if not isinstance(span, tuple):
        return ""
    start, end = cast(Span, span)
    if end - start > limits.MAX_PATH_BYTES:
        raise Malformed
    file.seek(start)
    return os.fsdecode(file.read(end - start))
