from __future__ import annotations

from typing import Any, Callable, Tuple

import numpy as np
import pytest

from testkit import cases
from weightd.protocol.messages.data import TensorSignature
from weightd.worker.canary import canary
from weightd.worker.canary.proof import Proof
from weightd.worker.engines.engine import Arrays, ModelSignature
from weightd.worker.engines.errors import Spoilt

Answer = Callable[[Arrays], Arrays]

BATCHED = ModelSignature((TensorSignature("x", "FP32", (-1, 3)),), (TensorSignature("y", "FP32", (-1, 3)),))


def thrice(inputs: Arrays) -> Arrays:
    return {"y": inputs["x"] * 3}


def two_rows(_: Arrays) -> Arrays:
    return {"y": np.ones((2, 3), np.float32)}


class Model:
    """As much of an engine as is needed: a function that can be exchanged, and a count of its calls."""

    def __init__(self, answer: Answer, signature: ModelSignature = BATCHED, *, spoils: bool = True) -> None:
        self.answer = answer
        self.spoils = spoils
        self.signature = signature
        self.calls = 0

    def predict(self, inputs: Arrays) -> Arrays:
        self.calls += 1
        return self.answer(inputs)


def twice(inputs: Arrays) -> Arrays:
    return {"y": inputs["x"] * 2}


def proved(model: Model, sizes: Tuple[int, ...] = (1, 2)) -> Proof:
    engine: Any = model
    proof = Proof(engine, canary.run(engine, cases.of(model.signature, *sizes)))
    model.calls = 0
    return proof


def batch(size: int) -> Arrays:
    return {"x": np.ones((size, 3), np.float32)}


def checked(proof: Proof, model: Model, inputs: Arrays) -> Arrays:
    return proof.checked(inputs, model.predict(inputs))


def test_what_fits_the_signature_passes_and_costs_nothing() -> None:
    model = Model(twice)
    proof = proved(model)
    for size in (1, 2, 7):
        assert checked(proof, model, batch(size))["y"].shape == (size, 3)
    assert model.calls == 3


@pytest.mark.parametrize(
    ("outputs", "problem"),
    [
        ({"y": np.ones((2, 3), np.float32)}, r"output y has shape \[2, 3\] for a batch of 5"),
        ({"y": np.ones((5, 4), np.float32)}, r"output y has shape \[5, 4\], expected \[-1, 3\]"),
        ({"y": np.ones(15, np.float32)}, r"output y has shape \[15\], expected \[-1, 3\]"),
        ({"y": np.ones((5, 3), np.float64)}, "output y is float64, expected FP32"),
        ({"z": np.ones((5, 3), np.float32)}, "outputs z, expected y"),
        ({}, "outputs , expected y"),
    ],
)
def test_an_answer_that_contradicts_and_cannot_be_had_again_is_not_given(outputs: Arrays, problem: str) -> None:
    model = Model(twice)
    proof = proved(model)
    with pytest.raises(Spoilt, match=rf"^the answer contradicts the model's signature: {problem}$"):
        proof.checked(batch(5), outputs)


def test_neither_is_one_of_a_model_whose_canary_is_wrong_now() -> None:
    model = Model(twice)
    proof = proved(model)
    model.answer = two_rows
    with pytest.raises(Spoilt):
        checked(proof, model, batch(5))


def test_a_model_that_goes_its_own_way_with_an_input_may_do_so() -> None:
    def unique(inputs: Arrays) -> Arrays:
        return {"y": np.unique(inputs["x"], axis=0)}

    model = Model(unique)
    proof = proved(model)
    assert checked(proof, model, batch(5))["y"].shape == (1, 3)
    # It is asked once, not for each request.
    model.calls = 0
    assert checked(proof, model, batch(6))["y"].shape == (1, 3)
    assert model.calls == 1


@pytest.mark.parametrize(
    "signature",
    [
        BATCHED._replace(inputs=(TensorSignature("x", "FP32", (-1, -1)),)),
        BATCHED._replace(inputs=(TensorSignature("x", "FP32", (3, -1)),)),
        BATCHED._replace(inputs=(TensorSignature("x", "FP32", None),)),
    ],
)
def test_where_another_dimension_is_free_nothing_is_said_of_the_batch(signature: ModelSignature) -> None:
    model = Model(
        lambda inputs: {"y": inputs["x"].sum() * np.ones((*inputs["x"].shape[-1:], 3), np.float32)}, signature
    )
    proof = proved(model)
    assert checked(proof, model, {"x": np.ones((3, 9), np.float32)})["y"].shape == (9, 3)
    assert model.calls == 1


def test_a_shape_that_the_engine_does_not_know_may_be_any() -> None:
    unknown = BATCHED._replace(outputs=(TensorSignature("y", "FP32", None),))
    model = Model(twice, unknown)
    proof = proved(model, sizes=())
    assert checked(proof, model, batch(5))["y"].shape == (5, 3)


