"""Messages about direct channels, over which a client and the workers of one model exchange requests and answers.

A direct channel is a pair of `SOCK_SEQPACKET` sockets. The client has one end; the workers and the daemon have the
other one. Each message on the channel is one packet: a request is preceded by its deadline (`pack_deadline`), an answer
is not. Both have the framing and the frames of the Unix socket. The ids of requests on a channel are decimal numbers.
"""

from __future__ import annotations

import struct
from dataclasses import field
from typing import Dict, Optional, Tuple, Type

from weightd_protocol import limits
from weightd_protocol.frozen import dataclass
from weightd_protocol.messages.inference import Infer
from weightd_protocol.schema import boolean, integer, list_of, one_of, text

_ID = text(limits.MAX_ID_BYTES)
_COUNT = integer(0, limits.MAX_COUNT)
_ROWS = integer(0, limits.MAX_CHANNEL_ROWS)
_DEADLINE = struct.Struct("<Q")

DEADLINE_BYTES = _DEADLINE.size
"""Length of the deadline before a request."""

MAX_REQUEST_NUMBER = 2**63 - 1
"""Largest id of a request on a direct channel."""

pack_deadline = _DEADLINE.pack
"""Return the bytes of a deadline: microseconds of CLOCK_MONOTONIC, as an unsigned little-endian integer."""


def unpack_deadline(packet: bytes) -> int:
    """Return the deadline of a request in microseconds of CLOCK_MONOTONIC; 0 if the packet is too short."""
    return _DEADLINE.unpack_from(packet)[0] if len(packet) >= DEADLINE_BYTES else 0


# --- client and daemon -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenChannel:
    """client → daemon: open a direct channel to a model. The response is `ChannelOpened` or `Error`.

    The id names the channel in later messages.
    """

    id: str = field(metadata=_ID)
    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    tenant: Optional[str] = field(default=None, metadata=text(limits.MAX_NAME_BYTES))
    """Tenant on whose behalf a gateway sends requests (`acts_for`); None for the sender's own tenant."""


@dataclass(frozen=True)
class ChannelOpened:
    """daemon → client: the direct channel is open. The client's end is attached.

    Limits count all requests of the channel, and the bytes of their packets.
    """

    id: str = field(metadata=_ID)
    max_requests: int = field(metadata=_COUNT)
    max_bytes: int = field(metadata=_COUNT)
    expires_us: int = field(metadata=_COUNT)
    """Time of CLOCK_MONOTONIC in microseconds, after which workers do not read from the channel."""


@dataclass(frozen=True)
class ChannelExtended:
    """daemon → client: the direct channel has higher limits and a later expiry."""

    id: str = field(metadata=_ID)
    max_requests: int = field(metadata=_COUNT)
    max_bytes: int = field(metadata=_COUNT)
    expires_us: int = field(metadata=_COUNT)


@dataclass(frozen=True)
class ChannelEnded:
    """daemon → client: no answer follows on the direct channel. Send each request again that has no answer."""

    id: str = field(metadata=_ID)


@dataclass(frozen=True)
class RequestAdopted:
    """daemon → client: the daemon has received a request of a direct channel, and answers it on this connection."""

    id: str = field(metadata=_ID)
    """Id of the request."""
    channel: str = field(metadata=_ID)


@dataclass(frozen=True)
class RequestLost:
    """daemon → client: a request of a direct channel gets no answer. Send it again, to the daemon.

    Its worker has exited, or could not send the answer, because the client did not read.
    """

    id: str = field(metadata=_ID)
    """Id of the request."""
    channel: str = field(metadata=_ID)


# --- daemon and worker -----------------------------------------------------------------------------------------------

ENDED, ORDERED, EXPIRED, OVERDRAWN, FOREIGN = "ended", "ordered", "expired", "overdrawn", "foreign"
RELEASE_REASONS = (ENDED, ORDERED, EXPIRED, OVERDRAWN, FOREIGN)
"""Reasons for which a worker releases a direct channel.

The worker has read it to the end; the daemon has ended it; it has expired; the client has sent more than its limits
allow; its slot belongs to another channel.
"""


@dataclass(frozen=True)
class WatchWeights:
    """daemon → worker: before each answer on a direct channel, check that the shared weights are still valid.

    The daemon checks this before it forwards an answer. Attached are, as far as they exist: /proc/PID/statm of the
    holder whose exit makes the weights invalid; the page store.
    """

    has_holder: bool = field(metadata=boolean())
    """Whether the first descriptor is the holder's."""
    store: Tuple[int, ...] = field(metadata=list_of(_COUNT, 2))
    """The valid page store's size in bytes and its modification time in ns; empty without a page store."""


@dataclass(frozen=True)
class SetChannelRows:
    """daemon → worker: use these pages for direct channels.

    The file descriptor of the device's pages is attached to the first of these messages. Later messages change `rows`
    and `peers`, because a worker has started.
    """

    generation: int = field(metadata=_COUNT)
    """Serial of the worker's generation."""
    row: int = field(metadata=_ROWS)
    """Index of this worker's row."""
    rows: int = field(metadata=_ROWS)
    """Number of rows of the device that are in use."""
    peers: Tuple[int, ...] = field(metadata=list_of(_ROWS, limits.MAX_CHANNEL_ROWS))
    """Indices of the rows of the workers of the same generation, with this worker's."""


@dataclass(frozen=True)
class AddChannel:
    """daemon → worker: read requests from a direct channel. Its workers' end is attached."""

    slot: int = field(metadata=_COUNT)
    """Index of the channel's entries in the pages. A later channel may get it."""
    channel: int = field(metadata=_COUNT)
    """Serial of the channel, which no other channel gets."""


@dataclass(frozen=True)
class AllowRequests:
    """daemon → worker: run the requests on a direct channel whose description has this digest.

    The daemon has validated the description, and a worker has answered a request with it. The worker hands over all
    other requests.
    """

    channel: int = field(metadata=_COUNT)
    digest: str = field(metadata=text(limits.MAX_DIGEST_BYTES))
    """SHA-256 of the bytes of the description, in hex."""


@dataclass(frozen=True)
class ReleaseChannel:
    """daemon → worker: close a direct channel."""

    channel: int = field(metadata=_COUNT)


@dataclass(frozen=True)
class ChannelReleased:
    """worker → daemon: the worker has closed a direct channel, and sends no answer on it."""

    channel: int = field(metadata=_COUNT)
    reason: str = field(metadata=one_of(RELEASE_REASONS))


@dataclass(frozen=True)
class RequestHandedOver:
    """worker → daemon: a request that the worker has taken from a direct channel and has not answered.

    The frame after the envelope is the packet of the request.
    """

    channel: int = field(metadata=_COUNT)
    request: int = field(metadata=_COUNT)
    """Id of the request; 0 if the packet is no request with a decimal id."""


@dataclass(frozen=True)
class AnswerDropped:
    """worker → daemon: the direct channel had no space for the answer to a request, as the client does not read."""

    channel: int = field(metadata=_COUNT)
    request: int = field(metadata=_COUNT)


PACKET_MESSAGES = frozenset([RequestHandedOver])
"""The messages whose envelope is followed by one frame that is not a tensor."""

FROM_CHANNEL: Dict[str, Type[Infer]] = {"infer": Infer}
"""The messages that a worker accepts on a direct channel."""
