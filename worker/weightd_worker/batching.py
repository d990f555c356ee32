"""Layout of a batch: merges the rows of several requests into one set of inputs, and divides the outputs among them.

A row is one index of a tensor's first dimension. Inputs are copied once; outputs are not copied.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Sequence, Tuple

from weightd_common.rowtest.bits import check_rows
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSpec
from weightd_protocol.tensors import describe_response, from_frame
from weightd_worker.engines.engine import Arrays


class OutputSlice(NamedTuple):
    """The part of a batch's outputs that belongs to one request.

    Attributes:
        description: the description of the request's outputs, which is sent to the client.
        byte_ranges: for each output of the request: the position of this output among the batch's outputs, and the
            offsets of the request's first byte and after its last byte in the batch's output.
    """

    description: ResponseDescription
    byte_ranges: Tuple[Tuple[int, int, int], ...]


class BatchLayout:
    """How requests with certain descriptions (names, datatypes and shapes) form a batch.

    A layout does not contain tensors, so it is used again for later requests with the same descriptions.

    Args:
        descriptions: the descriptions of the requests, in their order in the batch.
        min_rows: the minimum number of rows of the batch. If the requests have fewer, rows are added.
        allowed_batch_sizes: the only numbers of rows that the model supports, in ascending order; empty for any number.

    Attributes:
        row_counts: the number of rows of each request.
        total_rows: the number of rows of the batch, including added rows.
        specs: names, datatypes and shapes of the merged inputs.
        output_layout: the layout of the outputs for which `slices` was computed; () before that. The caller sets it.
        slices: the part of the outputs for each request.
        is_tested: whether it is known that each request gets the same answer in such a batch as alone.

    Raises:
        InvalidArgument: the requests differ in more than their number of rows, or an input has no rows.
    """

    __slots__ = (
        "_item_positions",
        "descriptions",
        "is_tested",
        "output_layout",
        "row_counts",
        "slices",
        "specs",
        "total_rows",
    )

    def __init__(
        self, descriptions: Sequence[RequestDescription], min_rows: int = 0, allowed_batch_sizes: Sequence[int] = ()
    ) -> None:
        self.descriptions = tuple(descriptions)
        self.row_counts = [_row_count(each.inputs) for each in self.descriptions]
        used = max(min_rows, sum(self.row_counts))
        self.total_rows = next((size for size in allowed_batch_sizes if size >= used), used)
        first = self.descriptions[0].inputs
        self.specs = tuple([TensorSpec(each.name, each.datatype, (self.total_rows, *each.shape[1:])) for each in first])
        # For each input of the batch, the position of this input among the inputs of each request.
        self._item_positions = [[_position_of(each, spec) for each in self.descriptions] for spec in first]
        self.output_layout: Tuple[Any, ...] = ()
        self.slices: List[OutputSlice] = []
        self.is_tested = False

    def merge_inputs(self, item_frames: Sequence[Sequence[Any]]) -> Arrays:
        """Return the merged inputs of the batch. Added rows are copies of the last row.

        The merged inputs are always copies, because a client may change tensors in shared memory at any time.

        Args:
            item_frames: for each request, the bytes of each of its inputs.

        Raises:
            InvalidArgument: the bytes of an input do not fit its description (`from_frame`).
        """
        inputs: Arrays = {}
        surplus = self.total_rows - sum(self.row_counts)
        for spec, positions in zip(self.specs, self._item_positions):
            arrays = [part[position] for part, position in zip(item_frames, positions)]
            if surplus:
                arrays += [_last_row(spec, arrays)] * surplus
            inputs[spec.name] = from_frame(spec, bytearray().join(arrays))
        return inputs

    def items_with_rows(self, rows: Any) -> List[int]:
        """Return the positions of the requests with at least one row for which the boolean array `rows` is true."""
        found: List[int] = []
        end = 0
        for index, count in enumerate(self.row_counts):
            begin, end = end, end + count
            if rows[begin:end].any():
                found.append(index)
        return found

    def learn_slices(self, arrays: Arrays) -> None:
        """Compute `slices` for outputs with the shapes and datatypes of `arrays`.

        Args:
            arrays: the outputs of a batch, as `to_wire` returns them.

        Raises:
            NotBatchable: an output does not have one row for each input row.
        """
        check_rows(arrays, self.total_rows)
        positions = {name: position for position, name in enumerate(arrays)}
        slices: List[OutputSlice] = []
        begin = 0
        for description, count in zip(self.descriptions, self.row_counts):
            end = begin + count
            own = {
                name: arrays[name][begin:end]
                for name in (arrays if description.outputs is None else description.outputs)
            }
            byte_ranges = [(positions[name], *_byte_range(arrays[name], begin, end)) for name in own]
            slices.append(OutputSlice(describe_response(description.model_name, own), tuple(byte_ranges)))
            begin = end
        self.slices = slices


def _row_count(specs: Sequence[TensorSpec]) -> int:
    counts = {each.shape[0] if each.shape else -1 for each in specs}
    if len(counts) != 1 or -1 in counts:
        raise InvalidArgument("inputs: expected the same number of rows in each input")
    return counts.pop()


def _position_of(description: RequestDescription, spec: TensorSpec) -> int:
    for position, each in enumerate(description.inputs):
        if each.name == spec.name and each.datatype == spec.datatype and each.shape[1:] == spec.shape[1:]:
            return position
    raise InvalidArgument(f"{spec.name}: expected the same datatype and row shape in all requests of a batch")


def _last_row(spec: TensorSpec, arrays: Sequence[Any]) -> Any:
    nbytes = TensorSpec(spec.name, spec.datatype, (1, *spec.shape[1:])).nbytes
    for array in reversed(arrays):
        if nbytes and len(array):
            return memoryview(array)[-nbytes:]
    return bytes(nbytes)


def _byte_range(array: Any, begin: int, end: int) -> Tuple[int, int]:
    nbytes = array.nbytes // max(len(array), 1)
    return begin * nbytes, end * nbytes
