"""Frames to messages and back: the whole of wire v2, without a socket.

The first frame of a message is its envelope: a msgpack map with ``v`` (the protocol's version), ``type`` (the message's
tag) and its fields. Where tensors follow, the second is their description, a map that is the same for all messages of a
shape: it is checked once, and found again by its bytes. One frame for each tensor comes after it, in order.
Decoding trusts nothing: every violation is a `RemoteProtocolError` that names the field. A header frame with more items
than a legal message of its type has is refused before it is unpacked (`preview`).
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

from weightd_protocol import envelope_cache, limits, preview
from weightd_protocol.errors import LocalProtocolError, RemoteProtocolError
from weightd_protocol.messages.inference import RequestDescription, TensorSpec
from weightd_protocol.messages.types import FROM_CLIENT, TO_CLIENT
from weightd_protocol.messages.worker import FROM_CHILD, TO_CHILD
from weightd_protocol.schema import FieldError, describe_value, label, max_record_items, plain
from weightd_protocol.schema import decode as decode_fields

M = TypeVar("M")

_TAGS: Dict[Type[Any], str] = {
    cls: tag for table in (FROM_CLIENT, TO_CLIENT, FROM_CHILD, TO_CHILD) for tag, cls in table.items()
}

# What describes the tensors of those messages that have any.
_DESCRIPTION_TYPES: Dict[Type[Any], Type[Any]] = {
    cls: field.metadata["description"] for cls in _TAGS for field in fields_of(cls) if "description" in field.metadata
}

# Added to the items that the fields of a message allow: `v` and `type` of the envelope, and a few more, so that a list
# that is a little too long is refused by its name.
_EXTRA_ITEMS = 64

# Descriptions that are known by their bytes: shapes that are in use at a time. With what is made of them about 8 MiB at
# most, and as much with the envelopes that came with them. A longer one than `_MAX_CACHED_DESCRIPTION_BYTES` is read
# anew each time.
_MAX_CACHED = 1024
_MAX_CACHED_BYTES = 2 * 1024 * 1024
_MAX_CACHED_DESCRIPTION_BYTES = 16 * 1024

# numpy and the engines count the elements of a tensor in an int64, with a dimension of 0 left out.
_MAX_EXTENT = 2**63


class Decoder(Generic[M]):
    """Reads the messages of a peer, and remembers what they have in common: most differ in an id and in their tensors.

    The same bytes of a description give the same object, which is immutable. What is known is bounded: what came first
    goes first.

    Args:
        table: tag to type of the messages that the peer may send; one of these has a description.
        max_bytes: the largest header frame to accept.
        max_cached: descriptions that are known at a time, and rests of envelopes with one of them.
        max_items_for: called with the sender and the front of a long description (`preview.front`) that is not known;
            returns the largest number of items that it may have, None for as many as the wire allows, or raises why the
            message is refused without a look at the rest of it.
    """

    def __init__(
        self,
        table: Mapping[str, Type[M]],
        *,
        max_bytes: int = limits.MAX_HEADER_BYTES,
        max_cached: int = _MAX_CACHED,
        max_items_for: Callable[[Any, Mapping[str, Any]], Optional[int]] = lambda sender, front: None,
    ) -> None:
        self._table = table
        self._max_bytes = max_bytes
        self._max_cached = max_cached
        self._max_items_for = max_items_for
        [self._described_type] = [cls for cls in table.values() if cls in _DESCRIPTION_TYPES]
        self._splitter = envelope_cache.SPLITTERS[self._described_type]
        self._id_field, self._split_envelope, _ = self._splitter
        # Descriptions by their bytes, and how many bytes these are in all.
        self._descriptions: Dict[bytes, Any] = {}
        self._description_bytes = 0
        # What messages say beside the number or the id, and the lengths of their tensors' frames: by the bytes of the
        # description and the rest of the envelope.
        self._envelopes: Dict[Tuple[bytes, bytes], Tuple[Dict[str, Any], List[int]]] = {}
        self._envelope_bytes = 0

    def decode(self, frames: Sequence[Any], sender: object = None) -> M:
        """Return the message of `frames`, as the function `decode` does. Those of the header are `bytes`.

        Args:
            frames: header and tensors.
            sender: is passed to `max_items_for`.

        Raises:
            RemoteProtocolError: the frames are not such a message.
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
        """The message, whatever its form."""
        frame = frames[1] if len(frames) > 1 else b""
        description = self._descriptions.get(frame)
        max_items = None
        # Behind a message that has no description there may be anything.
        if description is None and type(frame) is bytes and len(frame) > preview.SHORT_BYTES:
            max_items = self._max_items_for(sender, preview.leading_fields(frame))
        message = _decode(frames, self._table, description, self._max_bytes, max_items)
        if type(message) is self._described_type and len(frames[1]) <= _MAX_CACHED_DESCRIPTION_BYTES:
            if description is None:
                self._cache_description(frames[1], cast(Any, message).description)
            rest = envelope_cache.shared_rest(self._splitter, frames[0])
            if rest is not None and (frames[1], rest) not in self._envelopes:
                fields = {**message.__dict__}
                del fields[self._id_field]
                self._cache_envelope((frames[1], rest), (fields, [*map(len, frames[2:])]))
        return message

    def _cache_description(self, frame: bytes, description: Any) -> None:
        cache = self._descriptions
        cache[frame] = description
        self._description_bytes += len(frame)
        while len(cache) > self._max_cached or self._description_bytes > _MAX_CACHED_BYTES:
            first = next(iter(cache))
            del cache[first]
            self._description_bytes -= len(first)

    def _cache_envelope(self, key: Tuple[bytes, bytes], fields_and_sizes: Tuple[Dict[str, Any], List[int]]) -> None:
        cache = self._envelopes
        cache[key] = fields_and_sizes
        self._envelope_bytes += sum(map(len, key))
        while len(cache) > self._max_cached or self._envelope_bytes > _MAX_CACHED_BYTES:
            first = next(iter(cache))
            del cache[first]
            self._envelope_bytes -= sum(map(len, first))


