"""Tests of the batch guard, which compares answers of batched requests with their answers alone."""

from __future__ import annotations

from typing import Any, Callable, List, Sequence, Tuple

import numpy as np
import pytest

from testkit.fakeengine import FakeEngine
from weightd_common.rowtest.bits import NotBatchable
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.tensors import describe_request, frame_of
from weightd_worker import batch_guard as trials_module
from weightd_worker.batch_guard import RowsDiffer, ShadowChecks
from weightd_worker.batching import BatchLayout
from weightd_worker.engines.engine import ModelSignature

SIGNATURE = ModelSignature((TensorSignature("x", "FP32", (-1, -1)),), (TensorSignature("y", "FP32", (-1, -1)),))


class GuardedModel:
    """A batch guard with a model that is a function and may answer batches differently; a holder has tested rows of
    width 2."""

    def __init__(
        self,
        rows: int = 1,
        sizes: Sequence[int] = (),
        alone: Callable[[Any], Any] = np.negative,
        compared: int = 0,
    ) -> None:
        self.engine = FakeEngine(lambda inputs: {"y": alone(inputs["x"])}, SIGNATURE)
        self.trials = ShadowChecks(self.engine, rows, sizes, {"x": (1, 2)}, compared)
        self._sizes = sizes

    def joint(self, *counts: int, width: int = 2) -> Tuple[BatchLayout, Any]:
        arrays = [np.arange(count * width, dtype=np.float32).reshape(count, width) for count in counts]
        joint = BatchLayout([describe_request("m", {"x": array}) for array in arrays], 0, self._sizes)
        return joint, joint.merge_inputs([[frame_of(array)] for array in arrays])

    def run(self, *counts: int, width: int = 2, together: Callable[[Any], Any] = np.negative) -> List[int]:
        """Run a batch; return the numbers of rows that the guard ran again alone."""
        joint, inputs = self.joint(*counts, width=width)
        return self.check(joint, inputs, together)

    def check(self, joint: BatchLayout, inputs: Any, together: Callable[[Any], Any] = np.negative) -> List[int]:
        before = len(self.engine.received_inputs)
        self.trials.check(joint, inputs, {"y": together(inputs["x"])})
        return [len(each["x"]) for each in self.engine.received_inputs[before:]]


def test_runs_new_forms_alone() -> None:
    guarded = GuardedModel()
    assert guarded.run(1, 2, 0, 3) == [1, 2, 3]
    # The form is the total number of rows.
    assert guarded.run(4, 2) == []
    assert guarded.run(1, 4) == [1, 4]
    assert guarded.run(1, 4, width=3) == [1, 4]
    assert guarded.run(0, 0) == []
    assert guarded.run(1, 2, 3) == []


def test_skips_forms_compared_by_holder() -> None:
    guarded = GuardedModel(rows=1, compared=3)
    for counts, width, alone in (((1, 2), 2, []), ((2, 2), 2, [2, 2]), ((1, 2), 3, [1, 2])):
        joint, inputs = guarded.joint(*counts, width=width)
        assert guarded.trials.can_batch(joint)
        assert guarded.check(joint, inputs) == alone


def test_runs_unknown_dimensions_alone_several_times() -> None:
    guarded = GuardedModel()
    joint, inputs = guarded.joint(60, 7, width=3)
    assert [guarded.check(joint, inputs) for _ in range(4)] == [[60, 7]] * 3 + [[]]
    assert [guarded.run(1, 1, width=3) for _ in range(2)] == [[1, 1], []]


def test_does_not_compare_padding() -> None:
    guarded = GuardedModel(sizes=(2, 8))
    assert guarded.run(1, 2, 1, together=lambda x: np.concatenate([-x[:4], x[4:]])) == [2, 2, 2]


Function = Callable[[Any], Any]

DIFFERENT: List[Tuple[Function, Function, str]] = [
    (np.negative, lambda x: -x * 2, "output y: 3 of 3 rows that were batched differ"),
    (np.negative, lambda x: x * np.float32(-1) + np.float32(0), "output y: 2 of 3 rows .* by up to 0 where"),
    (lambda x: x[:1], np.negative, r"output y has shape \[1, 2\] for 2 rows"),
]


