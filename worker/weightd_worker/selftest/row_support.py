"""Row test of a holder: whether its model has rows, and whether several rows can share a predict.

The test itself is in `weightd_common.rowtest`, because `weightctl advise` runs it as well.
"""

from __future__ import annotations

from typing import Callable, List, Optional, Sequence

from weightd_common.rowtest import comparison
from weightd_common.rowtest.bits import NotBatchable
from weightd_common.rowtest.comparison import TestedModel
from weightd_common.rowtest.rows import RowKind
from weightd_protocol.codec import clip
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.worker import Build
from weightd_protocol.messages.worker_common import RowSupport, SelfTestCase, SelfTestCases
from weightd_worker.engines.engine import Arrays, BuildError, Engine, ModelCorrupted
from weightd_worker.selftest import selftest
from weightd_worker.selftest.selftest import SelfTestRun


def find_row_support(
    engine: Engine,
    order: Build,
    reference: SelfTestRun,
    rebuild: Callable[[], None],
    announce: Callable[[SelfTestCases], None],
    sample: Optional[Arrays] = None,
) -> Optional[RowSupport]:
    """Run the row test, and return how the model supports rows; None if the configuration disables batching.

    Args:
        engine: an engine that has built the model.
        order: the daemon's order, with the limits of a batch, and whether the answer to a row in a batch must equal its
            answer alone.
        reference: the self-test.
        rebuild: function that builds the model again after a predict has corrupted it.
        announce: function that announces the shapes of the next predict to the daemon. It is called before the first
            predict of each number of rows, because this predict may crash the process. After the last predict, it is
            called with ().
        sample: the self-test's inputs; None if they are generated.

    Raises:
        BuildError: a predict has corrupted the model, and the engine cannot build it again.
    """
    if order.max_rows == 1:
        return None
    try:
        inputs = comparison.inputs_with_rows(engine.signature.inputs, order.allowed_batch_sizes)
        if not reference.cases:
            raise NotBatchable(f"rows cannot be checked without a self-test: {reference.note}")
    except NotBatchable as error:
        return RowSupport((), (), is_equal=False, note=clip(str(error)))
    try_reporter = _TryReporter(engine, order, inputs, reference.cases, rebuild, announce)
    subject = _make_subject(engine, reference.cases[0], order.max_rows, order.allowed_batch_sizes, sample)
    is_exact = order.exact and reference.digest != ""
    found = comparison.compare(
        subject, exact=is_exact, before_run=try_reporter.on_try, on_refused=try_reporter.on_failure
    )
    try_reporter.finish()
    note = found.note
    if not note and not is_exact:
        note = (
            reference.note
            if order.exact
            else "equality of batched and single answers was not tested: the configuration does not require it"
        )
    # If a batch has corrupted the model, report no outputs, so that requests of clients are never batched.
    outputs = () if isinstance(found.batch_error, ModelCorrupted) else found.outputs
    special_kinds = tuple([each.value for each in found.unequal_specials])
    return RowSupport(inputs, outputs, not note, clip(note), "", found.compared_rows, found.kind.value, special_kinds)


def rows_digest(
    engine: Engine,
    cases: SelfTestCases,
    max_rows: int,
    allowed_batch_sizes: Sequence[int] = (),
    sample: Optional[Arrays] = None,
    row_kind: str = RowKind.SCALED.value,
) -> str:
    """Run one predict of many test rows, and return the digest of the answer.

    If a worker's digest equals the holder's digest, the holder's row test is valid for the worker.

    Args:
        engine: an engine that has built the model.
        cases: the cases of the self-test; the test rows have the shapes of the first one.
        max_rows: the maximum number of rows in one predict.
        allowed_batch_sizes: the only numbers of rows that the model supports; empty for any number.
        sample: the self-test's inputs; None if they are generated.
        row_kind: the kind of rows in the holder's row test (`RowSupport.row_kind`).

    Raises:
        RequestError: the model does not run on these rows.
    """
    subject = _make_subject(engine, cases[0], max_rows, allowed_batch_sizes, sample)
    return selftest.from_answers(({},), [comparison.predict_many_rows(subject, RowKind(row_kind))]).digest


def _make_subject(
    engine: Engine, case: SelfTestCase, max_rows: int, allowed_batch_sizes: Sequence[int], sample: Optional[Arrays]
) -> TestedModel:
    return TestedModel(
        engine.predict,
        engine.signature.inputs,
        case,
        max_rows,
        allowed_batch_sizes,
        sample,
        (InvalidArgument, ModelCorrupted),
    )


class _TryReporter:
    """Announces each number of rows to the daemon before its first predict, and builds a corrupted model again.

    If the predict crashes the process, the daemon starts another holder, which skips this number of rows.
    """

    def __init__(
        self,
        engine: Engine,
        order: Build,
        inputs: Sequence[str],
        cases: SelfTestCases,
        rebuild: Callable[[], None],
        announce: Callable[[SelfTestCases], None],
    ) -> None:
        self._engine = engine
        self._inputs = inputs
        self._cases = cases
        self._failed_cases = order.failed_cases
        self._rebuild = rebuild
        self._announce = announce
        self._announced: List[int] = []

    def on_try(self, row_count: int) -> None:
        """Announce the first predict of a number of rows. For later predicts of the same number, do nothing.

        Raises:
            NotBatchable: an earlier process has crashed with this number of rows.
        """
        if row_count in self._announced:
            return
        self._announced.append(row_count)
        case: SelfTestCase = {
            name: (row_count, *shape[1:]) if name in self._inputs else shape for name, shape in self._cases[0].items()
        }
        if case in self._failed_cases:
            raise NotBatchable(f"the process that built the model crashed with {row_count} rows")
        if case not in self._cases:
            self._announce((case,))

    def on_failure(self, error: Exception) -> None:
        """Build the model again if `error`, which a predict has raised, shows that the model is corrupted.

        Raises:
            BuildError: the model is corrupted, and the engine cannot build it again.
        """
        if isinstance(error, ModelCorrupted):
            if not self._engine.can_rebuild:
                raise BuildError(f"the model does not run on several rows: {error}; turn batching off") from None
            self.finish()
            self._rebuild()

    def finish(self) -> None:
        """Announce to the daemon that no announced predict is running."""
        self._announced.clear()
        self._announce(())