def encode(message: Any, *, max_bytes: int = limits.MAX_HEADER_BYTES) -> List[bytes]:
    """Return the header frames of `message`; the caller adds the tensors' frames.

    Raises:
        LocalProtocolError: it is no message, a field has a value that the peer would refuse, or a frame is too long.
    """
    cls = message.__class__
    writer = envelope_cache.WRITERS.get(cls)
    envelope = None if writer is None else writer(message)
    if envelope is not None:
        description = message.description
        # That it came in, or that it was sent in before. An envelope of this form is shorter than any bound.
        known_frame: Optional[bytes] = getattr(description, "_frame", None)
        if known_frame is not None and len(known_frame) <= max_bytes and type(description) is _DESCRIPTION_TYPES[cls]:
            return [envelope, known_frame]
    tag = _TAGS.get(cls)
    if tag is None:
        raise LocalProtocolError(f"{type(message).__name__} is not a message of the wire")
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
    """The bytes of the message's description: those that it came in, or that it was sent in before."""
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
    """Return the message of `frames`, one of the types in `table`.

    Tensor frames are only measured, never read or copied: they stay after the header frames. In answers of the daemon
    fields that are not known are passed over: a later one may tell more.

    Args:
        frames: header and tensors, without a routing prefix; anything with a length in bytes and a buffer.
        table: tag to type of the messages that the peer may send.
        max_bytes: the largest header frame to accept.

    Raises:
        RemoteProtocolError: the frames are not such a message.
    """
    return _decode(frames, table, None, max_bytes, None)


