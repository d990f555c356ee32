"""Row test: compares a model's answers to batched rows with its answers to the same rows, each run in its own predict.

The bits of a row's answer may depend on the row's position in the batch and on the size of the batch. For example, a
library may use one kernel for a single row and another for several rows, or the model may scale its inputs by the
largest value of all rows. No engine guarantees equal bits, so this module tests the model. The result is evidence and
not proof, because another row may still get different bits.

Rows whose values differ in magnitude reveal most differences. But a model whose inputs are indices rejects such rows,
and a model may give the same answer to all of them, which reveals nothing. In these cases the test uses rows of another
kind (`rows.row_kinds`).
"""

from __future__ import annotations

import itertools
import time
from typing import Any, Callable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Type

import numpy as np

from weightd_common.rowtest import bits
from weightd_common.rowtest.bits import Arrays, NotBatchable
from weightd_common.rowtest.rows import (
    MAX_TEST_BYTES,
    MIN_TEST_ROWS,
    SPECIALS,
    RowKind,
    SpecialFloats,
    TestRows,
    has_rows,
    row_bytes,
    row_kinds,
)
from weightd_protocol.messages.inference import TensorSignature

MAX_DURATION_S = 10.0
"""Maximum duration of the row test in seconds. A predict that is still running after this time is not interrupted."""

# Seconds after which the test runs no more single rows, so that time remains for batches. MIN_TEST_ROWS single rows are
# run in any case.
_MAX_SINGLE_ROWS_S = MAX_DURATION_S / 2

# Minimum number of distinct answers to the first MIN_TEST_ROWS rows. With fewer distinct answers, the test tries
# another kind of rows.
_MIN_DISTINCT = MIN_TEST_ROWS // 2

# Maximum duration in seconds of the test of rows with special floats such as NaN. For a kind of special floats that was
# not tested in this time, batched answers count as different from single answers.
MAX_SPECIAL_VALUES_S = 2.0
_SPECIAL_ROWS = 16

# Batch sizes to test in addition to the largest. Libraries process 4, 8 or 16 values at once, and may compute other
# bits for the remaining values of a batch whose size is not a multiple of 4, 8 or 16.
_ODD_SIZES = (2, 3, 5, 7)

# Maximum number of batch sizes that are tested with all rows if the model supports only certain batch sizes.
_MAX_ALLOWED_SIZES = 8

# Maximum number of batch sizes, counted from the smallest, that the test runs with one batch each. A worker tests a
# larger batch size when the first batch of this size occurs.
_MAX_ROW_COUNTS = 64

# Maximum batch size in `predict_many_rows`, which every worker runs when it attaches.
_MAX_DIGEST_ROWS = 64

_SAMPLE_HINT = "set `selftest` of the model to an .npz file of typical inputs, with several rows that differ"


class TestedModel(NamedTuple):
    """A model, and the parameters of its row test.

    Attributes:
        predict: runs the model on inputs by name and returns its outputs by name.
        inputs: the signatures of the model's inputs.
        shapes: shapes with which the model is known to run, by input name.
        max_rows: the largest number of rows that a batch may have.
        allowed_sizes: the only batch sizes that the model supports; empty if it supports any.
        sample: input values with the shapes in `shapes`; None if the test generates values.
        input_errors: the exceptions that `predict` raises if it rejects its inputs.
    """

    predict: Callable[[Arrays], Arrays]
    inputs: Sequence[TensorSignature]
    shapes: Mapping[str, Tuple[int, ...]]
    max_rows: int
    allowed_sizes: Sequence[int] = ()
    sample: Optional[Arrays] = None
    input_errors: Tuple[Type[Exception], ...] = ()


class RowTestResult(NamedTuple):
    """Result of a row test.

    Attributes:
        outputs: the names of the model's outputs, which all have one row for each input row; empty if that is not
            known, because the model was not run or rejected the rows.
        note: why batched and single answers differ, or why this is unknown; "" if they are equal.
        compared_rows: the number of rows up to which the test has run a batch of every possible size.
        kind: the kind of rows that the test has used.
        unequal_specials: kinds of special floats for which the test has not found batched and single answers equal.
        batch_error: the exception that `TestedModel.predict` raised for a batch whose rows run singly; None
            otherwise.
    """

    outputs: Tuple[str, ...] = ()
    note: str = ""
    compared_rows: int = 0
    kind: RowKind = RowKind.SCALED
    unequal_specials: Tuple[SpecialFloats, ...] = ()
    batch_error: Optional[Exception] = None


