"""The engine of one rank in a real group of two ranks: the same answers as the library, bit for bit."""

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


def test_answers_equal_unsliced_network(group: Group, slices: Slices) -> None:
    with np.load(slices.selftest_path) as selftest:
        right = selftest["output_0"]
        for answer in outputs(group.ask("predict", {"x": selftest["x"]})):
            np.testing.assert_allclose(answer, right, rtol=0, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize("rows", [1, 5, 64, 2])
def test_answers_of_any_batch_size_equal_library(group: Group, rows: int) -> None:
    question = inputs(rows, seed=rows)
    alone = outputs(group.ask("direct", question))
    ours = outputs(group.ask("predict", question))
    assert [each.tobytes() for each in ours] == [each.tobytes() for each in alone]
    assert ours[0].tobytes() == ours[1].tobytes()
    assert ours[0].shape == (rows, 8)


def test_rejects_empty_input(group: Group) -> None:
    before = outputs(group.ask("predict", inputs(3)))
    with pytest.raises(RankError, match=r"RankRejected: input x: has no elements"):
        group.ask("predict", inputs(0))
    assert np.array_equal(outputs(group.ask("predict", inputs(3))), before)


def test_rejects_inputs_with_wrong_shape_or_type(group: Group) -> None:
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


def test_rejects_inconsistent_free_dimensions(group: Group, slices: Slices, tmp_path: Path) -> None:
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


def test_ranks_agree_on_wrong_answer_of_wrong_slice(group: Group, slices: Slices) -> None:
    """Only a known answer reveals the wrong slice."""
    right = outputs(group.ask("predict", inputs(3)))
    for slice_of_rank_1 in (0, 1):
        load(group, slices.paths[0], slices.paths[slice_of_rank_1])
        now = outputs(group.ask("predict", inputs(3)))
        assert np.array_equal(now[0], now[1])
        assert np.array_equal(now, right) == (slice_of_rank_1 == 1)


def test_keeps_parent_death_signal(group: Group) -> None:
    """The library does not reset the parent-death signal, so no rank outlives a killed daemon."""
    signals = group.ask("parent", {})
    assert [int(each["signal"]) for each in signals] == [signal.SIGKILL, signal.SIGKILL]


def test_ranks_exit_when_scheduler_is_killed(group: Group) -> None:
    """Keep this test last: it ends the group. The ranks exit within a second on an idle machine."""
    os.kill(group.scheduler.pid, signal.SIGKILL)
    assert {each.wait(30) for each in group.ranks} <= {-signal.SIGTERM, 128 + signal.SIGTERM}
