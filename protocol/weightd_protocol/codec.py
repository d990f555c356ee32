"""Conversion between frames and messages of protocol version 2. No sockets.

The first frame of a message is the envelope: a msgpack map with ``v`` (the protocol version), ``type`` (the tag of the
message type) and the fields of the message. A message with tensors has a second frame, the description of the tensors,
which is followed by one frame for each tensor. All messages with equal shapes have the same description, so a
description is validated once and later recognized by its bytes.

Decoding trusts nothing that the peer sends. Every violation of the protocol is a `RemoteProtocolError` that names the
field. A header frame with more items than a legal message of its type can have is rejected before it is unpacked
(`preview`).
"""

from __future__ import annotations

from dataclasses import fields as fields_of
from dataclasses import replace
from typing import (
    Any,
    Callable,
    Dict,
    Generic,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    Type,
    TypeVar,
    cast,
)

import msgpack

from weightd_protocol import description_cache, envelope_cache, limits, preview
from weightd_protocol.description_cache import MAX_CACHED, DescriptionCache
from weightd_protocol.errors import LocalProtocolError, RemoteProtocolError
from weightd_protocol.messages.channels import PACKET_MESSAGES
from weightd_protocol.messages.inference import RequestDescription, TensorSpec
from weightd_protocol.messages.types import FROM_CLIENT, TO_CLIENT
from weightd_protocol.messages.worker import FROM_CHILD, TO_CHILD
from weightd_protocol.schema import FieldError, describe_value, label, max_record_items, plain
from weightd_protocol.schema import decode as decode_fields

M = TypeVar("M")

_TAGS: Dict[Type[Any], str] = {
    cls: tag for table in (FROM_CLIENT, TO_CLIENT, FROM_CHILD, TO_CHILD) for tag, cls in table.items()
}

# The type of the field `description` of each message type that has tensors.
_DESCRIPTION_TYPES: Dict[Type[Any], Type[Any]] = {
    cls: field.metadata["description"] for cls in _TAGS for field in fields_of(cls) if "description" in field.metadata
}

# Number of msgpack items that a header may have beyond the items of the message's fields. They cover `v` and `type` of
# the envelope. The margin lets a slightly too long list reach the check of its field, whose error names the field.
_EXTRA_ITEMS = 64

# Maximum size of a description that is cached.
_MAX_CACHED_DESCRIPTION_BYTES = 16 * 1024

# Limit for the product of a tensor's item size and its dimensions other than 0. numpy and the engines compute this
# product as an int64, even for a tensor without elements.
_MAX_EXTENT = 2**63


