"""Messages and records for shared-memory regions, which hold tensors that are not sent in frames."""

from __future__ import annotations

from dataclasses import field
from typing import Tuple

from weightd_protocol import limits
from weightd_protocol.frozen import dataclass
from weightd_protocol.schema import integer, list_of, record, text

_TENSOR = integer(0, limits.MAX_TENSORS - 1)
_BYTES = integer(0, limits.MAX_COUNT)
_NUMBER = integer(0, limits.MAX_COUNT)
REGION = text(limits.MAX_REGION_ID_BYTES)

# Positions of tensors in the inputs of a request or the outputs of a response.
POSITIONS = list_of(_TENSOR, limits.MAX_TENSORS)


@dataclass(frozen=True)
class InputLocation:
    """Location of an input in shared memory: it begins at `offset` in the region with the id `region`.

    `tensor_index` is the position of the input in the request.
    """

    tensor_index: int = field(metadata=_TENSOR)
    region: str = field(metadata=REGION)
    offset: int = field(metadata=_BYTES)


@dataclass(frozen=True)
class OutputLocation:
    """Buffer for an output in shared memory: `nbytes` bytes from `offset` on in the region with the id `region`.

    `tensor_index` is the position of the output in the response. The output may be shorter than the buffer.
    """

    tensor_index: int = field(metadata=_TENSOR)
    region: str = field(metadata=REGION)
    offset: int = field(metadata=_BYTES)
    nbytes: int = field(metadata=_BYTES)


@dataclass(frozen=True)
class Regions:
    """Locations of the request's tensors that are in shared memory, and of buffers for outputs."""

    inputs: Tuple[InputLocation, ...] = field(default=(), metadata=list_of(record(InputLocation), limits.MAX_TENSORS))
    outputs: Tuple[OutputLocation, ...] = field(
        default=(), metadata=list_of(record(OutputLocation), limits.MAX_TENSORS)
    )


@dataclass(frozen=True)
class MappedInput:
    """An `InputLocation` in a message to a worker. Regions have numbers there instead of ids."""

    tensor_index: int = field(metadata=_TENSOR)
    """Position of the input in the request."""
    region: int = field(metadata=_NUMBER)
    """Number of the region, from `MapRegion`."""
    offset: int = field(metadata=_BYTES)
    """Offset of the input's first byte in the region."""


@dataclass(frozen=True)
class MappedOutput:
    """An `OutputLocation` in a message to a worker. Regions have numbers there instead of ids."""

    tensor_index: int = field(metadata=_TENSOR)
    """Position of the output in the result."""
    region: int = field(metadata=_NUMBER)
    """Number of the region, from `MapRegion`."""
    offset: int = field(metadata=_BYTES)
    """Offset of the buffer's first byte in the region."""
    nbytes: int = field(metadata=_BYTES)
    """Size of the buffer in bytes."""


@dataclass(frozen=True)
class MappedRegions:
    """The record `Regions` in a message to a worker. Regions have numbers there instead of ids."""

    inputs: Tuple[MappedInput, ...] = field(default=(), metadata=list_of(record(MappedInput), limits.MAX_TENSORS))
    """Locations of the inputs that have no frame."""
    outputs: Tuple[MappedOutput, ...] = field(default=(), metadata=list_of(record(MappedOutput), limits.MAX_TENSORS))
    """Buffers to which the worker may write outputs."""


@dataclass(frozen=True)
class Register:
    """client → daemon: register a shared-memory region. Its file descriptor is attached to the message."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))


@dataclass(frozen=True)
class Registered:
    """daemon → client: the region is registered. Requests on this connection may use it with the id `region`."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    region: str = field(metadata=REGION)


@dataclass(frozen=True)
class Unregister:
    """client → daemon: no further request will use this region. This message has no response."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    region: str = field(metadata=REGION)


@dataclass(frozen=True)
class Released:
    """daemon → client: no worker writes to the output buffers of this request any more.

    The daemon sends this message after a response with `may_still_write`.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))


@dataclass(frozen=True)
class MapRegion:
    """daemon → worker: map the region whose file descriptor is attached. No other region gets the number `region`."""

    region: int = field(metadata=_NUMBER)


@dataclass(frozen=True)
class UnmapRegion:
    """daemon → worker: unmap a shared-memory region. No later predict uses it."""

    region: int = field(metadata=_NUMBER)
