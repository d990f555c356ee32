"""The engine of one rank, in a real group of two: its answers are the library's own, bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit.ranks import Group, RankError, Slices, export_pair, inputs


@pytest.fixture(scope="module")
def group(slices: Slices) -> Iterator[Group]:
    with Group(slices.paths) as group:
        yield group


def outputs(answers: list[dict[str, Any]]) -> list[Any]:
    return [each["output_0"] for each in answers]


def test_the_answer_is_that_of_the_network_that_was_not_cut(group: Group, slices: Slices) -> None:
    with np.load(slices.selftest_path) as selftest:
        right = selftest["output_0"]
        for answer in outputs(group.ask("predict", {"x": selftest["x"]})):
            np.testing.assert_allclose(answer, right, rtol=0, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize("rows", [1, 5, 64, 2])
def test_batches_of_any_size_are_answered_as_by_the_library_alone(group: Group, rows: int) -> None:
    question = inputs(rows, seed=rows)
    alone = outputs(group.ask("direct", question))
    ours = outputs(group.ask("predict", question))
    assert [each.tobytes() for each in ours] == [each.tobytes() for each in alone]
    assert ours[0].tobytes() == ours[1].tobytes()
    assert ours[0].shape == (rows, 8)


def test_what_has_no_elements_is_refused_and_costs_nothing(group: Group) -> None:
    before = outputs(group.ask("predict", inputs(3)))
    with pytest.raises(RankError, match=r"RankRejected: input x: it has no elements"):
        group.ask("predict", inputs(0))
    assert np.array_equal(outputs(group.ask("predict", inputs(3))), before)


def test_inputs_that_do_not_fit_never_reach_the_others(group: Group) -> None:
    before = outputs(group.ask("predict", inputs(3)))
    for wrong in (np.zeros((3, 17), np.float32), np.zeros((3, 16), np.float64), np.zeros(16, np.float32)):
        with pytest.raises(RankError):
            group.ask("predict", {"x": wrong})
    assert np.array_equal(outputs(group.ask("predict", inputs(3))), before)


def load(group: Group, *paths: Path) -> None:
    for rank, path in enumerate(paths):
        group.send(rank, "load", {"path": np.array(str(path))})
    for rank in range(len(paths)):
        group.receive(rank)


def test_free_dimensions_that_do_not_fit_each_other_are_refused_before_anything_is_sent(
    group: Group, slices: Slices, tmp_path: Path
) -> None:
    pair = export_pair(tmp_path / "pair.mindir")
    load(group, pair, pair)
    rows = {rows: np.full((rows, 4), rows, np.float32) for rows in (1, 2, 3)}
    for a, b in ((2, 2), (2, 3), (3, 3), (1, 3), (3, 2), (2, 2)):
        if a in (1, b):
            expected = 2 * (2 * rows[a] + rows[b])
            answers = outputs(group.ask("predict", {"a": rows[a], "b": rows[b]}))
            assert all(np.array_equal(each, expected) for each in answers)
        else:
            with pytest.raises(RankError, match=r"RankRejected: mindspore: For 'Add'"):
                group.ask("predict", {"a": rows[a], "b": rows[b]})
    load(group, *slices.paths)


def test_with_a_wrong_slice_all_ranks_agree_on_a_wrong_answer(group: Group, slices: Slices) -> None:
    """Only an answer that is known shows it."""
    right = outputs(group.ask("predict", inputs(3)))
    for slice_of_rank_1 in (0, 1):
        load(group, slices.paths[0], slices.paths[slice_of_rank_1])
        now = outputs(group.ask("predict", inputs(3)))
        assert np.array_equal(now[0], now[1])
        assert np.array_equal(now, right) == (slice_of_rank_1 == 1)


def test_the_kernel_ends_them_with_their_parent_still(group: Group) -> None:
    """The library leaves what a child has asked for: nothing of it outlives a daemon that is killed."""
    signals = group.ask("parent", {})
    assert [int(each["signal"]) for each in signals] == [signal.SIGKILL, signal.SIGKILL]


def test_ranks_end_without_their_scheduler(group: Group) -> None:
    """The last test of this group. Within a second, on a quiet machine."""
    os.kill(group.scheduler.pid, signal.SIGKILL)
    assert {each.wait(30) for each in group.ranks} <= {-signal.SIGTERM, 128 + signal.SIGTERM}