class _Refused(NotBatchable):
    """The model rejects a batch of this size. `cause` is the exception that `TestedModel.predict` raised."""

    def __init__(self, text: str, cause: Exception) -> None:
        super().__init__(text)
        self.cause = cause


class _ValuesUnfit(Exception):
    """Rows of this kind reveal nothing about this model. The text gives the reason.

    Attributes:
        distinct_count: the number of distinct answers to the first MIN_TEST_ROWS rows; -1 if the model rejected a row.
    """

    def __init__(self, text: str, variety: int = -1) -> None:
        super().__init__(text)
        self.distinct_count = variety


def inputs_with_rows(inputs: Sequence[TensorSignature], sizes: Sequence[int] = ()) -> Tuple[str, ...]:
    """Return the names of the inputs that have rows.

    Args:
        inputs: the signatures of the model's inputs.
        sizes: the only batch sizes that the model supports; empty if it supports any. With `sizes`, rows may be added
            to a batch, so every input must have rows.

    Raises:
        NotBatchable: requests of the model cannot be batched.
    """
    if not inputs:
        raise NotBatchable("the model has no inputs")
    names = tuple(each.name for each in inputs if has_rows(each))
    for each in inputs:
        if each.shape is None:
            raise NotBatchable(f"input {each.name} has no rows: it may be of any rank")
        if not has_rows(each) and (sizes or not names):
            form = each.shape_text
            raise NotBatchable(f"input {each.name} has no rows: its shape is {form}, whose first dimension is not free")
    return names


def compare(
    subject: TestedModel,
    *,
    exact: bool,
    before_run: Callable[[int], None] = lambda _: None,
    on_refused: Callable[[Exception], None] = lambda _: None,
) -> RowTestResult:
    """Run test rows batched and singly, compare the answers, and return the result.

    Args:
        subject: the model.
        exact: whether the answers are compared bit for bit; if False, only the shapes of the outputs are checked.
        before_run: called with the number of rows before each predict; raises `NotBatchable` to prevent the predict.
        on_refused: called with each exception of `subject.predict` before the model is run again.
    """
    return _Comparison(subject, exact, before_run, on_refused).run()


def predict_many_rows(subject: TestedModel, kind: RowKind) -> Arrays:
    """Return the answer to one predict of many test rows.

    The rows are the same in every process, so a holder and its workers can compare the bits of their answers.

    Args:
        subject: the model.
        kind: the kind of rows.

    Raises:
        Exception: one of `subject.input_errors`, if the model rejects the rows.
    """
    sizes = _sizes_to_test(subject)
    count = next((size for size in sizes if size <= _MAX_DIGEST_ROWS), sizes[-1])
    rows = TestRows(subject.inputs, subject.shapes, subject.sample, kind, max_rows=count)
    return subject.predict(rows.select([index % rows.count for index in range(count)]))


