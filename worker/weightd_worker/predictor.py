"""Runs the inference requests that a worker receives, and sends the results to the daemon."""

from __future__ import annotations

import abc
import logging
import operator
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from weightd_common.rowtest.bits import NotBatchable
from weightd_protocol.codec import clip
from weightd_protocol.errors import Internal, InvalidArgument, RequestError
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSpec
from weightd_protocol.messages.regions import MappedRegions
from weightd_protocol.messages.worker import Predict, PredictFailed, PredictResult
from weightd_protocol.tensors import describe_response, frame_of, from_frame, to_wire
from weightd_worker import exit_codes
from weightd_worker.batch_guard import BatchGuard
from weightd_worker.batching import BatchLayout, OutputSlice
from weightd_worker.engines.engine import Arrays, Engine, MaybeCorrupted, ModelCorrupted, NotRun
from weightd_worker.regions import RegionTable
from weightd_worker.selftest.selftest import AnswerVerifier

_log = logging.getLogger("weightd.worker")

# Maximum number of stored batch layouts, and maximum number of requests in a batch whose layout is stored.
_MAX_MERGED_REQUESTS = 64
_MAX_MERGED_ITEMS = 64

Reply = Tuple[object, Sequence[Any]]
"""A message to the daemon, and the tensors that are sent with it."""

SendReply = Callable[..., Any]
"""A function that sends its arguments, which are replies, together."""

PredictItem = Tuple[Predict, Sequence[Any]]
"""A request, and its tensors that have arrived in frames and not in shared memory."""

_layout_of = operator.attrgetter("shape", "dtype", "flags.c_contiguous")


class RequestRunner(abc.ABC):
    """Interface of an object that runs the requests of a process and sends a reply to each request.

    Attributes:
        regions: the regions of clients' shared memory that this process has mapped.
        step: the step of the last request in a rank group or a model group; 0 in other processes.
    """

    def __init__(self, regions: RegionTable) -> None:
        self.regions = regions
        self.step = 0

    @abc.abstractmethod
    def predict(self, order: Predict, frames: Sequence[Any]) -> int:
        """Run one request. Return OK, or the exit status if the process must exit."""

    @abc.abstractmethod
    def predict_batch(self, items: Sequence[PredictItem], rows: int = 0, principal_ids: Tuple[int, ...] = ()) -> int:
        """Run several requests in one predict. Return OK, or the exit status if the process must exit.

        Args:
            items: the requests, in their order in the batch.
            rows: the minimum number of rows of the batch; 0 for the number of rows that the requests have.
            principal_ids: the principal of each request; empty if answers in a batch are not compared with answers
                alone.
        """


