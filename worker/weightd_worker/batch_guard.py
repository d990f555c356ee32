"""Decides which requests may share a predict, and checks that each request gets the same answer as alone.

The holder tests batching with generated rows, which have the dimensions of the self-test, but requests may have other
dimensions. So a worker also runs the requests of some batches alone, and compares the answers:

- the first batch of each shape;
- further batches, until the worker has compared as many rows as the holder, because perhaps only a few of many rows
  get another answer;
- after that, one of many batches as a sample.
"""

from __future__ import annotations

import collections
import logging
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from weightd_common.rowtest import bits
from weightd_common.rowtest.bits import NotBatchable
from weightd_common.rowtest.rows import MAX_TEST_ROWS, SpecialFloats, rows_with_special_values
from weightd_protocol import limits
from weightd_protocol.codec import clip
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.worker import BatchMismatch
from weightd_protocol.messages.worker_common import SelfTestCase
from weightd_worker.batching import BatchLayout
from weightd_worker.engines.engine import Arrays, Engine

# Maximum number of principals whose requests run alone. If there were more, the requests of all principals run alone.
_MAX_UNBATCHABLE_PRINCIPALS = limits.MAX_TENANTS

# Number of requests with special floats, such as NaN, after which all requests of a principal run alone. Each request
# with special floats delays the other requests of its batch by an additional predict.
_MAX_SPECIAL_REQUESTS = 64

_log = logging.getLogger("weightd.worker")


# Of this many batches, the guard keeps one as a sample. When the worker is idle, it compares the sample batch again. A
# batch with more than _MAX_SAMPLE_BYTES is never kept.
_RECHECK_INTERVAL = 1000
_MAX_SAMPLE_BYTES = 16 * 1024 * 1024

# Maximum number of batch shapes that a worker tests, or `max_rows` if that is larger. Each test costs predicts.
# Requests that would form a batch of any further shape run alone.
_MAX_TESTED_SPECS = 64


