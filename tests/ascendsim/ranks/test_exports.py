"""Tests of the ways to export a split network: which rank has which part of the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascendsim import Host, driver_state, modelfile, protobuf, ranks
from ascendsim.program import Program

from ..support import errors_of
from .support import World, assert_right, connected, predict


@pytest.fixture
def x() -> Any:
    return np.random.RandomState(3).randint(-3, 4, (4, 16)).astype(np.float32)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Return the rank table of four cards."""
    return ranks.table(tmp_path / "table.json", [0, 1, 2, 3])


def test_whole_outputs_on_every_rank(world: World, tmp_path: Path, x: Any) -> None:
    """The option is full_batch=True (virtual_output_info.cc)."""
    cut = ranks.mlp(tmp_path / "cut", ranks=4)
    connected(world, cut, x)
    assert all(np.array_equal(each, ranks.whole(x)) for each in cut.answers(x))


def test_each_rank_has_its_rows(world: World, tmp_path: Path, x: Any) -> None:
    """Without full_batch. Rows that cannot be split are rejected before communication, at no cost."""
    cut = ranks.mlp(tmp_path / "cut", ranks=4, output="sliced")
    programs = connected(world, cut, x)
    assert [each.shape for each in cut.answers(x)] == [(1, 16)] * 4
    assert np.array_equal(np.concatenate(cut.answers(x)), ranks.whole(x))
    assert_right(programs, cut, np.concatenate([x, x]))


def test_rejects_indivisible_rows_before_communication(world: World, tmp_path: Path, x: Any) -> None:
    programs = connected(world, ranks.mlp(tmp_path / "cut", ranks=4, output="sliced"), x)
    assert predict(programs, x[:3]) == ["predict failed!"] * 4
    assert not any("EI0002" in each for program in programs for each in program.errors())


@pytest.mark.parametrize("count", [2, 4])
def test_only_the_last_stage_has_an_answer(world: World, tmp_path: Path, x: Any, count: int) -> None:
    """Outputs of earlier stages are useless; each stage is a separate group of `group_info_file`."""
    cut = ranks.mlp(tmp_path / "cut", ranks=count, layers=1, stages=2)
    table = ranks.table(tmp_path / "t.json", range(count))
    programs = connected(world, cut, x, table=table)
    *earlier, last = cut.answers(x)
    assert np.array_equal(last, ranks.whole(x, layers=2))
    assert not np.any(earlier[0])
    assert_right(programs, cut, x[:1])


def test_pipeline_may_broadcast_its_result(world: World, tmp_path: Path, x: Any) -> None:
    """The option is pipeline_result_broadcast=True."""
    cut = ranks.mlp(tmp_path / "cut", ranks=4, layers=1, stages=2, broadcast=True)
    connected(world, cut, x)
    assert all(np.array_equal(each, ranks.whole(x)) for each in cut.answers(x))


def test_each_communicator_has_buffers(world: World, host: Host, tmp_path: Path, x: Any) -> None:
    connected(world, ranks.mlp(tmp_path / "cut", ranks=4, layers=1, stages=2), x)
    kinds = [each.kind for each in host.card_state().allocations]
    assert kinds.count(driver_state.BUFFERS) == 2  # One for the rank's stage, and one for its position in the pipeline.


def test_group_needs_its_file(world: World, tmp_path: Path, x: Any) -> None:
    """ge_device_context.cc:264 calls HcomCreateGroup for each group in the file."""
    cut = ranks.mlp(tmp_path / "cut", ranks=4, layers=1, stages=2)
    programs = world(cut._replace(group_infos=[]))
    assert programs[0].refusal("predict(x)", x=x).text == "predict failed!"
    assert "EI0004: No valid communicator" in programs[0].errors()[-2]


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_invalid_group_info_file_fails_build(program: Program, tmp_path: Path, table: Path, content: Any) -> None:
    """comm_group_info.cc:50 raises an exception."""
    cut, file = ranks.mlp(tmp_path / "cut"), tmp_path / "groups.pb"
    if content:
        file.write_bytes(content)
    errors_of(program, "rank(path, table, 0, groups=file)", path=cut.paths[0], table=table, file=file)


def test_reads_signature_of_slice_from_its_file(tmp_path: Path) -> None:
    """Fields in mind_ir.proto: ModelProto 7 graph, with 5 input and 6 output; 1 name, 2 tensor: 1 dims, 2 data_type."""
    [path, _] = ranks.mlp(tmp_path / "cut", width=8).paths
    graph = dict(protobuf.fields(path.read_bytes()))[7]
    assert isinstance(graph, bytes)
    for number, name in ((5, b"x"), (6, b"y")):
        value = next(each for field, each in protobuf.fields(graph) if field == number)
        assert isinstance(value, bytes)
        info = dict(protobuf.fields(value))
        assert info[1] == name
        tensor = info[2]
        assert isinstance(tensor, bytes)
        assert list(protobuf.fields(tensor)) == [(1, 2**64 - 1), (1, 8), (2, 1), (7, name)]


def test_slices_are_reproducible_and_distinct(tmp_path: Path) -> None:
    one, again, other = (ranks.mlp(tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1)))
    assert [each.read_bytes() for each in one.paths] == [each.read_bytes() for each in again.paths]
    assert len({modelfile.read(each).weights for each in one.paths + other.paths}) == 4
    with pytest.raises(ValueError, match="3 ranks, 1 stages, width 16"):
        ranks.mlp(tmp_path / "wrong", ranks=3)


def test_fixed_batch_stays_fixed(world: World, tmp_path: Path, x: Any) -> None:
    programs = connected(world, ranks.mlp(tmp_path / "cut", ranks=4, batch=4, output="sliced"), x)
    assert programs[0].refusal("predict(x)", x=x[:3]).text.startswith("resize failed!")
    assert programs[0].do("[each.shape for each in lib.model.get_outputs()]") == [[1, 16]]


def test_files_and_groups_of_split_network(tmp_path: Path) -> None:
    cut = ranks.mlp(tmp_path / "cut", ranks=4, layers=1, stages=2)
    assert [each.name for each in cut.paths] == [f"rank{rank}.mindir" for rank in range(4)]
    assert cut.groups == {"stage0": [0, 1], "stage1": [2, 3], "pipe0": [0, 2], "pipe1": [1, 3]}
