"""Comparison of a model's answers to batched rows with its answers to the same rows run singly.

The bits of a row's answer may depend on its position in the batch and on the size of the batch: a library may have a
separate kernel for a single row, and another for the remainder of a vector; a model may scale by the largest value of
all rows. No engine gives a guarantee, so this module tests. The result is evidence, not proof, because differences
depend on the values.

Rows of different magnitudes reveal most. A model may reject them because its inputs are indices, or may give the same
answer to all of them, which reveals nothing. Then the test uses another kind of rows (`rows.row_kinds`).
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
"""Maximum duration of the test in seconds. A predict in progress at this time is not interrupted."""

# Part of MAX_DURATION_S for predicts of single rows, which run before any batch.
_MAX_SINGLE_ROWS_S = MAX_DURATION_S / 2

# Required number of distinct answers to the first MIN_TEST_ROWS rows. With fewer, another kind of rows is tried.
_MIN_DISTINCT = MIN_TEST_ROWS // 2

# Maximum duration in seconds of the test of rows with special values. A kind of rows that was not tested in this time
# counts as unequal.
MAX_SPECIAL_VALUES_S = 2.0
_SPECIAL_ROWS = 16

# Libraries process 4, 8 or 16 values at once, and differences appear in the remainder.
_ODD_SIZES = (2, 3, 5, 7)

# Maximum number of tested batch sizes if the model supports only certain ones.
_MAX_ALLOWED_SIZES = 8

# Number of batch sizes that are run once. Workers test larger ones when they occur.
_MAX_ROW_COUNTS = 64

# Batch size that a worker runs when it attaches.
_MAX_DIGEST_ROWS = 64

_SAMPLE_HINT = "set `selftest` of the model to an .npz file of typical inputs, with several rows that differ"


class TestedModel(NamedTuple):
    """A model and the parameters of its test.

    Attributes:
        predict: runs the model.
        inputs: the signatures of its inputs.
        shapes: shapes with which the model runs, by input name.
        max_rows: the largest number of rows in one predict.
        allowed_sizes: the only numbers of rows that the model supports; empty for any.
        sample: input values with these shapes; None to generate them.
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
    """Result of the test.

    Attributes:
        outputs: the names of the outputs, each of which has the rows of the inputs; empty if the model was not run.
        note: why batched and single answers differ, or why this is unknown; "" if they are equal.
        compared_rows: each number of rows up to this one was run.
        kind: the kind of rows that was used.
        unequal_specials: for rows with such values, batched answers are not known to equal single answers.
        batch_error: the exception that `TestedModel.predict` raised for several rows, each of which runs singly.
    """

    outputs: Tuple[str, ...] = ()
    note: str = ""
    compared_rows: int = 0
    kind: RowKind = RowKind.SCALED
    unequal_specials: Tuple[SpecialFloats, ...] = ()
    batch_error: Optional[Exception] = None


class _Refused(NotBatchable):
    """The model rejects this number of rows."""

    def __init__(self, text: str, cause: Exception) -> None:
        super().__init__(text)
        self.cause = cause


class _ValuesUnfit(Exception):
    """Rows of this kind reveal nothing about this model. The text gives the reason.

    Attributes:
        distinct_count: the number of distinct answers to the first rows; -1 if the model rejected a row.
    """

    def __init__(self, text: str, variety: int = -1) -> None:
        super().__init__(text)
        self.distinct_count = variety


