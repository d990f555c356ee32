"""What a holder finds out of the rows of its model: whether it has any, and whether they can be run together.

The bits of a row's answer may hang on its place among others, and on how many they are: a library may have another way
for one row alone, and another for what is left over at the end of a vector; a model may scale by the largest of all
values. Nobody promises anything, so it is tested. That is evidence and no proof: what differs depends on the values.
"""

from __future__ import annotations

import itertools
import time
from typing import Any, Callable, Iterator, List, Optional, Sequence, Set, Tuple

import numpy as np

from weightd.protocol.codec import clip
from weightd.protocol.errors import InvalidArgument
from weightd.protocol.messages.children import Build
from weightd.protocol.messages.findings import Case, Cases, Rows
from weightd.worker.batching import bits
from weightd.worker.batching.bits import NotTogether
from weightd.worker.batching.questions import LEAST, MAX_BYTES, Questions, has_rows
from weightd.worker.canary import canary
from weightd.worker.canary.canary import Canary
from weightd.worker.engines.engine import Arrays, Engine, ModelSignature
from weightd.worker.engines.errors import BuildError, Spoilt

MOST_S = 10.0
"""How long it may take, beside the predict that is under way then."""

# For the rows alone, before they are run together.
_ALONE_S = MOST_S / 2

# A library's own ways are for 4, 8 or 16 values at once: what is left over is where they differ.
_ODD_SIZES = (2, 3, 5, 7)

# More are not looked at, where only some numbers of rows can be run.
_MAX_SIZES = 8

# Of all numbers of rows that there may be the first ones are tried; others by workers, when they come.
_MOST_NUMBERS = 64

# What a worker that attaches runs at once.
_MAX_DIGEST_ROWS = 64


class _No(Exception):
    """Rows cannot be run together, or it cannot be told; the text says why."""


def find(
    engine: Engine,
    order: Build,
    known: Canary,
    rebuild: Callable[[], None],
    tell: Callable[[Cases], None],
    sample: Optional[Arrays] = None,
) -> Optional[Rows]:
    """Return what is found of the rows of the model that `engine` has built; None where that is not asked for.

    Args:
        engine: built.
        order: how many rows there may be, and whether it is tested that their answers are those of each alone.
        known: the canary.
        rebuild: called where a try has spoilt the engine.
        tell: called before a number of rows is run for the first time, which may be the end of this process; and with
            nothing, when it was not.
        sample: what the canary asks, if it is not made up.

    Raises:
        BuildError: it has spoilt the engine, which cannot be rebuilt.
    """
    if order.rows == 1:
        return None
    inputs: Tuple[str, ...] = ()
    outputs: Tuple[str, ...] = ()
    compared = 0
    try:
        inputs = _inputs(engine.signature, known, order.sizes)
        trial = _Trial(engine, order, inputs, known.cases, tell, sample)
        outputs = trial.outputs()
        if order.exact:
            note = trial.difference() if known.digest else known.note
            compared = trial.compared() if not note else 0
        else:
            note = "it was not tested whether answers are the same: they need not be"
        tell(())
    except (_No, NotTogether) as error:
        note = str(error)
        tell(())
    except Spoilt as error:
        note, outputs = f"the model does not run on so many rows: {error}", ()
        if not engine.can_rebuild:
            raise BuildError(f"{note}; run no requests together") from None
        tell(())
        rebuild()
    return Rows(inputs, outputs, not note, clip(note), compared=compared)


def digest_of(
    engine: Engine, cases: Cases, rows: int, sizes: Sequence[int] = (), sample: Optional[Arrays] = None
) -> str:
    """Return the digest of the answer to a predict of many rows.

    Raises:
        RequestError: the model does not run on them.
    """
    tried = _sizes(rows, sizes, Questions(engine.signature, cases[0], most=1).row_bytes)
    count = next((size for size in tried if size <= _MAX_DIGEST_ROWS), tried[-1])
    questions = Questions(engine.signature, cases[0], sample, most=count)
    answer = engine.predict(questions.of([index % questions.count for index in range(count)]))
    return canary.of(({},), [answer]).digest


