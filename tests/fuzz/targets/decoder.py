"""Target for the message decoder: frames are rejected as the peer's fault, or are a message that round-trips
unchanged.

An input is a byte of flags, the number of tensor frames, four bytes with the length of each, and the header: with
`DESCRIBED` two bytes with the length of the envelope, the envelope and the description, else the envelope alone.
With `FITTING` the lengths are those in the header, if it is readable: hardly any other message with tensors is
accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from targets.reader import Reader
from weightd_protocol import codec, limits
from weightd_protocol.datatypes import ITEM_BYTES
from weightd_protocol.errors import ERRORS, RemoteProtocolError
from weightd_protocol.messages.inference import Error, RequestDescription, ResponseDescription
from weightd_protocol.messages.types import FROM_CLIENT, TO_CLIENT
from weightd_protocol.messages.worker import FROM_CHILD, TO_CHILD
from weightd_protocol.schema import FieldError, describe_fields

TABLES: tuple[dict[str, Any], ...] = (FROM_CLIENT, TO_CLIENT, FROM_CHILD, TO_CHILD)

# Flags, besides two bits for the table.
FITTING = 4
NO_FRAMES = 8
DESCRIBED = 16

MAX_BYTES = 4096
WORDS: tuple[bytes, ...] = tuple(
    msgpack.packb(word)
    for word in sorted(
        {"v", "type", "name", "datatype", "shape", *ITEM_BYTES, *ERRORS, *(tag for table in TABLES for tag in table)}
        | {name for table in TABLES for cls in table.values() for name, _, _ in describe_fields(cls)}
        | {name for cls in (RequestDescription, ResponseDescription) for name, _, _ in describe_fields(cls)}
    )
)


class Refusal(NamedTuple):
    """The contents of a RemoteProtocolError."""

    text: str
    request_id: str


class Frame:
    """A tensor frame of which the decoder may read only the length."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


def one_input(data: bytes) -> None:
    frames, table = read(data)
    known: codec.Decoder[Any] = codec.Decoder(table, max_bytes=limits.MAX_STATUS_BYTES)
    outcome = decoded(frames, table, known)
    # The second call may use a cached description.
    assert decoded(frames, table, known) == outcome
    if isinstance(outcome, Refusal):
        _check_refusal(outcome)
    else:
        _check_message(outcome, frames, table)


def read(data: bytes) -> tuple[list[Any], dict[str, Any]]:
    """Return the frames of an input, and the message table for their decoding."""
    reader = Reader(data)
    flags = reader.number()
    sizes = [reader.number(4) for _ in range(reader.number())]
    length = reader.number(2) if flags & DESCRIBED else MAX_BYTES
    header, table = reader.rest(), TABLES[flags & 3]
    if flags & NO_FRAMES:
        return [], table
    frames = [header[:length], header[length:]] if flags & DESCRIBED else [header]
    fitting = fitting_frames(frames[-1], table) if flags & FITTING and flags & DESCRIBED else None
    return [*frames, *(map(Frame, sizes) if fitting is None else fitting)], table


def written(header: Sequence[bytes], table: dict[str, Any], sizes: Sequence[int] | None = None) -> bytes:
    """Return the input for header frames and these lengths of tensor frames, or with lengths that fit the header."""
    flags = next(number for number, each in enumerate(TABLES) if each is table)
    flags |= (FITTING if sizes is None else 0) | (DESCRIBED if len(header) > 1 else 0)
    lengths = [len(sizes or ()).to_bytes(1, "little"), *(size.to_bytes(4, "little") for size in sizes or ())]
    split = [len(header[0]).to_bytes(2, "little")] if len(header) > 1 else []
    return b"".join([bytes([flags]), *lengths, *split, *header])


def fitting_frames(frame: bytes, table: dict[str, Any]) -> list[Frame] | None:
    """Return tensor frames with the lengths in the description, or None if it is unreadable."""
    cls: Any = ResponseDescription if table in (TO_CLIENT, FROM_CHILD) else RequestDescription
    try:
        description: Any = codec._decode_description(  # pyright: ignore[reportPrivateUsage]
            cls, [b"", frame], limits.MAX_STATUS_BYTES, None, tolerant=table is TO_CLIENT
        )
    except (RemoteProtocolError, FieldError):
        return None
    # No frame can be longer; the decoder must detect that this one does not fit.
    return [Frame(min(size, 2**62)) for size in description.sizes]


def decoded(frames: Sequence[Any], table: dict[str, Any], known: codec.Decoder[Any] | None = None) -> Any:
    """Return the message of the frames, or the Refusal; pass every other error on."""
    try:
        return known.decode(frames) if known else codec.decode(frames, table, max_bytes=limits.MAX_STATUS_BYTES)
    except RemoteProtocolError as error:
        return Refusal(str(error), error.request_id)


def _check_refusal(refusal: Refusal) -> None:
    """Check that the refusal fits on a log line and into a response."""
    assert refusal.text.isprintable()
    assert len(refusal.text) < 1024
    codec.encode(Error(refusal.request_id, "INVALID_ARGUMENT", codec.clip(refusal.text)))


def _check_message(message: Any, frames: Sequence[Any], table: dict[str, Any]) -> None:
    assert type(message) in table.values()
    description = getattr(message, "description", None)
    tensors = frames[limits.MAX_HEADER_FRAMES :]
    described = enumerate(() if description is None else description.tensors)
    assert [each.nbytes for index, each in described if index not in message.shared_positions] == [*map(len, tensors)]
    # The peer may have omitted defaults and encoded an integer for a number, so the encoding here may be longer than
    # the input.
    header = codec.encode(message, max_bytes=2 * limits.MAX_STATUS_BYTES)
    assert decoded([*header, *tensors], table) == message
    assert codec.encode(message, max_bytes=2 * limits.MAX_STATUS_BYTES) == header
