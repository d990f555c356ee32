"""Tests of the traps in tensors and predicts that 2.7 shares with 2.0, of gears, and of `update_weights`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascendsim import models
from ascendsim.program import Died, Program

from .support import Start, answers

HELPERS = """
def fit(*shapes):
    lib.model.resize(lib.model.get_inputs(), list(shapes))
    return lib.model.get_inputs()
def run(t):
    return lib.model.predict(t)[0].get_data_to_numpy()
def put(array):
    t[0].set_data_from_numpy(array)
    return run(t)
t = fit([3, 64])
"""


@pytest.fixture(params=["cpu", "ascend"])
def built(start: Start, request: pytest.FixtureRequest) -> Program:
    """Return a program with a model and, in `t`, the inputs after a resize to [3, 64]."""
    program = start()
    program.do("build(path, target=target)", target=request.param)
    program.do(HELPERS)
    return program


def test_inputs_and_outputs_are_views(built: Program, path: Path, x: Any) -> None:
    built.do("mine = x.copy()\nfirst = put(mine)\nkept = first.copy()\nmine *= 2\nsecond = run(t)")
    assert answers(built, path, x, "kept")
    assert answers(built, path, x * 2, "first")


@pytest.mark.parametrize("ignored", ["(x + 1).copy('F')", "(x + 1).astype('>f4')"])
def test_silently_ignores_other_layouts(built: Program, path: Path, x: Any, ignored: str) -> None:
    assert answers(built, path, np.zeros_like(x), f"put({ignored})")
    built.do("put(x)")
    assert answers(built, path, x, f"put({ignored})")  # The answer belongs to the request before.
    # This input is copied, and the answer is right.
    assert answers(built, path, x + np.float32(1), "put(np.repeat(x + np.float32(1), 2, 0)[::2])")


def test_checks_only_dtype_and_size(built: Program, path: Path, x: Any) -> None:
    assert answers(built, path, x, "put(x.reshape(64, 3))")
    assert built.refusal("put(x.astype('f8'))").text.startswith("data type not equal!")
    assert built.refusal("put(x[:2])").text.startswith("data size not equal!")
    assert built.refusal("put(x.astype(complex))").kind == "TypeError"
    assert built.refusal("put([1.0])").kind == "TypeError"


def test_binds_inputs_by_position(program: Program, tmp_path: Path) -> None:
    path = models.two_inputs(tmp_path / "two.mindir")
    a, b = np.full((1, 4), 5, np.float32), np.full((1, 4), 2, np.float32)
    program.do("build(path)\npredict(a, b)\nt = lib.model.get_inputs()", path=path, a=a, b=b)
    program.do("t[0].set_data_from_numpy(a)\nt[1].set_data_from_numpy(b)")
    swapped = program.do("[o.get_data_to_numpy() for o in lib.model.predict(t[::-1])]")
    assert all(map(np.array_equal, swapped, models.answers(path, {"a": b, "b": a}).values()))


def test_old_tensors_keep_old_shape(built: Program) -> None:
    assert built.do("u = fit([5, 64])\n[t[0].shape, u[0].shape]") == [[3, 64], [5, 64]]


def test_dynamic_model_needs_a_resize(program: Program, path: Path, x: Any) -> None:
    program.do("build(path)\nt = lib.model.get_inputs()")
    assert "Tensor size: 0" in program.refusal("t[0].set_data_from_numpy(x)").text
    assert program.refusal("lib.model.predict(t)").text == "predict failed!"
    assert answers(program, path, x)  # The model is still intact.
    program.do("build(path)")
    assert program.refusal("lib.model.predict([ms.Tensor(x)])").text == "predict failed!"
    assert program.refusal("predict(x)").text == "predict failed!"  # A real shape has corrupted the model.


def test_old_answer_follows_failed_predict(built: Program, path: Path, x: Any) -> None:
    built.do("put(x)")
    assert built.refusal("run(fit([3, 65]))").text == "predict failed!"  # The resize had an effect.
    assert answers(built, path, x, "predict(np.ones((7, 64), np.float32))")
    assert answers(built, path, x, "predict(np.ones((3, 64), np.float32))")


def test_next_resize_repairs_wrong_resize(built: Program, path: Path, x: Any) -> None:
    built.do("fit([3, 65])")
    assert answers(built, path, x)
    for shapes in ("[-1, 64]", "[0, 64]", "[3, 64], [3, 64]"):
        assert built.refusal(f"fit({shapes})").kind in ("RuntimeError", "ValueError")
    assert built.refusal("lib.model.predict(t * 2)").text == "model input len:1 not equal input len:2!"
    assert answers(built, path, x)


@pytest.mark.parametrize(("target", "taken"), [("cpu", True), ("ascend", False)])
def test_shape_is_fixed_only_on_a_card(program: Program, tmp_path: Path, target: str, taken: bool) -> None:
    path = models.mlp(tmp_path / "fixed.mindir", batch=1)
    program.do("build(path, target=target)\npredict(np.ones((1, 64), np.float32))", path=path, target=target)
    resize = "lib.model.resize(lib.model.get_inputs(), [[5, 64]])"
    if taken:
        program.do(resize)
    else:
        assert program.refusal(resize).text == "resize failed! Error is Common error code."


# --- gears ------------------------------------------------------------------------------------------------------


def test_batch_gears_check_only_first_input(program: Program, tmp_path: Path) -> None:
    path = models.two_inputs(tmp_path / "two.mindir", gears=(1, 2))
    a, b = np.ones((2, 4), np.float32), np.ones((1, 4), np.float32)
    assert program.do("build(path)\npredict(a, b).shape", path=path, a=a, b=b) == (2, 4)


def test_update_without_weights_crashes(program: Program, tmp_path: Path) -> None:
    program.do("build(path)", path=models.mlp(tmp_path / "bundle.mindir", bundle=True))
    with pytest.raises(Died, match=f"exit status -{int(signal.SIGSEGV)}"):
        program.do("lib.model.update_weights([])")
