"""What a holder finds out of the rows of its model: whether it has any, and whether they can be run together.

The test itself is `weightd.shared.rowtest`, for `weightctl advise` runs the same one.
"""

from __future__ import annotations

from typing import Callable, List, Optional, Sequence

from weightd.protocol.codec import clip
from weightd.protocol.errors import InvalidArgument
from weightd.protocol.messages.children import Build
from weightd.protocol.messages.findings import SelfTestCase, SelfTestCases, Rows
from weightd.shared.rowtest import comparison
from weightd.shared.rowtest.bits import NotTogether
from weightd.shared.rowtest.comparison import Subject
from weightd.shared.rowtest.rows import Kind
from weightd.worker.canary import canary
from weightd.worker.canary.canary import Canary
from weightd.worker.engines.engine import Arrays, Engine
from weightd.worker.engines.errors import BuildError, Spoilt


def find(
    engine: Engine,
    order: Build,
    known: Canary,
    rebuild: Callable[[], None],
    tell: Callable[[SelfTestCases], None],
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
    try:
        inputs = comparison.inputs_with_rows(engine.signature.inputs, order.sizes)
        if not known.cases:
            raise NotTogether(f"there is no canary, by which rows are looked at: {known.note}")
    except NotTogether as error:
        return Rows((), (), equal=False, note=clip(str(error)))
    tries = _Tries(engine, order, inputs, known.cases, rebuild, tell)
    subject = _subject(engine, known.cases[0], order.rows, order.sizes, sample)
    is_exact = order.exact and known.digest != ""
    found = comparison.compare(subject, exact=is_exact, before_run=tries.begin, on_refused=tries.refused)
    tries.end()
    note = found.note
    if not note and not is_exact:
        note = known.note if order.exact else "it was not tested whether answers are the same: they need not be"
    # What fails in a way that spoils the model is not risked with the requests of clients.
    outputs = () if isinstance(found.batch_error, Spoilt) else found.outputs
    special = tuple([each.value for each in found.unequal_specials])
    return Rows(inputs, outputs, not note, clip(note), "", found.compared_rows, found.kind.value, special)


def digest_of(
    engine: Engine,
    cases: SelfTestCases,
    rows: int,
    sizes: Sequence[int] = (),
    sample: Optional[Arrays] = None,
    values: str = Kind.SCALED.value,
) -> str:
    """Return the digest of the answer to a predict of many rows.

    Args:
        engine: built.
        cases: of the canary.
        rows: the largest number of rows in one predict.
        sizes: the only numbers of rows that the model takes; none: any.
        sample: what the canary asks, if it is not made up.
        values: the kind of rows that the holder has tested (`Rows.values`).

    Raises:
        RequestError: the model does not run on them.
    """
    subject = _subject(engine, cases[0], rows, sizes, sample)
    return canary.of(({},), [comparison.predict_many_rows(subject, Kind(values))]).digest


def _subject(engine: Engine, case: SelfTestCase, rows: int, sizes: Sequence[int], sample: Optional[Arrays]) -> Subject:
    return Subject(engine.predict, engine.signature.inputs, case, rows, sizes, sample, (InvalidArgument, Spoilt))


class _Tries:
    """Tells the daemon what is tried, and rebuilds what a try has spoilt."""

    def __init__(
        self,
        engine: Engine,
        order: Build,
        inputs: Sequence[str],
        cases: SelfTestCases,
        rebuild: Callable[[], None],
        tell: Callable[[SelfTestCases], None],
    ) -> None:
        self._engine = engine
        self._inputs = inputs
        self._cases = cases
        self._unfit = order.unfit
        self._rebuild = rebuild
        self._tell = tell
        self._told: List[int] = []

    def begin(self, count: int) -> None:
        """Tell of a number of rows that is run for the first time.

        Raises:
            NotTogether: a process has died of it.
        """
        if count in self._told:
            return
        self._told.append(count)
        case: SelfTestCase = {
            name: (count, *shape[1:]) if name in self._inputs else shape for name, shape in self._cases[0].items()
        }
        if case in self._unfit:
            raise NotTogether(f"the process that has built the model died of {count} rows")
        if case not in self._cases:
            self._tell((case,))

    def refused(self, error: Exception) -> None:
        """Rebuild the model if that is needed.

        Raises:
            BuildError: it is, and cannot be done.
        """
        if isinstance(error, Spoilt):
            if not self._engine.can_rebuild:
                raise BuildError(f"the model does not run on so many rows: {error}; run no requests together") from None
            self.end()
            self._rebuild()

    def end(self) -> None:
        """Tell that nothing is tried any more."""
        self._told.clear()
        self._tell(())
