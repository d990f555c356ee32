"""Parses packets of direct channels that no worker has run. A client has sent them, so they may contain anything."""

from __future__ import annotations

from weightd_protocol.codec import heading
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.framing import FrameReader, Message
from weightd_protocol.messages.channels import DEADLINE_BYTES, MAX_REQUEST_NUMBER


def message_of(packet: bytes) -> Message | None:
    """Return the message in a packet; None if the packet does not have exactly one complete message."""
    try:
        messages = FrameReader().receive(packet[DEADLINE_BYTES:])
    except RemoteProtocolError:
        return None
    return messages[0] if len(messages) == 1 and messages[0].is_complete else None


def request_number(packet: bytes) -> int:
    """Return the number that is the id of the request in a packet; 0 for any other packet."""
    message = message_of(packet)
    text = "" if message is None else heading(message.frames).id
    # Python refuses to convert a text of thousands of digits.
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < len(str(MAX_REQUEST_NUMBER)) + 1 else 0
    return number if number <= MAX_REQUEST_NUMBER else 0
