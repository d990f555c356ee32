"""Requests that were run together are run alone, too: each form of them that comes for the first time, and few again.

What a holder tests has the self-test's dimensions, and rows that it has made up. What comes may have others: of these
as many rows are run alone as the holder has, for where rows differ, few may.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from weightd_common.rowtest import bits
from weightd_common.rowtest.bits import NotBatchable
from weightd_common.rowtest.rows import MAX_TEST_ROWS
from weightd_protocol.messages.worker_common import SelfTestCase
from weightd_worker.batching.merge import BatchLayout
from weightd_worker.engines.engine import Arrays, Engine

# One job of so many is looked at again, when nothing else is to be done. It is kept for that, if it is not too large.
_RECHECK_INTERVAL = 1000
_MAX_SAMPLE_BYTES = 16 * 1024 * 1024

# Forms that are known at a time, or one for each number of rows: each costs predicts. Others are not run together.
_MAX_TESTED_SPECS = 64


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