def _decode(
    frames: Sequence[Any],
    table: Mapping[str, Type[M]],
    known_description: Any,
    max_bytes: int,
    max_description_items: Optional[int],
) -> M:
    """The message, whatever its form; `known_description` is its description, if that is known."""
    if not frames:
        raise RemoteProtocolError("envelope: expected a frame, got an empty message")
    # Of fields that are passed over there may be any number.
    is_tolerant = table is TO_CLIENT
    is_bounded = not is_tolerant and len(frames[0]) > preview.SHORT_BYTES
    try:
        fields = _unpack(frames[0], max_bytes, _max_envelope_items(frames[0], table) if is_bounded else None)
    except FieldError as error:
        raise RemoteProtocolError(f"envelope: {error}", heading(frames).id) from None
    # Whatever happens to the fields: an answer may need it.
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
        elif len(frames) > 1:
            raise FieldError(f"expected the envelope alone, got {len(frames)}").at("frames")
    except FieldError as error:
        raise RemoteProtocolError(str(error), _readable_id(request_id)) from None
    return message


def type_name(message: Any) -> str:
    """Return the type of a message as it is spelled in the envelope."""
    return _TAGS[type(message)]


class EnvelopeHeading(NamedTuple):
    """Type and id of a message that is not decoded; "" for one that does not stand at the front of the envelope."""

    type: str
    id: str


def heading(frames: Sequence[Any]) -> EnvelopeHeading:
    """Return type and id of a message, at a cost that does not depend on its length."""
    fields = preview.leading_fields(frames[0]) if frames else {}
    return EnvelopeHeading(_readable_id(fields.get("type")), _readable_id(fields.get("id")))


def max_request_items(inputs: int, outputs: int) -> int:
    """Return the largest number of items of the description of a request that names so many inputs and outputs."""
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
        # A text is bounded by the bytes that are there. A list or map is allocated at the length that it claims, and
        # again on each level of nesting: hence the bounds. Depth is bounded by unpackb's own stack.
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
    # A list, or from msgpack in pure Python an iterator.
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
    """Those that have a frame."""
    if max(shared_positions) >= len(tensors) or len({*shared_positions}) < len(shared_positions):
        listed = ", ".join(map(str, shared_positions))
        raise FieldError(f"expected positions of {len(tensors)} tensors, each once, got {listed}").at("regions")
    return [each for index, each in enumerate(tensors) if index not in shared_positions]


def _frames_error(tensors: Sequence[TensorSpec], frames: Sequence[Any]) -> FieldError:
    """What is wrong with frames that are not of the described sizes."""
    if len(frames) != len(tensors):
        return FieldError(f"expected {len(tensors)} tensor frames after the header, got {len(frames)}").at("frames")
    index = next(index for index, tensor in enumerate(tensors) if len(frames[index]) != tensor.nbytes)
    return _tensor_error(index, tensors[index], f"is {tensors[index].nbytes} bytes, got {len(frames[index])}")


def _extent(tensor: TensorSpec) -> int:
    """The bytes of the tensor if dimensions of 0 did not count."""
    return replace(tensor, shape=tuple(dim for dim in tensor.shape if dim)).nbytes


def _tensor_error(index: int, tensor: TensorSpec, problem: str) -> FieldError:
    what = f"{tensor.datatype} of shape {list(tensor.shape)} {problem}"
    return FieldError(what).at(f"frames[{limits.MAX_HEADER_FRAMES + index}] ({label(tensor.name)})")


def _readable_id(request_id: object) -> str:
    """The id that an error answer can carry, if the envelope has a legal one."""
    if type(request_id) is not str or len(request_id.encode()) > limits.MAX_ID_BYTES:
        return ""
    return request_id


def clip(text: str, max_bytes: int = limits.MAX_TEXT_BYTES) -> str:
    """Return `text` cut to so many bytes of UTF-8, by default what an error text of the wire may hold."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= max_bytes:
        return raw.decode("utf-8")
    return raw[: max_bytes - 3].decode("utf-8", "ignore") + "..."