class _Trial:
    """Runs rows together and alone."""

    def __init__(
        self,
        engine: Engine,
        order: Build,
        inputs: Sequence[str],
        cases: Cases,
        tell: Callable[[Cases], None],
        sample: Optional[Arrays],
    ) -> None:
        self._engine = engine
        self._inputs = inputs
        self._cases = cases
        self._unfit = order.unfit
        self._tell = tell
        self._questions = Questions(engine.signature, cases[0], sample)
        # What one row alone is run on: the least number of rows that there may be.
        self._fewest = min(order.sizes, default=1)
        self._sizes = _sizes(order.rows, order.sizes, self._questions.row_bytes)
        numbers = range(1 if order.sizes else 2, self._sizes[0] + 1)
        self._numbers = [size for size in numbers if not order.sizes or size in order.sizes][:_MOST_NUMBERS]
        self._tried: Set[int] = set()
        self._told: List[int] = []
        self._began = time.monotonic()
        self._row_bytes = 0

    def outputs(self) -> Tuple[str, ...]:
        """Return the names of the outputs, which all have the rows of the inputs.

        Raises:
            NotTogether: one has not.
            _No: the model does not run on them.
        """
        alone = self._run(np.zeros(self._fewest, int))
        self._row_bytes = sum(array.nbytes for array in alone.values()) // self._fewest
        self._run(np.arange(self._sizes[0]) % self._questions.count)
        return tuple(alone)

    def difference(self) -> str:
        """Run rows together and alone; return what differs, "" if nothing does.

        Raises:
            NotTogether: as `outputs`.
            _No: as `outputs`, or it takes too long.
        """
        alone = self._alone()
        number = len(next(iter(alone.values())))
        for turn, size in self._turns(number):
            if time.monotonic() >= self._began + MOST_S:
                if turn or self._tried.issuperset(self._sizes):
                    break
                raise _No(f"the model takes too long: not all of {self._sizes} rows were run in {MOST_S:g} s")
            indices = np.arange(turn * size, (turn + 1) * size) % number
            found = bits.difference(self._run(indices), {name: array[indices] for name, array in alone.items()})
            if found:
                return found
            self._tried.add(size)
        return ""

    def compared(self) -> int:
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

    def _alone(self) -> Arrays:
        answers: List[Arrays] = []
        most = min(self._questions.count, max(LEAST, MAX_BYTES // max(self._row_bytes, 1)))
        while len(answers) < most and (time.monotonic() < self._began + _ALONE_S or len(answers) < LEAST):
            if time.monotonic() >= self._began + MOST_S:
                raise _No(f"the model takes too long: only {len(answers)} rows were run in {MOST_S:g} s")
            answer = self._run(np.full(self._fewest, len(answers)))
            answers.append({name: array[:1] for name, array in answer.items()})
        return bits.joined(answers)

    def _run(self, indices: Any) -> Arrays:
        count = len(indices)
        if count not in self._told:
            self._told.append(count)
            self._tell_of(count)
        try:
            answer = self._engine.predict(self._questions.of(indices))
        except InvalidArgument as error:
            raise _No(f"the model does not run on {count} rows: {error}") from None
        return bits.of_rows(answer, count)

    def _tell_of(self, count: int) -> None:
        case: Case = {
            name: (count, *shape[1:]) if name in self._inputs else shape for name, shape in self._cases[0].items()
        }
        if case in self._unfit:
            raise _No(f"the process that has built the model died of {count} rows")
        if case not in self._cases:
            self._tell((case,))


def _inputs(signature: ModelSignature, known: Canary, sizes: Sequence[int]) -> Tuple[str, ...]:
    """Return the names of the inputs that have rows. Where rows are added to make up a number, each has to."""
    if not signature.inputs:
        raise _No("the model has no inputs")
    names = tuple(each.name for each in signature.inputs if has_rows(each))
    for each in signature.inputs:
        if each.shape is None:
            raise _No(f"input {each.name} has no rows: it may be of any rank")
        if not has_rows(each) and (sizes or not names):
            raise _No(f"input {each.name} has no rows: its shape is {each.form}, whose first dimension is not free")
    if not known.cases:
        raise _No(f"there is no canary, by which rows are looked at: {known.note}")
    return names


def _sizes(rows: int, sizes: Sequence[int], row_bytes: int) -> List[int]:
    """The numbers of rows that are tried, the largest first."""
    if sizes:
        return sorted((size for size in sizes if size <= rows), reverse=True)[:_MAX_SIZES] or [min(sizes)]
    largest = min(rows, max(2, MAX_BYTES // max(row_bytes, 1)))
    return sorted({largest, *(size for size in _ODD_SIZES if size < largest)}, reverse=True)
