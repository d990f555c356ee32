"""What is found in the files of ranks. No engine has made them: a MindIR is protobuf, and a small one is short."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightd_daemon.config import check, check_ranks
from weightd_daemon.config.load import parse
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.engines import ranktable
from weightd_daemon.engines.ranktable import RankDevice
from weightd_protocol.version import VERSION

FP32, INT32 = 1, 6
X, OUT = ("main:x", FP32, [4, 2]), ("main:CNode_1:1", FP32, [4, 3])


@pytest.fixture(autouse=True)
def _all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)


def field(number: int, value: bytes | str | int) -> bytes:
    """A field of protobuf whose number and length are small."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    content = value.encode() if isinstance(value, str) else value
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def mindir(
    weights: str,
    inputs: Sequence[tuple[str, int, list[int]]] = (X,),
    outputs: Sequence[tuple[str, int, list[int]]] = (OUT,),
    producer: str = "MindSpore",
) -> bytes:
    def value(name: str, datatype: int, shape: list[int]) -> bytes:
        tensor = b"".join(field(1, dim) for dim in shape) + field(2, datatype)
        return field(1, name) + field(2, tensor)

    graph = b"".join(field(5, value(*each)) for each in inputs) + b"".join(field(6, value(*each)) for each in outputs)
    return field(2, producer) + field(7, graph) + field(15, weights)


