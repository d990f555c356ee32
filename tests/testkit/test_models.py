"""The kit itself: its models compute what numpy computes, on both engines; the digits are read."""

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

RNG = np.random.default_rng(1)


def normal(*shape: int) -> NDArray[np.float32]:
    return RNG.standard_normal(shape, dtype=np.float32)


WRITERS: dict[str, Callable[[Path], Path]] = {
    "mlp": lambda path: models.mlp(path, layers=3, width=128),
    "mlp, fixed batch": lambda path: models.mlp(path, layers=2, width=32, batch=3),
    "tiny": models.tiny,
    "two_inputs": models.two_inputs,
    "two_batches": models.two_batches,
    "integers": models.integers,
    "fixed": models.fixed,
    "with_external_data": models.with_external_data,
}
INPUTS: dict[str, Arrays] = {
    "mlp": {"x": normal(2, 128)},
    "mlp, fixed batch": {"x": normal(3, 32)},
    "tiny": {"x": np.asfortranarray(normal(5, 64))},
    "two_inputs": {"b": normal(2, 4), "a": normal(2, 4)},
    "two_batches": {"a": normal(2, 4), "b": normal(2, 4)},
    "integers": {"ids": np.array([[0, 1, 15], [7, 7, 7]])},
    "fixed": {"x": normal(2, 3)},
    "with_external_data": {"x": normal(2, 64)},
}


@pytest.fixture
def mslite() -> Path:
    python = mindir.interpreter()
    if python is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(mindir.HOW_TO_GET_IT)
    return python


def assert_close(answer: Arrays, expected: Arrays) -> None:
    assert {name: a.shape for name, a in answer.items()} == {name: e.shape for name, e in expected.items()}
    for name, array in expected.items():
        assert answer[name].dtype == array.dtype
        np.testing.assert_allclose(answer[name], array, rtol=1e-4, atol=1e-4)


def by_numpy(onnx: Path, inputs: Arrays) -> Arrays:
    evaluator: Any = reference.ReferenceEvaluator(str(onnx))
    return dict(zip(evaluator.output_names, evaluator.run(None, inputs), strict=True))


@pytest.mark.parametrize("name", WRITERS)
def test_onnxruntime_gives_the_answer_of_numpy(name: str, tmp_path: Path) -> None:
    onnx = WRITERS[name](tmp_path / "model.onnx")
    with plain.PlainProcess(onnx) as process:
        assert_close(process.infer(INPUTS[name]), by_numpy(onnx, INPUTS[name]))


@pytest.mark.parametrize("name", WRITERS)
def test_mindspore_lite_gives_the_answer_of_numpy(name: str, tmp_path: Path, mslite: Path) -> None:
    onnx = WRITERS[name](tmp_path / "model.onnx")
    converted = mindir.convert(onnx, tmp_path / "model.mindir", mslite)
    with plain.PlainProcess(converted, "mindspore_lite") as process:
        for _ in range(2):
            assert_close(process.infer(INPUTS[name]), by_numpy(onnx, INPUTS[name]))


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    first, second, other = (tmp_path / name / "model.onnx" for name in ("first", "second", "other"))
    for path, seed in ((first, 0), (second, 0), (other, 1)):
        path.parent.mkdir()
        models.mlp(path, layers=2, width=16, seed=seed)
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()


def test_external_weights_are_not_in_the_model_file(tmp_path: Path) -> None:
    onnx = models.with_external_data(tmp_path / "model.onnx", locations=3, width=64)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["model.onnx", "model.w0.bin", "model.w1.bin", "model.w2.bin"]
    assert onnx.stat().st_size < 1000
    assert (tmp_path / "model.w2.bin").stat().st_size == 64 * 64 * 4


def test_random_output_is_never_the_same(tmp_path: Path) -> None:
    with plain.PlainProcess(models.random_output(tmp_path / "model.onnx")) as process:
        x = np.zeros((1, 4), np.float32)
        assert not np.array_equal(process.infer({"x": x})["y"], process.infer({"x": x})["y"])


def test_a_plain_process_measures_itself(tmp_path: Path) -> None:
    with plain.PlainProcess(models.tiny(tmp_path / "model.onnx")) as process:
        x = {"x": normal(1, 64)}
        assert 0 < process.build_seconds < process.start_seconds
        assert process.times(x, 5).shape == (5,)
        assert 0 < process.repeat(x, 5) < 10
        assert [times.shape for times in plain.times_together([process], x, 3)] == [(3,)]
        assert 2**20 < memory.pss(process.pid) < 2**30
        assert memory.pss_total([process.pid]) > 2**20
    with pytest.raises(ProcessLookupError):
        memory.pss(process.pid)


def test_what_the_engine_refuses_is_an_error_with_its_reason(tmp_path: Path) -> None:
    mismatch = {"a": normal(2, 4), "b": normal(3, 4)}
    with (
        plain.PlainProcess(models.two_batches(tmp_path / "model.onnx")) as process,
        pytest.raises(plain.PlainError, match="2 by 3"),
    ):
        process.infer(mismatch)
    empty = tmp_path / "empty.onnx"
    empty.touch()
    with pytest.raises(plain.PlainError, match=r"empty\.onnx"), plain.PlainProcess(empty):
        pass


def test_a_failed_predict_of_mindspore_lite_brings_its_log(tmp_path: Path, mslite: Path) -> None:
    onnx = models.two_batches(tmp_path / "model.onnx")
    converted = mindir.convert(onnx, tmp_path / "model.mindir", mslite)
    with (
        plain.PlainProcess(converted, "mindspore_lite") as process,
        pytest.raises(plain.PlainError, match=r"predict failed!(.|\n)*\[ERROR\]"),
    ):
        process.infer({"a": normal(2, 4), "b": normal(3, 4)})


def test_a_conversion_that_fails_says_why(tmp_path: Path, mslite: Path) -> None:
    onnx = models.random_output(tmp_path / "model.onnx")
    with pytest.raises(mindir.ConvertError, match="RandomUniformLike"):
        mindir.convert(onnx, tmp_path / "model.mindir", mslite)
    with pytest.raises(ValueError, match=r"\.mindir"):
        mindir.convert(onnx, tmp_path / "model.bin", mslite)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("digits") / "digits.onnx"
    command = [sys.executable, "-m", "benchmarks.demo.model", str(out)]
    subprocess.run(command, cwd=mindir.REPOSITORY, check=True, timeout=60)
    return out


def held_out(monkeypatch: pytest.MonkeyPatch) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    monkeypatch.setattr(sys, "path", [str(mindir.REPOSITORY), *sys.path])  # benchmarks are not installed
    from benchmarks.demo import model

    data = model.split()
    assert len(data.training_images) + len(data.held_out_images) == 1797
    return data.held_out_images, data.held_out_labels


def share_right(process: plain.PlainProcess, images: NDArray[np.float32], labels: NDArray[np.uint8]) -> float:
    return float((process.infer({"image": images})["scores"].argmax(axis=1) == labels).mean())


def test_the_digits_are_read_by_onnxruntime(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert digits.stat().st_size > 128 * 2**20
    with plain.PlainProcess(digits) as process:
        assert share_right(process, *held_out(monkeypatch)) > 0.97


def test_the_digits_are_read_by_mindspore_lite(digits: Path, monkeypatch: pytest.MonkeyPatch, mslite: Path) -> None:
    converted = mindir.convert(digits, digits.with_suffix(".mindir"), mslite)
    with plain.PlainProcess(converted, "mindspore_lite") as process:
        assert share_right(process, *held_out(monkeypatch)) > 0.97