class Decoder(Generic[M]):
    """Decodes the messages of a peer, with a cache. Most messages differ only in their id and their tensors.

    Descriptions with equal bytes are decoded to the same object, which is immutable. The cache has limits; it drops the
    oldest entries first.

    Args:
        table: the message types that the peer may send, by tag. Exactly one of these types has a description.
        max_bytes: the maximum size of a header frame in bytes.
        max_cached: the maximum number of cached descriptions, and of cached envelopes.
        max_items_for: a function that limits the items of a description, called for each long description that is not
            cached, with the sender and the leading fields of the description (`preview.leading_fields`). It returns the
            maximum number of msgpack items, or None for the limit of the protocol. It may raise an error to reject the
            message before the rest is decoded.
        descriptions: the cache of descriptions, which another decoder may use if its descriptions have the same type;
            None for a new cache.

    Attributes:
        descriptions: the cached descriptions.
    """

    def __init__(
        self,
        table: Mapping[str, Type[M]],
        *,
        max_bytes: int = limits.MAX_HEADER_BYTES,
        max_cached: int = MAX_CACHED,
        max_items_for: Callable[[Any, Mapping[str, Any]], Optional[int]] = lambda sender, front: None,
        descriptions: Optional[DescriptionCache] = None,
    ) -> None:
        self._table = table
        self._max_bytes = max_bytes
        self._max_cached = max_cached
        self._max_items_for = max_items_for
        [self._described_type] = [cls for cls in table.values() if cls in _DESCRIPTION_TYPES]
        self._splitter = envelope_cache.SPLITTERS[self._described_type]
        self._id_field, self._split_envelope, _ = self._splitter
        self.descriptions = DescriptionCache(max_cached) if descriptions is None else descriptions
        # Cached envelopes. The key is the bytes of the description and the envelope without its id
        # (`EnvelopeSplitter`). The value is all fields of the message except its id, and the lengths of its tensor
        # frames.
        self._envelopes: Dict[Tuple[bytes, bytes], Tuple[Dict[str, Any], List[int]]] = {}
        self._envelope_bytes = 0

    def decode(self, frames: Sequence[Any], sender: object = None) -> M:
        """Return the message of `frames`, like the function `decode` of this module. The header frames must be `bytes`.

        Args:
            frames: the header frames and the tensor frames of a message.
            sender: the sender of the message, passed to `max_items_for`.

        Raises:
            RemoteProtocolError: the frames are not a message of a type in `table`.
        """
        try:
            first, rest = self._split_envelope(frames[0])
            known_fields, sizes = self._envelopes[frames[1], rest]
        except LookupError:
            return self._decode_slowly(frames, sender)
        if [*map(len, frames[2:])] != sizes:
            return self._decode_slowly(frames, sender)
        message: M = object.__new__(self._described_type)
        fields = message.__dict__
        fields.update(known_fields)
        fields[self._id_field] = first
        return message

    def _decode_slowly(self, frames: Sequence[Any], sender: object) -> M:
        """Decode a message whose envelope is not cached, and cache its description and envelope if they are small."""
        frame = frames[1] if len(frames) > 1 else b""
        description = self.descriptions.get(frame)
        max_items = None
        # Limit only real descriptions. If the message has no description, the second frame may contain anything.
        if description is None and type(frame) is bytes and len(frame) > preview.SHORT_BYTES:
            max_items = self._max_items_for(sender, preview.leading_fields(frame))
        message = _decode(frames, self._table, description, self._max_bytes, max_items)
        if type(message) is self._described_type and len(frames[1]) <= _MAX_CACHED_DESCRIPTION_BYTES:
            if description is None:
                self.descriptions.add(frames[1], cast(Any, message).description)
            rest = envelope_cache.shared_rest(self._splitter, frames[0])
            if rest is not None and (frames[1], rest) not in self._envelopes:
                fields = {**message.__dict__}
                del fields[self._id_field]
                self._cache_envelope((frames[1], rest), (fields, [*map(len, frames[2:])]))
        return message

    def _cache_envelope(self, key: Tuple[bytes, bytes], fields_and_sizes: Tuple[Dict[str, Any], List[int]]) -> None:
        cache = self._envelopes
        cache[key] = fields_and_sizes
        self._envelope_bytes += sum(map(len, key))
        while len(cache) > self._max_cached or self._envelope_bytes > description_cache.MAX_CACHED_BYTES:
            first = next(iter(cache))
            del cache[first]
            self._envelope_bytes -= sum(map(len, first))


def encode(message: Any, max_bytes: int = limits.MAX_HEADER_BYTES) -> List[bytes]:
    """Return the header frames of `message`: the envelope and, if it has tensors, their description.

    The caller appends the tensor frames.

    Raises:
        LocalProtocolError: `message` is not an instance of a message type, a field has a value that the peer would
            reject, or a header frame is too long.
    """
    cls = message.__class__
    writer = envelope_cache.WRITERS.get(cls)
    envelope = None if writer is None else writer(message)
    if envelope is not None:
        description = message.description
        # The frame in which this process received or sent the same description before. The envelope needs no size
        # check, because a writer creates only short envelopes.
        known_frame: Optional[bytes] = getattr(description, "_frame", None)
        if known_frame is not None and len(known_frame) <= max_bytes and type(description) is _DESCRIPTION_TYPES[cls]:
            return [envelope, known_frame]
    tag = _TAGS.get(cls)
    if tag is None:
        raise LocalProtocolError(f"{type(message).__name__} is not a message of the protocol")
    try:
        if envelope is None:
            envelope = msgpack.packb({"v": limits.PROTOCOL_VERSION, "type": tag, **plain(message)})
            envelope_cache.remember_tail(envelope, message)
        frames = [envelope, _description_frame(message)] if cls in _DESCRIPTION_TYPES else [envelope]
    except FieldError as error:
        raise LocalProtocolError(f"{tag}: {error}") from None
    for frame in frames:
        if len(frame) > max_bytes:
            raise LocalProtocolError(f"{tag}: expected a header of at most {max_bytes} bytes, got {len(frame)}")
    return frames


def _description_frame(message: Any) -> bytes:
    """Return the encoded description. If it was received or sent before, return the same bytes again."""
    description = message.description
    if type(description) is not _DESCRIPTION_TYPES[type(message)]:
        raise FieldError(
            f"expected a {_DESCRIPTION_TYPES[type(message)].__name__}, got {describe_value(description)}"
        ).at("description")
    frame: Optional[bytes] = description.__dict__.get("_frame")
    if frame is None:
        try:
            packed: bytes = msgpack.packb(plain(description))
        except FieldError as error:
            raise error.at(".description") from None
        frame = description.__dict__["_frame"] = packed
    return frame


