"""Tests of the inputs of `weightctl predict` in files, and of its output of scores."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, List, Optional, Sequence

import numpy as np
import pytest

from testkit.fakedaemon import FakeDaemon, echo
from weightctl import exit_codes
from weightd_protocol.codec import encode
from weightd_protocol.messages.control import ModelMetadata, ModelMetadataResponse
from weightd_protocol.messages.inference import Infer, TensorSignature
from weightd_protocol.messages.types import ClientMessage
from weightd_protocol.tensors import from_frame

from ..conftest import Ctl, outputs

IDS = TensorSignature("ids", "INT64", (-1, -1))
MASK = TensorSignature("mask", "FP32", (2,))


class Model:
    """A model that answers with its inputs, and its metadata."""

    def __init__(self, *inputs: TensorSignature, example: Any = None) -> None:
        self.inputs = inputs
        self.example = example
        self.asked = 0

    def __call__(self, message: ClientMessage, tensors: Sequence[bytes]) -> Sequence[List[Any]]:
        if isinstance(message, ModelMetadata):
            self.asked += 1
            return [encode(ModelMetadataResponse(message.id, "m", "fake", self.inputs, (), example=self.example))]
        return echo(message, tensors)


@pytest.fixture
def model(daemon: FakeDaemon) -> Model:
    daemon.handle = made = Model(IDS, MASK, example=((1, 7), (2,)))
    return made


@pytest.fixture
def one(daemon: FakeDaemon) -> Model:
    daemon.handle = made = Model(IDS)
    return made


def sent(daemon: FakeDaemon) -> Any:
    """Return the inputs of the request."""
    while True:
        message, tensors = daemon.next()
        if isinstance(message, Infer):
            return {spec.name: from_frame(spec, each) for spec, each in zip(message.description.inputs, tensors)}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.save("ids.npy", np.array([[1, 2]]))
    np.savez("both.npz", ids=np.array([[3, 4]]), mask=np.ones(2, np.float32), more=np.zeros(2, np.float32))
    Path("ids.json").write_text("[[5, 6]]")
    Path("both.json").write_text('{"ids": [[7, 8]], "mask": [0, 1]}')
    Path("ids.csv").write_text("9,10\n")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "ids"),
    [
        ("ids=ids.npy mask=both.npz", [[1, 2]]),
        ("ids=both.npz mask=both.npz:more", [[3, 4]]),
        ("ids=ids.json mask=both.npz", [[5, 6]]),
        ("both.json", [[7, 8]]),
        ("ids=ids.csv mask=both.npz", [[9, 10]]),
    ],
)
def test_reads_inputs_from_files(
    ctl: Ctl, model: Model, daemon: FakeDaemon, files: Path, arguments: str, ids: Any
) -> None:
    given = [word for each in arguments.split() for word in ("--input", each)]
    ran = ctl("predict", "m", *given)
    assert (ran.status, ran.err) == (exit_codes.OK, "")
    there = sent(daemon)
    assert {**there, "mask": 0} == {"ids": there["ids"], "mask": 0}
    assert there["ids"].tolist() == ids


def test_npz_has_all_inputs(ctl: Ctl, model: Model, files: Path) -> None:
    assert ctl("predict", "m", "--input", "both.npz").status == exit_codes.OK
    assert model.asked == 0


@pytest.mark.parametrize("name", ["ids.npy", "ids.json", "ids.csv"])
def test_single_file_is_the_only_input(ctl: Ctl, one: Model, daemon: FakeDaemon, files: Path, name: str) -> None:
    assert ctl("predict", "m", "--input", name).status == exit_codes.OK
    assert [*sent(daemon)] == ["ids"]


def test_several_inputs_need_names(ctl: Ctl, model: Model, files: Path) -> None:
    ran = ctl("predict", "m", "--input", "ids.json")
    names = "there are: ids INT64 [-1, -1], mask FP32 [2]"
    assert (ran.status, ran.out) == (exit_codes.USAGE, "")
    assert ran.err == f"INVALID_ARGUMENT: ids.json: m takes 2 inputs: expected NAME=ids.json; {names}\n"
    ran = ctl("predict", "m", "--input", "idz=ids.json")
    assert (ran.status, ran.err) == (exit_codes.USAGE, f"INVALID_ARGUMENT: m has no input 'idz'; {names}\n")


@pytest.mark.parametrize("content", [b"[[11, 12]]", b"11,12\n", b" \n11, 12", "npy", "npz"])
def test_reads_inputs_from_stdin(
    ctl: Ctl, one: Model, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, content: Any
) -> None:
    file = io.BytesIO(b"" if isinstance(content, str) else content)
    if content == "npy":
        np.save(file, np.array([[11, 12]]))
    elif content == "npz":
        np.savez(file, ids=np.array([[11, 12]]))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(file.getvalue())))
    assert ctl("predict", "m", "--input", "-")[::2] == (exit_codes.OK, "")
    assert sent(daemon)["ids"].tolist() == [[11, 12]]


@pytest.mark.parametrize(
    ("content", "name", "expected"),
    [
        ("[[1, 1.5]]", "x.json", "x.json: [0][1]: expected an integer from"),
        ('{"ids": 1}', "x.json", "x.json: expected a list or a number, got an object"),
        ("1,b", "x.csv", "x.csv: line 1, column 2: expected a number, got str 'b'"),
        ("1,2", "x.txt", "x.txt: expected a .npy file of numpy.save, or an .npz, .json, .csv or image file, got"),
        (b"\xff", "x.csv", "x.csv: expected numbers as UTF-8 text"),
        (b"\x89PNG\r\n", "x.json", "x.json: cannot convert an image to [-1, -1]; expected "),
        (None, "both.npz:none", "both.npz: no array 'none'; there are: ids, mask, more"),
    ],
)
def test_rejects_file_that_does_not_fit(
    ctl: Ctl, model: Model, files: Path, content: Any, name: str, expected: str
) -> None:
    if content is not None:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    ran = ctl("predict", "m", "--input", f"ids={name}")
    assert (ran.status, ran.out) == (exit_codes.NO_INPUT, "")
    assert ran.err.startswith(f"INVALID_ARGUMENT: {expected}")


@pytest.mark.parametrize("bound", ["arrays._MAX_TOTAL_BYTES", "predict.sources._MAX_TEXT_BYTES"])
def test_limits_size_of_files(ctl: Ctl, model: Model, files: Path, monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(f"weightctl.{bound}", 4)
    ran = ctl("predict", "m", "--input", "ids=ids.json")
    assert (ran.status, "at most 4 bytes" in ran.err) == (exit_codes.NO_INPUT, True)


def test_limits_unpacked_arrays_and_pipes(ctl: Ctl, model: Model, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed("bomb.npz", ids=np.zeros(10**5))
    monkeypatch.setattr("weightctl.arrays._MAX_TOTAL_BYTES", 10**5)
    assert (
        "expected arrays of at most 100,000 bytes together, got 800" in ctl("predict", "m", "--input", "bomb.npz").err
    )
    monkeypatch.setattr("weightctl.arrays._MAX_BYTES", 4)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"[1, 2]")))
    assert "stdin: expected at most 4 bytes" in ctl("predict", "m", "--input", "ids=-").err
    os.mkfifo("pipe")
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(Path("pipe").write_bytes, b"[1, 2]")
        assert "pipe: expected at most 4 bytes" in ctl("predict", "m", "--input", "ids=pipe").err
        writing.result()


# --- random inputs ----------------------------------------------------------------------------------------------------


def test_random_inputs_have_known_shapes(ctl: Ctl, model: Model, daemon: FakeDaemon, files: Path) -> None:
    assert ctl("predict", "m", "--random").status == exit_codes.OK
    first = sent(daemon)
    assert {name: array.shape for name, array in first.items()} == {"ids": (1, 7), "mask": (2,)}
    assert ctl("predict", "m", "--random", "1", "--shape", "ids=2,3").status == exit_codes.OK
    second = sent(daemon)
    assert second["ids"].shape == (2, 3)
    assert not np.array_equal(first["mask"], second["mask"])
    assert ctl("predict", "m", "--random", "--input", "ids=ids.npy").status == exit_codes.OK
    assert sent(daemon)["ids"].tolist() == [[1, 2]]


# --- scores -----------------------------------------------------------------------------------------------------------

SCORES = np.array([[0.25, 0.5, 0.25], [np.nan, -1.0, np.inf]], np.float32)


def test_prints_labels_of_highest_scores(ctl: Ctl, daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.handle = outputs(("y", SCORES), ("n", np.array([7])))
    labels = tmp_path / "labels.txt"
    labels.write_text("a cat\na dog\n\x1b[2Ja horse\n")
    ran = ctl("predict", "m", "--top", "2", "--labels", str(labels))
    assert ran.out.splitlines() == [
        "y: FP32 [2, 3]",
        " row 0",
        "  1  0.5           a dog",
        "  0  0.25          a cat",
        " row 1",
        "  2  inf           \\x1b[2Ja horse",
        "  1  -1            a dog",
        "n: INT64 [1]",
        "[7]",
    ]
    ran = ctl("predict", "m", "--top", "2", "--json")
    assert json.loads(ran.out)["outputs"][0]["top"] == [
        [{"index": 1, "score": 0.5}, {"index": 0, "score": 0.25}],
        [{"index": 2, "score": "Infinity"}, {"index": 1, "score": -1}],
    ]


def test_limits_rows_of_scores(ctl: Ctl, daemon: FakeDaemon) -> None:
    daemon.handle = outputs(("y", np.zeros((20, 3), np.float32)))
    lines = ctl("predict", "m", "--top", "1").out.splitlines()
    assert len(lines) == 1 + 2 * 16 + 1
    assert lines[-1] == " ... and 4 more rows; use --output to get all"


def test_rejects_labels_of_another_model(ctl: Ctl, daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.handle = outputs(("y", SCORES))
    labels = tmp_path / "labels.txt"
    labels.write_text("a\n")
    ran = ctl("predict", "m", "--top", "1", "--labels", str(labels))
    assert (ran.status, ran.out) == (exit_codes.NO_INPUT, "")
    assert ran.err == f"INVALID_ARGUMENT: {labels}: 1 name, but outputs have vectors of 3 scores\n"
    assert "No such file" in ctl("predict", "m", "--top", "1", "--labels", str(tmp_path / "none")).err
    os.mkfifo(str(tmp_path / "pipe"))
    assert "expected a regular file" in ctl("predict", "m", "--top", "1", "--labels", str(tmp_path / "pipe")).err


def test_writes_all_outputs_to_one_file(ctl: Ctl, daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.handle = outputs(("y", SCORES), ("file", np.array([7])))
    there = tmp_path / "all.npz"
    ran = ctl("predict", "m", "--output", str(there))
    assert ran.out == f"y: FP32 [2, 3] -> {there}\nfile: INT64 [1] -> {there}\n"
    with np.load(str(there)) as read:
        assert read.files == ["y", "file"]
        assert np.array_equal(read["y"], SCORES, equal_nan=True)
    assert ctl("predict", "m", "--output", str(tmp_path / "none" / "all.npz")).status == exit_codes.CANNOT_WRITE


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--labels names", "--labels: expected --top, too"),
        ("--shape x=1", "--shape: expected --random, too"),
        ("--std 0", "--std: expected numbers other than 0"),
        ("--mean 1,b", "expected numbers, as in 0.485,0.456,0.406, got '1,b'"),
        ("--scale 1,2", "expected one number, got '1,2'"),
        ("--random -1", "expected a number from 0 to 4294967295, got '-1'"),
        ("--top 0", "expected at most"),
        ("--input =x", "expected NAME=FILE, or FILE if the model has one input, got '=x'"),
        ("--input x=", "got 'x='"),
    ],
)
def test_invalid_command_line(alone: Ctl, arguments: str, expected: str) -> None:
    ran = alone("predict", "m", *arguments.split())
    assert (ran.status, ran.out) == (exit_codes.USAGE, "")
    assert expected in ran.err


class FailingFile(io.BytesIO):
    """A file on a failing disk."""

    def __init__(self, path: str) -> None:
        super().__init__()

    def read(self, size: Optional[int] = -1) -> bytes:
        raise OSError(errno.EIO, "no such luck")


def test_reports_unreadable_stdin(ctl: Ctl, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    ran = ctl("predict", "m", "--input", "ids=-")
    assert (ran.status, ran.err) == (exit_codes.NO_INPUT, "INVALID_ARGUMENT: stdin: closed\n")
    monkeypatch.setattr("weightctl.arrays.open_input", FailingFile)
    ran = ctl("predict", "m", "--input", "ids=x.json")
    assert (ran.status, ran.err) == (exit_codes.NO_INPUT, "INVALID_ARGUMENT: x.json: no such luck\n")