class BatchGuard:
    """Decides which requests for one model may share a predict, based on earlier comparisons of answers.

    Args:
        engine: the engine that runs the model. It must have built the model before `configure` is called.
        reply: sends a message with its tensors to the daemon.

    Attributes:
        allowed_batch_sizes: the only numbers of rows that the model supports, in ascending order; empty for any number.
    """

    def __init__(self, engine: Engine, reply: Callable[..., None]) -> None:
        self.allowed_batch_sizes: Sequence[int] = ()
        self._engine = engine
        self._reply = reply
        self._is_batching = True
        self._shadow_checks: Optional[ShadowChecks] = None
        self._special_kinds: Sequence[SpecialFloats] = ()
        # For each principal, the number of its requests with special floats.
        self._special_counts: collections.Counter[int] = collections.Counter()
        # Principals whose requests run alone, and the reason for each.
        self._unbatchable_principals: Dict[int, str] = {}

    def configure(
        self,
        max_rows: int,
        allowed_batch_sizes: Sequence[int],
        *,
        is_exact: bool,
        case: Optional[SelfTestCase] = None,
        compared_rows: int = 0,
        special_kinds: Sequence[str] = (),
    ) -> None:
        """Set the batching rules after the model is built and attached to the shared weights.

        Args:
            max_rows: the maximum number of rows of one predict.
            allowed_batch_sizes: the only numbers of rows that the model supports; empty for any number.
            is_exact: whether the answer to a request in a batch must equal its answer alone, bit for bit.
            case: the shapes of the inputs in the holder's row test, apart from the number of rows; None without a
                self-test.
            compared_rows: the number of rows up to which the holder has compared batches of every size; 0 if this
                process may give other answers than the holder.
            special_kinds: kinds of special floats (`SpecialFloats`). With `is_exact`, requests that contain such floats
                run alone.
        """
        self._special_kinds = [SpecialFloats(each) for each in special_kinds] if is_exact else []
        self.allowed_batch_sizes = sorted(allowed_batch_sizes)
        self._shadow_checks = (
            ShadowChecks(self._engine, max_rows, self.allowed_batch_sizes, case, compared_rows) if is_exact else None
        )

    @property
    def is_check_due(self) -> bool:
        """Whether the guard keeps a sample batch that the worker should compare again when it is idle."""
        return self._shadow_checks is not None and self._shadow_checks.is_due

    def run_due_check(self) -> None:
        """Compare the kept sample batch again with its requests run alone, and restrict batching if answers differ.

        Raises:
            ModelCorrupted: a predict has corrupted the model.
        """
        if self._shadow_checks is not None:
            try:
                self._shadow_checks.recheck()
            except (NotBatchable, InvalidArgument) as error:
                self.on_rows_differ(error)

    def can_batch(self, merged: BatchLayout) -> bool:
        """Return whether the requests of a batch with this layout may share a predict."""
        return self._is_batching and (self._shadow_checks is None or self._shadow_checks.can_batch(merged))

    def indices_to_run_alone(
        self, merged: BatchLayout, inputs: Arrays, principal_ids: Tuple[int, ...]
    ) -> Sequence[int]:
        """Return the positions in the batch of requests that must run alone, because of their principal or values."""
        if not (self._unbatchable_principals or self._special_kinds):
            return ()
        found = {index for index, each in enumerate(principal_ids) if each in self._unbatchable_principals}
        # Report these principals again. That the daemon has batched their requests shows that it does not know the
        # first report: it has not read the report yet, or it was restarted after the report.
        for principal in sorted({principal_ids[index] for index in found}):
            self._reply((BatchMismatch(self._unbatchable_principals[principal], (principal,)), ()))
        if self._special_kinds:
            names = [each.name for each in merged.specs]
            special = merged.items_with_rows(rows_with_special_values(inputs, names, self._special_kinds))
            found.update(special)
            if special and principal_ids:
                self._count_special([principal_ids[index] for index in special])
        return sorted(found)

    def check(self, merged: BatchLayout, inputs: Arrays, outputs: Arrays, principal_ids: Tuple[int, ...]) -> None:
        """Compare a batch with its requests run alone, see `ShadowChecks.check`. Without `is_exact`, do nothing."""
        if self._shadow_checks is not None:
            self._shadow_checks.check(merged, inputs, outputs, principal_ids)

    def stop_batching(self, reason: str) -> None:
        """Run every request alone from now on, and report the reason to the daemon."""
        if self._is_batching:
            _log.warning("requests are no longer batched: %s", reason)
            self._is_batching = False
            self._reply((BatchMismatch(clip(reason)), ()))

    def on_rows_differ(self, error: Exception) -> None:
        """Run the requests of the principals in `error` alone from now on, or all requests if it names none."""
        note = clip(str(error))
        principal_ids = error.principal_ids if isinstance(error, RowsDiffer) else ()
        new = [each for each in principal_ids if each not in self._unbatchable_principals]
        if not principal_ids or len(self._unbatchable_principals) + len(new) > _MAX_UNBATCHABLE_PRINCIPALS:
            self.stop_batching(note)
            return
        if not new:
            return  # these principals are already known: this batch ran before the comparison that found them
        principals_text = "1 principal" if len(new) == 1 else f"{len(new)} principals"
        _log.warning("requests of %s are no longer batched: %s", principals_text, note)
        self._unbatchable_principals = {**self._unbatchable_principals, **dict.fromkeys(new, note)}
        self._reply((BatchMismatch(note, tuple(new)), ()))

    def _count_special(self, principal_ids: Sequence[int]) -> None:
        if len(self._special_counts) >= _MAX_UNBATCHABLE_PRINCIPALS:
            self._special_counts.clear()
        self._special_counts.update(principal_ids)
        exceeding = [
            each for each in dict.fromkeys(principal_ids) if self._special_counts[each] >= _MAX_SPECIAL_REQUESTS
        ]
        if exceeding and len(self._unbatchable_principals) < _MAX_UNBATCHABLE_PRINCIPALS:
            kinds = ", ".join(each.value for each in self._special_kinds)
            self.on_rows_differ(RowsDiffer(f"many requests have values that must run alone ({kinds})", exceeding))


class RowsDiffer(NotBatchable):
    """The answers to some rows of a batch differ from the answers to the same rows run alone.

    Attributes:
        principal_ids: the principals whose rows get other answers in any batch; empty if these principals are not
            known, or if the rows of one principal change the answers to another principal's rows.
    """

    def __init__(self, text: str, principal_ids: Sequence[int]) -> None:
        super().__init__(text)
        self.principal_ids = principal_ids


class _BatchSample(NamedTuple):
    merged: BatchLayout
    inputs: Arrays
    outputs: Arrays
    principal_ids: Tuple[int, ...]