def decode(frames: Sequence[Any], table: Mapping[str, Type[M]], *, max_bytes: int = limits.MAX_HEADER_BYTES) -> M:
    """Return the message of `frames`, an instance of one of the types in `table`.

    This function only measures tensor frames; it does not read or copy them. Unknown fields in messages of the daemon
    are ignored, because a newer daemon may send additional fields.

    Args:
        frames: the header frames and tensor frames, without a ZeroMQ routing prefix. Each frame has a length in bytes
            and the buffer interface.
        table: the message types that the peer may send, by tag.
        max_bytes: the maximum size of a header frame in bytes.

    Raises:
        RemoteProtocolError: the frames are not a message of a type in `table`.
    """
    return _decode(frames, table, None, max_bytes, None)


def _decode(
    frames: Sequence[Any],
    table: Mapping[str, Type[M]],
    known_description: Any,
    max_bytes: int,
    max_description_items: Optional[int],
) -> M:
    """Decode a message. `known_description` is its description if the description is cached, otherwise None."""
    if not frames:
        raise RemoteProtocolError("envelope: expected a frame, got an empty message")
    # Clients tolerate unknown fields of the daemon, and any number of them, so the items of the envelope are not
    # limited.
    is_tolerant = table is TO_CLIENT
    is_bounded = not is_tolerant and len(frames[0]) > preview.SHORT_BYTES
    try:
        fields = _unpack(frames[0], max_bytes, _max_envelope_items(frames[0], table) if is_bounded else None)
    except FieldError as error:
        raise RemoteProtocolError(f"envelope: {error}", heading(frames).id) from None
    # Read the id first: an error response needs it even if the message is invalid, and decoding modifies `fields`.
    request_id = fields.get("id")
    try:
        message = _decode_message(fields, table, tolerant=is_tolerant)
        described = _DESCRIPTION_TYPES.get(type(message))
        if described is not None:
            try:
                description = known_description or _decode_description(
                    described, frames, max_bytes, max_description_items, tolerant=is_tolerant
                )
            except FieldError as error:
                raise FieldError(f"{_TAGS[type(message)]}: {error}") from None
            message.__dict__["description"] = description
            shared_positions: Sequence[int] = cast(Any, message).shared_positions
            tensors, sizes = description.tensors, description.sizes
            if shared_positions:
                tensors = _framed_tensors(tensors, shared_positions)
                sizes = [each.nbytes for each in tensors]
            if [*map(len, frames[2:])] != [*sizes]:
                raise _frames_error(tensors, frames[2:])
        elif len(frames) > 1 and type(message) not in PACKET_MESSAGES:
            raise FieldError(f"expected the envelope alone, got {len(frames)}").at("frames")
    except FieldError as error:
        raise RemoteProtocolError(str(error), _readable_id(request_id)) from None
    return message


def type_name(message: Any) -> str:
    """Return the tag of a message: the value of `type` in its envelope."""
    return _TAGS[type(message)]


class EnvelopeHeading(NamedTuple):
    """Type and id of a message that was not decoded. A value is "" if it is not a leading field of the envelope."""

    type: str
    id: str


def heading(frames: Sequence[Any]) -> EnvelopeHeading:
    """Return type and id of a message without decoding it. The cost does not depend on the length of the message."""
    fields = preview.leading_fields(frames[0]) if frames else {}
    return EnvelopeHeading(_readable_id(fields.get("type")), _readable_id(fields.get("id")))


def max_request_items(inputs: int, outputs: int) -> int:
    """Return the maximum number of msgpack items in a request's description with this many inputs and outputs."""
    surplus_inputs, surplus_outputs = limits.MAX_TENSORS - inputs, limits.MAX_TENSORS - outputs
    surplus = surplus_inputs * max_record_items(TensorSpec) + surplus_outputs
    return _EXTRA_ITEMS + max_record_items(RequestDescription) - surplus


def _max_envelope_items(frame: Any, table: Mapping[str, Type[M]]) -> int:
    tag = preview.leading_fields(frame).get("type")
    cls = table.get(tag) if type(tag) is str else None
    if cls is not None:
        return _EXTRA_ITEMS + max_record_items(cls)
    return _EXTRA_ITEMS + max(map(max_record_items, table.values()))


def _decode_description(
    cls: Type[M], frames: Sequence[Any], max_bytes: int, max_items: Optional[int], *, tolerant: bool
) -> Any:
    if len(frames) == 1:
        raise FieldError("missing").at("description")
    if max_items is None and not tolerant:
        max_items = _EXTRA_ITEMS + max_record_items(cls)
    try:
        description: Any = decode_fields(cls, _unpack(frames[1], max_bytes, max_items), tolerant=tolerant)
    except FieldError as error:
        raise error.at(".description") from None
    for index, (tensor, nbytes) in enumerate(zip(description.tensors, description.sizes)):
        if nbytes == 0 and _extent(tensor) >= _MAX_EXTENT:
            raise _tensor_error(index, tensor, "is too large to be described, even if it is empty")
    description.__dict__["_frame"] = bytes(frames[1])
    return description


