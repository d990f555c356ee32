"""Messages for inference: requests, responses, errors, and the description of their tensors."""

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
    """Description of one tensor of a request or response. The tensor frame at the same position has the tensor's bytes.

    `shape` has the size of each dimension; [] is the shape of a scalar. The frame has the elements in C order,
    little-endian, without padding, so its length is the product of the dimensions and the element size.
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
    """Signature of one input or output of a model. If a dimension is -1, each request chooses its size.

    If `shape` is None, each request also chooses the number of dimensions. [] is the shape of a scalar.
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
    """Options of an inference request."""

    timeout_us: Optional[int] = field(default=None, metadata=integer(1, limits.MAX_TIMEOUT_US))
    """Microseconds until the client stops waiting for the response; None for the daemon's default timeout."""
    regions: Optional[Regions] = field(default=None, metadata=record(Regions))
    """Locations of the tensors that are in shared memory; None if all tensors are in frames."""
    priority: Optional[int] = field(default=None, metadata=integer(0, limits.MAX_PRIORITY))
    """Requests with priority 1 are served first. The model's configuration sets the largest number.

    0 and None select the model's default priority.
    """
    tenant: Optional[str] = field(default=None, metadata=text(limits.MAX_NAME_BYTES))
    """Tenant on whose behalf a gateway sends the request (`acts_for`); None for the sender's own tenant."""


NO_PARAMETERS = Parameters()


class _Once(Generic[T]):
    """A property that is computed when it is first read. The value is then stored as an attribute."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> T:
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


class _Description:
    """Description of the tensors of a message. It is encoded in a separate frame.

    All messages with equal shapes share one description object.
    """

    @property
    def tensors(self) -> Tuple[TensorSpec, ...]:
        """The described tensors: inputs of a request, or outputs of a response."""
        raise NotImplementedError

    @_Once
    def sizes(self) -> Tuple[int, ...]:
        """The length of each tensor's frame in bytes."""
        return tuple(each.nbytes for each in self.tensors)

    @_Once
    def largest(self) -> int:
        """The length of the longest tensor frame in bytes; 0 if there are no tensors."""
        return max(self.sizes, default=0)

    @property
    def nbytes(self) -> int:
        """The total length of the tensor frames in bytes."""
        return sum(self.sizes)


@dataclass(frozen=True)
class RequestDescription(_Description):
    """Model name, inputs and requested outputs of a request. All requests with equal shapes share one object."""

    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    inputs: Tuple[TensorSpec, ...] = field(metadata=list_of(record(TensorSpec), limits.MAX_TENSORS))
    outputs: Optional[Tuple[str, ...]] = field(
        default=None, metadata=list_of(text(limits.MAX_NAME_BYTES), limits.MAX_TENSORS)
    )
    """Names of the requested outputs, in the order of the response; None for all outputs of the model."""

    @property
    def tensors(self) -> Tuple[TensorSpec, ...]:
        """The inputs: the tensors that a request has."""
        return self.inputs


@dataclass(frozen=True)
class ResponseDescription(_Description):
    """Model name and outputs of a response. All responses with equal shapes share one object."""

    model_name: str = field(metadata=text(limits.MAX_NAME_BYTES))
    outputs: Tuple[TensorSpec, ...] = field(metadata=list_of(record(TensorSpec), limits.MAX_TENSORS))

    @property
    def tensors(self) -> Tuple[TensorSpec, ...]:
        """The outputs: the tensors that a response has."""
        return self.outputs


@dataclass(frozen=True)
class Infer:
    """client → daemon: run the model on the inputs in the frames that follow, and in shared memory."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    description: RequestDescription = field(metadata=in_own_frame(RequestDescription))
    parameters: Parameters = field(default=NO_PARAMETERS, metadata=record(Parameters))

    @property
    def shared_positions(self) -> Tuple[int, ...]:
        """The positions of the inputs that are in shared memory and so have no frame."""
        regions = self.parameters.regions
        return () if regions is None else tuple([each.tensor_index for each in regions.inputs])


@dataclass(frozen=True)
class InferResponse:
    """daemon → client: the outputs of the model, in the frames that follow and in shared memory."""

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
    description: ResponseDescription = field(metadata=in_own_frame(ResponseDescription))
    shared_outputs: Optional[Tuple[int, ...]] = field(default=None, metadata=POSITIONS)
    """Positions of the outputs that the worker has written to shared memory. They have no frame."""
    may_still_write: Optional[bool] = field(default=None, metadata=boolean())
    """Whether a worker may still write to the output buffers of the request.

    If so, the message `released` follows later.
    """

    @property
    def shared_positions(self) -> Tuple[int, ...]:
        """The positions of the outputs that are in shared memory and so have no frame."""
        return self.shared_outputs or ()


@dataclass(frozen=True)
class Error:
    """daemon → client: the request with this id failed.

    `id` is "" if the daemon could not read the id of the message, or if it closes the connection.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES, empty=True))
    code: str = field(metadata=one_of(ERRORS))
    error: str = field(metadata=text(limits.MAX_TEXT_BYTES, empty=True))
    retry_after_us: Optional[int] = field(default=None, metadata=integer(0, limits.MAX_TIMEOUT_US))
    """Microseconds after which the same request may succeed; None if the daemon does not know this."""
    may_still_write: Optional[bool] = field(default=None, metadata=boolean())
    """Whether a worker may still write to the output buffers of the request.

    If so, the message `released` follows later.
    """


@dataclass(frozen=True)
class Cancel:
    """client → daemon: cancel the request with this id.

    A request that has not ended now ends with the error CANCELLED. The message `cancel` itself has no response.
    """

    id: str = field(metadata=text(limits.MAX_ID_BYTES))
