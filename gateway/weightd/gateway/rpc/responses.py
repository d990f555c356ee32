"""An answer, as the bytes of a `ModelInferResponse`: each output is copied once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from weightd.gateway import arrays
from weightd.gateway.arrays import Array
from weightd.gateway.codes import TooLarge
from weightd.gateway.model_view import VERSION
from weightd.gateway.question import Answer
from weightd.gateway.rpc import parameters
from weightd.gateway.rpc.messages import INFERENCE
from weightd.gateway.rpc.requests import Asked, Target
from weightd.protocol.errors import InvalidArgument
from weightd.protocol.schema import label
from weightd.protocol.tensors import frame_of

_Response, _Streamed = INFERENCE["ModelInferResponse"], INFERENCE["ModelStreamInferResponse"]

# Fields 3, 6 and 2, of bytes, of which the length follows.
_ID = b"\x1a"
_RAW_OUTPUT = b"\x32"
_INFER_RESPONSE = b"\x12"

# Of a protobuf, by what its libraries read.
_MOST_BYTES = 2**31 - 1

# What clients of streams wait for: the answer to a request has one response here.
_FINAL = "triton_final_response"


def response(asked: Asked, answer: Answer, *, final: bool = False) -> bytes:
    """Return the bytes of the response; what is to be in shared memory is written there.

    Args:
        asked: what was asked.
        answer: what was answered.
        final: whether it says that no other one follows.

    Raises:
        InvalidArgument: an output does not fit where it is to be.
    """
    question, targets = asked
    if targets:
        head, contents = _partly_placed(asked, answer, final=final)
    else:
        shapes = tuple([(name, arrays.datatype_of(array), array.shape) for name, array in answer.items()])
        head, contents = _head(question.model, shapes, final=final), [*map(frame_of, answer.values())]
    parts: list[bytes | memoryview] = [head]
    if question.id:
        request_id = question.id.encode()
        parts += (_ID, _varint(len(request_id)), request_id)
    for content in contents:
        parts += (_RAW_OUTPUT, _varint(len(content)), content)
    return _joined(parts)


@functools.lru_cache(maxsize=256)
def _head(model: str, shapes: tuple[tuple[str, str, tuple[int, ...]], ...], *, final: bool) -> bytes:
    """Return the bytes of a response but for its id and its contents: the same for many."""
    head = _begun(model, final=final)
    for name, datatype, shape in shapes:
        head.outputs.add(name=name, datatype=datatype, shape=shape)
    content: bytes = head.SerializeToString()
    return content


def _partly_placed(asked: Asked, answer: Answer, *, final: bool) -> tuple[bytes, list[memoryview]]:
    """Return the same, and the contents, where outputs are to be elsewhere."""
    head = _begun(asked.question.model, final=final)
    contents: list[memoryview] = []
    for name, array in answer.items():
        output = head.outputs.add(name=name, datatype=arrays.datatype_of(array), shape=array.shape)
        target = asked.targets.get(name)
        contents.append(frame_of(array) if target is None else _placed(name, array, target, output))
    return head.SerializeToString(), contents


def _begun(model: str, *, final: bool) -> Any:
    head = _Response(model_name=model, model_version=VERSION)
    if final:
        head.parameters[_FINAL].bool_param = True
    return head


def _joined(parts: Sequence[bytes | memoryview]) -> bytes:
    size = sum(map(len, parts))
    if size > _MOST_BYTES:
        raise TooLarge(f"the answer has {size} bytes, and a message of gRPC at most {_MOST_BYTES}")
    return b"".join(parts)


def streamed(response: bytes) -> bytes:
    """Return the bytes of a `ModelStreamInferResponse` with a response."""
    return b"".join((_INFER_RESPONSE, _varint(len(response)), response))


def streamed_error(request_id: bytes, text: str) -> bytes:
    """Return the bytes of a `ModelStreamInferResponse` with the error of a request."""
    message = _Streamed(error_message=text)
    message.infer_response.id = request_id.decode(errors="replace")
    message.infer_response.parameters[_FINAL].bool_param = True
    content: bytes = message.SerializeToString()
    return content


def _placed(name: str, array: Array, target: Target, output: Any) -> memoryview:
    """Write an output where it is wanted, say so in what describes it, and return what is sent in its place."""
    region, place = target
    if array.nbytes > place.nbytes:
        raise InvalidArgument(
            f"output {label(name)}: {parameters.SIZE}: expected at least {array.nbytes}, got {place.nbytes}"
        )
    place.region.write(place.offset, frame_of(array))
    output.parameters[parameters.REGION].string_param = region
    output.parameters[parameters.OFFSET].int64_param = place.offset
    output.parameters[parameters.SIZE].int64_param = array.nbytes
    # Contents are counted by clients as outputs are: it has one that is empty.
    return memoryview(b"")


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)
