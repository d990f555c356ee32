"""The test kit's models: both engines compute the same answers as numpy; and the demo's model recognizes digits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import reference

from testkit import memory, mindir, models, plain

Arrays = dict[str, NDArray[Any]]
# Writes a model, and converts it for an engine; returns its path and the engine's name.
Write = Callable[[Callable[[Path], Path]], tuple[Path, str]]

RNG = np.random.default_rng(1)


def normal(*shape: int) -> NDArray[np.float32]:
    return RNG.standard_normal(shape, dtype=np.float32)


MODELS: dict[str, tuple[Callable[[Path], Path], Arrays]] = {
    "mlp": (lambda path: models.mlp(path, layers=3, width=128), {"x": normal(2, 128)}),
    "mlp, fixed batch": (lambda path: models.mlp(path, layers=2, width=32, batch=3), {"x": normal(3, 32)}),
    "tiny": (models.tiny, {"x": np.asfortranarray(normal(5, 64))}),
    "convolutions": (lambda path: models.convolutions(path, size=32), {"x": normal(2, 3, 32, 32)}),
    "transformer": (lambda path: models.transformer(path, 2, 6, 16), {"x": normal(2, 6, 16)}),
    "two_inputs": (models.two_inputs, {"b": normal(2, 4), "a": normal(2, 4)}),
    "two_batches": (models.two_batches, {"a": normal(2, 4), "b": normal(2, 4)}),
    "integers": (models.integers, {"ids": np.array([[0, 1, 15], [7, 7, 7]])}),
    "fixed": (models.fixed, {"x": normal(2, 3)}),
    "with_external_data": (models.with_external_data, {"x": normal(2, 64)}),
}

CONVERTED = ["mlp", "convolutions", "transformer", "two_inputs", "integers"]


@pytest.fixture
def mslite() -> Path:
    python = mindir.interpreter()
    if python is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(mindir.HOW_TO_GET_IT)
    return python


@pytest.fixture(params=["onnxruntime", "mindspore_lite"])
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Write:
    def written(writer: Callable[[Path], Path]) -> tuple[Path, str]:
        path = writer(tmp_path / "model.onnx")
        if request.param == "mindspore_lite":
            path = mindir.convert(path, tmp_path / "model.mindir", request.getfixturevalue("mslite"))
        return path, request.param

    return written


def by_numpy(onnx: Path, inputs: Arrays) -> Arrays:
    evaluator: Any = reference.ReferenceEvaluator(str(onnx))
    return dict(zip(evaluator.output_names, evaluator.run(None, inputs), strict=True))


@pytest.mark.parametrize(
    ("name", "write"),
    # Each model for MindSpore Lite must be converted first, so these are only the models that its tests serve.
    [(name, "onnxruntime") for name in MODELS] + [(name, "mindspore_lite") for name in CONVERTED],
    indirect=["write"],
)
def test_engine_answers_equal_numpy(name: str, write: Write) -> None:
    writer, inputs = MODELS[name]
    path, engine = write(writer)
    expected = by_numpy(path.with_suffix(".onnx"), inputs)
    with plain.PlainProcess(path, engine) as process:
        for answer in (process.infer(inputs), process.infer(inputs)):
            assert {**answer}.keys() == expected.keys()
            for output, array in expected.items():
                assert (answer[output].dtype, answer[output].shape) == (array.dtype, array.shape)
                np.testing.assert_allclose(answer[output], array, rtol=1e-4, atol=1e-4)


def test_error_of_engine_has_reason(write: Write) -> None:
    path, engine = write(models.two_batches)
    reason = {"onnxruntime": "2 by 3", "mindspore_lite": r"predict failed!(.|\n)*\[ERROR\]"}[engine]
    with plain.PlainProcess(path, engine) as process, pytest.raises(plain.PlainError, match=reason):
        process.infer({"a": normal(2, 4), "b": normal(3, 4)})


def test_same_seed_writes_same_bytes(tmp_path: Path) -> None:
    written: list[bytes] = []
    for name, seed in (("first", 0), ("second", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        written.append(models.mlp(tmp_path / name / "model.onnx", layers=2, width=16, seed=seed).read_bytes())
    assert written[0] == written[1] != written[2]


def test_external_weights_are_in_separate_files(tmp_path: Path) -> None:
    onnx = models.with_external_data(tmp_path / "model.onnx", locations=3, width=64)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir() if path != onnx}
    assert sizes == dict.fromkeys(["model.w0.bin", "model.w1.bin", "model.w2.bin"], 64 * 64 * 4)
    assert onnx.stat().st_size < 1000


def test_plain_process_measures_itself(tmp_path: Path) -> None:
    with plain.PlainProcess(models.tiny(tmp_path / "model.onnx")) as process:
        x = {"x": normal(1, 64)}
        assert 0 < process.build_seconds < process.start_seconds
        assert process.times(x, 5).shape == (5,)
        assert 0 < process.repeat(x, 5) < 10
        assert [times.shape for times in plain.concurrent_times([process], x, 3)] == [(3,)]
        assert 2**20 < memory.pss(process.pid) < 2**30
        assert memory.pss_total([process.pid]) > 2**20
    with pytest.raises(ProcessLookupError):
        memory.pss(process.pid)


def test_load_and_convert_errors_have_reasons(tmp_path: Path, mslite: Path) -> None:
    empty = tmp_path / "empty.onnx"
    empty.touch()
    with pytest.raises(plain.PlainError, match=r"empty\.onnx"), plain.PlainProcess(empty):
        pass
    onnx = models.random_output(tmp_path / "model.onnx")
    with plain.PlainProcess(onnx) as process:
        x = np.zeros((1, 4), np.float32)
        assert not np.array_equal(process.infer({"x": x})["y"], process.infer({"x": x})["y"])
    with pytest.raises(mindir.ConvertError, match="RandomUniformLike"):
        mindir.convert(onnx, tmp_path / "model.mindir", mslite)
    with pytest.raises(ValueError, match=r"\.mindir"):
        mindir.convert(onnx, tmp_path / "model.bin", mslite)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("digits") / "digits.onnx"
    command = [sys.executable, "-m", "benchmarks.demo.model", str(out)]
    subprocess.run(command, cwd=mindir.REPOSITORY, check=True)
    assert out.stat().st_size > 128 * 2**20
    return out


def test_demo_model_recognizes_digits(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(mindir.REPOSITORY), *sys.path])  # benchmarks are not installed
    from benchmarks.demo import model

    data = model.split()
    assert len(data.training_images) + len(data.held_out_images) == 1797
    with plain.PlainProcess(digits, "onnxruntime") as process:
        scores = process.infer({"image": data.held_out_images})["scores"]
    assert (scores.argmax(axis=1) == data.held_out_labels).mean() > 0.97