def _unpack(frame: Any, max_bytes: int, max_items: Optional[int]) -> Dict[str, Any]:
    if len(frame) > max_bytes:
        raise FieldError(f"expected at most {max_bytes} bytes, got {len(frame)}")
    problem = "" if max_items is None else preview.find_problem(frame, max_items)
    if problem:
        raise FieldError(problem)
    try:
        # The frame itself limits the length of a text. For a list or map, the unpacker allocates the length that the
        # frame announces, at each level of nesting; the limits below bound this memory. The unpacker itself limits the
        # depth of nesting.
        fields: Any = msgpack.unpackb(
            frame,
            object_pairs_hook=_unique_map,
            max_array_len=limits.MAX_LIST_ITEMS,
            max_map_len=limits.MAX_MAP_ITEMS,
        )
    except (RecursionError, msgpack.StackError):
        raise FieldError("nested too deep") from None
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        text = str(error) or type(error).__name__
        raise FieldError(f"expected one msgpack map: {text:.200}") from None
    if type(fields) is not dict:
        raise FieldError(f"expected one msgpack map, got {type(fields).__name__}")
    return cast(Dict[str, Any], fields)


def _unique_map(pairs: Iterable[Tuple[Any, Any]]) -> Dict[Any, Any]:
    # msgpack passes a list of pairs, but its pure Python version passes an iterator, which can be read only once.
    listed = list(pairs)
    fields = dict(listed)
    if len(fields) != len(listed):
        seen: Set[Any] = set()
        for name, _ in listed:
            if name in seen:
                raise ValueError(f"the field {label(name)} is given twice")
            seen.add(name)
    return fields


def _decode_message(fields: Dict[str, Any], table: Mapping[str, Type[M]], *, tolerant: bool) -> M:
    version = fields.pop("v", None)
    if type(version) is not int or version != limits.PROTOCOL_VERSION:
        raise FieldError(
            f"this side speaks protocol version {limits.PROTOCOL_VERSION}, the peer sent {describe_value(version)}"
        ).at("v")
    tag = fields.pop("type", None)
    cls = table.get(tag) if type(tag) is str else None
    if cls is None:
        raise FieldError(f"expected one of {', '.join(table)}, got {describe_value(tag)}").at("type")
    try:
        return decode_fields(cls, fields, tolerant=tolerant)
    except FieldError as error:
        raise FieldError(f"{tag}: {error}") from None


def _framed_tensors(tensors: Sequence[TensorSpec], shared_positions: Sequence[int]) -> Sequence[TensorSpec]:
    """Return the tensors that have a frame, which are those not in shared memory."""
    if max(shared_positions) >= len(tensors) or len({*shared_positions}) < len(shared_positions):
        listed = ", ".join(map(str, shared_positions))
        raise FieldError(f"expected positions of {len(tensors)} tensors, each once, got {listed}").at("regions")
    return [each for index, each in enumerate(tensors) if index not in shared_positions]


def _frames_error(tensors: Sequence[TensorSpec], frames: Sequence[Any]) -> FieldError:
    """Return the error for tensor frames whose number or sizes do not match the description."""
    if len(frames) != len(tensors):
        return FieldError(f"expected {len(tensors)} tensor frames after the header, got {len(frames)}").at("frames")
    index = next(index for index, tensor in enumerate(tensors) if len(frames[index]) != tensor.nbytes)
    return _tensor_error(index, tensors[index], f"is {tensors[index].nbytes} bytes, got {len(frames[index])}")


def _extent(tensor: TensorSpec) -> int:
    """Return the size in bytes that the tensor would have if each dimension of 0 were 1."""
    return replace(tensor, shape=tuple(dim for dim in tensor.shape if dim)).nbytes


def _tensor_error(index: int, tensor: TensorSpec, problem: str) -> FieldError:
    what = f"{tensor.datatype} of shape {list(tensor.shape)} {problem}"
    return FieldError(what).at(f"frames[{limits.MAX_HEADER_FRAMES + index}] ({label(tensor.name)})")


def _readable_id(request_id: object) -> str:
    """Return the id for an error response, or "" if the envelope has no valid id."""
    if type(request_id) is not str or len(request_id.encode()) > limits.MAX_ID_BYTES:
        return ""
    return request_id


def clip(text: str, max_bytes: int = limits.MAX_TEXT_BYTES) -> str:
    """Return `text`, truncated if necessary to `max_bytes` bytes of UTF-8. The default is the limit for error texts."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= max_bytes:
        return raw.decode("utf-8")
    return raw[: max_bytes - 3].decode("utf-8", "ignore") + "..."