@pytest.mark.parametrize(("alone", "together", "note"), DIFFERENT)
def test_unequal_form_stays_unknown(alone: Function, together: Function, note: str) -> None:
    guarded = GuardedModel(alone=alone)
    for _ in range(2):
        with pytest.raises(NotBatchable, match=note):
            guarded.run(1, 2, together=together)


def odd(x: Any) -> Any:
    """Return another answer for 13 in a batch than alone, whatever the other rows are."""
    return -x + (x == 13) * (len(x) > 2)


def coupled(x: Any) -> Any:
    """Add the largest value of all rows to each row."""
    return -x + x.max()


@pytest.mark.parametrize(
    ("model", "values", "principal_ids", "guilty"),
    [
        (odd, ([1, 2], [13], [3]), (1, 2, 3), [2]),
        (odd, ([1, 13], [13], [3]), (1, 2, 3), [1, 2]),
        (odd, ([1, 2], [13], [3], [13]), (1, 2, 3, 2), [2]),
        # The rows of one principal in a batch are compared, too.
        (odd, ([1, 2], [13], [3]), (1, 1, 1), [1]),
        (odd, ([1, 2], [13], [3]), (), []),
        # The guard cannot tell which principal's rows change the other rows.
        (coupled, ([1], [13], [1]), (1, 2, 3), []),
    ],
)
def test_finds_principals_with_unequal_rows(
    model: Function, values: Sequence[List[float]], principal_ids: Tuple[int, ...], guilty: List[int]
) -> None:
    guarded = GuardedModel(alone=model)
    arrays = [np.repeat(np.array(each, np.float32)[:, None], 2, 1) for each in values]
    joint = BatchLayout([describe_request("m", {"x": array}) for array in arrays])
    inputs = joint.merge_inputs([[frame_of(array)] for array in arrays])
    with pytest.raises(RowsDiffer, match="rows that were batched differ") as caught:
        guarded.trials.check(joint, inputs, {"y": model(inputs["x"])}, principal_ids)
    assert [*caught.value.principal_ids] == guilty


@pytest.mark.parametrize(("rows", "most"), [(8, 64), (70, 70)])
def test_limits_number_of_forms(rows: int, most: int) -> None:
    guarded = GuardedModel(rows)
    joints = [guarded.joint(1, 1, width=width) for width in range(1, most + 2)]
    for joint, inputs in joints[:most]:
        assert guarded.trials.can_batch(joint)
        guarded.check(joint, inputs)
    assert not guarded.trials.can_batch(joints[-1][0])
    assert guarded.trials.can_batch(joints[0][0])
    assert guarded.trials.can_batch(guarded.joint(1, 1, width=1)[0])


def test_rechecks_one_of_a_thousand_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = GuardedModel()
    joint, inputs = guarded.joint(1, 2)
    for _ in range(1000):
        guarded.check(joint, inputs)
    due = [guarded.trials.is_due]
    guarded.trials.recheck()
    assert len(guarded.engine.received_inputs) == 2
    guarded.check(joint, inputs)
    due.append(guarded.trials.is_due)
    guarded.trials.recheck()
    due.append(guarded.trials.is_due)
    assert (len(guarded.engine.received_inputs), due) == (4, [False, True, False])
    monkeypatch.setattr(trials_module, "_RECHECK_INTERVAL", 1)
    monkeypatch.setattr(trials_module, "_MAX_SAMPLE_BYTES", 2 * 3 * 2 * 4)
    for size, is_kept in ((3, True), (4, False)):
        guarded = GuardedModel()
        for _ in range(2):
            guarded.run(size - 1, 1)
            joint, inputs = guarded.joint(size - 1, 1)
            guarded.check(joint, inputs)
            guarded.check(joint, inputs, np.positive)
        assert guarded.trials.is_due == is_kept
    guarded = GuardedModel()
    guarded.check(joint, inputs)
    monkeypatch.setattr(trials_module, "_MAX_SAMPLE_BYTES", 1000)
    guarded.check(joint, inputs, np.abs)
    with pytest.raises(NotBatchable, match="differ"):
        guarded.trials.recheck()
