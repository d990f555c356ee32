"""Self-test of ranks, with known answers from a file.

The ranks' answers cannot be checked by comparing them with each other: if two ranks load the same slice by mistake, all
ranks agree on a wrong answer.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from weightd_common.rowtest.bits import NotBatchable, check_rows
from weightd_common.rowtest.rows import has_rows
from weightd_protocol.codec import clip
from weightd_protocol.messages.worker_common import RowSupport, SelfTestCase
from weightd_worker.engines.engine import Arrays, BuildError, ModelSignature
from weightd_worker.selftest import sample, selftest

_NOT_TESTED = "equality of batched and single answers was not tested: a rank runs only the requests that all ranks run"
_ROWS_ARE_SHARDED = "each rank returns different rows, so requests are neither batched nor split"


class RowShare(NamedTuple):
    """The part of an answer's rows that one rank returns.

    Attributes:
        share_index: the number of the part, from 0.
        share_count: the number of equal parts into which the rows are divided.
    """

    share_index: int = 0
    share_count: int = 1


class ReferenceAnswer:
    """The inputs of a self-test, and the known answer that this rank must return.

    Args:
        path: path of an .npz file with an array for each input and for each output of the model.
        signature: the model's signature.
        row_share: the rows of the outputs that this rank returns; None if it returns no outputs.
        tolerance: the largest allowed difference from the known answer (`selftest.difference`).

    Attributes:
        inputs: the inputs of the self-test.
        sharded_inputs: the names of the inputs whose rows are divided among the ranks; empty if one rank returns the
            complete answer.

    Raises:
        BuildError: the arrays in the file do not fit the model, or cannot be divided into equal parts.
    """

    def __init__(self, path: str, signature: ModelSignature, row_share: Optional[RowShare], tolerance: float) -> None:
        self._signature = signature
        self._row_share = row_share
        self._tolerance = tolerance
        self.inputs, expected = sample.load_with_answers(path, signature)
        lengths = {len(each) for each in expected.values() if each.ndim}
        is_sharded = row_share is not None and row_share.share_count > 1
        names = self._inputs_with_rows if is_sharded else ()
        self.sharded_inputs = tuple(name for name in names if len(self.inputs[name]) in lengths)
        self._expected = (
            {}
            if row_share is None
            else {name: _shard_of(path, name, each, row_share) for name, each in expected.items()}
        )

    @property
    def case(self) -> SelfTestCase:
        """The shapes of the self-test's inputs."""
        return {name: tuple(array.shape) for name, array in self.inputs.items()}

    def digest_of(self, answer: Arrays) -> str:
        """Check this rank's answer and return its digest; "" if this rank returns no outputs.

        Raises:
            BuildError: the answer differs from the known answer. The text describes the difference.
        """
        if self._row_share is None:
            return ""
        if sorted(answer) != sorted(self._expected):
            raise BuildError(f"selftest: expected outputs {', '.join(self._expected)}, got {', '.join(answer)}")
        for name, right in self._expected.items():
            far = selftest.answer_difference({name: right}, {name: answer[name]})
            if far > self._tolerance:
                problem = _describe_difference(right, answer[name], far, self._tolerance)
                raise BuildError(f"the answer to the self-test is wrong: output {name}: {problem}")
        return selftest.from_answers((self.case,), [{name: answer[name] for name in self._expected}]).digest

    def with_other_row_count(self, allowed_batch_sizes: Sequence[int]) -> Tuple[Arrays, str]:
        """Return a pair: inputs with another number of rows than the self-test has, and "".

        If there can be no such inputs, return {} and the reason. All ranks have the same self-test and signature, so
        the method returns the same in all ranks.

        Args:
            allowed_batch_sizes: the only numbers of rows that the model supports; empty for any number.
        """
        inputs_with_rows = self._inputs_with_rows
        inputs_without_rows = [each.name for each in self._signature.inputs if each.name not in inputs_with_rows]
        if not inputs_with_rows or (allowed_batch_sizes and inputs_without_rows):
            return (
                {},
                f"input {inputs_without_rows[0]} has no rows" if inputs_without_rows else "the model has no inputs",
            )
        counts = sorted({len(self.inputs[name]) for name in inputs_with_rows})
        if len(counts) != 1 or 0 in counts:
            return (
                {},
                f"the self-test's inputs have {', '.join(map(str, counts))} rows, expected the same number in each",
            )
        count = counts[0]
        new_count = (
            next((size for size in sorted(allowed_batch_sizes) if size != count), 0)
            if allowed_batch_sizes
            else 2 * count
        )
        if not new_count:
            return {}, f"the model accepts only {count} rows"
        indices = np.arange(new_count) % count
        return {name: each[indices] if name in inputs_with_rows else each for name, each in self.inputs.items()}, ""

    def find_row_support(self, batch_inputs: Arrays, answer: Arrays, reason: str) -> Optional[RowSupport]:
        """Return whether the model has rows and which outputs have them; None if this rank returns no outputs.

        Args:
            batch_inputs: the inputs from `with_other_row_count`.
            answer: the answer to `batch_inputs`; empty if they were not run or were rejected.
            reason: why `answer` is empty; "" if `answer` is not empty.
        """
        if self._row_share is None:
            return None
        names = self._inputs_with_rows
        if self._row_share.share_count > 1:
            return RowSupport(names, (), is_equal=False, note=_ROWS_ARE_SHARDED)
        if reason:
            return RowSupport(names, (), is_equal=False, note=clip(reason))
        try:
            outputs = tuple(check_rows(answer, len(batch_inputs[names[0]])))
        except NotBatchable as error:
            return RowSupport(names, (), is_equal=False, note=clip(str(error)))
        return RowSupport(names, outputs, is_equal=False, note=_NOT_TESTED)

    @property
    def _inputs_with_rows(self) -> Tuple[str, ...]:
        return tuple(each.name for each in self._signature.inputs if has_rows(each))


def _shard_of(path: str, name: str, array: Any, row_share: RowShare) -> Any:
    if row_share.share_count == 1:
        return array
    each, rest = divmod(len(array) if array.ndim else 1, row_share.share_count)
    if rest or not array.ndim:
        raise BuildError(
            f"selftest: {path}: {name}: expected rows that {row_share.share_count} ranks can share equally, got"
            f" {list(array.shape)}"
        )
    return array[row_share.share_index * each : (row_share.share_index + 1) * each]


def _describe_difference(expected: Any, answer: Any, difference: float, tolerance: float) -> str:
    if difference == float("inf"):
        layouts = [f"{each.dtype} {list(each.shape)}" for each in (expected, answer)]
        if layouts[0] != layouts[1]:
            return f"expected {layouts[0]}, got {layouts[1]}"
        return "differs where equality is required: in integers, in which values are finite, or from an output of zeros"
    return f"differs by {difference:.3g} of the largest value, expected at most {tolerance:g}"
