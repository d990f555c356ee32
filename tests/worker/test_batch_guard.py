"""Requests that are run together, and alone, too."""

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


class World:
    """Trials of a model that is a function, whose answer to many rows may differ. A holder has tried rows of 2."""

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
        """Return how many rows were run at once for it, beside all together."""
        joint, inputs = self.joint(*counts, width=width)
        return self.check(joint, inputs, together)

    def check(self, joint: BatchLayout, inputs: Any, together: Callable[[Any], Any] = np.negative) -> List[int]:
        before = len(self.engine.received_inputs)
        self.trials.check(joint, inputs, {"y": together(inputs["x"])})
        return [len(each["x"]) for each in self.engine.received_inputs[before:]]


def test_each_form_is_run_alone_when_it_comes_for_the_first_time() -> None:
    world = World()
    assert world.run(1, 2, 0, 3) == [1, 2, 3]
    # It is the number of all rows that counts.
    assert world.run(4, 2) == []
    assert world.run(1, 4) == [1, 4]
    assert world.run(1, 4, width=3) == [1, 4]
    assert world.run(0, 0) == []
    assert world.run(1, 2, 3) == []


def test_what_a_holder_has_compared_is_not_run_alone_again() -> None:
    world = World(rows=1, compared=3)
    for counts, width, alone in (((1, 2), 2, []), ((2, 2), 2, [2, 2]), ((1, 2), 3, [1, 2])):
        joint, inputs = world.joint(*counts, width=width)
        assert world.trials.can_batch(joint)
        assert world.check(joint, inputs) == alone


def test_of_dimensions_that_no_holder_has_tried_as_many_rows_are_run_alone_as_it_does() -> None:
    world = World()
    joint, inputs = world.joint(60, 7, width=3)
    assert [world.check(joint, inputs) for _ in range(4)] == [[60, 7]] * 3 + [[]]
    assert [world.run(1, 1, width=3) for _ in range(2)] == [[1, 1], []]


def test_rows_that_only_make_up_the_number_are_not_compared() -> None:
    world = World(sizes=(2, 8))
    assert world.run(1, 2, 1, together=lambda x: np.concatenate([-x[:4], x[4:]])) == [2, 2, 2]


Function = Callable[[Any], Any]

DIFFERENT: List[Tuple[Function, Function, str]] = [
    (np.negative, lambda x: -x * 2, "output y: 3 of 3 rows that were batched differ"),
    (np.negative, lambda x: x * np.float32(-1) + np.float32(0), "output y: 2 of 3 rows .* by up to 0 where"),
    (lambda x: x[:1], np.negative, r"output y has shape \[1, 2\] for 2 rows"),
]


@pytest.mark.parametrize(("alone", "together", "note"), DIFFERENT)
def test_what_differs_is_told_and_is_no_form_that_is_known(alone: Function, together: Function, note: str) -> None:
    world = World(alone=alone)
    for _ in range(2):
        with pytest.raises(NotBatchable, match=note):
            world.run(1, 2, together=together)


def odd(x: Any) -> Any:
    """Answers 13 in a batch otherwise than alone, whatever is beside it."""
    return -x + (x == 13) * (len(x) > 2)


def coupled(x: Any) -> Any:
    """Adds the largest value of all rows to each."""
    return -x + x.max()


@pytest.mark.parametrize(
    ("model", "values", "principal_ids", "guilty"),
    [
        (odd, ([1, 2], [13], [3]), (1, 2, 3), [2]),
        (odd, ([1, 13], [13], [3]), (1, 2, 3), [1, 2]),
        (odd, ([1, 2], [13], [3], [13]), (1, 2, 3, 2), [2]),
        # A principal's own rows together are compared, too.
        (odd, ([1, 2], [13], [3]), (1, 1, 1), [1]),
        (odd, ([1, 2], [13], [3]), (), []),
        # Whose rows change others' is not to be told.
        (coupled, ([1], [13], [1]), (1, 2, 3), []),
    ],
)
def test_whose_rows_differ_is_found_row_by_row(
    model: Function, values: Sequence[List[float]], principal_ids: Tuple[int, ...], guilty: List[int]
) -> None:
    world = World(alone=model)
    arrays = [np.repeat(np.array(each, np.float32)[:, None], 2, 1) for each in values]
    joint = BatchLayout([describe_request("m", {"x": array}) for array in arrays])
    inputs = joint.merge_inputs([[frame_of(array)] for array in arrays])
    with pytest.raises(RowsDiffer, match="rows that were batched differ") as caught:
        world.trials.check(joint, inputs, {"y": model(inputs["x"])}, principal_ids)
    assert [*caught.value.principal_ids] == guilty


@pytest.mark.parametrize(("rows", "most"), [(8, 64), (70, 70)])
def test_forms_are_as_many_as_can_be_remembered(rows: int, most: int) -> None:
    world = World(rows)
    joints = [world.joint(1, 1, width=width) for width in range(1, most + 2)]
    for joint, inputs in joints[:most]:
        assert world.trials.can_batch(joint)
        world.check(joint, inputs)
    assert not world.trials.can_batch(joints[-1][0])
    assert world.trials.can_batch(joints[0][0])
    assert world.trials.can_batch(world.joint(1, 1, width=1)[0])


def test_one_of_a_thousand_is_run_alone_again_if_it_is_not_large(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    joint, inputs = world.joint(1, 2)
    for _ in range(1000):
        world.check(joint, inputs)
    due = [world.trials.is_due]
    world.trials.recheck()
    assert len(world.engine.received_inputs) == 2
    world.check(joint, inputs)
    due.append(world.trials.is_due)
    world.trials.recheck()
    due.append(world.trials.is_due)
    assert (len(world.engine.received_inputs), due) == (4, [False, True, False])
    monkeypatch.setattr(trials_module, "_RECHECK_INTERVAL", 1)
    monkeypatch.setattr(trials_module, "_MAX_SAMPLE_BYTES", 2 * 3 * 2 * 4)
    for size, is_kept in ((3, True), (4, False)):
        world = World()
        for _ in range(2):
            world.run(size - 1, 1)
            joint, inputs = world.joint(size - 1, 1)
            world.check(joint, inputs)
            world.check(joint, inputs, np.positive)
        assert world.trials.is_due == is_kept
    world = World()
    world.check(joint, inputs)
    monkeypatch.setattr(trials_module, "_MAX_SAMPLE_BYTES", 1000)
    world.check(joint, inputs, np.abs)
    with pytest.raises(NotBatchable, match="differ"):
        world.trials.recheck()
