"""An accepted request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from weightd.protocol.messages.data import TensorSpec

# What a request takes beside its tensors, about: the header's objects.
_OBJECTS_BYTES = 2048


class Origin(NamedTuple):
    """Who is at the other end of a connection, as the kernel knows it: what a client says of itself proves nothing.

    Attributes:
        near: the process of a unix socket's peer; of TCP the connection.
        far: all that a process may just be one of: the user, or the address.
    """

    near: str
    far: str


NOBODY = Origin("", "")


@dataclass(eq=False, slots=True)
class Request:
    """A request under way. Times are monotonic seconds.

    Attributes:
        frames: the tensors' bytes; only `contents` looks at them.
        origin: who has sent it, as far as the kernel tells.
        deaths: workers that died of it, or so it seems.
        losses: workers that ended while they ran it, for whatever reason.
        digest: of its content, once that has been computed.
        confined: it runs only while no other one like it does, and alone.
        alone: nothing waits behind it at its worker, or is before it: if that dies, then of this.
        answered: the client has been told how it ended: what a worker gives later is dropped.
    """

    number: int
    client: bytes
    id: str
    model_name: str
    inputs: Sequence[TensorSpec]
    frames: Sequence[Any]
    arrived: float
    deadline: float
    nbytes: int
    origin: Origin = NOBODY
    deaths: int = 0
    losses: int = 0
    confined: bool = False
    alone: bool = False
    digest: bytes = b""
    answered: bool = False

    @property
    def kept_bytes(self) -> int:
        """What the daemon keeps of it in memory until it has ended."""
        return self.nbytes + _OBJECTS_BYTES
