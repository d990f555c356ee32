"""An accepted request."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weightd.protocol.messages import TensorSpec

# What a request takes beside its tensors, about: the header's objects.
_OBJECTS_BYTES = 2048


@dataclass(eq=False, slots=True)
class Request:
    """A request under way. Times are monotonic seconds.

    Attributes:
        frames: the tensors' bytes; only `content` looks at them.
        deaths: workers that died of it, or so it seems.
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
    deaths: int = 0
    answered: bool = False

    @property
    def kept_bytes(self) -> int:
        """What the daemon keeps of it in memory until it has ended."""
        return self.nbytes + _OBJECTS_BYTES


def content(request: Request) -> bytes:
    """Return a digest of the tensors, the same whatever their order: equal requests have equal ones."""
    state = hashlib.blake2b(digest_size=16)
    for spec, frame in sorted(zip(request.inputs, request.frames, strict=True), key=lambda pair: pair[0].name):
        state.update(f"{spec.name}\0{spec.datatype}\0{spec.shape}\0".encode())
        state.update(frame)
    return state.digest()
