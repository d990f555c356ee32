"""Measures requests of one row and of several rows, and tests whether the daemon would batch such requests.

Only one request runs at a time. Its rows are generated, or read from a file. Requests of all sizes (numbers of rows)
alternate, so that other load on the host affects all sizes equally.
"""

from __future__ import annotations

import itertools
import time
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from weightctl import arrays
from weightctl.advise.recommend import BatchSizeResult, Comparison
from weightctl.command import BadInput
from weightctl.request_inputs import describe
from weightctl.target import has_split, read_counters
from weightctl.text import clean
from weightd.client import Client
from weightd_common.rowtest import comparison
from weightd_common.rowtest.bits import Arrays, NotBatchable
from weightd_common.rowtest.comparison import TestedModel
from weightd_common.rowtest.rows import RowKind, TestRows
from weightd_protocol.datatypes import NUMPY_DTYPE
from weightd_protocol.errors import Internal, InvalidArgument
from weightd_protocol.messages.inference import TensorSignature, TensorSpec
from weightd_protocol.messages.status import StatusResponse

Outputs = Mapping[str, Any]

# Number of pings that take as long as the overhead of a request. The daemon answers a ping itself. A request travels
# from the client to the daemon, on to the worker, and back the same way: twice the distance.
OVERHEAD_PINGS = 2


class SyntheticRows:
    """Generated rows, all of them different: the same rows with which the daemon tests a model.

    Args:
        specs: names, datatypes and shapes of the inputs of a request. The first dimension, the number of rows, is
            ignored.
        kind: the kind of rows to generate.

    Attributes:
        distinct_rows: the number of different rows; None for an unlimited number.
        sample: None, because the rows do not come from a file.
        shapes: the shape of each input with one row, by name.
    """

    distinct_rows: Optional[int] = None
    sample: Optional[Arrays] = None

    def __init__(self, specs: Sequence[TensorSpec], kind: RowKind = RowKind.SCALED) -> None:
        self.shapes: Dict[str, Tuple[int, ...]] = {each.name: (1, *each.shape[1:]) for each in specs}
        self._inputs = [TensorSignature(each.name, each.datatype, (-1, *each.shape[1:])) for each in specs]
        self.kind = kind

    def block(self, number: int, rows: int) -> Arrays:
        """Return the rows of the block with this number. Each block has `rows` rows."""
        test_rows = TestRows(self._inputs, self.shapes, kind=self.kind, max_rows=rows, first_index=number * rows)
        return test_rows.select([row % test_rows.count for row in range(rows)])


class FileRows:
    """The rows of an .npz file. After the last row, the first one is used again.

    Args:
        path: the path of the .npz file.
        inputs: the inputs in the model's signature.

    Attributes:
        distinct_rows: the number of rows in the file.
        sample: the arrays of the file, by name.
        shapes: the shape of each input with one row, by name.

    Raises:
        BadInput: the file cannot be read, or does not match the model's signature.
    """

    def __init__(self, path: str, inputs: Sequence[TensorSignature]) -> None:
        with arrays.open_input(path) as file:
            self.sample: Arrays = arrays.load_all(path, file)
        lengths = {_check_array(path, self.sample, each) for each in inputs}
        if len(lengths) != 1 or not min(lengths):
            raise BadInput(f"{path}: expected as many rows of each input, at least 1, got {sorted(lengths)}")
        self._length = lengths.pop()
        self.distinct_rows: Optional[int] = self._length
        self._names = [each.name for each in inputs]
        self.shapes: Dict[str, Tuple[int, ...]] = {name: (1, *self.sample[name].shape[1:]) for name in self._names}

    def block(self, number: int, rows: int) -> Arrays:
        """Return the rows of the block with this number. Each block has `rows` rows."""
        indices = np.arange(number * rows, (number + 1) * rows) % self._length
        return {name: np.ascontiguousarray(self.sample[name][indices]) for name in self._names}


class AdvisePlan(NamedTuple):
    """Plan of a measurement: the requests to send and the rows to compare.

    Attributes:
        model: the name of the model to measure.
        sizes: the numbers of rows per request, in ascending order. The first one is 1.
        source: the rows to send.
        min_distinct_rows: the minimum number of different rows to compare.
        min_seconds: the minimum duration of the measurement in seconds.
    """

    model: str
    sizes: Sequence[int]
    source: Union[SyntheticRows, FileRows]
    min_distinct_rows: int
    min_seconds: float


