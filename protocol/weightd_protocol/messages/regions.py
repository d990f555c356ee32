"""Tensors that are not in frames: in memory that a client has registered."""

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

# Of tensors in a description.
POSITIONS = list_of(_TENSOR, limits.MAX_TENSORS)


@dataclass(frozen=True)
class InputLocation:
    """An input that has no frame: it is in a region, from `offset` on.

    `tensor_index` is its position in the description.
    """

    tensor_index: int = field(metadata=_TENSOR)
    region: str = field(metadata=REGION)
    offset: int = field(metadata=_BYTES)


@dataclass(frozen=True)
class OutputLocation:
    """Where an output may be written, if it has no more than `nbytes`. `tensor_index` is its position in the answer."""

    tensor_index: int = field(metadata=_TENSOR)
    region: str = field(metadata=REGION)
    offset: int = field(metadata=_BYTES)
    nbytes: int = field(metadata=_BYTES)


@dataclass(frozen=True)
class Regions:
    """Which tensors of a request are in shared memory, and where."""

    inputs: Tuple[InputLocation, ...] = field(default=(), metadata=list_of(record(InputLocation), limits.MAX_TENSORS))
    outputs: Tuple[OutputLocation, ...] = field(
        default=(), metadata=list_of(record(OutputLocation), limits.MAX_TENSORS)
    )


@dataclass(frozen=True)
class MappedInput:
    """An `InputLocation`, for a worker, which knows regions by numbers."""

    tensor_index: int = field(metadata=_TENSOR)
    """Position in `inputs` of the request."""
    region: int = field(metadata=_NUMBER)
    """Number of the region, as in `MapRegion`."""
    offset: int = field(metadata=_BYTES)
    """First byte in the region."""


@dataclass(frozen=True)
class MappedOutput:
    """An `OutputLocation`, for a worker, which knows regions by numbers."""

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
    """`Regions`, for a worker, which knows them by numbers."""

    inputs: Tuple[MappedInput, ...] = field(default=(), metadata=list_of(record(MappedInput), limits.MAX_TENSORS))
    """Inputs without a frame."""
    outputs: Tuple[MappedOutput, ...] = field(default=(), metadata=list_of(record(MappedOutput), limits.MAX_TENSORS))
    """Space where the worker may write outputs."""


@dataclass(frozen=True)
class Register:
    """client → daemon: let tensors be in this memory, whose descriptor comes with the message."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))


@dataclass(frozen=True)
class Registered:
    """daemon → client: requests on this connection may name the region so."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    region: str = field(metadata=REGION)


@dataclass(frozen=True)
class Unregister:
    """client → daemon: no further request names the region. This message itself has no answer."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    region: str = field(metadata=REGION)


@dataclass(frozen=True)
class Released:
    """daemon → client: nobody writes any more where the outputs of this request were to be.

    It follows an answer, and only one that said that the request was still running.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
