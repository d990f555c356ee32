"""An accepted request."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weightd_daemon.scheduling.tensor_location import NO_LOCATIONS, TensorLocations
from weightd_daemon.tenants.tenant import DEFAULT_TENANT, Tenant
from weightd_daemon.tenants.usage import Usage
from weightd_protocol.messages.inference import RequestDescription

# What a request takes beside its tensors, about: the header's objects.
OVERHEAD_BYTES = 2048


class ClientOrigin(NamedTuple):
    """Who is at the other end of a connection, as the kernel knows it: what a client says of itself proves nothing.

    Attributes:
        peer: the process of a unix socket's peer; of TCP the connection.
        principal: all that a process may just be one of: the user, or the address; where there are tenants, that.
        is_tenant: whether it is.
    """

    peer: str
    principal: str
    is_tenant: bool = False


UNKNOWN_ORIGIN = ClientOrigin("", "")


class Isolation(enum.IntEnum):
    """What else may run while a request does, each narrower than the one before."""

    BATCHABLE = 0
    ALONE = 1  # nothing is before it or behind it at its slot, or in its batch: if the slot dies, then of this
    CONFINED = 2  # nor does any other one that is confined run


@dataclass(eq=False, slots=True)
class Request:
    """A request under way. Times are monotonic seconds.

    Attributes:
        description: what is asked: the model, its inputs, the outputs that are wanted.
        frames: the tensors' bytes; only `contents` looks at them.
        locations: of the tensors that have no frame.
        origin: who has sent it, as far as the kernel tells.
        tenant: on whose account it goes.
        usage: of the tenant, for the model.
        priority_level: how many levels of priority come before its own.
        isolation: what else may run while it does.
        deaths: slots that died of it, or so it seems.
        has_started: a slot was given it, or some of it.
        waited_s: seconds from its arrival until then.
        lost_slots: slots that ended while they ran it, for whatever reason; those that ran it at once count once.
        lost_at: when the last one did that counts.
        digest: of its content, once that has been computed.
        sample_digest: likewise, see `fault_isolation.fingerprint`.
        is_ended: while a slot ran it: what that gives later is dropped.
        pending_writes: the rows whose outputs a process may still write to memory of the client, of each process.
        may_still_write: it has ended while there were any.
        buffered_bytes: what the daemon keeps of it in memory until it has ended; the answers to its parts, too.
    """

    number: int
    client: bytes
    id: str
    description: RequestDescription
    frames: Sequence[Any]
    arrived_at: float
    deadline: float
    nbytes: int
    origin: ClientOrigin = UNKNOWN_ORIGIN
    locations: TensorLocations = NO_LOCATIONS
    tenant: Tenant = DEFAULT_TENANT
    usage: Usage = field(default_factory=Usage)
    priority_level: int = 0
    isolation: Isolation = Isolation.BATCHABLE
    deaths: int = 0
    has_started: bool = False
    waited_s: float = 0.0
    lost_slots: int = 0
    lost_at: float = -float("inf")
    digest: bytes = b""
    sample_digest: bytes = b""
    is_ended: bool = False
    pending_writes: tuple[range, ...] = ()
    may_still_write: bool = False
    buffered_bytes: int = 0

    @property
    def content_bytes(self) -> int:
        """The bytes of its tensors, wherever they are."""
        return self.nbytes + sum(location.nbytes for location in self.locations.inputs.values())

    @property
    def is_mutable(self) -> bool:
        """Whether its client can change the content at any time: an input is in memory of the client."""
        return bool(self.locations.inputs)


def isolate(request: Request, isolation: Isolation) -> None:
    """From now on nothing else may run with a request but what this allows, or less."""
    request.isolation = max(request.isolation, isolation)
