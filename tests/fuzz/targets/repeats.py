"""Headers that are recognised instead of parsed: the outcome is the one of a parse from scratch, in both directions.

An input is a byte of flags (two bits: the table), the length of a header in two bytes, the header, and changes of it.
It is decoded, so that it is known; then it is changed and decoded again, change by change. A change is a position of
two bytes, a byte of flags, the number of bytes that go, the number of those that come, and these. The bytes that come
are also an id for the message as it is now.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from targets import decoder
from targets.decoder import TABLES, Refusal, decoded, fitting_frames, forget
from targets.reader import Reader
from weightd.protocol import codec, limits
from weightd.protocol.errors import LocalProtocolError

# Of a change's flags.
FITTING = 1
DROPPED = 2

# Half of them are about a header, which is learned up to 2,048 bytes.
MAX_BYTES = 4096
WORDS = decoder.WORDS


def one_input(data: bytes) -> None:
    reader = Reader(data)
    table = TABLES[reader.number() & 3]
    header = reader.take(reader.number(2))
    tensors: list[Any] = list(fitting_frames(header, table) or ())
    forget()
    _check(header, tensors, table)
    while reader.left():
        at, flags, gone = reader.number(2), reader.number(), reader.number()
        come = reader.take(reader.number())
        header = header[:at] + come + header[at + gone :]
        if flags & FITTING:
            tensors = list(fitting_frames(header, table) or ())
        if flags & DROPPED:
            tensors = tensors[:-1]
        message = _check(header, tensors, table)
        if not isinstance(message, Refusal):
            _check_written(message, come)


def written(header: bytes, table: dict[str, Any], changes: Sequence[tuple[int, int, int, bytes]]) -> bytes:
    """Return the input for a header and changes: position, flags, how many bytes go, and those that come."""
    number = next(number for number, each in enumerate(TABLES) if each is table)
    first = bytes([number]) + len(header).to_bytes(2, "little") + header
    return first + b"".join(
        at.to_bytes(2, "little") + bytes([flags, gone, len(come)]) + come for at, flags, gone, come in changes
    )


def _check(header: bytes, tensors: Sequence[Any], table: dict[str, Any]) -> Any:
    outcome = decoded([header, *tensors], table)
    # Only a header in bytes is recognised.
    assert outcome == decoded([memoryview(header), *tensors], table)
    return outcome


def _check_written(message: Any, come: bytes) -> None:
    _check_encoded(message)
    if hasattr(message, "tensors"):
        for key, value in (
            ("id", come.decode("utf-8", "surrogateescape")),
            ("request", int.from_bytes(come, "little", signed=True)),
        ):
            if hasattr(message, key):
                _check_encoded(dataclasses.replace(message, **{key: value}))


def _check_encoded(message: Any) -> None:
    assert _encoded(message, anew=False) == _encoded(message, anew=True)


def _encoded(message: Any, *, anew: bool) -> bytes | str:
    """The header, or what is wrong with the message."""
    try:
        if anew:
            return codec._encode_anew(message, limits.MAX_STATUS_BYTES)  # pyright: ignore[reportPrivateUsage]
        return codec.encode(message, max_bytes=limits.MAX_STATUS_BYTES)
    except LocalProtocolError as error:
        return str(error)
