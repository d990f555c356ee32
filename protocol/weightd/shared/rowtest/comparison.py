"""Compares the answers to rows that a model runs together with its answers to the same rows alone.

The bits of a row's answer may depend on its position among others, and on how many there are: a library may have
another kernel for one row alone, and another for what is left over at the end of a vector; a model may scale by the
largest of all values. No engine promises anything, so it is tested. That is evidence and no proof: what differs depends
on the values.

Rows of different magnitudes show most. A model may refuse them, because its inputs are indices, or give the same answer
to all of them, which shows nothing: then rows of another kind are tried (`rows.kinds`).
"""

from __future__ import annotations

import itertools
import time
from typing import Any, Callable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Type

import numpy as np

from weightd.protocol.messages.data import TensorSignature
from weightd.shared.rowtest import bits
from weightd.shared.rowtest.bits import Arrays, NotTogether
from weightd.shared.rowtest.rows import (
    LEAST,
    MAX_BYTES,
    SPECIALS,
    Kind,
    Special,
    TestRows,
    has_rows,
    kinds,
    row_bytes,
)

MOST_S = 10.0
"""How long it may take, beside the predict that is under way then."""

# For the rows alone, before they are run together.
_ALONE_S = MOST_S / 2

# Of the first LEAST rows so many have different answers, or rows of another kind are tried.
_ENOUGH_DIFFERENT = LEAST // 2

# For rows with special values. What was not tested until then is taken to differ.
SPECIAL_S = 2.0
_SPECIAL_ROWS = 16

# A library's own ways are for 4, 8 or 16 values at once: what is left over is where they differ.
_ODD_SIZES = (2, 3, 5, 7)

# More are not looked at, where only some numbers of rows can be run.
_MAX_SIZES = 8

# Of all numbers of rows that there may be the first ones are tried; others by workers, when they come.
_MOST_NUMBERS = 64

# What a worker that attaches runs at once.
_MAX_DIGEST_ROWS = 64

_SET_A_SAMPLE = "set `canary` of the model to an .npz file of typical inputs, with several rows that differ"


class Subject(NamedTuple):
    """A model, and how it is tested.

    Attributes:
        predict: runs it.
        inputs: of the model.
        shapes: of the inputs, by name, with which it runs.
        rows: the largest number of rows in one predict.
        sizes: the only numbers of rows that it takes; none: any.
        sample: values of the inputs, of these shapes; None: they are made up.
        refusals: what `predict` raises where it refuses its inputs.
    """

    predict: Callable[[Arrays], Arrays]
    inputs: Sequence[TensorSignature]
    shapes: Mapping[str, Tuple[int, ...]]
    rows: int
    sizes: Sequence[int] = ()
    sample: Optional[Arrays] = None
    refusals: Tuple[Type[Exception], ...] = ()


class Found(NamedTuple):
    """What was found.

    Attributes:
        outputs: the names of the outputs, which all have the rows of the inputs; none where the model was not run.
        note: why the answers are not the same together, or why this is not known; "" if they are the same.
        compared: each number of rows up to this one was run.
        kind: the rows that were used.
        special: rows with such values are not known to have the answers that they have alone.
        refusal: what `Subject.predict` has raised for several rows, each of which it runs alone.
    """

    outputs: Tuple[str, ...] = ()
    note: str = ""
    compared: int = 0
    kind: Kind = Kind.SCALED
    special: Tuple[Special, ...] = ()
    refusal: Optional[Exception] = None


class _Refused(NotTogether):
    """The model refuses so many rows."""

    def __init__(self, text: str, cause: Exception) -> None:
        super().__init__(text)
        self.cause = cause


class _ValuesUnfit(Exception):
    """Rows of this kind show nothing of this model; the text says why.

    Attributes:
        variety: how many different answers the model gave to the first of them; -1: it refused one.
    """

    def __init__(self, text: str, variety: int = -1) -> None:
        super().__init__(text)
        self.variety = variety


def with_rows(inputs: Sequence[TensorSignature], sizes: Sequence[int] = ()) -> Tuple[str, ...]:
    """Return the names of the inputs that have rows. Where rows are added to make up a number, each has to.

    Raises:
        NotTogether: requests of the model cannot be batched.
    """
    if not inputs:
        raise NotTogether("the model has no inputs")
    names = tuple(each.name for each in inputs if has_rows(each))
    for each in inputs:
        if each.shape is None:
            raise NotTogether(f"input {each.name} has no rows: it may be of any rank")
        if not has_rows(each) and (sizes or not names):
            form = each.form
            raise NotTogether(f"input {each.name} has no rows: its shape is {form}, whose first dimension is not free")
    return names


