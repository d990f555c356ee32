"""Requests that clients send on direct channels. No I/O.

A client may send anything on its end, so nothing of a packet is used before it has been checked. The daemon has
validated the description of the tensors: a request runs only if its description has exactly the same bytes.
"""

from __future__ import annotations

import hashlib
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, cast

from weightd_protocol import limits
from weightd_protocol.codec import Decoder, heading
from weightd_protocol.description_cache import DescriptionCache
from weightd_protocol.envelope_cache import SPLITTERS
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.messages.channels import FROM_CHANNEL, MAX_REQUEST_NUMBER
from weightd_protocol.messages.inference import Infer, Parameters, RequestDescription
from weightd_protocol.packets import split_request

# Maximum number of combinations of a description and parameters that are remembered for a channel.
_MAX_KNOWN = 2 * limits.MAX_CHANNEL_DESCRIPTIONS

_split_envelope = SPLITTERS[Infer].split


class ChannelRequest(NamedTuple):
    """A request on a direct channel.

    Attributes:
        deadline_us: the deadline in microseconds of CLOCK_MONOTONIC.
        id: the id, "" if the packet has none.
        number: the id as a number; 0 if it is no decimal number.
        description: the description of the inputs; None if the worker must not run the request.
        tensors: the inputs.
    """

    deadline_us: int
    id: str
    number: int
    description: Optional[RequestDescription]
    tensors: Sequence[bytes]


# Constructor of `ChannelRequest`, without the cost of the Python function that a named tuple has as its constructor.
_new_request: Callable[..., ChannelRequest] = cast(Any, tuple).__new__


class RequestReader:
    """Reads the requests of one channel.

    Args:
        decoder: decodes the requests of all channels of this worker.
    """

    __slots__ = ("_decoder", "_descriptions", "_digests", "_known")

    def __init__(self, decoder: Decoder[Infer]) -> None:
        self._decoder = decoder
        # The bytes of the allowed descriptions, and the digests of the descriptions that no request has had yet.
        self._descriptions: Set[bytes] = set()
        self._digests: Set[str] = set()
        # The descriptions and the sizes of the inputs of valid requests, by the bytes of the description and of the
        # envelope without the id. The oldest entries are dropped first.
        self._known: Dict[Tuple[bytes, bytes], Tuple[RequestDescription, List[int]]] = {}

    def allow(self, digest: str) -> None:
        """Allow the requests whose description has this digest."""
        if len(self._descriptions) + len(self._digests) < limits.MAX_CHANNEL_DESCRIPTIONS:
            self._digests.add(digest)

    def read(self, packet: bytes) -> ChannelRequest:
        """Return the request in a packet. The packet may contain anything."""
        try:
            deadline_us, frames = split_request(packet)
        except RemoteProtocolError:
            return ChannelRequest(0, "", 0, None, ())
        try:
            request_id, rest = _split_envelope(frames[0])
            description, sizes = self._known[frames[1], rest]
        except LookupError:
            return self._read_slowly(deadline_us, frames)
        tensors = frames[2:]
        number = number_of(request_id)
        if not number or [*map(len, tensors)] != sizes:
            return self._read_slowly(deadline_us, frames)
        return _new_request(ChannelRequest, (deadline_us, request_id, number, description, tensors))

    def _read_slowly(self, deadline_us: int, frames: List[bytes]) -> ChannelRequest:
        """Return a request, and remember its description and parameters if it may run."""
        request_id = heading(frames).id
        number = number_of(request_id)
        refused = ChannelRequest(deadline_us, request_id, number, None, ())
        if not number or not self._is_allowed(frames[1]):
            return refused
        try:
            request = self._decoder.decode(frames)
        except RemoteProtocolError:
            return refused
        if request.id != request_id or request.parameters != Parameters(request.parameters.timeout_us):
            return refused
        _, rest = _split_envelope(frames[0])
        tensors = frames[2:]
        if rest:
            if len(self._known) >= _MAX_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[frames[1], rest] = request.description, [*map(len, tensors)]
        return ChannelRequest(deadline_us, request_id, number, request.description, tensors)

    def _is_allowed(self, description: bytes) -> bool:
        if description in self._descriptions:
            return True
        if not self._digests:
            return False
        digest = hashlib.sha256(description).hexdigest()
        if digest not in self._digests:
            return False
        self._digests.remove(digest)
        self._descriptions.add(description)
        return True


def new_decoder(descriptions: DescriptionCache) -> Decoder[Infer]:
    """Return a decoder for the requests on direct channels.

    Args:
        descriptions: the descriptions that this worker has decoded. Requests on channels and requests of the daemon
            share them, because the predictor recognizes a description by its object.
    """
    return Decoder(FROM_CHANNEL, descriptions=descriptions)


def number_of(request_id: str) -> int:
    """Return the number that a request's id is in decimal, without leading zeros; 0 if it is no such number."""
    try:
        number = int(request_id)
    except (ValueError, TypeError):
        return 0
    return number if 0 < number <= MAX_REQUEST_NUMBER and str(number) == request_id else 0