class SliceFiles:
    """A directory with the files of two ranks, all of them good."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for rank in range(2):
            self.slice(rank).write_bytes(mindir(f"weights of {rank}"))
        self.save_selftest("x", "output_0")

    def slice(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.mindir"

    def save_selftest(self, *names: str) -> None:
        arrays: dict[str, Any] = {name: np.zeros(1, np.float32) for name in names}
        np.savez(self.directory / "selftest.npz", **arrays)

    def model(self, ranks: dict[str, Any] | None = None, **keys: Any) -> ModelConfig:
        given = {"path": "rank{rank}.mindir", "selftest": "selftest.npz", **keys}
        given["ranks"] = ranks or {"devices": ["ascend:0", "ascend:1"]}
        return parse({"models": {"big": given}}, self.directory).models["big"]

    def problems(self, model: ModelConfig | None = None, visible: str = "", name: str = "big") -> list[str]:
        model = model or self.model()
        assert model.ranks is not None
        self.owners: check_ranks.PortOwners = getattr(self, "owners", {})
        return list(check_ranks.find_problems(name, model, model.ranks, visible, self.owners))


@pytest.fixture
def place(tmp_path: Path) -> SliceFiles:
    return SliceFiles(tmp_path)


# --- slices -----------------------------------------------------------------------------------------------------------


def test_a_set_of_slices_that_is_good(place: SliceFiles) -> None:
    assert place.problems() == []


def test_a_slice_that_is_missing(place: SliceFiles) -> None:
    place.slice(1).unlink()
    assert place.problems() == [f"path: rank 1: {place.slice(1)}: No such file or directory"]


def test_a_slice_that_is_none(place: SliceFiles) -> None:
    place.slice(0).write_bytes(b"PK\x03\x04")
    assert place.problems() == [f"path: rank 0: {place.slice(0)}: expected a complete MindIR file"]


def test_a_slice_that_was_converted(place: SliceFiles) -> None:
    place.slice(1).write_bytes(mindir("weights", [("x", FP32, [4, 2])], [("output_0", FP32, [4, 3])], "Converter"))
    [problem] = place.problems()
    assert problem.endswith("rank1.mindir: expected a MindIR exported by MindSpore, got one of the Converter")


def test_a_slice_that_no_request_could_be_sent_to(place: SliceFiles) -> None:
    for rank in range(2):
        place.slice(rank).write_bytes(mindir(f"weights of {rank}", [("main:x", 8, [4])]))
    problems = place.problems()
    assert len(problems) == 2
    for rank, problem in enumerate(problems):
        assert problem.startswith(
            f"path: rank {rank}: {place.slice(rank)}: input 'x': string is not a supported datatype"
        )


@pytest.mark.parametrize(
    ("inputs", "outputs", "difference"),
    [
        ([("main:x", FP32, [4, 3])], [OUT], "expected the inputs of rank 0, x FP32 [4, 2], got x FP32 [4, 3]"),
        ([("main:y", FP32, [4, 2])], [OUT], "expected the inputs of rank 0, x FP32 [4, 2], got y FP32 [4, 2]"),
        (
            [X],
            [("o", INT32, [4, 3])],
            "expected the outputs of rank 0, output_0 FP32 [4, 3], got *",
        ),
    ],
)
def test_slices_of_two_models(place: SliceFiles, inputs: Any, outputs: Any, difference: str) -> None:
    place.slice(1).write_bytes(mindir("weights of 1", inputs, outputs))
    [problem] = place.problems()
    assert problem.startswith(f"path: rank 1: {place.slice(1)}: {difference.rstrip('*')}")


def test_two_ranks_with_one_slice(place: SliceFiles) -> None:
    place.slice(1).write_bytes(place.slice(0).read_bytes())
    [problem] = place.problems()
    same = f"has the same content as the slice of rank 0, {place.slice(0)}; expected a different slice for each rank"
    assert problem == f"path: rank 1: {place.slice(1)}: {same}"


def test_a_slice_that_differs_in_its_last_byte_only(place: SliceFiles) -> None:
    place.slice(0).write_bytes(mindir("a" * 100 + "0"))
    place.slice(1).write_bytes(mindir("a" * 100 + "1"))
    assert place.problems() == []


# --- the self-test ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["x"], ["x", "output_0", "z"], ["output_0"], ["x", "output_1"]])
def test_a_selftest_without_the_right_answer(place: SliceFiles, names: list[str]) -> None:
    place.save_selftest(*names)
    [problem] = place.problems()
    expected = "expected arrays x, output_0, the inputs and the correct outputs"
    assert problem == f"selftest: {place.directory}/selftest.npz: {expected}, got {', '.join(names)}"


def test_a_selftest_that_is_no_npz(place: SliceFiles) -> None:
    (place.directory / "selftest.npz").write_bytes(b"x = 1")
    [problem] = place.problems()
    assert problem.startswith(f"selftest: {place.directory}/selftest.npz: expected an .npz of plain arrays: ")


# --- rank tables ------------------------------------------------------------------------------------------------------

TABLE = {"devices": ["ascend:0", "ascend:1"], "rank_table": "table.json"}


def write(place: SliceFiles, *devices: RankDevice, name: str = "table.json") -> Path:
    path = place.directory / name
    path.write_text(ranktable.generate(devices))
    return path


def test_a_table_of_these_devices(place: SliceFiles) -> None:
    write(place, RankDevice(4), RankDevice(5))
    assert place.problems(place.model(TABLE), visible="4,5") == []


def test_a_table_of_other_devices(place: SliceFiles) -> None:
    path = write(place, RankDevice(0), RankDevice(2))
    expected = "rank 1: expected device_id 1, which ascend:1 is, got 2"
    assert place.problems(place.model(TABLE)) == [f"ranks.rank_table: {path}: {expected}"]


def test_a_table_that_is_missing_or_wrong(place: SliceFiles) -> None:
    path = place.directory / "table.json"
    assert place.problems(place.model(TABLE)) == [f"ranks.rank_table: {path}: No such file or directory"]
    path.write_text(json.dumps({"version": 1.0}))
    [problem] = place.problems(place.model(TABLE))
    assert problem.startswith(f"ranks.rank_table: {path}: version: expected text, as HCCL stores every value, got ")
    path.write_text(" " * (ranktable.MAX_BYTES + 1))
    assert place.problems(place.model(TABLE)) == [
        f"ranks.rank_table: {path}: expected a file of at most 1,048,576 bytes"
    ]


def test_a_link_to_a_table_of_another_name(place: SliceFiles) -> None:
    write(place, RankDevice(0), RankDevice(1), name="table.txt")
    (place.directory / "table.json").symlink_to("table.txt")
    [problem] = place.problems(place.model(TABLE))
    assert problem.startswith(f"ranks.rank_table: {place.directory}/table.json: links resolved, expected a path with ")


def test_a_card_that_is_not_visible(place: SliceFiles) -> None:
    text = "ranks.devices: ascend:1: not in ASCEND_RT_VISIBLE_DEVICES, which is '4'"
    assert place.problems(visible="4") == [text]


def test_models_whose_ranks_meet_on_a_port_that_a_table_names(place: SliceFiles) -> None:
    write(place, RankDevice(0, port=16667), RankDevice(1, port=16667))
    model = place.model(TABLE)
    assert place.problems(model, name="one") == []
    assert place.problems(name="two") == []  # on HCCL's own
    assert place.problems(model, name="three") == [
        f"ranks.devices: the ranks of one already use port 16667 on ascend:{number}" for number in (0, 1)
    ]


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_group_info_that_is_missing(place: SliceFiles) -> None:
    (place.directory / "groups0.pb").touch()
    model = place.model({"devices": ["ascend:0", "ascend:1"], "group_info_file": "groups{rank}.pb"})
    path = place.directory / "groups1.pb"
    assert place.problems(model) == [f"ranks.group_info_file: {path}: No such file or directory"]


def test_a_time_limit_after_which_nothing_is_answered(place: SliceFiles) -> None:
    file = place.directory / "lite.ini"
    file.write_text("[ge_session_options]\nstream_sync_timeout=1000\n")
    [problem] = place.problems(place.model(mindspore_lite={"config_file": "lite.ini"}))
    assert problem.startswith(
        f"mindspore_lite.config_file: {file}: stream_sync_timeout: after this timeout, the graph engine "
    )


def test_each_problem_has_the_name_of_the_model_and_the_interpreter_is_asked_for_ranks(
    place: SliceFiles, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$2" > {tmp_path}/asked; echo {VERSION}\n')
    python.chmod(0o700)
    place.slice(1).unlink()
    [problem] = check.find_problems({"big": place.model(python=str(python))})["big"]
    assert problem == f"models.big.path: rank 1: {place.slice(1)}: No such file or directory"
    assert "RANK_ENGINES" in (tmp_path / "asked").read_text()


def test_a_member_of_a_group_needs_a_library_that_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mindspore_lite.py").write_text('__version__ = "2.0.0"\n')
    (tmp_path / "m.mindir").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    model = ModelConfig(str(tmp_path / "m.mindir"), "mindspore_lite", sys.executable)
    of_a_member = check.find_problems({"m": model}, ["m"])["m"][-1]
    assert of_a_member.endswith("expected mindspore_lite 2.1 or later, which supports model groups, got 2.0.0")
    assert check.find_problems({"m": model})["m"][-1] != of_a_member


def test_what_each_model_will_be(place: SliceFiles) -> None:
    ranks = {"devices": [["ascend:0", "ascend:1"], ["ascend:2", "ascend:3"]]}
    card = {"devices": ["ascend:4", "ascend:5"]}
    models = {
        "big": {"path": "rank{rank}.mindir", "selftest": "selftest.npz", "ranks": ranks},
        "cut": {
            "path": "{rank}.mindir",
            "selftest": "c.npz",
            "engine": "mindspore",
            "ranks": {"size": 3},
        },
        "small": {"path": "m.onnx", "workers": 3},
        "one": {"path": "m.mindir", **card},
        "two": {"path": "n.mindir", **card},
    }
    config = parse({"models": models, "groups": {"g": {"models": ["one", "two"]}}}, Path("/srv"))
    assert list(check.describe_config(config)) == [
        "big: mindspore_lite, 2 groups of 2 ranks on ascend:0, ascend:1; ascend:2, ascend:3, /srv/rank{rank}.mindir",
        "cut: mindspore, 3 ranks on cpu, /srv/{rank}.mindir",
        "small: onnxruntime, 3 workers, /srv/m.onnx",
        "one: mindspore_lite, 1 worker, /srv/m.mindir",
        "two: mindspore_lite, 1 worker, /srv/n.mindir",
        "g: one, two in one process on ascend:4, ascend:5, workspace shared",
    ]
