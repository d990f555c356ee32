"""A worker's requests: each is run, and answered with what comes of it."""

from __future__ import annotations

import collections
import logging
import operator
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from weightd_common.rowtest.bits import NotBatchable
from weightd_common.rowtest.rows import SpecialFloats, rows_with_special_values
from weightd_protocol import limits
from weightd_protocol.codec import clip
from weightd_protocol.errors import Internal, InvalidArgument, RequestError
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSpec
from weightd_protocol.messages.regions import MappedRegions
from weightd_protocol.messages.worker import BatchMismatch, Predict, PredictFailed, PredictResult
from weightd_protocol.messages.worker_common import SelfTestCase
from weightd_protocol.tensors import describe_response, frame_of, from_frame, to_wire
from weightd_worker import exit_codes
from weightd_worker.batching.merge import BatchLayout, OutputSlice
from weightd_worker.batching.shadow_check import RowsDiffer, ShadowChecks
from weightd_worker.engines.engine import Arrays, Engine
from weightd_worker.engines.errors import MaybeCorrupted, ModelCorrupted, NotRun
from weightd_worker.regions import RegionTable
from weightd_worker.selftest.verifier import AnswerVerifier

_log = logging.getLogger("weightd.worker")

# Jobs of which it is remembered how they are put together, and the most parts of such a one.
_MAX_MERGED_REQUESTS = 64
_MAX_MERGED_ITEMS = 64

# Principals whose requests are run one by one. Where there are more, those of all are.
_MAX_UNBATCHABLE_PRINCIPALS = limits.MAX_TENANTS

# Requests with special values of a principal, after which its requests are not sent together with others any more: each
# costs those that come with it the time of another predict.
_MAX_SPECIAL_REQUESTS = 64

Reply = Tuple[object, Sequence[Any]]
"""A message, and its tensors."""

PredictItem = Tuple[Predict, Sequence[Any]]
"""A request, and its tensors that have frames."""

_layout_of = operator.attrgetter("shape", "dtype", "flags.c_contiguous")


