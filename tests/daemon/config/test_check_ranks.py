"""Tests of the check of rank files. The tests write minimal MindIR files (protobuf) themselves, without an engine."""

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
    """Return a protobuf field whose number and length fit in one byte each."""
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
    """Directory with valid files for two ranks."""

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
def files(tmp_path: Path) -> SliceFiles:
    return SliceFiles(tmp_path)


# --- slices -----------------------------------------------------------------------------------------------------------


def test_accepts_valid_slices(files: SliceFiles) -> None:
    assert files.problems() == []


def test_missing_slice_is_reported(files: SliceFiles) -> None:
    files.slice(1).unlink()
    assert files.problems() == [f"path: rank 1: {files.slice(1)}: No such file or directory"]


def test_slice_with_wrong_format_is_reported(files: SliceFiles) -> None:
    files.slice(0).write_bytes(b"PK\x03\x04")
    assert files.problems() == [f"path: rank 0: {files.slice(0)}: expected a complete MindIR file"]


def test_slice_made_by_converter_is_reported(files: SliceFiles) -> None:
    files.slice(1).write_bytes(mindir("weights", [("x", FP32, [4, 2])], [("output_0", FP32, [4, 3])], "Converter"))
    [problem] = files.problems()
    assert problem.endswith("rank1.mindir: expected a MindIR exported by MindSpore, got one of the Converter")


