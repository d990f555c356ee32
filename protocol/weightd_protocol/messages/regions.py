"""Shared-memory regions: tensors in memory that a client has registered, instead of in frames."""

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

# Positions of tensors in a description.
POSITIONS = list_of(_TENSOR, limits.MAX_TENSORS)


@dataclass(frozen=True)
class InputLocation:
    """Location of an input without a frame: it starts at `offset` of a region.

    `tensor_index` is its position in the description.
    """

    tensor_index: int = field(metadata=_TENSOR)
    region: str = field(metadata=REGION)
    offset: int = field(metadata=_BYTES)


@dataclass(frozen=True)
class OutputLocation:
    """Buffer for an output of at most `nbytes`. `tensor_index` is the position of the output in the response."""

    tensor_index: int = field(metadata=_TENSOR)
    region: str = field(metadata=REGION)
    offset: int = field(metadata=_BYTES)
    nbytes: int = field(metadata=_BYTES)


@dataclass(frozen=True)
class Regions:
    """Locations of the tensors of a request that are in shared memory."""

    inputs: Tuple[InputLocation, ...] = field(default=(), metadata=list_of(record(InputLocation), limits.MAX_TENSORS))
    outputs: Tuple[OutputLocation, ...] = field(
        default=(), metadata=list_of(record(OutputLocation), limits.MAX_TENSORS)
    )


@dataclass(frozen=True)
class MappedInput:
    """An `InputLocation` for a worker, which identifies regions by numbers."""

    tensor_index: int = field(metadata=_TENSOR)
    """Position in `inputs` of the request."""
    region: int = field(metadata=_NUMBER)
    """Number of the region, as in `MapRegion`."""
    offset: int = field(metadata=_BYTES)
    """First byte in the region."""


@dataclass(frozen=True)
class MappedOutput:
    """An `OutputLocation` for a worker, which identifies regions by numbers."""

    tensor_index: int = field(metadata=_TENSOR)
    """Position in `outputs` of the result."""
    region: int = field(metadata=_NUMBER)
    """Number of the region, as in `MapRegion`."""
    offset: int = field(metadata=_BYTES)
    """First byte in the region."""
    nbytes: int = field(metadata=_BYTES)
    """Size of the space for the output."""


@dataclass(frozen=True)
class MappedRegions:
    """`Regions` for a worker, which identifies regions by numbers."""

    inputs: Tuple[MappedInput, ...] = field(default=(), metadata=list_of(record(MappedInput), limits.MAX_TENSORS))
    """Inputs without a frame."""
    outputs: Tuple[MappedOutput, ...] = field(default=(), metadata=list_of(record(MappedOutput), limits.MAX_TENSORS))
    """Space where the worker may write outputs."""


@dataclass(frozen=True)
class Register:
    """client → daemon: register a region. The descriptor of the memory is attached to the message."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))


@dataclass(frozen=True)
class Registered:
    """daemon → client: requests on this connection may use the region under this name."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    region: str = field(metadata=REGION)


@dataclass(frozen=True)
class Unregister:
    """client → daemon: no further request uses the region. This message has no response."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    region: str = field(metadata=REGION)


@dataclass(frozen=True)
class Released:
    """daemon → client: no worker writes to the output buffers of this request any more.

    It follows a response, and only one with `may_still_write`.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
