"""Frames to messages and back: the whole of wire v1, without a socket.

A message is one ZeroMQ multipart message. Frame 0 is a msgpack map: ``v`` (the protocol's version), ``type``
(the message's tag) and the fields of the message. One frame for each tensor follows, in order.
Decoding trusts nothing: every violation is a `RemoteProtocolError` that names the field.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, Iterable, Mapping, Sequence, Sized, Tuple, Type, TypeVar, cast

import msgpack

from weightd.protocol import limits
from weightd.protocol.errors import LocalProtocolError, RemoteProtocolError
from weightd.protocol.messages.children import FROM_CHILD, TO_CHILD, Predict, Result
from weightd.protocol.messages.data import Infer, InferResponse, TensorSpec
from weightd.protocol.messages.types import FROM_CLIENT, TO_CLIENT
from weightd.protocol.repeats import Repeats
from weightd.protocol.schema import FieldError, got, label, plain
from weightd.protocol.schema import decode as decode_fields

M = TypeVar("M")

_TAGS: Dict[Type[Any], str] = {
    cls: tag for table in (FROM_CLIENT, TO_CLIENT, FROM_CHILD, TO_CHILD) for tag, cls in table.items()
}

# A request is these four messages: the ones that come often.
_INFER = Repeats(Infer, "infer", "id", is_text=True)
_INFER_RESPONSE = Repeats(InferResponse, "infer_response", "id", is_text=True)
_PREDICT = Repeats(Predict, "predict", "request", is_text=False)
_RESULT = Repeats(Result, "result", "request", is_text=False)
_WRITTEN: Dict[Type[Any], Repeats] = {
    Infer: _INFER,
    InferResponse: _INFER_RESPONSE,
    Predict: _PREDICT,
    Result: _RESULT,
}
# By the identity of the table that says what the peer may send: it is one of the four.
_READ: Dict[int, Repeats] = {
    id(FROM_CLIENT): _INFER,
    id(TO_CLIENT): _INFER_RESPONSE,
    id(TO_CHILD): _PREDICT,
    id(FROM_CHILD): _RESULT,
}

# numpy and the engines count the elements of a tensor in an int64, with a dimension of 0 left out.
_MAX_EXTENT = 2**63


def encode(message: object, *, max_bytes: int = limits.MAX_HEADER_BYTES) -> bytes:
    """Return the header frame of `message`; the caller adds the tensors' frames.

    Raises:
        LocalProtocolError: it is no message, a field has a value that the peer would refuse, or the header is too long.
    """
    repeats = _WRITTEN.get(type(message))
    known = None if repeats is None else repeats.write(message)
    if known is not None and len(known) <= max_bytes:
        return known
    header = _encode_anew(message, max_bytes)
    if repeats is not None:
        repeats.wrote(message, header)
    return header


def _encode_anew(message: object, max_bytes: int) -> bytes:
    tag = _TAGS.get(type(message))
    if tag is None:
        raise LocalProtocolError(f"{type(message).__name__} is not a message of the wire")
    try:
        header: bytes = msgpack.packb({"v": limits.PROTOCOL_VERSION, "type": tag, **plain(message)})
    except FieldError as error:
        raise LocalProtocolError(f"{tag}: {error}") from None
    if len(header) > max_bytes:
        raise LocalProtocolError(f"{tag}: expected a header of at most {max_bytes} bytes, got {len(header)}")
    return header


def decode(frames: Sequence[Any], table: Mapping[str, Type[M]], *, max_bytes: int = limits.MAX_HEADER_BYTES) -> M:
    """Return the message of `frames`, one of the types in `table`.

    Tensor frames are only measured, never read or copied: they stay ``frames[1:]``.

    Args:
        frames: header and tensors, without a routing prefix; anything with a length in bytes and a buffer.
        table: tag to type of the messages that the peer may send.
        max_bytes: the largest header to accept.

    Raises:
        RemoteProtocolError: the frames are not such a message.
    """
    repeats = _READ.get(id(table))
    if repeats is None or not frames or len(frames[0]) > max_bytes:
        return _decode_anew(frames, table, max_bytes)
    message: Any = repeats.recognise(frames)
    if message is None:
        message = _decode_anew(frames, table, max_bytes)
        if isinstance(message, repeats.cls):
            repeats.learn(frames, message)
    return cast(M, message)


def _decode_anew(frames: Sequence[Any], table: Mapping[str, Type[M]], max_bytes: int) -> M:
    fields = _unpack_header(frames, max_bytes)
    try:
        message = _message(fields, table)
        _check_tensor_frames(getattr(message, "tensors", ()), frames)
    except FieldError as error:
        raise RemoteProtocolError(str(error), _readable_id(fields)) from None
    return message


def _unpack_header(frames: Sequence[Any], max_bytes: int) -> Dict[str, Any]:
    if not frames:
        raise RemoteProtocolError("header: expected a frame, got an empty message")
    header = frames[0]
    if len(header) > max_bytes:
        raise RemoteProtocolError(f"header: expected at most {max_bytes} bytes, got {len(header)}")
    try:
        # A text is bounded by the bytes that are there. A list or map is allocated at the length that it claims, and
        # again on each level of nesting: hence the bounds. Depth is bounded by unpackb's own stack.
        fields: Any = msgpack.unpackb(
            header,
            object_pairs_hook=_unique_map,
            max_array_len=limits.MAX_LIST_ITEMS,
            max_map_len=limits.MAX_MAP_ITEMS,
        )
    except (RecursionError, msgpack.StackError):
        raise RemoteProtocolError("header: nested too deep") from None
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        text = str(error) or type(error).__name__
        raise RemoteProtocolError(f"header: expected one msgpack map: {text:.200}") from None
    if type(fields) is not dict:
        raise RemoteProtocolError(f"header: expected one msgpack map, got {type(fields).__name__}")
    return cast(Dict[str, Any], fields)


def _unique_map(pairs: Iterable[Tuple[Any, Any]]) -> Dict[Any, Any]:
    # A list, or from msgpack in pure Python an iterator.
    listed = list(pairs)
    fields = dict(listed)
    if len(fields) != len(listed):
        names = [name for name, _ in listed]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {label(twice)} is given twice")
    return fields


def _message(fields: Dict[str, Any], table: Mapping[str, Type[M]]) -> M:
    version = fields.pop("v", None)
    if type(version) is not int or version != limits.PROTOCOL_VERSION:
        raise FieldError(
            f"this side speaks protocol version {limits.PROTOCOL_VERSION}, the peer sent {got(version)}"
        ).at("v")
    tag = fields.pop("type", None)
    cls = table.get(tag) if type(tag) is str else None
    if cls is None:
        raise FieldError(f"expected one of {', '.join(table)}, got {got(tag)}").at("type")
    try:
        return decode_fields(cls, fields)
    except FieldError as error:
        raise FieldError(f"{tag}: {error}") from None


def _check_tensor_frames(tensors: Sequence[TensorSpec], frames: Sequence[Sized]) -> None:
    if len(frames) - 1 != len(tensors):
        raise FieldError(f"expected {len(tensors)} tensor frames after the header, got {len(frames) - 1}").at("frames")
    for index, tensor in enumerate(tensors, 1):
        nbytes = tensor.nbytes
        if len(frames[index]) != nbytes:
            raise _tensor_error(index, tensor, f"is {nbytes} bytes, got {len(frames[index])}")
        if nbytes == 0 and _extent(tensor) >= _MAX_EXTENT:
            raise _tensor_error(index, tensor, "is too large to be described, even if it is empty")


def _extent(tensor: TensorSpec) -> int:
    """The bytes of the tensor if dimensions of 0 did not count."""
    return replace(tensor, shape=tuple(dim for dim in tensor.shape if dim)).nbytes


def _tensor_error(index: int, tensor: TensorSpec, problem: str) -> FieldError:
    what = f"{tensor.datatype} of shape {list(tensor.shape)} {problem}"
    return FieldError(what).at(f"frames[{index}] ({label(tensor.name)})")


def _readable_id(fields: Dict[str, Any]) -> str:
    """The id that an error answer can carry, if the header has a legal one."""
    request_id = fields.get("id")
    if type(request_id) is not str or len(request_id.encode()) > limits.MAX_ID_BYTES:
        return ""
    return request_id


def clip(text: str, max_bytes: int = limits.MAX_TEXT_BYTES) -> str:
    """Return `text` cut to so many bytes of UTF-8, by default what an error text of the wire may hold."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= max_bytes:
        return raw.decode("utf-8")
    return raw[: max_bytes - 3].decode("utf-8", "ignore") + "..."
