"""Target for the requests on direct channels: a worker runs a request only if it is exactly an allowed one.

An input is a sequence of packets: two bytes with the length of a packet, and the packet. The worker has one reader for
all of them, which may remember the earlier ones.
"""

from __future__ import annotations

import hashlib
import struct

import msgpack

from targets.reader import Reader
from weightd_protocol.codec import decode, encode
from weightd_protocol.description_cache import DescriptionCache
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.framing import FrameReader, message_prefix
from weightd_protocol.messages.channels import FROM_CHANNEL, pack_deadline, unpack_deadline
from weightd_protocol.messages.inference import Infer, Parameters, RequestDescription, TensorSpec
from weightd_worker.channels.requests import ChannelRequest, RequestReader, new_decoder

DESCRIPTION = RequestDescription("m", (TensorSpec("x", "INT8", (4,)), TensorSpec("y", "BOOL", ())))
FRAME = encode(Infer("7", DESCRIPTION))[1]

MAX_BYTES = 4096
WORDS: tuple[bytes, ...] = (
    FRAME,
    encode(Infer("7", DESCRIPTION))[0],
    encode(Infer("7", DESCRIPTION, Parameters(5_000_000)))[0],
    *map(
        msgpack.packb, ("id", "parameters", "timeout_us", "priority", "tenant", "regions", "7", "12345678901234567890")
    ),
)


def one_input(data: bytes) -> None:
    reader = RequestReader(new_decoder(DescriptionCache()))
    reader.allow(hashlib.sha256(FRAME).hexdigest())
    left = Reader(data)
    while left.left():
        packet = left.take(left.number(2))
        request = reader.read(packet)
        # The second call may find the request among the known ones.
        assert reader.read(packet) == request
        _check(packet, request)


def packet_of(request: Infer, *tensors: bytes, deadline_us: int = 1) -> bytes:
    """Return the packet of a request."""
    frames = [*encode(request), *tensors]
    return pack_deadline(deadline_us) + message_prefix(frames) + b"".join(frames)


def written(*packets: bytes) -> bytes:
    """Return the input for packets."""
    return b"".join(struct.pack("<H", len(packet)) + packet for packet in packets)


def _check(packet: bytes, request: ChannelRequest) -> None:
    expected = _expected(packet)
    assert (request.description is not None) == (expected is not None)
    assert request.number in (0, _number(request.id))
    if expected is None:
        assert request.tensors == ()
        return
    frames = FrameReader().receive(packet[8:])[0].frames
    assert request.description == DESCRIPTION
    assert (request.id, str(request.number)) == (expected.id, expected.id)
    assert [*request.tensors] == frames[2:]
    assert request.deadline_us == unpack_deadline(packet)


def _number(request_id: str) -> int:
    return int(request_id) if request_id.isascii() and request_id.isdecimal() else 0


def _expected(packet: bytes) -> Infer | None:
    """Return the request in a packet if a worker may run it, without any of the reader's shortcuts."""
    try:
        stream = FrameReader()
        [message] = stream.receive(packet[8:])
        if not stream.is_idle or not message.is_complete or message.frames[1] != FRAME:
            return None
        request = decode(message.frames, FROM_CHANNEL)
    except (RemoteProtocolError, LookupError, ValueError):
        return None
    parameters = request.parameters
    if parameters.regions is not None or parameters.priority is not None or parameters.tenant is not None:
        return None
    number = _number(request.id)
    return request if 0 < number < 2**63 and str(number) == request.id else None