class Measurement:
    """Runs a measurement and keeps its results, so that they are available even if Ctrl-C interrupts it.

    Args:
        client: the client that sends the requests.
        plan: the requests to send and the rows to compare.
    """

    def __init__(self, client: Client, plan: AdvisePlan) -> None:
        self._client = client
        self._plan = plan
        self._ping_times_s: List[float] = []
        self._request_times_s: Dict[int, List[float]] = {size: [] for size in plan.sizes}
        self._comparisons: Dict[int, Comparison] = {size: Comparison() for size in plan.sizes}
        self._refusals: Dict[int, str] = {}
        self._is_split: Dict[int, bool] = {}

    @property
    def results(self) -> List[BatchSizeResult]:
        """The results of all sizes, in ascending order. If the model rejected a size, its result gives the reason."""
        overhead_s = OVERHEAD_PINGS * _median(self._ping_times_s)
        return [
            BatchSizeResult(
                size,
                _median(self._request_times_s[size]),
                overhead_s,
                len(self._request_times_s[size]),
                self._comparisons[size],
                self._is_split.get(size, False),
                self._refusals.get(size, ""),
            )
            for size in self._plan.sizes
        ]

    def run(self, on_progress: Callable[[int, int], None]) -> None:
        """Send requests until the outputs of all blocks are compared and the minimum duration is reached.

        `on_progress` is called with the number of rows that were compared so far, and the planned number of rows.

        Raises:
            RequestError: a request failed for a reason other than its number of rows.
        """
        begin = time.monotonic()
        sizes = self._warm_up()
        length = sizes[-1]
        block_count = count_blocks(sizes, self._plan.min_distinct_rows)
        for done in itertools.count():
            if done >= block_count and time.monotonic() - begin >= self._plan.min_seconds:
                return
            for each in self._measure_block(sizes, done):
                on_progress(done * length + each.end, block_count * length)

    def _warm_up(self) -> List[int]:
        """Send one request of each size to warm up the model. Return the sizes that the model accepts."""
        rows = self._plan.source.block(0, self._plan.sizes[-1])
        accepted: List[int] = []
        for size in self._plan.sizes:
            before = read_counters(self._client.status(), self._plan.model)
            try:
                self._infer(rows, RowSlice(size, 0))
            except (InvalidArgument, Internal) as error:
                if size == 1:
                    raise
                self._refusals[size] = str(error)
            else:
                accepted.append(size)
                after = read_counters(self._client.status(), self._plan.model)
                self._is_split[size] = has_split(before, after)
        return accepted

    def _measure_block(self, sizes: Sequence[int], number: int) -> Iterator[RowSlice]:
        """Send the rows of a block in requests of each size. After the response to each slice, yield the slice.

        The outputs of each slice of several rows are compared with the outputs of its single rows.
        """
        rows = self._plan.source.block(number, sizes[-1])
        single: List[Outputs] = []
        for each in block_requests(sizes):
            begin = time.monotonic()
            outputs = self._infer(rows, each)
            end = time.monotonic()
            self._request_times_s[each.rows].append(end - begin)
            if each.rows == 1:
                single.append(outputs)
                self._client.ready(self._plan.model)
                self._ping_times_s.append(time.monotonic() - end)
            else:
                self._comparisons[each.rows].compare(outputs, single[each.first : each.end])
            yield each
        self._comparisons[1].compare(self._infer(rows, RowSlice(1, 0)), single[:1])

    def _infer(self, rows: Arrays, row_slice: RowSlice) -> Outputs:
        inputs = {name: array[row_slice.first : row_slice.end] for name, array in rows.items()}
        return self._client.infer(self._plan.model, inputs)


class RowSlice(NamedTuple):
    """Consecutive rows of a block that are sent as one request.

    Attributes:
        rows: the number of rows in the slice.
        first: the index of the slice's first row in the block.
    """

    rows: int
    first: int

    @property
    def end(self) -> int:
        """The index in the block after the slice's last row."""
        return self.first + self.rows


