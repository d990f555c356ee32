"""Accepted inference requests, the identities of their clients, and the isolation levels of requests."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weightd_daemon.scheduling.tensor_location import NO_LOCATIONS, TensorLocations
from weightd_daemon.tenants.tenant import DEFAULT_TENANT, Tenant
from weightd_daemon.tenants.usage import Usage
from weightd_protocol.messages.inference import RequestDescription

# Approximate bytes of memory of a request besides its tensors, for the objects of the decoded header.
OVERHEAD_BYTES = 2048


class ClientOrigin(NamedTuple):
    """The identity of a client, as the kernel reports it for the connection. No message can change the identity.

    Attributes:
        peer: the process at the other end of a Unix socket, or the TCP connection.
        principal: the user or the address, which all processes of the client have in common; if tenants are configured,
            the name of the tenant.
        is_tenant: whether `principal` is the name of a tenant.
    """

    peer: str
    principal: str
    is_tenant: bool = False


UNKNOWN_ORIGIN = ClientOrigin("", "")


class Isolation(enum.IntEnum):
    """Isolation levels of requests, in ascending order: which other requests may run at the same time."""

    BATCHABLE = 0
    ALONE = 1  # runs at a slot without any other request: if the slot dies, this request is the cause
    CONFINED = 2  # like ALONE, and no other confined request runs at the same time


@dataclass(eq=False, slots=True)
class Request:
    """An accepted request. Times are monotonic seconds.

    Attributes:
        description: the header of the request: the model, the inputs, the requested outputs.
        frames: the bytes of the tensors. In the daemon, only `fault_isolation.contents` reads them.
        locations: the locations, in the client's shared memory, of the tensors that have no frame.
        origin: the identity of the client.
        tenant: the tenant to whose quota and usage the request counts.
        usage: the record of the tenant's usage of the model.
        priority_level: the priority as an index; 0 is the highest.
        buffered_bytes: the bytes that are reserved for the request in the memory budget until the request ends,
            including the bytes of partial results.
        isolation: the isolation level: which other requests may run at the same time.
        deaths: the number of slots that this request appears to have crashed.
        has_started: whether a slot has received the request, or some of its rows.
        waited_s: seconds from the arrival of the request until a slot first received it.
        lost_slots: the number of slots that were lost while they ran the request, for any reason; slots that ran parts
            of the request at the same time count once.
        lost_at: the time at which `lost_slots` was last increased.
        digest: the digest of the content; empty until it has been computed.
        sample_digest: the digest of samples of the content; empty until it has been computed. See
            `fault_isolation.contents`.
        is_ended: whether the request has ended although a slot still has it. Later results of the slot are dropped.
        pending_writes: the ranges of rows whose outputs a process may still write to the client's memory, one range for
            each process.
        may_still_write: whether there were pending writes when the request ended.
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
    buffered_bytes: int = 0
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

    @property
    def content_bytes(self) -> int:
        """The number of bytes of all input tensors, in frames and in shared memory."""
        return self.nbytes + sum(location.nbytes for location in self.locations.inputs.values())

    @property
    def is_mutable(self) -> bool:
        """Whether the client can change the content at any time, because an input is in the client's shared memory."""
        return bool(self.locations.inputs)


@functools.lru_cache(maxsize=64)
def with_model_name(description: RequestDescription, name: str) -> RequestDescription:
    """Return a request's description with another name of the model, which the response repeats."""
    return dataclasses.replace(description, model_name=name)


def isolate(request: Request, isolation: Isolation) -> None:
    """Raise the isolation of a request to at least `isolation`."""
    request.isolation = max(request.isolation, isolation)
