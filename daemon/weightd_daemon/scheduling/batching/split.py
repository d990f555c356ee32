"""Split requests: the rows of a split request run in separate batches, whose results are joined."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from weightd_daemon.scheduling.batching.policy import BatchingPolicy, BatchKey
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.tensor_location import NO_LOCATIONS, TensorLocation, TensorLocations
from weightd_protocol import limits
from weightd_protocol.errors import Internal, ResourceExhausted
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSpec
from weightd_protocol.messages.worker import PredictResult


class PartialResult(NamedTuple):
    """The result for some rows of a split request.

    Attributes:
        rows: the number of rows.
        description: the description of the outputs.
        frames: the bytes of each output, or their location in the client's shared memory.
    """

    rows: int
    description: ResponseDescription
    frames: Sequence[Any]


def join_results(
    partials: Sequence[PartialResult], row_outputs: Collection[str]
) -> tuple[ResponseDescription, list[Any]]:
    """Join the outputs of partial results; return their description, and the frame or location of each output.

    Args:
        partials: the partial results in the order of their rows; at least one.
        row_outputs: the outputs whose first dimension is the number of rows. All other outputs must be equal in all
            partial results.

    Raises:
        Internal: the partial results do not fit together. The text names the output, the expected and the received
            value.
    """
    first = partials[0].description
    total = sum(partial.rows for partial in partials)
    outputs: list[TensorSpec] = []
    frames: list[Any] = []
    for index, spec in enumerate(first.outputs):
        has_rows = spec.name in row_outputs
        for partial in partials:
            _check_output(spec, partial, index, has_rows=has_rows, frame=partials[0].frames[index])
        if has_rows:
            outputs.append(dataclasses.replace(spec, shape=(total, *spec.shape[1:])))
            frames.append(_join_frames([partial.frames[index] for partial in partials]))
        else:
            outputs.append(spec)
            frames.append(partials[0].frames[index])
    return ResponseDescription(first.model_name, tuple(outputs)), frames


def _join_frames(frames: Sequence[Any]) -> Any:
    """Return the location of all frames if they are contiguous in the client's memory, else their joined bytes."""
    first, nbytes = frames[0], 0
    for each in frames:
        if not (isinstance(each, TensorLocation) and each == first.subrange(nbytes, len(each))):
            return b"".join([each[:] for each in frames])
        nbytes += len(each)
    return first.subrange(0, nbytes)


def _check_output(spec: TensorSpec, partial: PartialResult, index: int, *, has_rows: bool, frame: Any) -> None:
    actual = partial.description.outputs[index] if index < len(partial.description.outputs) else None
    expected = dataclasses.replace(spec, shape=(partial.rows, *spec.shape[1:])) if has_rows else spec
    if actual != expected:
        raise Internal(
            f"output {spec.name} of a partial result: expected {_describe_output(expected)}, "
            f"got {_describe_output(actual)}"
        )
    if not has_rows and partial.frames[index][:] != frame[:]:
        raise Internal(f"output {spec.name} has no rows, and differs between the partial results of the request")


def _describe_output(spec: TensorSpec | None) -> str:
    return "none" if spec is None else f"{spec.name} {spec.datatype} {list(spec.shape)}"


