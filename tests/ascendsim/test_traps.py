"""The traps of tensors and predicts, which 2.7 has from 2.0; and `update_weights`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from ascendsim import models
from ascendsim.program import Died, Program

Start = Callable[..., Program]

Built = Callable[[Path], Program]


@pytest.fixture(params=["cpu", "ascend"])
def built(start: Start, request: pytest.FixtureRequest) -> Built:
    """A program with a model, and in its `t` the inputs after a resize to [3, 64]."""

    def build(path: Path) -> Program:
        program = start()
        program.do("build(path, target=target)", path=path, target=request.param)
        program.do(
            "def fit(*shapes):\n lib.model.resize(lib.model.get_inputs(), list(shapes))\n return lib.model.get_inputs()"
        )
        program.do("t = fit([3, 64])")
        program.do("run = lambda t: lib.model.predict(t)[0].get_data_to_numpy()")
        return program

    return build


def test_outputs_are_views_that_the_next_predict_overwrites(built: Built, path: Path, x: Any) -> None:
    program = built(path)
    program.do("first = run([x])\nkept = first.copy()\nsecond = run([x * 2])", x=x)
    assert np.array_equal(program.do("kept"), models.answer(path, x))
    assert np.array_equal(program.do("first"), models.answer(path, x * 2))


def test_inputs_are_not_copied(built: Built, path: Path, x: Any) -> None:
    program = built(path)
    program.do("mine = x.copy()\nt[0].set_data_from_numpy(mine)\nmine += 1", x=x)
    assert np.array_equal(program.do("run(t)"), models.answer(path, x + np.float32(1)))


def test_other_layouts_are_silently_ignored(built: Built, path: Path, x: Any) -> None:
    program = built(path)
    for other in ("(x).copy('F')", "(x).astype('>f4')"):
        program.do(f"t = lib.model.get_inputs()\nt[0].set_data_from_numpy({other})", x=x)
        assert np.array_equal(program.do("run(t)"), models.answer(path, np.zeros_like(x)))
        program.do(f"t[0].set_data_from_numpy(x)\nt[0].set_data_from_numpy({other.replace('(x)', '(x + 1)')})")
        assert np.array_equal(program.do("run(t)"), models.answer(path, x))  # the request before
    program.do("t[0].set_data_from_numpy(np.repeat(x, 2, 0)[::2])")  # strided: copied, and right
    assert np.array_equal(program.do("run(t)"), models.answer(path, x))


def test_only_dtype_and_size_are_checked(built: Built, path: Path, x: Any) -> None:
    program = built(path)
    program.do("t[0].set_data_from_numpy(x.reshape(64, 3))\nrun(t)", x=x)
    assert np.array_equal(program.do("run(t)"), models.answer(path, x))
    assert program.refusal("t[0].set_data_from_numpy(x.astype('f8'))").text.startswith("data type not equal!")
    assert program.refusal("t[0].set_data_from_numpy(x[:2])").text.startswith("data size not equal!")
    assert program.refusal("t[0].set_data_from_numpy(x.astype(complex))").kind == "TypeError"
    assert program.refusal("t[0].set_data_from_numpy([1.0])").kind == "TypeError"


def test_no_data_is_zeros(built: Built, path: Path) -> None:
    assert np.array_equal(built(path).do("run(t)"), models.answer(path, np.zeros((3, 64))))


def test_inputs_are_bound_by_position(start: Start, tmp_path: Path) -> None:
    path = models.two_inputs(tmp_path / "two.mindir")
    a, b = np.full((1, 4), 5, np.float32), np.full((1, 4), 2, np.float32)
    program = start()
    program.do("build(path)\npredict(a, b)", path=path, a=a, b=b)
    swapped = "t = lib.model.get_inputs()\nt[0].set_data_from_numpy(a)\nt[1].set_data_from_numpy(b)\n"
    swapped += "[o.get_data_to_numpy() for o in lib.model.predict(t[::-1])]"
    expected = models.answers(path, {"a": b, "b": a})
    assert all(np.array_equal(x, y) for x, y in zip(program.do(swapped), expected.values()))


def test_old_tensors_keep_the_old_shape(built: Built, path: Path) -> None:
    program = built(path)
    assert program.do("u = fit([5, 64])\n[t[0].shape, u[0].shape]") == [[3, 64], [5, 64]]


def test_a_dynamic_model_wants_a_resize_first(start: Start, path: Path, x: Any) -> None:
    program = start()
    program.do("build(path)\nt = lib.model.get_inputs()", path=path)
    assert "Tensor size: 0" in program.refusal("t[0].set_data_from_numpy(x)", x=x).text
    assert program.refusal("lib.model.predict(t)").text == "predict failed!"
    assert np.array_equal(program.do("predict(x)"), models.answer(path, x))  # harmless


def test_a_tensor_of_a_real_shape_without_a_resize_poisons(start: Start, path: Path, x: Any) -> None:
    program = start()
    program.do("build(path)", path=path)
    assert program.refusal("lib.model.predict([ms.Tensor(x)])", x=x).text == "predict failed!"
    assert program.refusal("predict(x)").text == "predict failed!"


def test_after_a_failed_predict_comes_the_old_answer(built: Built, path: Path, x: Any) -> None:
    program = built(path)
    program.do("run([x])", x=x)
    assert program.refusal("run(fit([3, 65]))").text == "predict failed!"  # the resize was taken
    assert program.do("predict(np.ones((7, 64), np.float32))").shape == (3, 64)
    assert program.do("len(fit([3, 64]))") == 1
    assert np.array_equal(program.do("predict(np.ones((3, 64), np.float32))"), models.answer(path, x))


def test_a_wrong_resize_is_undone_by_another(built: Built, path: Path, x: Any) -> None:
    program = built(path)
    program.do("fit([3, 65])")
    assert np.array_equal(program.do("predict(x)", x=x), models.answer(path, x))
    for shapes in ("[-1, 64]", "[0, 64]", "[3, 64], [3, 64]"):
        assert program.refusal(f"fit({shapes})").kind in ("RuntimeError", "ValueError")
    assert np.array_equal(program.do("predict(x)", x=x), models.answer(path, x))


def test_a_wrong_count_does_not_poison(built: Built, path: Path, x: Any) -> None:
    program = built(path)
    assert program.refusal("lib.model.predict(t * 2)").text == "model input len:1 not equal input len:2!"
    assert np.array_equal(program.do("predict(x)", x=x), models.answer(path, x))


@pytest.mark.parametrize(("target", "taken"), [("cpu", True), ("ascend", False)])
def test_a_fixed_shape_is_fixed_on_a_card_only(start: Start, tmp_path: Path, target: str, taken: bool) -> None:
    program = start()
    path = models.mlp(tmp_path / "fixed.mindir", batch=1)
    program.do("build(path, target=target)", path=path, target=target)
    program.do("predict(np.ones((1, 64), np.float32))")
    resize = "lib.model.resize(lib.model.get_inputs(), [[5, 64]])"
    if taken:
        program.do(resize)
    else:
        assert program.refusal(resize).text == "resize failed! Error is Common error code."


def test_the_shape_of_an_array_stays(any_tensor: Program) -> None:
    assert any_tensor.do("t = ms.Tensor(np.ones((2, 3), np.float32))\nt.shape = [3, 2]\nt.shape") == [2, 3]
    any_tensor.do("u = ms.Tensor()\nu.shape = [2, 2]")
    assert any_tensor.do("[u.shape, u.element_num, u.data_size]") == [[2, 2], 4, 16]


@pytest.fixture
def any_tensor(start: Start) -> Program:
    return start()


def test_outputs_of_the_caller_are_filled(built: Built, path: Path, x: Any) -> None:
    program = built(path)
    program.do("mine = np.zeros((3, 64), np.float32)\no = [ms.Tensor(mine)]\nr = lib.model.predict([x], o)", x=x)
    assert program.do("r[0] is o[0]")
    assert np.array_equal(program.do("mine"), models.answer(path, x))
    assert program.refusal("lib.model.predict([x], 1)").kind == "TypeError"
    assert program.refusal("lib.model.predict([x], [x])").kind == "TypeError"


# --- update_weights ---------------------------------------------------------------------------------------------


@pytest.fixture
def bundle(start: Start, tmp_path: Path) -> Program:
    """A program with a bundle model, and in its `w` new weights for the first layer."""
    program = start()
    program.do("build(path)", path=models.mlp(tmp_path / "bundle.mindir", bundle=True))
    program.do("w = ms.Tensor(np.zeros((64, 64), np.float32))\nw.name = 'w0'")
    return program


def test_a_bundle_model_takes_new_weights(bundle: Program, x: Any) -> None:
    assert bundle.do("predict(x)", x=x).any()
    bundle.do("lib.model.update_weights([[w]])")
    assert not bundle.do("predict(x)", x=x).any()


@pytest.mark.parametrize("weights", ["[[w], [w]]", "[[]]", "[[ms.Tensor(np.zeros(3, np.float32))]]"])
def test_weights_that_are_refused(bundle: Program, weights: str) -> None:
    assert bundle.refusal(f"lib.model.update_weights({weights})").kind == "RuntimeError"


def test_no_weights_at_all_is_a_crash(bundle: Program) -> None:
    with pytest.raises(Died) as died:
        bundle.do("lib.model.update_weights([])")
    assert died.value.status == -signal.SIGSEGV


@pytest.mark.parametrize("target", ["cpu", "ascend"])
def test_other_models_take_no_weights(start: Start, path: Path, target: str) -> None:
    program = start()
    program.do("build(path, target=target)\nw = ms.Tensor(np.zeros((64, 64), np.float32))", path=path, target=target)
    assert program.refusal("lib.model.update_weights([[w]])").kind == "RuntimeError"
