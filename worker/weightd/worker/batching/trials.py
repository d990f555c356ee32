"""Requests that were run together are run alone, too: each form of them that comes for the first time, and few again.

What a holder tests has the canary's dimensions, and rows that it has made up. What comes may have others: of these as
many rows are run alone as the holder has, for where rows differ, few may.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from weightd.protocol.messages.findings import SelfTestCase
from weightd.shared.rowtest import bits
from weightd.shared.rowtest.bits import NotTogether
from weightd.shared.rowtest.rows import MAX_TEST_ROWS
from weightd.worker.batching.joint import Joint
from weightd.worker.engines.engine import Arrays, Engine

# One job of so many is looked at again, when nothing else is to be done. It is kept for that, if it is not too large.
_SELDOM = 1000
_MAX_KEPT_BYTES = 16 * 1024 * 1024

# Forms that are known at a time, or one for each number of rows: each costs predicts. Others are not run together.
_MAX_FORMS = 64


class RowsDiffer(NotTogether):
    """Rows that were run together differ from the same rows run alone.

    Attributes:
        parties: whose rows differ, whatever they are run with; none where that is not known, or where rows change the
            answers to those of others.
    """

    def __init__(self, text: str, parties: Sequence[int]) -> None:
        super().__init__(text)
        self.parties = parties


class _Kept(NamedTuple):
    joint: Joint
    inputs: Arrays
    outputs: Arrays
    parties: Tuple[int, ...]


class Trials:
    """What is known of the answers to requests that are run together.

    Args:
        engine: has built the model.
        rows: of one predict at most.
        sizes: the only numbers of rows that it takes, the least first; none: any.
        case: shapes of inputs; with these, but for the rows, the holder has compared rows.
        compared: each number of rows up to this one.
    """

    def __init__(
        self, engine: Engine, rows: int, sizes: Sequence[int] = (), case: Optional[SelfTestCase] = None, compared: int = 0
    ) -> None:
        self._engine = engine
        self._sizes = sizes
        self._most = max(_MAX_FORMS, rows)
        self._forms: Set[Any] = set()
        # By the other dimensions: how many rows.
        self._compared: Dict[Any, int] = {}
        self._case = frozenset((name, tuple(shape[1:])) for name, shape in case.items()) if case else None
        self._most_compared = compared
        if case:
            self._compared[self._case] = MAX_TEST_ROWS
        self._left = _SELDOM
        self._kept: Optional[_Kept] = None

    @property
    def is_due(self) -> bool:
        """Whether there is something to be looked at again."""
        return self._kept is not None

    def takes(self, joint: Joint) -> bool:
        """Return whether requests of this form may be run together."""
        if not joint.is_tested and joint.total <= self._most_compared and _dims(joint) == self._case:
            joint.is_tested = True
        return joint.is_tested or len(self._forms) < self._most or joint.specs in self._forms

    def check(self, joint: Joint, inputs: Arrays, outputs: Arrays, parties: Tuple[int, ...] = ()) -> None:
        """Find out whether each has the same answer alone, unless that is known of the form.

        Args:
            joint: of the requests.
            inputs: of all of them, which are not to be changed after that.
            outputs: as `Joint.learn` has seen them.
            parties: whose each request is, if that is known.

        Raises:
            RowsDiffer: one has another.
            RequestError: one cannot be run alone.
        """
        if joint.is_tested:
            self._left -= 1
            if self._left <= 0:
                self._keep(_Kept(joint, inputs, outputs, parties))
            return
        dims = _dims(joint)
        compared = self._compared.get(dims, 0)
        if joint.specs not in self._forms or compared < MAX_TEST_ROWS:
            self._compare(_Kept(joint, inputs, outputs, parties))
            self._forms.add(joint.specs)
            self._compared[dims] = compared = compared + sum(joint.counts)
        joint.is_tested = compared >= MAX_TEST_ROWS

    def again(self) -> None:
        """Look again at what is due, if anything is.

        Raises:
            RowsDiffer: as `check`.
            RequestError: as `check`.
        """
        kept, self._kept = self._kept, None
        if kept is not None:
            self._compare(kept)

    def _keep(self, kept: _Kept) -> None:
        self._left = _SELDOM
        if sum(array.nbytes for arrays in (kept.inputs, kept.outputs) for array in arrays.values()) <= _MAX_KEPT_BYTES:
            self._kept = kept

    def _compare(self, job: _Kept) -> None:
        joint, inputs = job.joint, job.inputs
        used = sum(joint.counts)
        parts: List[Arrays] = []
        end = 0
        for count in joint.counts:
            begin, end = end, end + count
            if count:
                size = next((size for size in self._sizes if size >= count), count)
                rows = np.minimum(np.arange(begin, begin + size), end - 1)
                parts.append({name: array[:count] for name, array in self._run(inputs, rows).items()})
        alone, together = bits.concatenate(parts), {name: array[:used] for name, array in job.outputs.items()}
        found = bits.describe_difference(together, alone)
        if found:
            raise RowsDiffer(found, self._whose(job, together, alone))

    def _whose(self, job: _Kept, together: Arrays, alone: Arrays) -> Sequence[int]:
        """Return whose rows differ.

        The rows of each such party are run again without those of others: in the places of these are its own rows. If
        they do not differ then, it was the rows of others that have changed the answers to them; so those may change
        the answers to anybody's, and none is to blame alone.
        """
        forms = [{name: (array.dtype, array.shape) for name, array in each.items()} for each in (together, alone)]
        if not job.parties or forms[0] != forms[1]:
            return ()
        party_of_row = np.repeat(job.parties, job.joint.counts)
        differ = bits.differing_rows(together, alone)
        found = sorted({int(each) for each in party_of_row[differ]})
        for party in found:
            own = np.flatnonzero(party_of_row == party)
            rows = np.resize(own, job.joint.total)
            rows[own] = own
            answer = self._run(job.inputs, rows)
            pairs = ({name: array[own] for name, array in each.items()} for each in (answer, alone))
            if not bits.describe_difference(*pairs):
                return ()
        return found

    def _run(self, inputs: Arrays, rows: Any) -> Arrays:
        return bits.check_rows(self._engine.predict({name: each[rows] for name, each in inputs.items()}), len(rows))


def _dims(joint: Joint) -> Any:
    return frozenset((each.name, each.shape[1:]) for each in joint.specs)