def test_rejects_slices_with_string_input(files: SliceFiles) -> None:
    for rank in range(2):
        files.slice(rank).write_bytes(mindir(f"weights of {rank}", [("main:x", 8, [4])]))
    problems = files.problems()
    assert len(problems) == 2
    for rank, problem in enumerate(problems):
        assert problem.startswith(
            f"path: rank {rank}: {files.slice(rank)}: input 'x': string is not a supported datatype"
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
def test_reports_slices_of_different_models(files: SliceFiles, inputs: Any, outputs: Any, difference: str) -> None:
    files.slice(1).write_bytes(mindir("weights of 1", inputs, outputs))
    [problem] = files.problems()
    assert problem.startswith(f"path: rank 1: {files.slice(1)}: {difference.rstrip('*')}")


def test_identical_slices_are_reported(files: SliceFiles) -> None:
    files.slice(1).write_bytes(files.slice(0).read_bytes())
    [problem] = files.problems()
    same = f"has the same content as the slice of rank 0, {files.slice(0)}; expected a different slice for each rank"
    assert problem == f"path: rank 1: {files.slice(1)}: {same}"


def test_accepts_slices_that_differ_in_last_byte(files: SliceFiles) -> None:
    files.slice(0).write_bytes(mindir("a" * 100 + "0"))
    files.slice(1).write_bytes(mindir("a" * 100 + "1"))
    assert files.problems() == []


# --- the self-test ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["x"], ["x", "output_0", "z"], ["output_0"], ["x", "output_1"]])
def test_selftest_needs_all_inputs_and_outputs(files: SliceFiles, names: list[str]) -> None:
    files.save_selftest(*names)
    [problem] = files.problems()
    expected = "expected arrays x, output_0, the inputs and the correct outputs"
    assert problem == f"selftest: {files.directory}/selftest.npz: {expected}, got {', '.join(names)}"


def test_selftest_must_be_npz_file(files: SliceFiles) -> None:
    (files.directory / "selftest.npz").write_bytes(b"x = 1")
    [problem] = files.problems()
    assert problem.startswith(f"selftest: {files.directory}/selftest.npz: expected an .npz of plain arrays: ")


# --- rank tables ------------------------------------------------------------------------------------------------------

TABLE = {"devices": ["ascend:0", "ascend:1"], "rank_table": "table.json"}


def write(files: SliceFiles, *devices: RankDevice, name: str = "table.json") -> Path:
    path = files.directory / name
    path.write_text(ranktable.generate(devices))
    return path


def test_accepts_rank_table_of_configured_devices(files: SliceFiles) -> None:
    write(files, RankDevice(4), RankDevice(5))
    assert files.problems(files.model(TABLE), visible="4,5") == []


def test_rejects_rank_table_of_other_devices(files: SliceFiles) -> None:
    path = write(files, RankDevice(0), RankDevice(2))
    expected = "rank 1: expected device_id 1, which ascend:1 is, got 2"
    assert files.problems(files.model(TABLE)) == [f"ranks.rank_table: {path}: {expected}"]


def test_missing_or_invalid_rank_table_is_reported(files: SliceFiles) -> None:
    path = files.directory / "table.json"
    assert files.problems(files.model(TABLE)) == [f"ranks.rank_table: {path}: No such file or directory"]
    path.write_text(json.dumps({"version": 1.0}))
    [problem] = files.problems(files.model(TABLE))
    assert problem.startswith(f"ranks.rank_table: {path}: version: expected text, as HCCL stores every value, got ")
    path.write_text(" " * (ranktable.MAX_BYTES + 1))
    assert files.problems(files.model(TABLE)) == [
        f"ranks.rank_table: {path}: expected a file of at most 1,048,576 bytes"
    ]


def test_rank_table_link_must_resolve_to_json_path(files: SliceFiles) -> None:
    write(files, RankDevice(0), RankDevice(1), name="table.txt")
    (files.directory / "table.json").symlink_to("table.txt")
    [problem] = files.problems(files.model(TABLE))
    assert problem.startswith(f"ranks.rank_table: {files.directory}/table.json: links resolved, expected a path with ")


def test_invisible_card_is_reported(files: SliceFiles) -> None:
    text = "ranks.devices: ascend:1: not in ASCEND_RT_VISIBLE_DEVICES, which is '4'"
    assert files.problems(visible="4") == [text]


def test_port_conflict_through_rank_table_is_reported(files: SliceFiles) -> None:
    write(files, RankDevice(0, port=16667), RankDevice(1, port=16667))
    model = files.model(TABLE)
    assert files.problems(model, name="one") == []
    assert files.problems(name="two") == []  # uses the default port of HCCL
    assert files.problems(model, name="three") == [
        f"ranks.devices: the ranks of one already use port 16667 on ascend:{number}" for number in (0, 1)
    ]


# --- other files ----------------------------------------------------------------------------------------------------


def test_missing_group_info_file_is_reported(files: SliceFiles) -> None:
    (files.directory / "groups0.pb").touch()
    model = files.model({"devices": ["ascend:0", "ascend:1"], "group_info_file": "groups{rank}.pb"})
    path = files.directory / "groups1.pb"
    assert files.problems(model) == [f"ranks.group_info_file: {path}: No such file or directory"]


def test_rejects_stream_sync_timeout(files: SliceFiles) -> None:
    file = files.directory / "lite.ini"
    file.write_text("[ge_session_options]\nstream_sync_timeout=1000\n")
    [problem] = files.problems(files.model(mindspore_lite={"config_file": "lite.ini"}))
    assert problem.startswith(
        f"mindspore_lite.config_file: {file}: stream_sync_timeout: after this timeout, the graph engine "
    )


def test_check_names_model_and_asks_for_rank_engines(files: SliceFiles, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$2" > {tmp_path}/asked; echo {VERSION}\n')
    python.chmod(0o700)
    files.slice(1).unlink()
    [problem] = check.find_problems({"big": files.model(python=str(python))})["big"]
    assert problem == f"models.big.path: rank 1: {files.slice(1)}: No such file or directory"
    assert "RANK_ENGINES" in (tmp_path / "asked").read_text()


def test_model_group_needs_library_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mindspore_lite.py").write_text('__version__ = "2.0.0"\n')
    (tmp_path / "m.mindir").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    model = ModelConfig(str(tmp_path / "m.mindir"), "mindspore_lite", sys.executable)
    group_problem = check.find_problems({"m": model}, ["m"])["m"][-1]
    assert group_problem.endswith("expected mindspore_lite 2.1 or later, which supports model groups, got 2.0.0")
    assert check.find_problems({"m": model})["m"][-1] != group_problem


def test_describes_models(files: SliceFiles) -> None:
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
