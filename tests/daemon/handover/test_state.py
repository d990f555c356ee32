"""Tests of the handover file, which passes the state of a daemon to the next one."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from weightd_common.toml_schema import ErrorCollector
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.model_rules import complete_model
from weightd_daemon.engines.mindspore_lite import MindSporeLiteOptions
from weightd_daemon.generations.persisted import ChildRecord, GenerationRecord, SealRecord
from weightd_daemon.handover import state
from weightd_daemon.handover.state import Handover, HandoverError
from weightd_daemon.models.persisted import DeviceRecord, ModelRecord, SourceRecord
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.worker import (
    CHILD_PROTOCOL_VERSION,
    Built,
    Hello,
)
from weightd_protocol.messages.worker_common import DeviceMemory, SharingTraits
from weightd_protocol.version import VERSION

SHA = "5" * 64
X = TensorSignature("x", "FP32", (-1, 4))
CARD = SharingTraits(pids_fixed_at_build=True, holder_must_outlive=True, attach_rewrites_weights=True)
HELLO = Hello("11", SHA, {"weightd": VERSION, "python": ""}, CARD)
GENERATION = GenerationRecord(
    number=12,
    source=3,
    device="ascend:0",
    is_sharing=True,
    sha256=SHA,
    attach_state="frozen",
    attach_closed_reason="a löwly reason\n",
    process_bytes=2**40,
    started_workers=7,
    built=Built("12345", (X,), (X, X), ({"x": (2,)},), "digest", 4096, "a note", DeviceMemory(2**36, 2**35)),
    children=(
        ChildRecord("m.12.holder", "holder", HELLO, 4096, "a note", "ascend:0"),
        ChildRecord("m.12.w7", "worker", HELLO, 0, "", "ascend:0"),
    ),
    store_fingerprint=SealRecord(2**33, 1_700_000_000_000_000_001),
)
OTHER = dataclasses.replace(
    GENERATION, device="ascend:1", attach_state="open", attach_closed_reason="", children=(), store_fingerprint=None
)
MODEL = ModelRecord(
    name="m",
    config=complete_model(
        ModelConfig(
            path="m.mindir",
            devices=("ascend:0", "ascend:1"),
            sharing="auto",
            timeout=0.1,
            mindspore_lite=MindSporeLiteOptions(precision_mode="enforce_fp16"),
        ),
        {},
        Path("/models"),
        ErrorCollector(),
    ),
    source=3,
    previous=2,
    last_ids=(12, 4),
    sources=(
        SourceRecord(3, "/new.mindir", "/w.npz", "/cache/m.v3.snapshot/model/new.mindir", "/cache/w.npz", SHA, 2**33),
        SourceRecord(2, "/old.mindir", "", "/cache/m.v2.snapshot/model/old.mindir", "", SHA, 1, "/s.npz", "known"),
    ),
    generations=(GENERATION, OTHER),
)
DEVICES = [DeviceRecord("cpu"), DeviceRecord("ascend:0", 2**36, 0)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "handover"


def names(path: Path) -> list[str]:
    """Return the names of all files in the directory."""
    return [each.name for each in path.parent.iterdir()]


def test_read_returns_last_written_state(path: Path) -> None:
    other = dataclasses.replace(MODEL, name="n", previous=0)
    state.write(path, [MODEL, other], DEVICES)
    assert state.read(path) == Handover(VERSION, CHILD_PROTOCOL_VERSION, (MODEL, other), tuple(DEVICES))
    assert names(path) == ["handover"]
    state.write(path, [], [])
    assert state.read(path) == Handover(VERSION, CHILD_PROTOCOL_VERSION, (), ())
    # Another version with the same worker protocol is accepted.
    path.write_text(path.read_text().replace(f'"{VERSION}"', '"9.9"'))
    assert state.read(path).version == "9.9"


# --- rejected files -------------------------------------------------------------------------------------------------


def refusal(path: Path) -> str:
    with pytest.raises(HandoverError) as caught:
        state.read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("text", ["[]", "null", "1", '"handover"', "{}"])
def test_file_without_protocol_is_rejected(path: Path, text: str) -> None:
    path.write_text(text)
    assert "uses protocol None" in refusal(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000], ids=["empty", "cut", "bytes", "deep"])
def test_invalid_json_is_rejected(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert refusal(path).startswith(f"{path}: not JSON: ")


LATER = CHILD_PROTOCOL_VERSION + 1
LATER_TEXT = f"weightd 9.9 uses protocol {LATER} with its workers, {VERSION} {CHILD_PROTOCOL_VERSION}"


@pytest.mark.parametrize(
    ("model", "values", "text"),
    [
        # The other fields of another protocol are ignored.
        ({}, {"version": "9.9", "protocol": LATER, "models": "other", "devices": None}, LATER_TEXT),
        ({}, {"models": None}, "{}: models"),
        ({}, {"models": [{"name": ""}]}, "{}: models[0]"),
        ({}, {"devices": [{"name": "cpu", "free_bytes": -1}]}, "{}: devices[0].free_bytes: expected"),
        ({}, {"surprise": 1}, "{}: surprise"),
        ({}, {"version": 3}, "{}: version"),
        ({}, {"protocol": float(CHILD_PROTOCOL_VERSION)}, "{}: protocol"),
        ({"source": 1}, {}, "{}: models[0].source: expected the number of one of its sources, got 1"),
        (
            {"generations": (dataclasses.replace(GENERATION, source=1),)},
            {},
            "{}: models[0].generations.source: expected the number of",
        ),
        ({"last_ids": (12,)}, {}, "{}: models[0].last_ids: expected two numbers, got 1"),
    ],
)
def test_invalid_field_is_reported_with_path(
    path: Path, model: dict[str, Any], values: dict[str, object], text: str
) -> None:
    state.write(path, [dataclasses.replace(MODEL, **model)], DEVICES)
    table = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))
    assert refusal(path).startswith(text.format(path))


def test_invalid_nested_field_is_reported_with_path(path: Path) -> None:
    assert refusal(path) == f"{path}: No such file or directory"
    state.write(path, [MODEL], DEVICES)
    path.write_text(path.read_text().replace('"role": "worker"', '"role": "cook"'))
    assert refusal(path).startswith(f"{path}: models[0].generations[0].children[1].role: expected one of ")


# --- write errors ---------------------------------------------------------------------------------------------------


def warned(caplog: pytest.LogCaptureFixture, path: Path) -> str:
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    begin = f"the next daemon will have to load every model: {path}: "
    assert record.getMessage().startswith(begin)
    return record.getMessage().removeprefix(begin)


def test_full_disk_leaves_no_file(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.write(path, [], DEVICES)

    def write_text(self: Path, text: str, encoding: str) -> int:
        self.write_bytes(text[:10].encode(encoding))
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_text", write_text)
    state.write(path, [MODEL], DEVICES)
    assert names(path) == []
    assert warned(caplog, path) == "[Errno 28] No space left on device"


def test_unreplaceable_file_is_kept_without_temporary_file(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.mkdir()
    (path / "in the way").touch()
    state.write(path, [MODEL], DEVICES)
    assert names(path) == ["handover"]
    assert "directory" in warned(caplog, path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": "x" * 100_000}, "models[0].name: expected text"),
        (
            {"config": dataclasses.replace(MODEL.config, path="/models/\udcff.onnx")},
            "models[0].config.path: expected text that UTF-8 can encode",
        ),
    ],
)
def test_unencodable_state_is_not_written(
    path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], text: str
) -> None:
    state.write(path, [MODEL], DEVICES)
    state.write(path, [dataclasses.replace(MODEL, **change)], DEVICES)
    assert names(path) == []
    assert warned(caplog, path).startswith(text)
