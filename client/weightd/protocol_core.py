"""The client's side of the protocol: creates request messages and matches responses to calls. No I/O.

Several threads may use a `ClientCore`. Only one thread at a time may pass received messages to it; any thread may start
a call or fail all calls. Because there is no lock, every change of shared state is a single atomic operation.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections import abc
from time import monotonic
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Type
from weakref import ReferenceType, WeakValueDictionary, ref

import numpy as np

from weightd import arguments, queries
from weightd.channels.calls import ChannelCalls
from weightd.channels.requests import ChannelRequests
from weightd.inputs import UNTYPED_TYPES, NeedsMetadata, to_typed_inputs
from weightd.pending import PendingCall, VersionOutputs
from weightd.queries import Query
from weightd.shm_tensors import MIN_SHARED_BYTES, SharedInput, SharedOutput, ShmTensors, WrongOut
from weightd_protocol import limits
from weightd_protocol.codec import Decoder, encode
from weightd_protocol.errors import (
    InvalidArgument,
    LocalProtocolError,
    RemoteProtocolError,
    RequestError,
    Unavailable,
    WeightdError,
    request_error,
)
from weightd_protocol.messages.channels import (
    ChannelEnded,
    ChannelExtended,
    ChannelOpened,
    RequestAdopted,
    RequestLost,
)
from weightd_protocol.messages.control import ModelMetadataResponse
from weightd_protocol.messages.inference import Cancel, Error, Infer, InferResponse, Parameters, RequestDescription
from weightd_protocol.messages.regions import InputLocation, OutputLocation, Regions, Registered, Released
from weightd_protocol.messages.types import TO_CLIENT, ClientMessage, DaemonMessage
from weightd_protocol.schema import label
from weightd_protocol.tensors import describe_request, frame_of, from_frame, to_wire

if TYPE_CHECKING:
    from weightd.channels.calls import ClientChannel
    from weightd.inputs import Inputs

# Number of tracked calls from which on the client removes the entries of calls that their owners have dropped.
_MIN_SWEEP_CALLS = 256

# Maximum number of cached signatures. At this limit the cache is cleared. A daemon has no more models than this.
_MAX_CACHED_METADATA = limits.MAX_MODELS

# Module-level alias, because looking up `np.ndarray` for each input takes longer than the comparison itself.
_ndarray = np.ndarray

# The frames of a message that contain tensors: they follow the header frames.
_TENSOR_FRAMES = slice(limits.MAX_HEADER_FRAMES, None)


# A call that has not been sent yet, and the frames of its message.
PreparedCall = Tuple[PendingCall, List[Any]]


class ClientCore:
    """Creates requests and matches responses to calls.

    The core holds only weak references to calls. If the owner of a call drops it, the core discards the late response.

    Attributes:
        calls: weak references to the calls in progress, by request id. Some entries may refer to calls that their
            owners have dropped. The dictionary is empty if the daemon owes no response.
        shm_tensors: the tensors of requests that are in shared memory.
        channels: the direct channels, and the calls that use them.

    Args:
        tenant: the tenant on whose behalf requests are sent; None for the tenant to which the daemon assigns this
            client. `update` and `reload` are always sent without a tenant.
    """

    def __init__(self, tenant: Optional[str] = None) -> None:
        self._tenant = None if tenant is None else arguments.parse_name("tenant", tenant)
        # Ids are decimal numbers, as direct channels require. They begin with the process id, which helps to tell
        # clients apart in logs. A process id is not secret.
        self._ids: Iterator[str] = map(f"{os.getpid()}{{:012d}}".format, itertools.count(1))
        # Plain weak references, because an entry of a WeakValueDictionary costs more than encoding a small request.
        self.calls: Dict[str, ReferenceType[PendingCall]] = {}
        self._sweep_at = _MIN_SWEEP_CALLS
        self._decode = Decoder(TO_CLIENT, max_bytes=limits.MAX_STATUS_BYTES).decode
        self.shm_tensors = ShmTensors(self._next_id)
        self.channels = ChannelCalls(self.calls, ChannelRequests(self._next_id, self._tenant, monotonic))
        # By model: the signatures that were received over the current connection, and the calls that request a
        # signature.
        self._metadata_by_model: Dict[str, ModelMetadataResponse] = {}
        self._metadata_calls: WeakValueDictionary[str, PendingCall] = WeakValueDictionary()

    @property
    def pending_count(self) -> int:
        """The number of calls that are in progress and whose owners have not dropped them."""
        return sum(call() is not None for call in list(self.calls.values()))

    def prepare_infer(
        self,
        model: str,
        inputs: Inputs,
        timeout: float,
        outputs: Optional[Sequence[str]] = None,
        out: Optional[Mapping[str, Any]] = None,
        priority: Optional[int] = None,
    ) -> PreparedCall:
        """Create an inference request. Return the call and the frames of its message.

        Raises:
            NeedsMetadata: `inputs` must first be converted with `typed_inputs`.
            InvalidArgument: an argument is invalid; an array has a datatype that the protocol lacks, or is too large;
                the names or shapes do not fit into the message's header.
        """
        # The names must be plain strings, because they are keys of the cache of descriptions: equal keys must have
        # equal encodings.
        if type(model) is not str:
            model = arguments.parse_text("model", model)
        if outputs is not None:
            outputs = arguments.parse_names("outputs", outputs)
        if out is not None:
            arguments.check_out(out)
        if priority is not None:
            arguments.check_priority(priority)
        arrays = _wire_arrays(inputs)
        description = describe_request(model, arrays, outputs)
        if out or description.largest >= MIN_SHARED_BYTES or id(description) in self.shm_tensors.large_outputs:
            parameters = _parameters(timeout, priority, self._tenant)
            return self._prepare_shared(description, parameters, [*arrays.values()], out or {})
        request = Infer(next(self._ids), description, _parameters(timeout, priority, self._tenant))
        frames: List[Any] = [*_encode_checked(request), *map(frame_of, arrays.values())]
        call = PendingCall(request.id, InferResponse, request)
        if priority is None:
            call.description_frame = frames[1]
        return call, frames

    def _prepare_shared(
        self, description: RequestDescription, parameters: Parameters, arrays: List[Any], out: Mapping[str, Any]
    ) -> PreparedCall:
        """Create a request whose tensors may be in shared memory. Return the call and the frames of its message."""
        lease = self.shm_tensors.new_lease(description, arrays, out)
        if lease.shared_inputs or lease.shared_outputs:
            parameters = _shared_parameters(parameters, tuple(lease.shared_inputs), tuple(lease.shared_outputs))
        request = Infer(next(self._ids), description, parameters)
        call = PendingCall(request.id, InferResponse, request)
        call.lease = lease
        return call, [*_encode_checked(request), *map(frame_of, lease.framed_inputs)]

    def typed_inputs(self, model: str, inputs: Inputs) -> Optional[Dict[str, Any]]:
        """Return `inputs` as arrays by name, converted according to the cached signature of the model.

        Return None if the client must first request the signature from the daemon: it is not cached, or the inputs do
        not match the cached signature, which may be outdated.
        """
        model = arguments.parse_text("model", model)
        metadata = self._metadata_by_model.get(model)
        if metadata is None:
            return None
        try:
            return to_typed_inputs(inputs, model, metadata.inputs)
        except InvalidArgument:
            self._metadata_by_model.pop(model, None)
            return None

    def prepare_metadata_call(self, model: str) -> PreparedCall:
        """Return a call that requests a model's signature, and its frames.

        If such a call is already in progress, return that call without frames: the caller only has to wait for it.
        """
        model = arguments.parse_text("model", model)
        call = self._metadata_calls.get(model)
        if call is not None and self.is_tracked(call):
            return call, []
        call, frames = self.prepare_query(queries.metadata(model))
        call.model = model
        self._metadata_calls[model] = call
        return call, frames

    def abort_metadata_call(self, prepared: PreparedCall, error: BaseException) -> None:
        """Fail a metadata call if `error` prevented sending its message. Other threads may be waiting for the call."""
        call, frames = prepared
        if frames and not call.done and not self.is_tracked(call):
            kind = type(error) if isinstance(error, RequestError) else Unavailable
            call.fail(kind(str(error) or "the metadata request was interrupted"))

    def frames_without_sharing(self, call: PendingCall) -> Optional[List[Any]]:
        """Return new frames for a request whose shared memory was registered on a connection that is now lost.

        On a new connection the daemon does not know this memory, so the new frames contain all tensors. Return None for
        any other request, whose frames remain valid.
        """
        lease, request = call.lease, call.request
        if lease is None or request is None or not self.shm_tensors.is_stale(lease):
            return None
        lease.shared_inputs.clear()
        lease.output_buffers.clear()
        parameters = dataclasses.replace(request.parameters, regions=None)
        return [*encode(Infer(call.id, request.description, parameters)), *map(frame_of, lease.arrays)]

    def track(self, call: PendingCall, frames: List[Any]) -> List[Any]:
        """Track a call whose frames are about to be sent. From now on a response or an error can end the call.

        Returns:
            The frames to send. They differ from `frames` if the connection on which the request's shared memory was
            registered is lost.
        """
        lease = call.lease
        if lease is not None and not self.shm_tensors.activate(call.id, lease):
            frames = self.frames_without_sharing(call) or frames
        calls = self.calls
        if calls and len(calls) >= self._sweep_at:
            for each in list(calls):
                known = calls.get(each)
                if known is not None and known() is None:
                    calls.pop(each, None)
            self._sweep_at = max(_MIN_SWEEP_CALLS, 2 * len(calls))
        calls[call.id] = ref(call)
        return frames

    def is_tracked(self, call: PendingCall) -> bool:
        """Return whether the call is tracked: it has been sent, or is about to be, and has not ended."""
        return call.id in self.calls

    def untrack(self, call: PendingCall) -> None:
        """Stop tracking a call, because its message could not be sent."""
        self.shm_tensors.release(call.id)
        self.calls.pop(call.id, None)

    def cancel_frames(self, call: PendingCall) -> List[Any]:
        """Return the frames of a message that cancels a request.

        The daemon still responds to the request, with outputs, an error, or the error `Cancelled`.
        """
        return encode(Cancel(call.id))

    def prepare_query(self, query: Query[Any]) -> PreparedCall:
        """Create a call other than inference. Return the call and the frames of its message.

        Raises:
            InvalidArgument: the value of a field is not valid in the protocol.
        """
        call = PendingCall(self._next_id(), query.response_type)
        tenant = (self._tenant,) if query.takes_tenant else ()
        return call, _encode_checked(query.message_type(call.id, *query.fields, *tenant))

    def on_message(  # noqa: C901, PLR0912 - the fast path of all answers
        self, frames: Sequence[Any], channel: Optional[ClientChannel] = None
    ) -> None:
        """Process a received message: end the call with the id of the message. Drop a message whose id is unknown.

        Args:
            frames: the frames of the message.
            channel: the direct channel on which a worker sent the message; None if the daemon sent it. A worker can
                end only the calls that were sent on its channel, and that the daemon has not received.

        Raises:
            RemoteProtocolError: the sender violated the protocol, or sent an error without the id of a call. The caller
                must close the connection or the channel.
        """
        try:
            message = self._decode(frames)
        except RemoteProtocolError as error:
            self._on_unreadable(error, channel)
            return
        if channel is not None:
            call = self.calls.get(message.id, _no_call)()
            if call is None or call.channel is not channel:
                self._on_unexpected_answer(message.id, call)
                return
        if not isinstance(message, InferResponse):
            self._on_other_message(message, is_answer=channel is not None)
            return
        call = self.calls.pop(message.id, _no_call)()
        request = None if call is None else call.request
        if call is not None and request is not None:
            description = message.description
            try:
                if call.lease is None and message.shared_outputs is None and description.largest < MIN_SHARED_BYTES:
                    outputs: Dict[str, Any] = {}
                    for spec, frame in zip(description.outputs, frames[_TENSOR_FRAMES]):
                        outputs[spec.name] = from_frame(spec, frame)
                else:
                    outputs = self.shm_tensors.read_outputs(
                        request.description, call.lease, message, frames[_TENSOR_FRAMES]
                    )
            except InvalidArgument as error:
                call.fail(_outputs_error(call, error))
            else:
                if channel is None and call.description_frame is not None:
                    self.channels.on_relayed_answer(request.description.model_name, call.description_frame)
                is_same = description.model_name == request.description.model_name
                call.succeed(outputs if is_same else VersionOutputs(outputs, description.model_name))
        elif call is not None:
            call.fail(_unexpected_response(call, message))
        if self.shm_tensors.leases:
            self.shm_tensors.release(message.id, running=message.may_still_write or False)

    def _on_unexpected_answer(self, request_id: str, call: Optional[PendingCall]) -> None:
        """Drop an answer of a worker to a call that has ended, or whose answer is not expected on the channel."""
        if not request_id:
            raise RemoteProtocolError("a worker has refused a request on a direct channel")
        if call is None:
            self.calls.pop(request_id, None)

    def _on_unreadable(self, error: RemoteProtocolError, channel: Optional[ClientChannel]) -> None:
        if not error.request_id:
            raise error
        call = self.calls.get(error.request_id, _no_call)()
        if channel is None or (call is not None and call.channel is channel):
            self._fail_call(error.request_id, error)

    def _on_other_message(self, message: DaemonMessage, *, is_answer: bool) -> None:
        """Process a message of any type other than `InferResponse`. An answer of a worker can only be an error."""
        if isinstance(message, Error):
            self._on_error(message)
            return
        if is_answer:
            raise RemoteProtocolError(f"expected an answer on a direct channel, got a {type(message).__name__}")
        if isinstance(message, Released):
            self.shm_tensors.release(message.id)
            return
        if isinstance(message, Registered):
            self.shm_tensors.on_registered(message.id, message.region)
            return
        if isinstance(message, (ChannelOpened, ChannelExtended, RequestAdopted, RequestLost, ChannelEnded)):
            self.channels.on_message(message)
            return
        call = self.calls.pop(message.id, _no_call)()
        if call is not None and type(message) is not call.response_type:
            call.fail(_unexpected_response(call, message))
        elif call is not None:
            if isinstance(message, ModelMetadataResponse):
                self._remember_metadata(call, message)
            call.succeed(message)

    def _on_error(self, message: Error) -> None:
        if not message.id:
            raise RemoteProtocolError(f"the daemon closed this connection: {message.error}")
        retry_after_s = None if message.retry_after_us is None else message.retry_after_us / 1e6
        if not (self.shm_tensors.on_refused(message.id) or self.channels.requests.on_refused(message.id)):
            self._fail_call(message.id, request_error(message.code, message.error, retry_after=retry_after_s))
        self.shm_tensors.release(message.id, running=message.may_still_write or False)

    def fail_all(self, kind: Type[WeightdError], text: str, *, on_channels: bool = True) -> None:
        """Fail all calls in progress with an error of type `kind`, and clear the cached signatures.

        Without `on_channels`, the calls on direct channels go on.
        """
        self._metadata_by_model.clear()
        for request_id in list(self.calls):
            call = self.calls.get(request_id, _no_call)()
            if call is not None and call.channel is not None and not on_channels:
                continue
            if self.calls.pop(request_id, None) is not None and call is not None:
                call.fail(kind(text))

    # --- within -------------------------------------------------------------------------------------------------

    def _remember_metadata(self, call: PendingCall, model: ModelMetadataResponse) -> None:
        if len(self._metadata_by_model) >= _MAX_CACHED_METADATA:
            self._metadata_by_model.clear()
        # If the call names a model with several versions, the response contains the name of one of them. Store the
        # signature under the name in the call, because the next request will look for that name.
        self._metadata_by_model[call.model or model.name] = model

    def _next_id(self) -> str:
        return next(self._ids)

    def _fail_call(self, request_id: str, error: WeightdError) -> None:
        call = self.calls.pop(request_id, _no_call)()
        if call is not None:
            if call.request is not None and isinstance(error, InvalidArgument):
                # The cached signature may have caused the error: a reload may have changed the model.
                self._metadata_by_model.pop(call.request.description.model_name, None)
            call.fail(error)


def _wire_arrays(inputs: Inputs) -> Dict[str, Any]:
    """Return the inputs by name as arrays in the byte order and memory layout that the protocol requires.

    Raises:
        NeedsMetadata, InvalidArgument: as `ClientCore.prepare_infer`.
    """
    if not isinstance(inputs, dict) and not isinstance(inputs, abc.Mapping):
        raise NeedsMetadata
    arrays: Dict[str, Any] = {}
    for name, value in inputs.items():
        if type(name) is not str:
            name = arguments.parse_text("inputs: name", name)  # noqa: PLW2901 - the same name
        if value.__class__ is not _ndarray and isinstance(value, UNTYPED_TYPES):
            raise NeedsMetadata
        try:
            arrays[name] = to_wire(value)
        except InvalidArgument as error:
            raise InvalidArgument(f"input {label(name)}: {error}") from error.__cause__
    return arrays


@functools.lru_cache(maxsize=64)
def _parameters(timeout: float, priority: Optional[int], tenant: Optional[str]) -> Parameters:
    return Parameters(max(1, int(timeout * 1e6)), priority=priority, tenant=tenant)


@functools.lru_cache(maxsize=64)
def _shared_parameters(
    parameters: Parameters, inputs: Tuple[SharedInput, ...], outputs: Tuple[SharedOutput, ...]
) -> Parameters:
    regions = Regions(tuple(InputLocation(*each) for each in inputs), tuple(OutputLocation(*each) for each in outputs))
    return dataclasses.replace(parameters, regions=regions)


def _no_call() -> Optional[PendingCall]:
    """Return None, like a weak reference whose object is gone. Used when no call has the id of a message."""
    return None


def _outputs_error(call: PendingCall, error: InvalidArgument) -> WeightdError:
    """Return the error for a call whose outputs are invalid or do not match the arrays in `out`."""
    return error if isinstance(error, WrongOut) else RemoteProtocolError(f"outputs: {error}", call.id)


def _unexpected_response(call: PendingCall, message: DaemonMessage) -> RemoteProtocolError:
    text = f"expected a {call.response_type.__name__}, got a {type(message).__name__}"
    return RemoteProtocolError(text, call.id)


def _encode_checked(message: ClientMessage) -> List[Any]:
    """Encode a message whose fields come from the caller of the client.

    Raises:
        InvalidArgument: the value of a field is not valid in the protocol.
    """
    try:
        return encode(message)
    except LocalProtocolError as error:
        raise InvalidArgument(str(error)) from None
