"""Frames to messages and back: the whole of wire v1, without a socket.

A message is one ZeroMQ multipart message. Frame 0 is a msgpack map: ``v`` (the protocol's version), ``type``
(the message's tag) and the fields of the message. One frame for each tensor follows, in order.
Decoding trusts nothing: every violation is a `RemoteProtocolError` that names the field.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Sequence, Sized, Tuple, Type, TypeVar

import msgpack

from weightd.protocol import limits
from weightd.protocol.errors import LocalProtocolError, RemoteProtocolError
from weightd.protocol.messages import FROM_CLIENT, TO_CLIENT
from weightd.protocol.schema import FieldError, decode as decode_fields, plain
from weightd.protocol.worker_messages import FROM_CHILD, TO_CHILD

M = TypeVar("M")

_TAGS: Dict[Type[Any], str] = {
    cls: tag for table in (FROM_CLIENT, TO_CLIENT, FROM_CHILD, TO_CHILD) for tag, cls in table.items()
}


def encode(message: object, *, max_bytes: int = limits.MAX_HEADER_BYTES) -> bytes:
    """Return the header frame of `message`; the caller adds the tensors' frames.

    Raises:
        LocalProtocolError: a text is not encodable, an integer too large, or the header too long.
    """
    fields = {"v": limits.PROTOCOL_VERSION, "type": _TAGS[type(message)]}
    fields.update(plain(message))
    try:
        header: bytes = msgpack.packb(fields)
    except (ValueError, OverflowError) as error:
        raise LocalProtocolError(f"{fields['type']}: {error}") from None
    if len(header) > max_bytes:
        raise LocalProtocolError(f"header: expected at most {max_bytes} bytes, got {len(header)}")
    return header


def decode(frames: Sequence[Any], table: Mapping[str, Type[M]], *, max_bytes: int = limits.MAX_HEADER_BYTES) -> M:
    """Return the message of `frames`, one of the types in `table`.

    Tensor frames are only measured, never read or copied: they stay ``frames[1:]``.

    Args:
        frames: header and tensors, without a routing prefix; anything with a length and a buffer.
        table: tag to type of the messages that the peer may send.
        max_bytes: the largest header to accept.

    Raises:
        RemoteProtocolError: the frames are not such a message.
    """
    fields = _unpack_header(frames, max_bytes)
    request_id = _readable_id(fields)
    version = fields.pop("v", None)
    if type(version) is not int or version != limits.PROTOCOL_VERSION:
        raise RemoteProtocolError(
            f"v: this side speaks protocol version {limits.PROTOCOL_VERSION}, the peer sent {version!r:.40}",
            request_id,
        )
    tag = fields.pop("type", None)
    cls = table.get(tag) if type(tag) is str else None
    if cls is None:
        raise RemoteProtocolError(f"type: expected one of {', '.join(table)}, got {tag!r:.60}", request_id)
    try:
        message = decode_fields(cls, fields)
    except FieldError as error:
        raise RemoteProtocolError(f"{tag}: {error}", request_id) from None
    _check_tensor_frames(getattr(message, "tensors", ()), frames, request_id)
    return message


def _unpack_header(frames: Sequence[Any], max_bytes: int) -> Dict[str, Any]:
    if not frames:
        raise RemoteProtocolError("header: expected a frame, got an empty message")
    header = frames[0]
    if len(header) > max_bytes:
        raise RemoteProtocolError(f"header: expected at most {max_bytes} bytes, got {len(header)}")
    try:
        # unpackb bounds every claimed length by the bytes that are there, and nesting by its own stack.
        fields = msgpack.unpackb(
            getattr(header, "buffer", header), object_pairs_hook=_unique_map, ext_hook=_no_ext, max_ext_len=0
        )
    except RecursionError:
        raise RemoteProtocolError("header: nested too deep") from None
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        text = str(error) or type(error).__name__
        raise RemoteProtocolError(f"header: expected one msgpack map: {text:.200}") from None
    if type(fields) is not dict:
        raise RemoteProtocolError(f"header: expected one msgpack map, got {type(fields).__name__}")
    return fields


def _unique_map(pairs: List[Tuple[Any, Any]]) -> Dict[Any, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key stands twice")
    return fields


def _no_ext(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code}")


def _readable_id(fields: Dict[str, Any]) -> str:
    """The id that an error answer can carry, if the header has a legal one."""
    request_id = fields.get("id")
    if type(request_id) is not str or len(request_id.encode("utf-8", "replace")) > limits.MAX_ID_BYTES:
        return ""
    return request_id


def _check_tensor_frames(tensors: Sequence[Any], frames: Sequence[Sized], request_id: str) -> None:
    if len(frames) - 1 != len(tensors):
        raise RemoteProtocolError(
            f"frames: expected {len(tensors)} tensor frames after the header, got {len(frames) - 1}", request_id
        )
    for index, tensor in enumerate(tensors, 1):
        if len(frames[index]) != tensor.nbytes:
            raise RemoteProtocolError(
                f"frames[{index}] ({tensor.name}): {tensor.datatype} of shape {list(tensor.shape)} is "
                f"{tensor.nbytes} bytes, got {len(frames[index])}",
                request_id,
            )


def clip(text: str) -> str:
    """Return `text` cut to what an error text of the wire may hold."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= limits.MAX_TEXT_BYTES:
        return raw.decode("utf-8")
    return raw[: limits.MAX_TEXT_BYTES - 3].decode("utf-8", "ignore") + "..."