def compare(
    subject: Subject,
    *,
    exact: bool,
    before: Callable[[int], None] = lambda _: None,
    refused: Callable[[Exception], None] = lambda _: None,
) -> Found:
    """Run rows together and alone, and return what was found.

    Args:
        subject: the model.
        exact: False: only the forms of the outputs are looked at.
        before: called before so many rows are run; it raises `NotTogether` where they must not be.
        refused: called with what `subject.predict` has raised, before the model is run again.
    """
    return _Comparison(subject, exact, before, refused).run()


def answer_to_many(subject: Subject, kind: Kind) -> Arrays:
    """Return the answer to one predict of many rows, which is the same in each process where its bits are.

    Raises:
        Exception: one of `subject.refusals`: the model does not run on them.
    """
    tried = _sizes(subject)
    count = next((size for size in tried if size <= _MAX_DIGEST_ROWS), tried[-1])
    rows = TestRows(subject.inputs, subject.shapes, subject.sample, kind, most=count)
    return subject.predict(rows.of([index % rows.count for index in range(count)]))


class _Comparison:
    """One test of a model."""

    def __init__(
        self, subject: Subject, exact: bool, before: Callable[[int], None], refused: Callable[[Exception], None]
    ) -> None:
        self._subject = subject
        self._exact = exact
        self._before = before
        self._refused = refused
        # What one row alone is run on: the least number of rows that there may be.
        self._fewest = min(subject.sizes, default=1)
        self._sizes = _sizes(subject)
        numbers = range(1 if subject.sizes else 2, self._sizes[0] + 1)
        self._numbers = [size for size in numbers if not subject.sizes or size in subject.sizes][:_MOST_NUMBERS]
        self._tried: Set[int] = set()
        self._began = time.monotonic()

    def run(self) -> Found:
        """Test the model on the first kind of rows that shows something."""
        unfit: List[Tuple[Kind, _ValuesUnfit]] = []
        for kind in kinds(has_sample=self._subject.sample is not None):
            try:
                return self._test(kind, is_choice=True)
            except _ValuesUnfit as error:
                unfit.append((kind, error))
        kind, best = max(unfit, key=lambda each: each[1].variety)
        return self._test(kind, is_choice=False) if best.variety >= 0 else Found(note=str(best))

    def _test(self, kind: Kind, *, is_choice: bool) -> Found:
        """Test the model on rows of one kind.

        Args:
            kind: of the rows.
            is_choice: whether rows of another kind are to be tried if these show too little.

        Raises:
            _ValuesUnfit: they do, or the model refuses single rows.
        """
        subject = self._subject
        rows = TestRows(subject.inputs, subject.shapes, subject.sample, kind)
        outputs: Tuple[str, ...] = ()
        self._tried.clear()
        try:
            first = self._alone(rows, 0)
            self._together(rows, np.arange(self._sizes[0]) % rows.count)
            outputs = tuple(first)
            if not self._exact:
                return Found(outputs, kind=kind)
            nbytes = sum(array.nbytes for array in first.values())
            alone = self._each_alone(rows, nbytes, is_choice=is_choice)
            note = self._difference(rows, bits.joined(alone)) or _shows_nothing(alone)
        except NotTogether as error:
            return Found(outputs, str(error), kind=kind, refusal=error.cause if isinstance(error, _Refused) else None)
        if note:
            return Found(outputs, note, kind=kind)
        return Found(outputs, "", self._compared(), kind, self._special(rows, kind))

    def _special(self, rows: TestRows, kind: Kind) -> Tuple[Special, ...]:
        """Return the special values with which rows have other answers together, or change those of other rows."""
        until = time.monotonic() + SPECIAL_S
        if not rows.has_floats:
            return ()
        if kind not in (Kind.SCALED, Kind.UNSCALED):
            return SPECIALS  # floats may be indices: what is none is not tried
        if self._are_equal(rows, SPECIALS, until):
            return ()
        return tuple([each for each in SPECIALS if not self._are_equal(rows, (each,), until)])

    def _are_equal(self, rows: TestRows, specials: Sequence[Special], until: float) -> bool:
        """Return whether rows, of which some have such values, have the same answers together and alone."""
        inputs = rows.special(_SPECIAL_ROWS, specials)

        def run(indices: Any) -> Arrays:
            if time.monotonic() >= until:
                raise NotTogether("it takes too long")
            self._before(len(indices))
            return bits.of_rows(self._subject.predict(rows.chosen(inputs, indices)), len(indices))

        try:
            alone = bits.joined(
                [
                    {name: array[:1] for name, array in run(np.full(self._fewest, index)).items()}
                    for index in range(_SPECIAL_ROWS)
                ]
            )
            for size in self._sizes:
                indices = np.arange(size) % _SPECIAL_ROWS
                if bits.difference(run(indices), {name: array[indices] for name, array in alone.items()}):
                    return False
        except NotTogether:
            return False
        except self._subject.refusals as error:
            self._refused(error)
            return False
        return True

    def _difference(self, rows: TestRows, alone: Arrays) -> str:
        """Run rows together; return how they differ from the same rows alone, "" if they do not.

        Raises:
            NotTogether: an output has not the rows of the inputs, the model refuses them, or it takes too long.
        """
        number = len(next(iter(alone.values())))
        for turn, size in self._turns(number):
            if time.monotonic() >= self._began + MOST_S:
                if turn or self._tried.issuperset(self._sizes):
                    break
                raise NotTogether(f"the model takes too long: not all of {self._sizes} rows were run in {MOST_S:g} s")
            indices = np.arange(turn * size, (turn + 1) * size) % number
            found = bits.difference(
                self._together(rows, indices), {name: array[indices] for name, array in alone.items()}
            )
            if found:
                return found
            self._tried.add(size)
        return ""

    def _compared(self) -> int:
        """Return the number up to which each number of rows that there may be was run."""
        tried = itertools.takewhile(self._tried.__contains__, self._numbers)
        return max(tried, default=0)

    def _turns(self, number: int) -> Iterator[Tuple[int, int]]:
        """Yield which rows are run, as how many so many come before them, and how many there are.

        Some numbers of rows are run with all of them, the others once.
        """
        yield from [(0, size) for size in self._sizes]
        yield from [(0, size) for size in self._numbers if size not in self._sizes]
        yield from [(turn, size) for turn in range(1, number) for size in self._sizes if turn * size < number]

    def _each_alone(self, rows: TestRows, nbytes: int, *, is_choice: bool) -> List[Arrays]:
        """Return the answers to the rows, each run alone.

        Args:
            rows: the rows.
            nbytes: the size of one answer.
            is_choice: as for `_test`.

        Raises:
            _ValuesUnfit: as `_test`.
            NotTogether: it takes too long.
        """
        answers: List[Arrays] = []
        most = min(rows.count, max(LEAST, MAX_BYTES * self._fewest // max(nbytes, 1)))
        while len(answers) < most and (time.monotonic() < self._began + _ALONE_S or len(answers) < LEAST):
            if time.monotonic() >= self._began + MOST_S:
                raise NotTogether(f"the model takes too long: only {len(answers)} rows were run in {MOST_S:g} s")
            answers.append(self._alone(rows, len(answers)))
            if is_choice and len(answers) == LEAST and time.monotonic() < self._began + _ALONE_S:
                variety = bits.variety(answers)
                if variety < _ENOUGH_DIFFERENT:
                    raise _ValuesUnfit(f"{variety} of {LEAST} answers differ", variety)
        return answers

    def _alone(self, rows: TestRows, index: int) -> Arrays:
        """Return the answer to one row.

        Raises:
            _ValuesUnfit: the model refuses it.
        """
        try:
            answer = self._run(rows, np.full(self._fewest, index))
        except self._subject.refusals as error:
            self._refused(error)
            raise _ValuesUnfit(
                f"the model does not run on {self._fewest} rows: {error}; {_SET_A_SAMPLE}, or `sizes` to the numbers "
                "of rows that it takes"
            ) from None
        return {name: array[:1] for name, array in answer.items()}

    def _together(self, rows: TestRows, indices: Any) -> Arrays:
        """Return the answer to several rows.

        Raises:
            NotTogether: the model refuses so many.
            _ValuesUnfit: it refuses one of them alone, too.
        """
        try:
            return self._run(rows, indices)
        except self._subject.refusals as error:
            self._refused(error)
            for index in np.unique(indices):
                if time.monotonic() < self._began + _ALONE_S:
                    self._alone(rows, index)
            raise _Refused(f"the model does not run on {len(indices)} rows: {error}", error) from None

    def _run(self, rows: TestRows, indices: Any) -> Arrays:
        self._before(len(indices))
        return bits.of_rows(self._subject.predict(rows.of(indices)), len(indices))


def _shows_nothing(alone: Sequence[Arrays]) -> str:
    """Return why no difference could have shown in these answers to single rows, "" if it could."""
    if bits.variety(alone) > 1:
        return ""
    return f"no difference would show: the model answers all {len(alone)} rows of the test alike; {_SET_A_SAMPLE}"


def _sizes(subject: Subject) -> List[int]:
    """The numbers of rows that are tried, the largest first."""
    if subject.sizes:
        fit = sorted((size for size in subject.sizes if size <= subject.rows), reverse=True)
        return fit[:_MAX_SIZES] or [min(subject.sizes)]
    largest = min(subject.rows, max(2, MAX_BYTES // max(row_bytes(subject.inputs, subject.shapes), 1)))
    return sorted({largest, *(size for size in _ODD_SIZES if size < largest)}, reverse=True)