def block_requests(sizes: Sequence[int]) -> List[RowSlice]:
    """Return slices of a block.

    The slices of each size cover the whole block, which has as many rows as the largest size.

    The last slice of a size may overlap the one before it. If 1 is one of the sizes, each row is in a slice alone
    before it is in a larger slice.
    """
    rows = max(sizes)
    slices = [RowSlice(size, min(first, rows - size)) for size in sizes for first in range(0, rows, size)]
    return sorted(slices, key=lambda each: (each.end, each.rows))


def count_blocks(sizes: Sequence[int], min_rows: int) -> int:
    """Return the number of blocks that together have at least `min_rows` rows."""
    return -(-min_rows // max(sizes))


class BatchTestResult(NamedTuple):
    """Result of the test that decides whether the daemon batches requests of a model.

    Attributes:
        note: the reason why the daemon would not batch requests; "" if it would.
        needs_sample: whether the test was repeated with the rows of the file. The daemon then needs the file, too (key
            `selftest`).
    """

    note: str
    needs_sample: bool = False


class BatchTest:
    """Runs the test with which the daemon decides whether it batches requests of a model.

    Args:
        client: the client that sends the requests.
        model: the model's name.
        inputs: the inputs in the model's signature.
    """

    def __init__(self, client: Client, model: str, inputs: Sequence[TensorSignature]) -> None:
        self._client = client
        self._model = model
        self._inputs = inputs

    def find_kind(self, source: SyntheticRows, rows: int) -> RowKind:
        """Find the kind of generated rows that the model accepts, with requests of up to `rows` rows, and return it."""
        return comparison.compare(self._row_test_subject(source, None, rows, ()), exact=False).kind

    def verify(self, source: Union[SyntheticRows, FileRows], rows: int, sizes: Tuple[int, ...]) -> BatchTestResult:
        """Run the test with generated rows, as the daemon does. If it fails, repeat it with the rows of the file.

        Args:
            source: the rows that were sent in the measurement.
            rows: the maximum number of rows in one execution.
            sizes: the only numbers of rows that the model accepts; empty if it accepts all.
        """
        try:
            comparison.inputs_with_rows(self._inputs, sizes)
        except NotBatchable as error:
            return BatchTestResult(str(error))
        note = comparison.compare(self._row_test_subject(source, None, rows, sizes), exact=True).note
        if note and source.sample is not None:
            return BatchTestResult(
                comparison.compare(self._row_test_subject(source, source.sample, rows, sizes), exact=True).note, True
            )
        return BatchTestResult(note)

    def _row_test_subject(
        self, source: Union[SyntheticRows, FileRows], sample: Optional[Arrays], rows: int, sizes: Tuple[int, ...]
    ) -> TestedModel:
        return TestedModel(self._infer, self._inputs, source.shapes, rows, sizes, sample, (InvalidArgument, Internal))

    def _infer(self, inputs: Arrays) -> Any:
        return self._client.infer(self._model, inputs)


def batching_refusal(status: StatusResponse, model: str) -> str:
    """Return why the daemon does not batch requests of a model that is configured for batching. Return "" otherwise."""
    for each in status.models:
        if each.name == model:
            return next((generation.batching_note for generation in each.generations if generation.max_rows == 1), "")
    return ""


def _check_array(path: str, sample: Mapping[str, Any], signature: TensorSignature) -> int:
    """Check the array that the file has for an input. Return its number of rows."""
    array = sample.get(signature.name)
    if array is None:
        available = ", ".join(map(clean, sample)) or "none"
        raise BadInput(f"{path}: expected an array {clean(signature.name)}, there are: {available}")
    declared = signature.shape
    fits = declared is None or (
        array.ndim == len(declared) and all(dim in (-1, got) for got, dim in zip(array.shape, declared))
    )
    if array.ndim == 0 or not fits or array.dtype != np.dtype(NUMPY_DTYPE[signature.datatype]):
        raise BadInput(f"{path}: expected {describe([signature])}, got {array.dtype} {list(array.shape)}")
    return len(array)


def _median(seconds: Sequence[float]) -> float:
    """Return the median, or 0.0 for an empty sequence.

    The module `statistics` is not used, because it imports slowly.
    """
    return float(np.median(seconds)) if seconds else 0.0