def inputs_with_rows(inputs: Sequence[TensorSignature], sizes: Sequence[int] = ()) -> Tuple[str, ...]:
    """Return the names of the inputs that have rows. With `sizes`, rows may be padded, so every input must have rows.

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
    """Run rows batched and singly, and return the result of the comparison.

    Args:
        subject: the model.
        exact: if False, only the shapes of the outputs are checked.
        before_run: called with the number of rows before each predict; raises `NotBatchable` to prevent it.
        on_refused: called with an exception raised by `subject.predict`, before the model is run again.
    """
    return _Comparison(subject, exact, before_run, on_refused).run()


def predict_many_rows(subject: TestedModel, kind: RowKind) -> Arrays:
    """Return the answer to one predict of many rows. A deterministic model has the same bits in every process.

    Raises:
        Exception: one of `subject.input_errors`, if the model rejects the rows.
    """
    sizes = _sizes_to_test(subject)
    count = next((size for size in sizes if size <= _MAX_DIGEST_ROWS), sizes[-1])
    rows = TestRows(subject.inputs, subject.shapes, subject.sample, kind, max_rows=count)
    return subject.predict(rows.select([index % rows.count for index in range(count)]))


class _Comparison:
    """One test of a model."""

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
        # The batch size for a single row: the smallest supported one.
        self._min_rows = min(subject.allowed_sizes, default=1)
        self._batch_sizes = _sizes_to_test(subject)
        numbers = range(1 if subject.allowed_sizes else 2, self._batch_sizes[0] + 1)
        self._row_counts = [size for size in numbers if not subject.allowed_sizes or size in subject.allowed_sizes][
            :_MAX_ROW_COUNTS
        ]
        self._tested_sizes: Set[int] = set()
        self._started_at = time.monotonic()

    def run(self) -> RowTestResult:
        """Run the test with the first kind of rows that reveals something."""
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
            may_reject_kind: whether to raise `_ValuesUnfit` if the rows reveal too little.

        Raises:
            _ValuesUnfit: the rows reveal too little, or the model rejects a single row.
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
        """Return the special values that make batched answers differ, of rows with these values or of others."""
        deadline = time.monotonic() + MAX_SPECIAL_VALUES_S
        if not rows.has_floats:
            return ()
        if kind not in (RowKind.SCALED, RowKind.UNSCALED):
            return SPECIALS  # floats may be indices, so other values are not tried
        if self._are_equal(rows, SPECIALS, deadline):
            return ()
        return tuple([each for each in SPECIALS if not self._are_equal(rows, (each,), deadline)])

    def _are_equal(self, rows: TestRows, specials: Sequence[SpecialFloats], deadline: float) -> bool:
        """Return whether rows, some with such values, have the same answers batched and singly."""
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
            NotBatchable: an output does not have the rows of the inputs, the model rejects a batch, or the test takes
                too long.
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
        """Return the largest number such that every possible number of rows up to it was run."""
        tested = itertools.takewhile(self._tested_sizes.__contains__, self._row_counts)
        return max(tested, default=0)

    def _schedule(self, number: int) -> Iterator[Tuple[int, int]]:
        """Yield pairs of a block index and a batch size: the batch consists of the rows of this block.

        Some batch sizes are run with all rows, the others once.
        """
        yield from [(0, size) for size in self._batch_sizes]
        yield from [(0, size) for size in self._row_counts if size not in self._batch_sizes]
        yield from [(turn, size) for turn in range(1, number) for size in self._batch_sizes if turn * size < number]

    def _run_each_single(self, rows: TestRows, nbytes: int, *, may_reject_kind: bool) -> List[Arrays]:
        """Return the answers to the rows, each run singly.

        Args:
            rows: the rows.
            nbytes: the size of one answer.
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
        """Return the answer to one row.

        Raises:
            _ValuesUnfit: the model rejects it.
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
        """Return the answer to several rows.

        Raises:
            NotBatchable: the model rejects this number of rows.
            _ValuesUnfit: the model rejects one of the rows also singly.
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
    """Return the reason why these single answers could not have revealed a difference, "" if they could."""
    if bits.count_distinct(single) > 1:
        return ""
    return f"the test is inconclusive: the model gives the same answer to all {len(single)} test rows; {_SAMPLE_HINT}"


def _sizes_to_test(subject: TestedModel) -> List[int]:
    """Return the batch sizes to test, the largest first."""
    if subject.allowed_sizes:
        fit = sorted((size for size in subject.allowed_sizes if size <= subject.max_rows), reverse=True)
        return fit[:_MAX_ALLOWED_SIZES] or [min(subject.allowed_sizes)]
    largest = min(subject.max_rows, max(2, MAX_TEST_BYTES // max(row_bytes(subject.inputs, subject.shapes), 1)))
    return sorted({largest, *(size for size in _ODD_SIZES if size < largest)}, reverse=True)