class SplitRequest:
    """The state of a split request: the rows that no slot has received yet, and the results so far.

    Attributes:
        request: the request.
        policy: the batching policy of the slots that may run parts of the request.
        batch_key: the batch key of the request.
        is_ended: whether the request needs no further results.
    """

    def __init__(self, request: Request, policy: BatchingPolicy, batch_key: BatchKey) -> None:
        self.request = request
        self.policy = policy
        self.batch_key = batch_key
        self.is_ended = False
        # Each part writes its rows directly to these locations in the client's memory. Outputs that overlap an input
        # are not written there, because another part may still have to read the input.
        self._output_locations = {
            index: output_location
            for index, output_location in request.locations.outputs.items()
            if output_location.nbytes % batch_key.rows == 0
            and not any(map(output_location.overlaps, request.locations.inputs.values()))
        }
        # The ranges of pending rows in ascending order: the first row, and the row after the last one.
        self._pending_ranges = [(0, batch_key.rows)]
        # The partial results, by the index of their first row.
        self._partial_results: dict[int, PartialResult] = {}
        self._answered_rows = 0
        self._nbytes = 0
        self._descriptions: dict[int, RequestDescription] = {}

    @property
    def is_pending(self) -> bool:
        """Whether there are rows that no slot has received yet."""
        return bool(self._pending_ranges)

    @property
    def next_rows(self) -> int:
        """The maximum number of rows that `take_rows` returns next. There must be pending rows."""
        first, end = self._pending_ranges[0]
        return end - first

    def take_rows(self, rows: int) -> tuple[int, int]:
        """Take at most `rows` pending rows; return the index of the first one and their number."""
        first, end = self._pending_ranges.pop(0)
        rows = min(rows, end - first)
        if first + rows < end:
            self._pending_ranges.insert(0, (first + rows, end))
        return first, rows

    def put_back(self, first: int, rows: int) -> None:
        """Make rows pending again that a slot has received but does not run any more."""
        self._pending_ranges.append((first, first + rows))
        self._pending_ranges.sort()

    def description_of(self, rows: int) -> RequestDescription:
        """Return the description of a part of the request that has `rows` rows."""
        description = self._descriptions.get(rows)
        if description is None:
            original = self.request.description
            inputs = tuple(
                dataclasses.replace(each, shape=(rows, *each.shape[1:])) if self._has_rows(each) else each
                for each in original.inputs
            )
            description = self._descriptions[rows] = dataclasses.replace(original, inputs=inputs)
        return description

    def tensors_of(self, first: int, rows: int) -> tuple[list[Any], TensorLocations]:
        """Return the input frames of these rows, and the locations of their inputs and outputs in shared memory."""
        locations = self.request.locations
        remaining_frames = iter(self.request.frames)
        frames: list[Any] = []
        input_locations: dict[int, TensorLocation] = {}
        for index, spec in enumerate(self.request.description.inputs):
            row_bytes = spec.nbytes // self.batch_key.rows
            location = locations.inputs.get(index)
            if location is None:
                frame = next(remaining_frames)
                begin = first * row_bytes
                frames.append(memoryview(frame)[begin : begin + rows * row_bytes] if self._has_rows(spec) else frame)
            else:
                input_locations[index] = (
                    self._location_of_rows(location, first, rows) if self._has_rows(spec) else location
                )
        output_locations = {
            index: self._location_of_rows(output_location, first, rows)
            for index, output_location in self._output_locations.items()
        }
        return frames, TensorLocations(
            input_locations, output_locations
        ) if input_locations or output_locations else NO_LOCATIONS

    def add_result(
        self, first: int, rows: int, result: PredictResult, frames: Sequence[Any]
    ) -> tuple[PredictResult, list[Any]] | None:
        """Add the result of some rows; return the joined result and its frames once all rows have results, else None.

        Raises:
            RequestError: the results cannot be joined.
        """
        placed, remaining_frames = result.shared_outputs or (), iter(frames)
        if not self._output_locations.keys() >= {*placed}:
            raise Internal(
                f"outputs {list(placed)} of a split request: expected frames where no output memory was offered, "
                "got none"
            )
        # Copy the frames: they may be views of the receive buffer, which the next message overwrites.
        output_contents = [
            self._location_of_rows(self._output_locations[index], first, rows).subrange(0, nbytes)
            if index in placed
            else bytes(next(remaining_frames))
            for index, nbytes in enumerate(result.description.sizes)
        ]
        partial = PartialResult(rows, result.description, output_contents)
        self._partial_results[first] = partial
        self._answered_rows += rows
        self._nbytes += sum(map(len, partial.frames))
        if self._nbytes > limits.MAX_FRAME_BYTES:
            raise ResourceExhausted(f"the answer has more than {limits.MAX_FRAME_BYTES} bytes")
        if self._answered_rows < self.batch_key.rows:
            return None
        description, outputs = join_results(
            [self._partial_results[each] for each in sorted(self._partial_results)], self.policy.outputs
        )
        shared_indices = tuple(index for index, each in enumerate(outputs) if isinstance(each, TensorLocation))
        frames = [each for index, each in enumerate(outputs) if index not in shared_indices]
        return PredictResult(self.request.number, description, shared_indices or None), frames

    def _location_of_rows(self, location: TensorLocation, first: int, rows: int) -> TensorLocation:
        """Return the location of these rows, which is a part of the tensor's location."""
        row_bytes = location.nbytes // self.batch_key.rows
        return location.subrange(first * row_bytes, rows * row_bytes)

    def _has_rows(self, spec: TensorSpec) -> bool:
        return spec.name in self.policy.inputs
