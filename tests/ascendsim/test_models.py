"""The simulated models: the same bytes for the same arguments, the same bits of an answer everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from ascendsim import modelfile, models
from ascendsim.program import Program

Start = Callable[..., Program]


def test_a_seed_is_a_file(tmp_path: Path) -> None:
    first = models.mlp(tmp_path / "a.mindir", seed=3).read_bytes()
    assert models.mlp(tmp_path / "b.mindir", seed=3).read_bytes() == first
    assert models.mlp(tmp_path / "c.mindir", seed=4).read_bytes() != first


def test_the_answer_is_that_of_a_matrix_product(tmp_path: Path, x: Any) -> None:
    path = models.mlp(tmp_path / "m.mindir", layers=1, seed=5)
    weights = np.frombuffer(modelfile.read(path).weights, np.float32).reshape(64, 64)
    np.testing.assert_allclose(models.answer(path, x), np.maximum(x @ weights, 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", ["cpu", "ascend"])
def test_a_process_answers_the_same_bits(start: Start, path: Path, x: Any, target: str) -> None:
    program = start()
    program.do("build(path, target=target)", path=path, target=target)
    assert np.array_equal(program.do("predict(x)", x=x), models.answer(path, x))
    assert np.array_equal(program.do("predict(x)", x=x[1:2]), models.answer(path, x)[1:2])


def test_inputs_and_outputs_are_described(start: Start, path: Path, tmp_path: Path) -> None:
    program = start()
    program.do("build(path)", path=path)
    describe = "[(t.name, t.dtype.name, list(t.shape), t.data_size) for t in lib.model.get_{}()]"
    assert program.do(describe.format("inputs")) == [("x", "FLOAT32", [-1, 64], 0)]
    assert program.do(describe.format("outputs")) == [("y", "FLOAT32", [-1, 64], 0)]
    program.do("build(path)", path=models.mlp(tmp_path / "fixed.mindir", batch=2))
    assert program.do(describe.format("inputs")) == [("x", "FLOAT32", [2, 64], 512)]


def test_a_damaged_file_is_refused(start: Start, path: Path) -> None:
    data = path.read_bytes()
    program = start()
    for damaged in (b"", data[:-1], data + b"x", data[: len(data) // 2], b"text"):
        path.write_bytes(damaged)
        error = program.refusal("build(path)", path=path)
        assert (error.kind, error.text) == ("RuntimeError", "build_from_file failed! Error is Common error code.")


def test_flipped_bytes_in_the_weights_are_not_noticed(start: Start, path: Path, x: Any) -> None:
    expected = models.answer(path, x)
    data = bytearray(path.read_bytes())
    data[-2000:-1000] = bytes(1000)
    path.write_bytes(bytes(data))
    program = start()
    program.do("build(path)", path=path)
    assert not np.array_equal(program.do("predict(x)", x=x), expected)
