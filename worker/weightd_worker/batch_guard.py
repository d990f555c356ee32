"""Decides which requests may share a predict, and checks that each gets the answer that it would get alone.

The holder tests batching with the dimensions of the self-test and generated rows, but requests may have other
dimensions. So a worker compares batches with the same requests run alone: the first batch of each shape, further ones
until as many rows are compared as in the holder's test, because few rows may differ, and a sample later.
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

# Most principals whose requests run alone. With more of them, the requests of all principals run alone.
_MAX_UNBATCHABLE_PRINCIPALS = limits.MAX_TENANTS

# A principal that has sent this number of requests with special values is not batched any more: each of them costs the
# other requests of its batch the time of another predict.
_MAX_SPECIAL_REQUESTS = 64

_log = logging.getLogger("weightd.worker")


# One tested batch of this number is kept, unless it is too large, and compared again when the worker is idle.
_RECHECK_INTERVAL = 1000
_MAX_SAMPLE_BYTES = 16 * 1024 * 1024

# Most batch shapes that are tested, or `max_rows` if that is more: each costs predicts. Other shapes are not batched.
_MAX_TESTED_SPECS = 64


class BatchGuard:
    """Batching decisions of one model, based on comparisons of batched answers with answers alone.

    Args:
        engine: the engine, which has built the model when `configure` is called.
        reply: sends a message with its tensors to the daemon.

    Attributes:
        allowed_batch_sizes: the only numbers of rows that the model takes, in ascending order; empty: any number.
    """

    def __init__(self, engine: Engine, reply: Callable[..., None]) -> None:
        self.allowed_batch_sizes: Sequence[int] = ()
        self._engine = engine
        self._reply = reply
        self._is_batching = True
        self._shadow_checks: Optional[ShadowChecks] = None
        self._special_kinds: Sequence[SpecialFloats] = ()
        # The number of requests with special values of each principal.
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
        """Set the batching rules, once the model is built and attached.

        Args:
            max_rows: the most rows of one predict.
            allowed_batch_sizes: the only numbers of rows that the model takes; empty: any number.
            is_exact: whether batched answers must equal the answers to each request alone, bit for bit.
            case: the shapes of the inputs with which the holder has compared rows, whatever their number of rows.
            compared_rows: the holder has compared every number of rows up to this one.
            special_kinds: kinds of special floats. With `is_exact`, requests with such values run alone.
        """
        self._special_kinds = [SpecialFloats(each) for each in special_kinds] if is_exact else []
        self.allowed_batch_sizes = sorted(allowed_batch_sizes)
        self._shadow_checks = (
            ShadowChecks(self._engine, max_rows, self.allowed_batch_sizes, case, compared_rows) if is_exact else None
        )

    @property
    def is_check_due(self) -> bool:
        """Whether a kept batch has to be compared again when the worker is idle."""
        return self._shadow_checks is not None and self._shadow_checks.is_due

    def run_due_check(self) -> None:
        """Compare the kept batch again, and restrict batching if its answers differ.

        Raises:
            ModelCorrupted: a predict has corrupted the model.
        """
        if self._shadow_checks is not None:
            try:
                self._shadow_checks.recheck()
            except (NotBatchable, InvalidArgument) as error:
                self.on_rows_differ(error)

    def can_batch(self, merged: BatchLayout) -> bool:
        """Return whether requests with this layout may share a predict."""
        return self._is_batching and (self._shadow_checks is None or self._shadow_checks.can_batch(merged))

    def indices_to_run_alone(
        self, merged: BatchLayout, inputs: Arrays, principal_ids: Tuple[int, ...]
    ) -> Sequence[int]:
        """Return the positions of the requests that have to run alone, because of their principal or their values."""
        if not (self._unbatchable_principals or self._special_kinds):
            return ()
        found = {index for index, each in enumerate(principal_ids) if each in self._unbatchable_principals}
        # The daemon has batched them, so it has not read the first report yet, or is a later one that never got it.
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
        """Compare a batch with its requests run alone, see `ShadowChecks.check`; do nothing unless `is_exact`."""
        if self._shadow_checks is not None:
            self._shadow_checks.check(merged, inputs, outputs, principal_ids)

    def stop_batching(self, reason: str) -> None:
        """Run every request alone from now on, and report the reason to the daemon."""
        if self._is_batching:
            _log.warning("requests are no longer batched: %s", reason)
            self._is_batching = False
            self._reply((BatchMismatch(clip(reason)), ()))

    def on_rows_differ(self, error: Exception) -> None:
        """Run the requests of the differing principals alone from now on; all requests, if these are not known."""
        note = clip(str(error))
        principal_ids = error.principal_ids if isinstance(error, RowsDiffer) else ()
        new = [each for each in principal_ids if each not in self._unbatchable_principals]
        if not principal_ids or len(self._unbatchable_principals) + len(new) > _MAX_UNBATCHABLE_PRINCIPALS:
            self.stop_batching(note)
            return
        if not new:
            return  # this batch ran before the principals were known
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
    """Rows that were run together differ from the same rows run alone.

    Attributes:
        principal_ids: the principals whose rows differ whatever they run with; empty if they are not known, or if rows
            of one principal change the answers to another one's rows.
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
    """Compares batched answers with the answers to the same requests run alone, and remembers the tested shapes.

    Args:
        engine: an engine that has built the model.
        max_rows: the most rows of one predict.
        allowed_batch_sizes: the only numbers of rows that the model takes, in ascending order; empty: any number.
        case: the shapes of the inputs with which the holder has compared rows, whatever their number of rows.
        compared_rows: the holder has compared every number of rows up to this one.
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
        # The number of compared rows, by the other dimensions of the inputs.
        self._compared_rows: Dict[Any, int] = {}
        self._holder_dims = frozenset((name, tuple(shape[1:])) for name, shape in case.items()) if case else None
        self._holder_compared_rows = compared_rows
        if case:
            self._compared_rows[self._holder_dims] = MAX_TEST_ROWS
        self._until_recheck = _RECHECK_INTERVAL
        self._pending: Optional[_BatchSample] = None

    @property
    def is_due(self) -> bool:
        """Whether a batch is kept for another comparison."""
        return self._pending is not None

    def can_batch(self, merged: BatchLayout) -> bool:
        """Return whether requests with this layout may share a predict."""
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
        """Compare a batch with its requests run alone, unless its layout is already tested.

        Args:
            merged: the layout of the batch.
            inputs: the merged inputs; the caller must not change them afterwards.
            outputs: the outputs, as passed to `BatchLayout.learn_slices`.
            principal_ids: the principal of each request, if known.

        Raises:
            RowsDiffer: a request gets another answer alone.
            RequestError: a request cannot be run alone.
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
        """Compare the kept batch again, if there is one.

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
        """Return the principals whose own rows cause the difference; empty if rows of others may have caused it.

        The rows of each principal whose results differ run again, in a batch that consists only of copies of them. If
        the results are then correct, rows of other principals have changed them. Because these may change the results
        of any principal, the method returns none.
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
