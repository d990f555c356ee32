"""A canary whose right answer is known: two ranks with one slice agree on a wrong one, so that only this is a proof."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from weightd.protocol.codec import clip
from weightd.protocol.messages.findings import SelfTestCase, Rows
from weightd.shared.rowtest.bits import NotTogether, check_rows
from weightd.shared.rowtest.rows import has_rows
from weightd.worker.canary import canary, sample
from weightd.worker.engines.engine import Arrays, ModelSignature
from weightd.worker.engines.errors import BuildError

_NOT_TESTED = "it was not tested whether answers are the same: a rank runs nothing but what all ranks are asked"
_SHARES = "each rank answers with rows of its own: requests are neither put together nor cut"


class Share(NamedTuple):
    """The rows of an answer that a rank has: of so many equal shares the one with this number, from 0."""

    number: int = 0
    of: int = 1


class Known:
    """What is asked, and what this rank has to answer.

    Args:
        path: an .npz with an array for each input, and one for each output.
        signature: of the model.
        share: which rows of the outputs this rank answers with; None if it does not answer.
        tolerance: how far the answer may be from the known one (`canary.difference`).

    Attributes:
        inputs: what is asked.
        divided: those of which each rank answers with its share of the rows; none where one rank answers.

    Raises:
        BuildError: the file is not such, or cannot be divided into shares.
    """

    def __init__(self, path: str, signature: ModelSignature, share: Optional[Share], tolerance: float) -> None:
        self._signature = signature
        self._share = share
        self._tolerance = tolerance
        self.inputs, right = sample.load_known(path, signature)
        lengths = {len(each) for each in right.values() if each.ndim}
        is_divided = share is not None and share.of > 1
        names = self._with_rows if is_divided else ()
        self.divided = tuple(name for name in names if len(self.inputs[name]) in lengths)
        self._right = {} if share is None else {name: _cut(path, name, each, share) for name, each in right.items()}

    @property
    def case(self) -> SelfTestCase:
        """The shapes of the inputs."""
        return {name: tuple(array.shape) for name, array in self.inputs.items()}

    def digest_of(self, answer: Arrays) -> str:
        """Return the digest of an answer, "" if this rank has none to give.

        Raises:
            BuildError: it is not the known one; the text says by how much.
        """
        if self._share is None:
            return ""
        if sorted(answer) != sorted(self._right):
            raise BuildError(f"canary: expected outputs {', '.join(self._right)}, got {', '.join(answer)}")
        for name, right in self._right.items():
            far = canary.apart({name: right}, {name: answer[name]})
            if far > self._tolerance:
                problem = _told(right, answer[name], far, self._tolerance)
                raise BuildError(f"the canary's answer is not the known one: output {name}: {problem}")
        return canary.of((self.case,), [{name: answer[name] for name in self._right}]).digest

    def more(self, sizes: Sequence[int]) -> Tuple[Arrays, str]:
        """Return the canary with another number of rows; or nothing, and why.

        All ranks have the same canary and the same signature, and so the same of this.

        Args:
            sizes: the only numbers of rows that the model takes; none: any.
        """
        with_rows = self._with_rows
        without = [each.name for each in self._signature.inputs if each.name not in with_rows]
        if not with_rows or (sizes and without):
            return {}, f"input {without[0]} has no rows" if without else "the model has no inputs"
        counts = sorted({len(self.inputs[name]) for name in with_rows})
        if len(counts) != 1 or 0 in counts:
            return {}, f"the canary's inputs have {', '.join(map(str, counts))} rows, expected as many of each"
        count = counts[0]
        number = next((size for size in sorted(sizes) if size != count), 0) if sizes else 2 * count
        if not number:
            return {}, f"the model takes {count} rows only"
        indices = np.arange(number) % count
        return {name: each[indices] if name in with_rows else each for name, each in self.inputs.items()}, ""

    def rows(self, asked: Arrays, answer: Arrays, why: str) -> Optional[Rows]:
        """Return what is found of the rows of the model; None if this rank does not answer.

        Args:
            asked: as `more` gave it.
            answer: to that; none where nothing was asked, or that was refused.
            why: there is no answer.
        """
        if self._share is None:
            return None
        names = self._with_rows
        if self._share.of > 1:
            return Rows(names, (), equal=False, note=_SHARES)
        if why:
            return Rows(names, (), equal=False, note=clip(why))
        try:
            outputs = tuple(check_rows(answer, len(asked[names[0]])))
        except NotTogether as error:
            return Rows(names, (), equal=False, note=clip(str(error)))
        return Rows(names, outputs, equal=False, note=_NOT_TESTED)

    @property
    def _with_rows(self) -> Tuple[str, ...]:
        return tuple(each.name for each in self._signature.inputs if has_rows(each))


def _cut(path: str, name: str, array: Any, share: Share) -> Any:
    if share.of == 1:
        return array
    each, rest = divmod(len(array) if array.ndim else 1, share.of)
    if rest or not array.ndim:
        raise BuildError(
            f"canary: {path}: {name}: expected equal shares of rows for {share.of} ranks, got {list(array.shape)}"
        )
    return array[share.number * each : (share.number + 1) * each]


def _told(right: Any, answer: Any, far: float, tolerance: float) -> str:
    if far == float("inf"):
        forms = [f"{each.dtype} {list(each.shape)}" for each in (right, answer)]
        if forms[0] != forms[1]:
            return f"expected {forms[0]}, got {forms[1]}"
        return "it differs where it has to be equal: in whole numbers, in what is finite, or from an output of zeros"
    return f"it is {far:.3g} of the largest value away, expected at most {tolerance:g}"
