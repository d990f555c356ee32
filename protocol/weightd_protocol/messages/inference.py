"""Inference requests and responses, and their tensors."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Callable, Generic, Optional, Tuple, TypeVar

from weightd_protocol import limits
from weightd_protocol.datatypes import ITEM_BYTES
from weightd_protocol.errors import ERRORS
from weightd_protocol.frozen import dataclass
from weightd_protocol.messages.regions import POSITIONS, Regions
from weightd_protocol.schema import boolean, in_own_frame, integer, list_of, nullable, one_of, record, text

_COUNT = integer(0, limits.MAX_COUNT)

T = TypeVar("T")


@dataclass(frozen=True)
class TensorSpec:
    """Description of one tensor of a request or response. Its bytes are in the frame at the same position.

    `shape` has the size of each dimension; [] is a scalar. The frame holds the elements in C order, little-endian,
    without padding. Its length is the product of the dimensions and the element size.
    """

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    datatype: str = field(metadata=one_of(ITEM_BYTES))
    shape: Tuple[int, ...] = field(metadata=list_of(integer(0, limits.MAX_DIM), limits.MAX_RANK))

    @property
    def nbytes(self) -> int:
        """The length of the tensor's frame in bytes."""
        size = ITEM_BYTES[self.datatype]
        for dim in self.shape:
            size *= dim
        return size


@dataclass(frozen=True)
class TensorSignature:
    """Signature of one input or output of a model. A dimension of -1 is free: each request chooses its size.

    A shape of None means any rank, chosen by each request. A shape of [] is a scalar.
    """

    name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    datatype: str = field(metadata=one_of(ITEM_BYTES))
    shape: Optional[Tuple[int, ...]] = field(metadata=nullable(list_of(integer(-1, limits.MAX_DIM), limits.MAX_RANK)))

    @property
    def shape_text(self) -> str:
        """The shape as text."""
        return "of any rank" if self.shape is None else str(list(self.shape))


@dataclass(frozen=True)
class Parameters:
    """Options of a request beside its tensors."""

    timeout_us: Optional[int] = field(default=None, metadata=integer(1, limits.MAX_TIMEOUT_US))
    """Microseconds until the client stops waiting; None for the daemon's default."""
    regions: Optional[Regions] = field(default=None, metadata=record(Regions))
    """The tensors in shared memory and their locations; None if all tensors have frames."""
    priority: Optional[int] = field(default=None, metadata=integer(0, limits.MAX_PRIORITY))
    """1 is served first; the model's configuration sets the largest number. 0 and None select the model's default."""
    tenant: Optional[str] = field(default=None, metadata=text(limits.MAX_NAME_BYTES))
    """Tenant whose rights, quotas and share apply, set by a gateway (`acts_for`); None for the sender's tenant."""


NO_PARAMETERS = Parameters()


class _Once(Generic[T]):
    """A property that is computed at its first access and is then stored as an attribute."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> T:
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


class _Description:
    """Description of tensors, shared by all messages with equal shapes. It is encoded in a separate frame."""

    @property
    def tensors(self) -> Tuple[TensorSpec, ...]:
        """The tensors whose bytes follow the header."""
        raise NotImplementedError

    @_Once
    def sizes(self) -> Tuple[int, ...]:
        """The length of each tensor's frame in bytes."""
        return tuple(each.nbytes for each in self.tensors)

    @_Once
    def largest(self) -> int:
        """The length of the longest frame in bytes; 0 without tensors."""
        return max(self.sizes, default=0)

    @property
    def nbytes(self) -> int:
        """The total length of the frames in bytes."""
        return sum(self.sizes)


@dataclass(frozen=True)
class RequestDescription(_Description):
    """Model, inputs and requested outputs of a request, shared by all requests with equal shapes."""

    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    inputs: Tuple[TensorSpec, ...] = field(metadata=list_of(record(TensorSpec), limits.MAX_TENSORS))
    outputs: Optional[Tuple[str, ...]] = field(
        default=None, metadata=list_of(text(limits.MAX_NAME_BYTES), limits.MAX_TENSORS)
    )
    """Names of the requested outputs, in the order of the response; None for all."""

    @property
    def tensors(self) -> Tuple[TensorSpec, ...]:
        """The tensors whose bytes follow the header."""
        return self.inputs


@dataclass(frozen=True)
class ResponseDescription(_Description):
    """Model and outputs of a response."""

    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    outputs: Tuple[TensorSpec, ...] = field(metadata=list_of(record(TensorSpec), limits.MAX_TENSORS))

    @property
    def tensors(self) -> Tuple[TensorSpec, ...]:
        """The tensors whose bytes follow the header."""
        return self.outputs


@dataclass(frozen=True)
class Infer:
    """client → daemon: run the model on the tensors that follow."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    description: RequestDescription = field(metadata=in_own_frame(RequestDescription))
    parameters: Parameters = field(default=NO_PARAMETERS, metadata=record(Parameters))

    @property
    def shared_positions(self) -> Tuple[int, ...]:
        """The positions of the tensors without a frame."""
        regions = self.parameters.regions
        return () if regions is None else tuple([each.tensor_index for each in regions.inputs])


@dataclass(frozen=True)
class InferResponse:
    """daemon → client: the outputs of the model."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    description: ResponseDescription = field(metadata=in_own_frame(ResponseDescription))
    shared_outputs: Optional[Tuple[int, ...]] = field(default=None, metadata=POSITIONS)
    """Positions of the outputs in the memory that the request provided. They have no frame."""
    may_still_write: Optional[bool] = field(default=None, metadata=boolean())
    """Whether a worker may still write to this memory; `released` follows."""

    @property
    def shared_positions(self) -> Tuple[int, ...]:
        """The positions of the tensors without a frame."""
        return self.shared_outputs or ()


@dataclass(frozen=True)
class Error:
    """daemon → client: the request with this id failed.

    `id` is empty if the id of the request could not be read.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES, empty=True))
    code: str = field(metadata=one_of(ERRORS))
    error: str = field(metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    retry_after_us: Optional[int] = field(default=None, metadata=integer(0, limits.MAX_TIMEOUT_US))
    """Microseconds after which the same request may succeed; None if unknown."""
    may_still_write: Optional[bool] = field(default=None, metadata=boolean())
    """Whether a worker may still write to the memory that the request provided; `released` follows."""


@dataclass(frozen=True)
class Cancel:
    """client → daemon: cancel the request with this id.

    If the request has not ended, it now ends with CANCELLED. This message itself has no response.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
