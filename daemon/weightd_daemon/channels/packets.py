"""Parses packets of direct channels that no worker has run. A client has sent them, so they may contain anything."""

from __future__ import annotations

from weightd_protocol.codec import heading
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.framing import Message
from weightd_protocol.messages.channels import MAX_REQUEST_NUMBER
from weightd_protocol.packets import split_request


def message_of(packet: bytes) -> tuple[int, Message] | None:
    """Return the deadline in microseconds of CLOCK_MONOTONIC and the message of a packet; None if it has not both."""
    try:
        deadline_us, frames = split_request(packet)
    except RemoteProtocolError:
        return None
    return deadline_us, Message(frames, tuple(map(len, frames)))


def request_number(packet: bytes) -> int:
    """Return the number that is the id of the request in a packet; 0 for any other packet."""
    found = message_of(packet)
    text = "" if found is None else heading(found[1].frames).id
    # Python refuses to convert a text of thousands of digits.
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < len(str(MAX_REQUEST_NUMBER)) + 1 else 0
    return number if number <= MAX_REQUEST_NUMBER else 0