class _Comparison:
    """One row test of a model; see `compare` for the arguments."""

    def __init__(
        self,
        subject: TestedModel,
        exact: bool,
        before_run: Callable[[int], None],
        on_refused: Callable[[Exception], None],
    ) -> None:
        self._subject = subject
        self._exact = exact
        self._before_run = before_run
        self._on_refused = on_refused
        # Number of copies of a row in a predict of this single row: the smallest batch size that the model supports.
        self._min_rows = min(subject.allowed_sizes, default=1)
        self._batch_sizes = _sizes_to_test(subject)
        numbers = range(1 if subject.allowed_sizes else 2, self._batch_sizes[0] + 1)
        self._row_counts = [size for size in numbers if not subject.allowed_sizes or size in subject.allowed_sizes][
            :_MAX_ROW_COUNTS
        ]
        self._tested_sizes: Set[int] = set()
        self._started_at = time.monotonic()

    def run(self) -> RowTestResult:
        """Run the row test with the first kind of generated rows for which the model's answers are distinct enough."""
        unfit: List[Tuple[RowKind, _ValuesUnfit]] = []
        for kind in row_kinds(has_sample=self._subject.sample is not None):
            try:
                return self._test_kind(kind, may_reject_kind=True)
            except _ValuesUnfit as error:
                unfit.append((kind, error))
        kind, best = max(unfit, key=lambda each: each[1].distinct_count)
        return (
            self._test_kind(kind, may_reject_kind=False) if best.distinct_count >= 0 else RowTestResult(note=str(best))
        )

    def _test_kind(self, kind: RowKind, *, may_reject_kind: bool) -> RowTestResult:
        """Run the test with rows of one kind.

        Args:
            kind: the kind of rows.
            may_reject_kind: whether to raise `_ValuesUnfit` if there are too few distinct answers.

        Raises:
            _ValuesUnfit: there are too few distinct answers, or the model rejects a single row.
        """
        subject = self._subject
        rows = TestRows(subject.inputs, subject.shapes, subject.sample, kind)
        outputs: Tuple[str, ...] = ()
        self._tested_sizes.clear()
        try:
            first_outputs = self._run_single(rows, 0)
            self._run_batched(rows, np.arange(self._batch_sizes[0]) % rows.count)
            outputs = tuple(first_outputs)
            if not self._exact:
                return RowTestResult(outputs, kind=kind)
            nbytes = sum(array.nbytes for array in first_outputs.values())
            single = self._run_each_single(rows, nbytes, may_reject_kind=may_reject_kind)
            note = self._find_difference(rows, bits.concatenate(single)) or _inconclusive_reason(single)
        except NotBatchable as error:
            return RowTestResult(
                outputs, str(error), kind=kind, batch_error=error.cause if isinstance(error, _Refused) else None
            )
        if note:
            return RowTestResult(outputs, note, kind=kind)
        return RowTestResult(outputs, "", self._max_compared_rows(), kind, self._find_unequal_specials(rows, kind))

    def _find_unequal_specials(self, rows: TestRows, kind: RowKind) -> Tuple[SpecialFloats, ...]:
        """Return the kinds of special floats for which batched answers differ from single answers, or were not tested.

        The answers are compared for rows with special floats and for the other rows in the same batch.
        """
        deadline = time.monotonic() + MAX_SPECIAL_VALUES_S
        if not rows.has_floats:
            return ()
        if kind not in (RowKind.SCALED, RowKind.UNSCALED):
            return SPECIALS  # the floats may be indices, so special floats might be invalid and are not tried
        if self._are_equal(rows, SPECIALS, deadline):
            return ()
        return tuple([each for each in SPECIALS if not self._are_equal(rows, (each,), deadline)])

    def _are_equal(self, rows: TestRows, specials: Sequence[SpecialFloats], deadline: float) -> bool:
        """Return whether rows, some with special floats of these kinds, have equal answers batched and singly.

        The result is also False if the model rejects the rows, or when the time `deadline` has passed.
        """
        inputs = rows.with_special_values(_SPECIAL_ROWS, specials)

        def run(indices: Any) -> Arrays:
            if time.monotonic() >= deadline:
                raise NotBatchable("it takes too long")
            self._before_run(len(indices))
            return bits.check_rows(self._subject.predict(rows.select_from(inputs, indices)), len(indices))

        try:
            single = bits.concatenate(
                [
                    {name: array[:1] for name, array in run(np.full(self._min_rows, index)).items()}
                    for index in range(_SPECIAL_ROWS)
                ]
            )
            for size in self._batch_sizes:
                indices = np.arange(size) % _SPECIAL_ROWS
                if bits.describe_difference(run(indices), {name: array[indices] for name, array in single.items()}):
                    return False
        except NotBatchable:
            return False
        except self._subject.input_errors as error:
            self._on_refused(error)
            return False
        return True

    def _find_difference(self, rows: TestRows, single: Arrays) -> str:
        """Run batches and return the first difference from the single answers, "" if there is no difference.

        Raises:
            NotBatchable: an output does not have one row for each input row, the model rejects a batch, or the test
                takes too long.
        """
        number = len(next(iter(single.values())))
        for turn, size in self._schedule(number):
            if time.monotonic() >= self._started_at + MAX_DURATION_S:
                if turn or self._tested_sizes.issuperset(self._batch_sizes):
                    break
                raise NotBatchable(
                    f"the model takes too long: not all of {self._batch_sizes} rows were run in {MAX_DURATION_S:g} s"
                )
            indices = np.arange(turn * size, (turn + 1) * size) % number
            found = bits.describe_difference(
                self._run_batched(rows, indices), {name: array[indices] for name, array in single.items()}
            )
            if found:
                return found
            self._tested_sizes.add(size)
        return ""

    def _max_compared_rows(self) -> int:
        """Return the largest batch size up to which the test has run a batch of every possible size."""
        tested = itertools.takewhile(self._tested_sizes.__contains__, self._row_counts)
        return max(tested, default=0)

    def _schedule(self, number: int) -> Iterator[Tuple[int, int]]:
        """Yield the batches to run as (block index, batch size): each batch is a block of consecutive rows.

        Sizes in `_batch_sizes` are run with all blocks of the `number` rows. Sizes that are only in `_row_counts` are
        run once, with the first block.
        """
        yield from [(0, size) for size in self._batch_sizes]
        yield from [(0, size) for size in self._row_counts if size not in self._batch_sizes]
        yield from [(turn, size) for turn in range(1, number) for size in self._batch_sizes if turn * size < number]

    def _run_each_single(self, rows: TestRows, nbytes: int, *, may_reject_kind: bool) -> List[Arrays]:
        """Return the answers to the rows, each run in its own predict.

        Args:
            rows: the rows.
            nbytes: the size of one answer in bytes, which limits the number of rows that are run.
            may_reject_kind: as in `_test_kind`.

        Raises:
            _ValuesUnfit: as `_test_kind`.
            NotBatchable: the test takes too long.
        """
        answers: List[Arrays] = []
        max_answers = min(rows.count, max(MIN_TEST_ROWS, MAX_TEST_BYTES * self._min_rows // max(nbytes, 1)))
        while len(answers) < max_answers and (
            time.monotonic() < self._started_at + _MAX_SINGLE_ROWS_S or len(answers) < MIN_TEST_ROWS
        ):
            if time.monotonic() >= self._started_at + MAX_DURATION_S:
                raise NotBatchable(
                    f"the model takes too long: only {len(answers)} rows were run in {MAX_DURATION_S:g} s"
                )
            answers.append(self._run_single(rows, len(answers)))
            if (
                may_reject_kind
                and len(answers) == MIN_TEST_ROWS
                and time.monotonic() < self._started_at + _MAX_SINGLE_ROWS_S
            ):
                variety = bits.count_distinct(answers)
                if variety < _MIN_DISTINCT:
                    raise _ValuesUnfit(f"{variety} of {MIN_TEST_ROWS} answers differ", variety)
        return answers

    def _run_single(self, rows: TestRows, index: int) -> Arrays:
        """Return the answer to the row at `index`, run in its own predict.

        Raises:
            _ValuesUnfit: the model rejects the row.
        """
        try:
            answer = self._predict(rows, np.full(self._min_rows, index))
        except self._subject.input_errors as error:
            self._on_refused(error)
            raise _ValuesUnfit(
                f"the model does not run on {self._min_rows} rows: {error}; {_SAMPLE_HINT}, or `sizes` to the numbers "
                "of rows that it takes"
            ) from None
        return {name: array[:1] for name, array in answer.items()}

    def _run_batched(self, rows: TestRows, indices: Any) -> Arrays:
        """Return the answer to the rows at `indices`, run in one predict.

        Raises:
            NotBatchable: the model rejects the batch.
            _ValuesUnfit: the model rejects the batch, and also one of its rows in a separate predict.
        """
        try:
            return self._predict(rows, indices)
        except self._subject.input_errors as error:
            self._on_refused(error)
            for index in np.unique(indices):
                if time.monotonic() < self._started_at + _MAX_SINGLE_ROWS_S:
                    self._run_single(rows, index)
            raise _Refused(f"the model does not run on {len(indices)} rows: {error}", error) from None

    def _predict(self, rows: TestRows, indices: Any) -> Arrays:
        self._before_run(len(indices))
        return bits.check_rows(self._subject.predict(rows.select(indices)), len(indices))


def _inconclusive_reason(single: Sequence[Arrays]) -> str:
    """Return why these answers to single rows cannot show whether batched answers differ, or "" if they can.

    If all answers are equal, batched answers would be equal as well, even if the model mixed up the rows.
    """
    if bits.count_distinct(single) > 1:
        return ""
    return f"the test is inconclusive: the model gives the same answer to all {len(single)} test rows; {_SAMPLE_HINT}"


def _sizes_to_test(subject: TestedModel) -> List[int]:
    """Return the batch sizes to test with all rows, the largest first."""
    if subject.allowed_sizes:
        fit = sorted((size for size in subject.allowed_sizes if size <= subject.max_rows), reverse=True)
        return fit[:_MAX_ALLOWED_SIZES] or [min(subject.allowed_sizes)]
    largest = min(subject.max_rows, max(2, MAX_TEST_BYTES // max(row_bytes(subject.inputs, subject.shapes), 1)))
    return sorted({largest, *(size for size in _ODD_SIZES if size < largest)}, reverse=True)
