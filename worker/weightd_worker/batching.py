"""Several requests in one predict: their rows one behind another, and each one's share of the answer.

A row is what has one index in the first dimension of a tensor. Nothing is copied but the inputs, once.
"""

from __future__ import annotations

import logging
from typing import Any, List, NamedTuple, Sequence, Tuple

from weightd_common.rowtest.bits import check_rows
from weightd_protocol import limits
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSpec
from weightd_protocol.tensors import describe_response, from_frame
from weightd_worker.engines.engine import Arrays

# Principals whose requests are run one by one. Where there are more, those of all are.
_MAX_UNBATCHABLE_PRINCIPALS = limits.MAX_TENANTS

# Requests with special values of a principal, after which its requests are not sent together with others any more: each
# costs those that come with it the time of another predict.
_MAX_SPECIAL_REQUESTS = 64

_log = logging.getLogger("weightd.worker")


class OutputSlice(NamedTuple):
    """What one request has of an answer.

    Attributes:
        description: of its outputs.
        byte_ranges: for each of them the position of the answer's output, and the bytes of that.
    """

    description: ResponseDescription
    byte_ranges: Tuple[Tuple[int, int, int], ...]


class BatchLayout:
    """What is known of requests with these descriptions before their tensors: it holds for all that come so.

    Args:
        descriptions: of the requests, in their order.
        min_rows: that the model is run on, if they have less.
        allowed_batch_sizes: the only numbers of rows that it takes, the least first; none: any.

    Attributes:
        row_counts: the rows of each request.
        total_rows: all of them, and those that are there to make up the number.
        specs: of the inputs of all together.
        output_layout: of the answer to which `slices` belongs, as who calls names it; () before one was seen.
        slices: of each request.
        is_tested: whether it is known that each has the same answer alone.

    Raises:
        InvalidArgument: the requests differ in more than their rows, or have none.
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
        # Of each input, its position in each request.
        self._item_positions = [[_position_of(each, spec) for each in self.descriptions] for spec in first]
        self.output_layout: Tuple[Any, ...] = ()
        self.slices: List[OutputSlice] = []
        self.is_tested = False

    def merge_inputs(self, item_frames: Sequence[Sequence[Any]]) -> Arrays:
        """Return the inputs of all together: copies, for what a client can reach may change.

        Args:
            item_frames: the bytes of each request's inputs.

        Raises:
            InvalidArgument: as `from_frame`.
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
        """Return the positions of the requests that have one of these rows, which are an array of bool."""
        found: List[int] = []
        end = 0
        for index, count in enumerate(self.row_counts):
            begin, end = end, end + count
            if rows[begin:end].any():
                found.append(index)
        return found

    def learn_slices(self, arrays: Arrays) -> None:
        """Find out the shares of an answer.

        Args:
            arrays: as `to_wire` returns them.

        Raises:
            NotBatchable: an output has not as many rows as the inputs.
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
        raise InvalidArgument("inputs: expected as many rows of each")
    return counts.pop()


def _position_of(description: RequestDescription, spec: TensorSpec) -> int:
    for position, each in enumerate(description.inputs):
        if each.name == spec.name and each.datatype == spec.datatype and each.shape[1:] == spec.shape[1:]:
            return position
    raise InvalidArgument(f"{spec.name}: expected the same but for its rows in all requests of a batch")


def _last_row(spec: TensorSpec, arrays: Sequence[Any]) -> Any:
    nbytes = TensorSpec(spec.name, spec.datatype, (1, *spec.shape[1:])).nbytes
    for array in reversed(arrays):
        if nbytes and len(array):
            return memoryview(array)[-nbytes:]
    return bytes(nbytes)


def _byte_range(array: Any, begin: int, end: int) -> Tuple[int, int]:
    nbytes = array.nbytes // max(len(array), 1)
    return begin * nbytes, end * nbytes
