"""Decides which requests may share a predict, and checks that each has the answer that it would have alone.

Requests that were run together are run alone, too: each form of them that comes for the first time, and few again. What
a holder tests has the self-test's dimensions, and rows that it has made up. What comes may have others: of these as
many rows are run alone as the holder has, for where rows differ, few may.
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

# Principals whose requests are run one by one. Where there are more, those of all are.
_MAX_UNBATCHABLE_PRINCIPALS = limits.MAX_TENANTS

# Requests with special values of a principal, after which its requests are not sent together with others any more: each
# costs those that come with it the time of another predict.
_MAX_SPECIAL_REQUESTS = 64

_log = logging.getLogger("weightd.worker")


# One batch of so many is looked at again, when nothing else is to be done. It is kept for that, if it is not too large.
_RECHECK_INTERVAL = 1000
_MAX_SAMPLE_BYTES = 16 * 1024 * 1024

# Forms that are known at a time, or one for each number of rows: each costs predicts. Others are not run together.
_MAX_TESTED_SPECS = 64


class BatchGuard:
    """Decides which requests that come together are run together, by what is known of the answers to such requests.

    Args:
        engine: has built the model when `configure` is called.
        reply: sends a message with its tensors to the daemon.

    Attributes:
        allowed_batch_sizes: the only numbers of rows that the model takes, the least first; none: any.
    """

    def __init__(self, engine: Engine, reply: Callable[..., None]) -> None:
        self.allowed_batch_sizes: Sequence[int] = ()
        self._engine = engine
        self._reply = reply
        self._is_batching = True
        self._shadow_checks: Optional[ShadowChecks] = None
        self._special_kinds: Sequence[SpecialFloats] = ()
        # How many requests with special values have come of each principal.
        self._special_counts: collections.Counter[int] = collections.Counter()
        # Why requests of these principals are not run together with others.
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
        """The model is built and attached.

        Args:
            max_rows: of one predict at most.
            allowed_batch_sizes: the only numbers of rows that the model takes; none: any.
            is_exact: whether the answers to requests that are run together have to be those of each alone, bit for bit.
            case: shapes of inputs; with these, but for the rows, the holder has compared rows.
            compared_rows: each number of rows up to this one.
            special_kinds: kinds of floats: requests that have such values are run alone, if answers have to be the
                same.
        """
        self._special_kinds = [SpecialFloats(each) for each in special_kinds] if is_exact else []
        self.allowed_batch_sizes = sorted(allowed_batch_sizes)
        self._shadow_checks = (
            ShadowChecks(self._engine, max_rows, self.allowed_batch_sizes, case, compared_rows) if is_exact else None
        )

    @property
    def is_check_due(self) -> bool:
        """Whether requests that were run together are to be run again alone, when nothing else is to be done."""
        return self._shadow_checks is not None and self._shadow_checks.is_due

    def run_due_check(self) -> None:
        """Run them, and nothing together any more if their answers differ.

        Raises:
            ModelCorrupted: the model is.
        """
        if self._shadow_checks is not None:
            try:
                self._shadow_checks.recheck()
            except (NotBatchable, InvalidArgument) as error:
                self.on_rows_differ(error)

    def can_batch(self, merged: BatchLayout) -> bool:
        """Return whether requests of this form may be run together."""
        return self._is_batching and (self._shadow_checks is None or self._shadow_checks.can_batch(merged))

    def indices_to_run_alone(
        self, merged: BatchLayout, inputs: Arrays, principal_ids: Tuple[int, ...]
    ) -> Sequence[int]:
        """Return the positions of requests that are run alone, because of whose they are or because of their values."""
        if not (self._unbatchable_principals or self._special_kinds):
            return ()
        found = {index for index, each in enumerate(principal_ids) if each in self._unbatchable_principals}
        # The daemon does not know of these principals yet, or is another one than that which does.
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
        """As that of `ShadowChecks`; nothing is checked where answers need not be the same."""
        if self._shadow_checks is not None:
            self._shadow_checks.check(merged, inputs, outputs, principal_ids)

    def stop_batching(self, reason: str) -> None:
        """Run nothing together any more, for the reason that `reason` gives."""
        if self._is_batching:
            _log.warning("batching is off: %s", reason)
            self._is_batching = False
            self._reply((BatchMismatch(clip(reason)), ()))

    def on_rows_differ(self, error: Exception) -> None:
        """Run requests of the principals whose rows differ alone from now on; all, where these are not known."""
        note = clip(str(error))
        principal_ids = error.principal_ids if isinstance(error, RowsDiffer) else ()
        new = [each for each in principal_ids if each not in self._unbatchable_principals]
        if not principal_ids or len(self._unbatchable_principals) + len(new) > _MAX_UNBATCHABLE_PRINCIPALS:
            self.stop_batching(note)
            return
        if not new:
            return  # that was run before it was known
        _log.warning("requests of %d principal_ids are not batched any more: %s", len(new), note)
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
            self.on_rows_differ(RowsDiffer(f"many have values that are run alone ({kinds})", exceeding))


class RowsDiffer(NotBatchable):
    """Rows that were run together differ from the same rows run alone.

    Attributes:
        principal_ids: whose rows differ, whatever they are run with; none where that is not known, or where rows change
            the answers to those of others.
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
    """What is known of the answers to requests that are run together.

    Args:
        engine: has built the model.
        max_rows: of one predict at most.
        allowed_batch_sizes: the only numbers of rows that it takes, the least first; none: any.
        case: shapes of inputs; with these, but for the rows, the holder has compared rows.
        compared_rows: each number of rows up to this one.
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
        # By the other dimensions: how many rows.
        self._compared_rows: Dict[Any, int] = {}
        self._holder_dims = frozenset((name, tuple(shape[1:])) for name, shape in case.items()) if case else None
        self._holder_compared_rows = compared_rows
        if case:
            self._compared_rows[self._holder_dims] = MAX_TEST_ROWS
        self._until_recheck = _RECHECK_INTERVAL
        self._pending: Optional[_BatchSample] = None

    @property
    def is_due(self) -> bool:
        """Whether there is something to be looked at again."""
        return self._pending is not None

    def can_batch(self, merged: BatchLayout) -> bool:
        """Return whether requests of this form may be run together."""
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
        """Find out whether each has the same answer alone, unless that is known of the form.

        Args:
            merged: of the requests.
            inputs: of all of them, which are not to be changed after that.
            outputs: as `MergedRequest.learn_slices` has seen them.
            principal_ids: whose each request is, if that is known.

        Raises:
            RowsDiffer: one has another.
            RequestError: one cannot be run alone.
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
        """Look again at what is due, if anything is.

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
        """Return whose rows differ.

        The rows of each such principal are run again without those of others: in the places of these are its own rows.
        If they do not differ then, it was the rows of others that have changed the answers to them; so those may change
        the answers to anybody's, and none is to blame alone.
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