class ShadowChecks:
    """Compares the answers to batches with the answers to the same requests run alone, and records tested shapes.

    Args:
        engine: an engine that has built the model.
        max_rows: the maximum number of rows of one predict.
        allowed_batch_sizes: the only numbers of rows that the model supports, in ascending order; empty for any number.
        case: as in `BatchGuard.configure`.
        compared_rows: as in `BatchGuard.configure`.
    """

    def __init__(
        self,
        engine: Engine,
        max_rows: int,
        allowed_batch_sizes: Sequence[int] = (),
        case: Optional[SelfTestCase] = None,
        compared_rows: int = 0,
    ) -> None:
        self._engine = engine
        self._allowed_batch_sizes = allowed_batch_sizes
        self._max_tested_specs = max(_MAX_TESTED_SPECS, max_rows)
        self._tested_specs: Set[Any] = set()
        # Number of rows that were compared, by the dimensions of the inputs other than the number of rows.
        self._compared_rows: Dict[Any, int] = {}
        self._holder_dims = frozenset((name, tuple(shape[1:])) for name, shape in case.items()) if case else None
        self._holder_compared_rows = compared_rows
        if case:
            self._compared_rows[self._holder_dims] = MAX_TEST_ROWS
        self._until_recheck = _RECHECK_INTERVAL
        self._pending: Optional[_BatchSample] = None

    @property
    def is_due(self) -> bool:
        """Whether this object keeps a sample batch that should be compared again."""
        return self._pending is not None

    def can_batch(self, merged: BatchLayout) -> bool:
        """Return whether the requests of a batch with this layout may share a predict."""
        if (
            not merged.is_tested
            and merged.total_rows <= self._holder_compared_rows
            and _row_dims(merged) == self._holder_dims
        ):
            merged.is_tested = True
        return (
            merged.is_tested or len(self._tested_specs) < self._max_tested_specs or merged.specs in self._tested_specs
        )

    def check(self, merged: BatchLayout, inputs: Arrays, outputs: Arrays, principal_ids: Tuple[int, ...] = ()) -> None:
        """Run the requests of a batch alone and compare the answers, unless the batch's layout is already tested.

        Args:
            merged: the layout of the batch.
            inputs: the merged inputs of the batch. The caller must not change them afterwards.
            outputs: the outputs of the batch, as passed to `BatchLayout.learn_slices`.
            principal_ids: the principal of each request; empty if unknown.

        Raises:
            RowsDiffer: alone, a request gets another answer than in the batch.
            RequestError: the engine cannot run a request alone.
        """
        if merged.is_tested:
            self._until_recheck -= 1
            if self._until_recheck <= 0:
                self._keep_sample(_BatchSample(merged, inputs, outputs, principal_ids))
            return
        dims = _row_dims(merged)
        compared_rows = self._compared_rows.get(dims, 0)
        if merged.specs not in self._tested_specs or compared_rows < MAX_TEST_ROWS:
            self._compare(_BatchSample(merged, inputs, outputs, principal_ids))
            self._tested_specs.add(merged.specs)
            self._compared_rows[dims] = compared_rows = compared_rows + sum(merged.row_counts)
        merged.is_tested = compared_rows >= MAX_TEST_ROWS

    def recheck(self) -> None:
        """Compare the kept sample batch again, if a batch is kept.

        Raises:
            RowsDiffer: as `check`.
            RequestError: as `check`.
        """
        sample, self._pending = self._pending, None
        if sample is not None:
            self._compare(sample)

    def _keep_sample(self, sample: _BatchSample) -> None:
        self._until_recheck = _RECHECK_INTERVAL
        if (
            sum(array.nbytes for arrays in (sample.inputs, sample.outputs) for array in arrays.values())
            <= _MAX_SAMPLE_BYTES
        ):
            self._pending = sample

    def _compare(self, sample: _BatchSample) -> None:
        merged, inputs = sample.merged, sample.inputs
        used = sum(merged.row_counts)
        alone_outputs: List[Arrays] = []
        end = 0
        for count in merged.row_counts:
            begin, end = end, end + count
            if count:
                size = next((size for size in self._allowed_batch_sizes if size >= count), count)
                rows = np.minimum(np.arange(begin, begin + size), end - 1)
                alone_outputs.append({name: array[:count] for name, array in self._run(inputs, rows).items()})
        alone, batched = bits.concatenate(alone_outputs), {name: array[:used] for name, array in sample.outputs.items()}
        found = bits.describe_difference(batched, alone)
        if found:
            raise RowsDiffer(found, self._differing_principals(sample, batched, alone))

    def _differing_principals(self, sample: _BatchSample, batched: Arrays, alone: Arrays) -> Sequence[int]:
        """Return the principals whose rows get other answers even without rows of other principals in the batch.

        For each principal with differing answers, the method runs a batch that consists only of copies of this
        principal's rows. If this batch gives the same answers as the rows alone, the rows of another principal have
        changed the principal's answers in the original batch. Such rows may change the answers to any principal, so
        the method returns no principals.
        """
        layouts = [{name: (array.dtype, array.shape) for name, array in each.items()} for each in (batched, alone)]
        if not sample.principal_ids or layouts[0] != layouts[1]:
            return ()
        principal_by_row = np.repeat(sample.principal_ids, sample.merged.row_counts)
        differ = bits.differing_rows(batched, alone)
        found = sorted({int(each) for each in principal_by_row[differ]})
        for principal in found:
            own = np.flatnonzero(principal_by_row == principal)
            rows = np.resize(own, sample.merged.total_rows)
            rows[own] = own
            answer = self._run(sample.inputs, rows)
            pairs = ({name: array[own] for name, array in each.items()} for each in (answer, alone))
            if not bits.describe_difference(*pairs):
                return ()
        return found

    def _run(self, inputs: Arrays, rows: Any) -> Arrays:
        return bits.check_rows(self._engine.predict({name: each[rows] for name, each in inputs.items()}), len(rows))


def _row_dims(merged: BatchLayout) -> Any:
    return frozenset((each.name, each.shape[1:]) for each in merged.specs)