class Predictor(RequestRunner):
    """Runs requests on one engine, which must have built its model.

    Args:
        engine: the engine.
        reply: function that sends replies to the daemon.
        regions: the regions of clients' shared memory that this process has mapped; None for a new table.

    Attributes:
        verifier: checks answers against the signature and the self-test; None before the self-test has run.
        batch_guard: decides which requests may share a predict.
    """

    def __init__(self, engine: Engine, reply: SendReply, regions: Optional[RegionTable] = None) -> None:
        super().__init__(RegionTable() if regions is None else regions)
        self.verifier: Optional[AnswerVerifier] = None
        self.batch_guard = BatchGuard(engine, reply)
        self._engine = engine
        self._reply = reply
        # The layout and the description of the last answer that could be sent exactly as the engine returned it. They
        # are used again if the next answer has the same layout.
        self._last_layout: Tuple[Any, ...] = ()
        self._last_description: Any = None
        self._merged_requests: Dict[Tuple[int, ...], BatchLayout] = {}

    def predict(self, order: Predict, frames: Sequence[Any], reply: Optional[SendReply] = None) -> int:
        """Run one request, and send its result or error. Return OK, or the exit status if the process must exit.

        Args:
            order: the request.
            frames: the tensors of the request that have arrived in frames.
            reply: function that sends the reply; None to send it to the daemon.
        """
        reply = reply or self._reply
        try:
            request_description, regions, placed = order.description, order.regions, None
            inputs = self._input_arrays(order, frames)
            outputs = self._engine.predict(inputs)
            if (request_description, *outputs, *map(_layout_of, outputs.values())) == self._last_layout:
                description = self._last_description
            else:
                outputs, description = self._verify_outputs(request_description, inputs, outputs)
            rest = [*map(frame_of, outputs.values())]
            if regions is not None:
                placed, rest = self._write_to_regions(regions, rest)
            reply((PredictResult(order.request, description, placed), rest))
        except RequestError as error:
            return self._fail(order, error, is_leaving=not self._is_model_intact(error), reply=reply)
        except Exception as error:  # noqa: BLE001 - the request must be answered, whatever a library raises
            return self._fail_unexpected(order, error, reply)
        return exit_codes.OK

    def _verify_outputs(
        self, request_description: RequestDescription, inputs: Arrays, outputs: Arrays
    ) -> Tuple[Arrays, ResponseDescription]:
        """Check the outputs of a predict. Return the outputs to send and their description.

        Check and description depend only on the request's description and on the names and layouts of the outputs. Most
        requests equal the request before in this respect, so the last description is stored and used again.
        """
        form = (request_description, *outputs, *map(_layout_of, outputs.values()))
        if self.verifier is not None:
            outputs = self.verifier.verify(inputs, outputs)
        arrays = _to_wire_arrays(
            outputs
            if request_description.outputs is None
            else {name: outputs[name] for name in request_description.outputs}
        )
        description = describe_response(request_description.model_name, arrays)
        if request_description.outputs is None and all(arrays[name] is outputs[name] for name in outputs):
            self._last_layout, self._last_description = form, description
        return arrays, description

    def predict_batch(self, items: Sequence[PredictItem], rows: int = 0, principal_ids: Tuple[int, ...] = ()) -> int:
        """Run the model once on the rows of several requests, and reply to each.

        If the model rejects the merged inputs, or the outputs cannot be divided among the requests, each request runs
        alone, so that only an invalid request fails.
        """
        try:
            merged = self._merged_request(items, rows)
            if len(items) > 1 and not self.batch_guard.can_batch(merged):
                return self._predict_each(items)
            inputs = merged.merge_inputs([self._input_bytes(order, frames) for order, frames in items])
            if len(items) > 1:
                alone_indices = self.batch_guard.indices_to_run_alone(merged, inputs, principal_ids)
                if alone_indices:
                    return self._predict_apart(alone_indices, items, principal_ids)
            outputs, slices = self._run(merged, inputs, items, principal_ids)
            return self._reply_slices(items, slices, outputs)
        except NotBatchable as error:
            return self._on_not_batchable(items, error)
        except RequestError as error:
            return self._on_request_error(items, error)
        except Exception as error:  # noqa: BLE001 - the requests must be answered, whatever a library raises
            return self._fail_unexpected(items[0][0], error)

    def _predict_apart(
        self, alone_indices: Sequence[int], items: Sequence[PredictItem], principal_ids: Tuple[int, ...]
    ) -> int:
        """Run the requests at `alone_indices` one by one, after all other requests have run together."""
        batched_indices = [index for index in range(len(items)) if index not in alone_indices]
        batched_principal_ids = tuple([principal_ids[index] for index in batched_indices]) if principal_ids else ()
        status = (
            self.predict_batch([items[index] for index in batched_indices], 0, batched_principal_ids)
            if batched_indices
            else exit_codes.OK
        )
        return self._predict_each([items[index] for index in alone_indices]) if status == exit_codes.OK else status

    def _run(
        self, merged: BatchLayout, inputs: Arrays, items: Sequence[PredictItem], principal_ids: Tuple[int, ...] = ()
    ) -> Tuple[Arrays, Sequence[OutputSlice]]:
        outputs = self._engine.predict(inputs)
        form = (*outputs, *map(_layout_of, outputs.values()))
        if form != merged.output_layout:
            outputs = self._learn_outputs(merged, inputs, outputs, form)
        # Take the slices now, because `check` may run the model again, and another thread may replace the slices
        # meanwhile.
        slices = merged.slices
        if len(items) > 1:
            self.batch_guard.check(merged, inputs, outputs, principal_ids)
        return outputs, slices

    def _reply_slices(self, items: Sequence[PredictItem], slices: Sequence[OutputSlice], outputs: Arrays) -> int:
        """Send the reply to each request, with the request's slice of the outputs."""
        all_bytes = [*map(frame_of, outputs.values())]
        results: List[Reply] = []
        for (order, _), (description, byte_ranges) in zip(items, slices):
            placed, rest = None, [all_bytes[output][begin:end] for output, begin, end in byte_ranges]
            try:
                if order.regions is not None:
                    placed, rest = self._write_to_regions(order.regions, rest)
                results.append((PredictResult(order.request, description, placed), rest))
            except RequestError as error:
                self._fail(order, error, is_leaving=False)
        self._reply(*results)
        return exit_codes.OK

    def _on_not_batchable(self, items: Sequence[PredictItem], error: NotBatchable) -> int:
        if len(items) == 1:
            return self._fail(items[0][0], InvalidArgument(str(error)), is_leaving=False)
        self.batch_guard.on_rows_differ(error)
        return self._predict_each(items)

    def _on_request_error(self, items: Sequence[PredictItem], error: RequestError) -> int:
        if not self._is_model_intact(error):
            return self._fail(items[0][0], error, is_leaving=True)
        if len(items) == 1:
            return self._fail(items[0][0], error, is_leaving=False)
        return self._predict_each(items)

    def _predict_each(self, items: Sequence[PredictItem]) -> int:
        for order, frames in items:
            status = (
                self.predict_batch([(order, frames)])
                if self.batch_guard.allowed_batch_sizes
                else self.predict(order, frames)
            )
            if status != exit_codes.OK:
                return status
        return exit_codes.OK

    def _merged_request(self, items: Sequence[PredictItem], rows: int) -> BatchLayout:
        # The object ids can be the key: while a description object exists, the decoder returns the same object for
        # equal descriptions, and a stored layout refers to its descriptions.
        key = (rows, *[id(order.description) for order, _ in items])
        merged = self._merged_requests.get(key)
        if merged is None:
            merged = BatchLayout([order.description for order, _ in items], rows, self.batch_guard.allowed_batch_sizes)
            if len(items) <= _MAX_MERGED_ITEMS:
                if len(self._merged_requests) == _MAX_MERGED_REQUESTS:
                    self._merged_requests.pop(next(iter(self._merged_requests)))
                self._merged_requests[key] = merged
        return merged

    def _learn_outputs(self, merged: BatchLayout, inputs: Arrays, outputs: Arrays, form: Tuple[Any, ...]) -> Arrays:
        """Compute the slices for outputs with a new layout, and return the outputs that are divided by them."""
        if self.verifier is not None:
            outputs = self.verifier.verify(inputs, outputs)
        arrays = _to_wire_arrays(outputs)
        merged.learn_slices(arrays)
        merged.output_layout = form if all(arrays[name] is outputs[name] for name in outputs) else ()
        return arrays

    def _input_bytes(self, order: Predict, frames: Sequence[Any]) -> Sequence[Any]:
        """Return the bytes of each input of a request. Inputs in shared memory are copied."""
        if order.regions is None:
            return frames
        sizes, left = order.description.sizes, iter(frames)
        copies = {
            location.tensor_index: self.regions.read(location.region, location.offset, sizes[location.tensor_index])
            for location in order.regions.inputs
        }
        return [copies[index] if index in copies else next(left) for index in range(len(sizes))]

    def _input_arrays(self, order: Predict, frames: Sequence[Any]) -> Arrays:
        regions = order.regions
        return (
            _to_arrays(order.description.inputs, frames)
            if regions is None
            else self._mapped_inputs(order, regions, frames)
        )

    def _mapped_inputs(self, order: Predict, regions: MappedRegions, frames: Sequence[bytes]) -> Arrays:
        """Return the inputs of a request that has inputs in shared memory. These inputs are copied."""
        specs, sizes = order.description.inputs, order.description.sizes
        inputs: Arrays = {}
        for location in regions.inputs:
            spec = specs[location.tensor_index]
            copy = self.regions.read(location.region, location.offset, sizes[location.tensor_index])
            inputs[spec.name] = from_frame(spec, copy)
        if frames:
            inputs.update(_to_arrays([spec for spec in specs if spec.name not in inputs], frames))
        return inputs

    def _write_to_regions(
        self, regions: MappedRegions, frames: List[Any]
    ) -> Tuple[Optional[Tuple[int, ...]], List[Any]]:
        """Write outputs to the client's shared memory if they fit.

        Return two values: the positions of the written outputs (None if none was written), and the frames of all other
        outputs.
        """
        placed: List[int] = []
        for location in regions.outputs:
            index = location.tensor_index
            if index < len(frames) and self.regions.write(
                frames[index], location.region, location.offset, location.nbytes
            ):
                placed.append(index)
        if not placed:
            return None, frames
        if len(placed) == len(frames):
            return tuple(placed), []
        return tuple(placed), [frame for index, frame in enumerate(frames) if index not in placed]

    def _is_model_intact(self, error: RequestError) -> bool:
        """Return whether the model seems to be intact after a predict raised `error`.

        If the type of the error does not show this, the method runs the self-test. A model without a self-test counts
        as intact.
        """
        if isinstance(error, ModelCorrupted):
            return False
        return isinstance(error, NotRun) or self.verifier is None or not self.verifier.is_corrupted()

    def _fail_unexpected(self, order: Predict, error: Exception, reply: Optional[SendReply] = None) -> int:
        _log.exception("request %d failed", order.request)
        return self._fail(order, Internal(f"{type(error).__name__}: {error}"), is_leaving=True, reply=reply)

    def _fail(self, order: Predict, error: RequestError, *, is_leaving: bool, reply: Optional[SendReply] = None) -> int:
        if isinstance(error, MaybeCorrupted):
            # Another request has corrupted the model. When the daemon receives the reply to that request, it runs this
            # request in another process. So send no reply to this request.
            return exit_codes.MODEL_CORRUPTED
        (reply or self._reply)((PredictFailed(order.request, error.code, clip(str(error)), is_leaving), ()))
        return exit_codes.MODEL_CORRUPTED if is_leaving else exit_codes.OK


def _to_arrays(specs: Sequence[TensorSpec], frames: Sequence[bytes]) -> Arrays:
    """Return the received tensors as aligned arrays. Their bytes are already in native byte order and C order."""
    inputs: Arrays = {}
    for spec, frame in zip(specs, frames):
        array = from_frame(spec, frame)
        inputs[spec.name] = array if array.flags.aligned else array.copy()
    return inputs


def _to_wire_arrays(outputs: Arrays) -> Arrays:
    """Convert outputs to the form in which the protocol sends them.

    Raises:
        InvalidArgument: the protocol cannot carry an output, for example because it is too large. The request has
            caused this by the sizes of its inputs.
    """
    arrays: Arrays = {}
    for name, array in outputs.items():
        try:
            arrays[name] = to_wire(array)
        except InvalidArgument as error:
            raise InvalidArgument(f"output {name} of shape {list(array.shape)} cannot be sent: {error}") from None
    return arrays
