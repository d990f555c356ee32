"""Measures requests of one row and of several, one at a time, and tests whether the daemon would batch them.

Rows are made up, or those of a file. They are asked for alone and together, in turn, so that what else the host does
hits all alike.
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

# A request goes from client to daemon to worker and back; a question that the daemon answers itself half of that.
OVERHEAD_PINGS = 2


class SyntheticRows:
    """Rows that are all different: those on which the daemon tests the model.

    Args:
        specs: the inputs of a request, however many rows it has.
        kind: of the rows.

    Attributes:
        distinct_rows: how many different rows there are; None: no end of them.
        sample: None: the values come from no file.
        shapes: of the inputs, by name, with one row.
    """

    distinct_rows: Optional[int] = None
    sample: Optional[Arrays] = None

    def __init__(self, specs: Sequence[TensorSpec], kind: RowKind = RowKind.SCALED) -> None:
        self.shapes: Dict[str, Tuple[int, ...]] = {each.name: (1, *each.shape[1:]) for each in specs}
        self._inputs = [TensorSignature(each.name, each.datatype, (-1, *each.shape[1:])) for each in specs]
        self.kind = kind

    def block(self, number: int, rows: int) -> Arrays:
        """Return the rows of a block of so many."""
        test_rows = TestRows(self._inputs, self.shapes, kind=self.kind, max_rows=rows, first_index=number * rows)
        return test_rows.select([row % test_rows.count for row in range(rows)])


class FileRows:
    """The rows of an .npz file, in turn.

    Args:
        path: of the file.
        inputs: what the model takes.

    Attributes:
        distinct_rows: how many rows there are.
        sample: the arrays, by name.
        shapes: of the inputs, by name, with one row.

    Raises:
        BadInput: the file cannot be read, or holds something else than the model takes.
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
        """Return the rows of a block of so many."""
        indices = np.arange(number * rows, (number + 1) * rows) % self._length
        return {name: np.ascontiguousarray(self.sample[name][indices]) for name in self._names}


class AdvisePlan(NamedTuple):
    """What to measure.

    Attributes:
        model: which model is asked.
        sizes: how many rows a request has, in ascending order, 1 among them.
        source: where they come from.
        min_distinct_rows: how many different rows are compared at least.
        min_seconds: how long it goes on after that, all in all.
    """

    model: str
    sizes: Sequence[int]
    source: Union[SyntheticRows, FileRows]
    min_distinct_rows: int
    min_seconds: float


class Measurement:
    """Asks, and keeps what has come: it may be ended at any time.

    Args:
        client: asks.
        plan: for what.
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
        """What is known, in ascending order; of a size that was refused, why."""
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
        """Ask until there is enough.

        `on_progress` is called with how many rows have been compared, and how many will be.

        Raises:
            RequestError: a request was not answered, and not because of its rows.
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
        """Ask for each size once, which is the warm-up, and return those that are answered."""
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
        """Ask for the rows of a block in each size; yield what has been compared."""
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
    """Some rows of a block: one request.

    Attributes:
        rows: how many.
        first: the first of them.
    """

    rows: int
    first: int

    @property
    def end(self) -> int:
        """The row behind the last one."""
        return self.first + self.rows


def block_requests(sizes: Sequence[int]) -> List[RowSlice]:
    """Return the requests for as many rows as the largest size has: each row is in one of each size, or in two.

    A row has been asked for alone, if 1 is one of the sizes, before it is in a larger one.
    """
    rows = max(sizes)
    slices = [RowSlice(size, min(first, rows - size)) for size in sizes for first in range(0, rows, size)]
    return sorted(slices, key=lambda each: (each.end, each.rows))


def count_blocks(sizes: Sequence[int], min_rows: int) -> int:
    """Return how many blocks have at least so many rows."""
    return -(-min_rows // max(sizes))


class BatchTestResult(NamedTuple):
    """What the test has shown.

    Attributes:
        note: why the daemon would not batch requests; "" if it would.
        needs_sample: the daemon needs the rows of the file for that (key `selftest`).
    """

    note: str
    needs_sample: bool = False


class BatchTest:
    """Tests a model as the daemon does.

    Args:
        client: asks.
        model: its name.
        inputs: of the model.
    """

    def __init__(self, client: Client, model: str, inputs: Sequence[TensorSignature]) -> None:
        self._client = client
        self._model = model
        self._inputs = inputs

    def find_kind(self, source: SyntheticRows, rows: int) -> RowKind:
        """Return the kind of made-up rows that the model accepts, in requests of up to so many rows."""
        return comparison.compare(self._row_test_subject(source, None, rows, ()), exact=False).kind

    def verify(self, source: Union[SyntheticRows, FileRows], rows: int, sizes: Tuple[int, ...]) -> BatchTestResult:
        """Test the model with made-up rows, as the daemon does; if they do not do, with those of the file.

        Args:
            source: of the rows that were measured.
            rows: the largest number of rows that is to be in one execution.
            sizes: the only numbers of rows that the model takes; none: any.
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
    """Return why the daemon, which is configured to batch requests of a model, does not; "" if it does, or is not."""
    for each in status.models:
        if each.name == model:
            return next((generation.batching_note for generation in each.generations if generation.max_rows == 1), "")
    return ""


def _check_array(path: str, sample: Mapping[str, Any], signature: TensorSignature) -> int:
    """Return how many rows of an input there are."""
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
    """The module `statistics` takes longer to import than all of this."""
    return float(np.median(seconds)) if seconds else 0.0