def test_the_canary_shows_whether_the_model_is_what_it_was() -> None:
    model = Model(twice)
    proof = proved(model)
    before = proof.digest()
    assert not proof.refuted()
    model.answer = thrice
    assert proof.refuted()
    assert proof.digest() != before


def fails(_: Arrays) -> Arrays:
    raise Spoilt("predict failed")


def test_a_canary_that_fails_refutes() -> None:
    model = Model(twice)
    proof = proved(model)
    model.answer = fails
    assert proof.refuted()


def noise(inputs: Arrays) -> Arrays:
    return {"y": inputs["x"] * np.float32(1 + 1e-6 * np.random.rand())}


def test_answers_may_be_as_far_apart_as_is_allowed() -> None:
    model: Any = Model(noise)
    known = canary.run(model, cases.of(BATCHED, 1, 2))
    near, exact = Proof(model, known, tolerance=1e-5), Proof(model, known)
    assert (near.refuted(), near.digest(), exact.refuted()) == (False, known.digest, True)
    # An answer that contradicts the signature is looked into in the same way.

    def first_row(inputs: Arrays) -> Arrays:
        return noise(inputs) if len(inputs["x"]) < 3 else {"y": noise(inputs)["y"][:1]}

    model.answer = first_row
    assert checked(near, model, batch(5))["y"].shape == (1, 3)


# --- without a canary -----------------------------------------------------------------------------------------------

SIX = BATCHED._replace(outputs=(TensorSignature("y", "FP32", (1, 2, 60)),))


def test_without_a_canary_nothing_refutes() -> None:
    assert not proved(Model(fails), sizes=()).refuted()


def test_of_a_model_that_cannot_be_spoilt_every_answer_is_its_way() -> None:
    """An output that was declared inexactly, as by an export with a batch of 1."""
    model = Model(twice, SIX, spoils=False)
    proof = proved(model, sizes=())
    checked(proof, model, {"x": np.ones((1, 2, 60), np.float32)})
    for size in (5, 1, 5):
        assert checked(proof, model, batch(size))["y"].shape == (size, 3)
    assert model.calls == 4


def test_of_one_that_can_be_the_first_answer_shows_whether_the_signature_is_true() -> None:
    untrue, true = Model(twice, SIX), Model(twice, SIX)
    proof = proved(untrue, sizes=())
    for size in (5, 1):
        assert checked(proof, untrue, batch(size))["y"].shape == (size, 3)
    proof = proved(true, sizes=())
    checked(proof, true, {"x": np.ones((1, 2, 60), np.float32)})
    with pytest.raises(Spoilt, match=r"expected \[1, 2, 60\]; it has no canary by which that could be looked into$"):
        checked(proof, true, batch(5))


def random(inputs: Arrays) -> Arrays:
    return {"y": np.random.rand(*inputs["x"].shape).astype(np.float32)}


def test_of_a_model_that_does_not_repeat_itself_the_form_is_known() -> None:
    model: Any = Model(random, SIX)
    # Its only input was of the declared shape: nothing has shown that others are not.
    known = canary.of(({"x": (1, 2, 60)},), [random({"x": np.ones((1, 2, 60))})])._replace(digest="")
    proof = Proof(model, known)
    assert not proof.refuted()
    assert checked(proof, model, batch(5))["y"].shape == (5, 3)
    model.answer = two_rows
    assert proof.refuted()
    model.answer = fails
    assert proof.refuted()


def four_rows(_: Arrays) -> Arrays:
    return {"y": np.ones((4, 3), np.float32)}


def one_row(_: Arrays) -> Arrays:
    return {"y": np.ones((1, 3), np.float32)}


@pytest.mark.parametrize(("answer", "sizes"), [(four_rows, (1, 2)), (one_row, (1,))])
def test_an_output_that_did_not_follow_the_batch_need_not(answer: Answer, sizes: Tuple[int, ...]) -> None:
    model = Model(answer)
    proof = proved(model, sizes)
    checked(proof, model, batch(5))
    assert model.calls == 1


def test_where_inputs_are_of_several_sizes_there_is_no_batch() -> None:
    inputs = (TensorSignature("x", "FP32", (-1, 3)), TensorSignature("z", "FP32", (-1, 3)))
    model = Model(twice, BATCHED._replace(inputs=inputs))
    proof = proved(model)
    for x, z in ((5, 3), (3, 5)):
        assert checked(proof, model, {"x": batch(x)["x"], "z": batch(z)["x"]})["y"].shape == (x, 3)
    assert model.calls == 2


def test_the_same_bytes_in_another_shape_are_not_the_same_again() -> None:
    model = Model(twice)
    proof = proved(model)
    with pytest.raises(Spoilt):
        proof.checked(batch(2), {"y": np.full((3, 2), 2, np.float32)})