class Predictor:
    """Runs requests on an engine that has built the model.

    Args:
        engine: the engine.
        reply: sends messages to who has asked, which go together.

    Attributes:
        regions: the memory of clients that is mapped here.
        verifier: what is known of right answers; None before that is known.
    """

    def __init__(self, engine: Engine, reply: Callable[..., None]) -> None:
        self.regions = RegionTable()
        self.verifier: Optional[AnswerVerifier] = None
        self._engine = engine
        self._reply = reply
        # The last answer that was sent as the engine gave it, and what it was an answer to.
        self._last_layout: Tuple[Any, ...] = ()
        self._last_description: Any = None
        self._merged_requests: Dict[Tuple[int, ...], BatchLayout] = {}
        self._allowed_batch_sizes: Sequence[int] = ()
        # Whether requests that come together are run so, and by what it is tested that their answers are the same.
        self._is_batching = True
        self._special_kinds: Sequence[SpecialFloats] = ()
        # How many requests with special values have come of each principal.
        self._special_counts: collections.Counter[int] = collections.Counter()
        # Why requests of these principals are not run together with others.
        self._unbatchable_principals: Dict[int, str] = {}
        self._shadow_checks: Optional[ShadowChecks] = None

    def predict(self, order: Predict, frames: Sequence[bytes]) -> int:
        """Run the model on what has come, and answer; return the status with which the process is to end, or OK."""
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
            self._reply((PredictResult(order.request, description, placed), rest))
        except RequestError as error:
            return self._fail(order, error, is_leaving=not self._is_model_intact(error))
        except Exception as error:  # noqa: BLE001 - the request must be answered, whatever a library raises
            return self._fail_unexpected(order, error)
        return exit_codes.OK

    def _verify_outputs(
        self, request_description: RequestDescription, inputs: Arrays, outputs: Arrays
    ) -> Tuple[Arrays, ResponseDescription]:
        """What is sent of the engine's answer, and its description.

        All that it takes to find out is known of the request's description, and the names and forms of the outputs.
        Most requests are like the one before: what need not be changed is remembered.
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

    def configure_batching(
        self,
        max_rows: int,
        allowed_batch_sizes: Sequence[int],
        *,
        is_exact: bool,
        case: Optional[SelfTestCase] = None,
        compared_rows: int = 0,
        special_kinds: Sequence[str] = (),
    ) -> None:
        """The model is built and attached.

        Args:
            max_rows: of one predict at most.
            allowed_batch_sizes: the only numbers of rows that the model takes; none: any.
            is_exact: whether the answers to requests that are run together have to be those of each alone, bit for bit.
            case: shapes of inputs; with these, but for the rows, the holder has compared rows.
            compared_rows: each number of rows up to this one.
            special_kinds: kinds of floats: requests that have such values are run alone, if answers have to be the
                same.
        """
        self._special_kinds = [SpecialFloats(each) for each in special_kinds] if is_exact else []
        self._allowed_batch_sizes = sorted(allowed_batch_sizes)
        self._shadow_checks = (
            ShadowChecks(self._engine, max_rows, self._allowed_batch_sizes, case, compared_rows) if is_exact else None
        )

    @property
    def is_shadow_check_due(self) -> bool:
        """Whether requests that were run together are to be run again alone, when nothing else is to be done."""
        return self._shadow_checks is not None and self._shadow_checks.is_due

    def run_shadow_check(self) -> None:
        """Run them, and nothing together any more if their answers differ.

        Raises:
            ModelCorrupted: the model is.
        """
        if self._shadow_checks is not None:
            try:
                self._shadow_checks.recheck()
            except (NotBatchable, InvalidArgument) as error:
                self._on_rows_differ(error)

    def predict_batch(self, items: Sequence[PredictItem], rows: int = 0, principal_ids: Tuple[int, ...] = ()) -> int:
        """Run the model once on the rows of several requests, and answer each; return as `predict` does.

        What cannot be run or divided so is run one by one: then only that fails whose fault it is.

        Args:
            items: the requests, in their order.
            rows: to run it on, if they have less; 0: as many as they have.
            principal_ids: whose each of them is, if it is tested that each has the answer that it has alone.
        """
        try:
            merged = self._merged_request(items, rows)
            if len(items) > 1 and not (
                self._is_batching and (self._shadow_checks is None or self._shadow_checks.can_batch(merged))
            ):
                return self._predict_each(items)
            inputs = merged.merge_inputs([self._input_bytes(order, frames) for order, frames in items])
            if len(items) > 1 and (self._unbatchable_principals or self._special_kinds):
                alone_indices = self._indices_to_run_alone(merged, inputs, principal_ids)
                if alone_indices:
                    return self._predict_apart(alone_indices, items, principal_ids)
            outputs, slices = self._run(merged, inputs, items, principal_ids)
            return self._reply_slices(items, slices, outputs)
        except NotBatchable as error:
            return self._on_not_batchable(items, error)
        except RequestError as error:
            return self._on_request_error(items, error)
        except Exception as error:  # noqa: BLE001 - as for one
            return self._fail_unexpected(items[0][0], error)

    def _indices_to_run_alone(
        self, merged: BatchLayout, inputs: Arrays, principal_ids: Tuple[int, ...]
    ) -> Sequence[int]:
        """Return the positions of requests that are run alone, because of whose they are or because of their values."""
        found = {index for index, each in enumerate(principal_ids) if each in self._unbatchable_principals}
        # The daemon does not know of these principals yet, or is another one than that which does.
        for principal in sorted({principal_ids[index] for index in found}):
            self._reply((BatchMismatch(self._unbatchable_principals[principal], (principal,)), ()))
        if self._special_kinds:
            names = [each.name for each in merged.specs]
            special = merged.items_with_rows(rows_with_special_values(inputs, names, self._special_kinds))
            found.update(special)
            if special and principal_ids:
                self._count_special([principal_ids[index] for index in special])
        return sorted(found)

    def _count_special(self, principal_ids: Sequence[int]) -> None:
        if len(self._special_counts) >= _MAX_UNBATCHABLE_PRINCIPALS:
            self._special_counts.clear()
        self._special_counts.update(principal_ids)
        exceeding = [
            each for each in dict.fromkeys(principal_ids) if self._special_counts[each] >= _MAX_SPECIAL_REQUESTS
        ]
        if exceeding and len(self._unbatchable_principals) < _MAX_UNBATCHABLE_PRINCIPALS:
            kinds = ", ".join(each.value for each in self._special_kinds)
            self._on_rows_differ(RowsDiffer(f"many have values that are run alone ({kinds})", exceeding))

    def _predict_apart(
        self, alone_indices: Sequence[int], items: Sequence[PredictItem], principal_ids: Tuple[int, ...]
    ) -> int:
        """Run some of the requests one by one, and the others together."""
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
        # Another thread may learn others while this one runs the model again.
        slices = merged.slices
        if self._shadow_checks is not None and len(items) > 1:
            self._shadow_checks.check(merged, inputs, outputs, principal_ids)
        return outputs, slices

    def _reply_slices(self, items: Sequence[PredictItem], slices: Sequence[OutputSlice], outputs: Arrays) -> int:
        """Give each request what it has of the answer."""
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

    def stop_batching(self, reason: str) -> None:
        """Run nothing together any more, for the reason that `reason` gives."""
        if self._is_batching:
            _log.warning("batching is off: %s", reason)
            self._is_batching = False
            self._reply((BatchMismatch(clip(reason)), ()))

    def _on_rows_differ(self, error: Exception) -> None:
        """Run requests of the principals whose rows differ alone from now on; all, where these are not known."""
        note = clip(str(error))
        principal_ids = error.principal_ids if isinstance(error, RowsDiffer) else ()
        new = [each for each in principal_ids if each not in self._unbatchable_principals]
        if not principal_ids or len(self._unbatchable_principals) + len(new) > _MAX_UNBATCHABLE_PRINCIPALS:
            self.stop_batching(note)
            return
        if not new:
            return  # that was run before it was known
        _log.warning("requests of %d principal_ids are not batched any more: %s", len(new), note)
        self._unbatchable_principals = {**self._unbatchable_principals, **dict.fromkeys(new, note)}
        self._reply((BatchMismatch(note, tuple(new)), ()))

    def _on_not_batchable(self, items: Sequence[PredictItem], error: NotBatchable) -> int:
        if len(items) == 1:
            return self._fail(items[0][0], InvalidArgument(str(error)), is_leaving=False)
        self._on_rows_differ(error)
        return self._predict_each(items)

    def _on_request_error(self, items: Sequence[PredictItem], error: RequestError) -> int:
        if not self._is_model_intact(error):
            return self._fail(items[0][0], error, is_leaving=True)
        if len(items) == 1:
            return self._fail(items[0][0], error, is_leaving=False)
        return self._predict_each(items)

    def _predict_each(self, items: Sequence[PredictItem]) -> int:
        for order, frames in items:
            status = self.predict_batch([(order, frames)]) if self._allowed_batch_sizes else self.predict(order, frames)
            if status != exit_codes.OK:
                return status
        return exit_codes.OK

    def _merged_request(self, items: Sequence[PredictItem], rows: int) -> BatchLayout:
        # The same description is the same object, for as long as something has it.
        key = (rows, *[id(order.description) for order, _ in items])
        merged = self._merged_requests.get(key)
        if merged is None:
            merged = BatchLayout([order.description for order, _ in items], rows, self._allowed_batch_sizes)
            if len(items) <= _MAX_MERGED_ITEMS:
                if len(self._merged_requests) == _MAX_MERGED_REQUESTS:
                    self._merged_requests.pop(next(iter(self._merged_requests)))
                self._merged_requests[key] = merged
        return merged

    def _learn_outputs(self, merged: BatchLayout, inputs: Arrays, outputs: Arrays, form: Tuple[Any, ...]) -> Arrays:
        """What is divided of the engine's answer; how it is, is remembered."""
        if self.verifier is not None:
            outputs = self.verifier.verify(inputs, outputs)
        arrays = _to_wire_arrays(outputs)
        merged.learn_slices(arrays)
        merged.output_layout = form if all(arrays[name] is outputs[name] for name in outputs) else ()
        return arrays

    def _input_bytes(self, order: Predict, frames: Sequence[Any]) -> Sequence[Any]:
        """Return the bytes of the inputs of a request; those in regions are copied."""
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
        """The inputs of a request of which some are in regions."""
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
        """Write outputs where there is room for them; return their positions, and the frames of the others."""
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
        """Return whether the model answers as before after a refused predict, as far as can be seen."""
        if isinstance(error, ModelCorrupted):
            return False
        return isinstance(error, NotRun) or self.verifier is None or not self.verifier.is_corrupted()

    def _fail_unexpected(self, order: Predict, error: Exception) -> int:
        _log.exception("request %d", order.request)
        return self._fail(order, Internal(f"{type(error).__name__}: {error}"), is_leaving=True)

    def _fail(self, order: Predict, error: RequestError, *, is_leaving: bool) -> int:
        if isinstance(error, MaybeCorrupted):
            # The one who is to blame is told of. This one is run again, where the daemon has it next.
            return exit_codes.MODEL_CORRUPTED
        self._reply((PredictFailed(order.request, error.code, clip(str(error)), is_leaving), ()))
        return exit_codes.MODEL_CORRUPTED if is_leaving else exit_codes.OK


def _to_arrays(specs: Sequence[TensorSpec], frames: Sequence[bytes]) -> Arrays:
    """The received tensors as an engine wants them: the frames are native and in C order already."""
    inputs: Arrays = {}
    for spec, frame in zip(specs, frames):
        array = from_frame(spec, frame)
        inputs[spec.name] = array if array.flags.aligned else array.copy()
    return inputs


def _to_wire_arrays(outputs: Arrays) -> Arrays:
    """What the wire cannot carry is this request's error: it chose the sizes. A frame too long costs the connection."""
    arrays: Arrays = {}
    for name, array in outputs.items():
        try:
            arrays[name] = to_wire(array)
        except InvalidArgument as error:
            raise InvalidArgument(f"output {name} of shape {list(array.shape)} cannot be sent: {error}") from None
    return arrays
