from __future__ import annotations

import itertools
from typing import Any, Tuple

import numpy as np
import pytest

from testkit import cases
from testkit.fakeengine import Answer, FakeEngine
from weightd_protocol.messages.inference import TensorSignature
from weightd_worker.engines.engine import Arrays, ModelCorrupted, ModelSignature
from weightd_worker.selftest import selftest
from weightd_worker.selftest.selftest import AnswerVerifier

BATCHED = ModelSignature((TensorSignature("x", "FP32", (-1, 3)),), (TensorSignature("y", "FP32", (-1, 3)),))


def verifier_of(model: FakeEngine, sizes: Tuple[int, ...] = (1, 2), **more: Any) -> AnswerVerifier:
    """Return the verifier of a model after its self-test."""
    proof = AnswerVerifier(model, selftest.run(model, cases.of(model.signature, *sizes)), **more)
    model.received_inputs.clear()
    return proof


def batch(size: int) -> Arrays:
    return {"x": np.ones((size, 3), np.float32)}


def shape_of(proof: AnswerVerifier, model: FakeEngine, inputs: Arrays) -> Tuple[int, ...]:
    """Return the shape of an answer that the verifier accepts."""
    shape: Tuple[int, ...] = proof.verify(inputs, model.predict(inputs))["y"].shape
    return shape


def twice(inputs: Arrays) -> Arrays:
    return {"y": inputs["x"] * 2}


def thrice(inputs: Arrays) -> Arrays:
    return {"y": inputs["x"] * 3}


def rows(count: int) -> Answer:
    """Return a model whose answer does not depend on the batch size."""
    return lambda _: {"y": np.ones((count, 3), np.float32)}


def fails(_: Arrays) -> Arrays:
    raise ModelCorrupted("predict failed")


class Noise:
    """A model whose answers differ slightly each time; for large inputs it answers only their first row."""

    def __init__(self) -> None:
        self.large = 1000
        # Above 1, neighbouring float32 numbers are 1.2e-7 apart.
        self._factors = (np.float32(1 + 2e-7 * number) for number in itertools.count())

    def __call__(self, inputs: Arrays) -> Arrays:
        y = inputs["x"] * next(self._factors)
        return {"y": y if len(y) < self.large else y[:1]}


def random(inputs: Arrays) -> Arrays:
    return {"y": np.random.rand(*inputs["x"].shape).astype(np.float32)}


def test_accepts_matching_answer_without_predict() -> None:
    model = FakeEngine(twice, BATCHED)
    proof = verifier_of(model)
    for size in (1, 2, 7):
        assert shape_of(proof, model, batch(size)) == (size, 3)
    assert len(model.received_inputs) == 3


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
def test_rejects_contradicting_answer_that_does_not_repeat(outputs: Arrays, problem: str) -> None:
    proof = verifier_of(FakeEngine(twice, BATCHED))
    with pytest.raises(ModelCorrupted, match=rf"^the answer contradicts the model's signature: {problem}$"):
        proof.verify(batch(5), outputs)


def test_same_bytes_in_another_shape_do_not_repeat() -> None:
    with pytest.raises(ModelCorrupted):
        verifier_of(FakeEngine(twice, BATCHED)).verify(batch(2), {"y": np.full((3, 2), 2, np.float32)})


def test_rejects_answer_if_selftest_fails() -> None:
    model = FakeEngine(twice, BATCHED)
    proof = verifier_of(model)
    model.answer = rows(2)
    with pytest.raises(ModelCorrupted):
        shape_of(proof, model, batch(5))


def test_accepts_contradicting_answer_that_repeats() -> None:
    model = FakeEngine(lambda inputs: {"y": np.unique(inputs["x"], axis=0)}, BATCHED)
    proof = verifier_of(model)
    assert shape_of(proof, model, batch(5)) == (1, 3)
    # The verifier repeats the predict once and not for each request.
    model.received_inputs.clear()
    assert shape_of(proof, model, batch(6)) == (1, 3)
    assert len(model.received_inputs) == 1


@pytest.mark.parametrize("shape", [(-1, -1), (3, -1), None])
def test_no_batch_check_if_other_dimensions_are_free(shape: Any) -> None:
    def answer(inputs: Arrays) -> Arrays:
        return {"y": inputs["x"].sum() * np.ones((*inputs["x"].shape[-1:], 3), np.float32)}

    model = FakeEngine(answer, BATCHED._replace(inputs=(TensorSignature("x", "FP32", shape),)))
    assert shape_of(verifier_of(model), model, {"x": np.ones((3, 9), np.float32)}) == (9, 3)
    assert len(model.received_inputs) == 1


def test_no_batch_check_if_input_sizes_differ() -> None:
    inputs = (TensorSignature("x", "FP32", (-1, 3)), TensorSignature("z", "FP32", (-1, 3)))
    model = FakeEngine(twice, BATCHED._replace(inputs=inputs))
    proof = verifier_of(model)
    for x, z in ((5, 3), (3, 5)):
        assert shape_of(proof, model, {"x": batch(x)["x"], "z": batch(z)["x"]}) == (x, 3)
    assert len(model.received_inputs) == 2


@pytest.mark.parametrize(("count", "sizes"), [(4, (1, 2)), (1, (1,))])
def test_no_batch_check_for_independent_output(count: int, sizes: Tuple[int, ...]) -> None:
    model = FakeEngine(rows(count), BATCHED)
    shape_of(verifier_of(model, sizes), model, batch(5))
    assert len(model.received_inputs) == 1


@pytest.mark.parametrize("now", [thrice, fails])
def test_selftest_reveals_changed_model(now: Answer) -> None:
    model = FakeEngine(twice, BATCHED)
    proof = verifier_of(model)
    before = proof.current_digest()
    assert not proof.is_corrupted()
    model.answer = now
    assert proof.is_corrupted()
    if now is not fails:
        assert proof.current_digest() != before


def test_accepts_answers_within_tolerance() -> None:
    noise = Noise()
    model = FakeEngine(noise, BATCHED)
    known = selftest.run(model, cases.of(BATCHED, 1, 2))
    near, exact = AnswerVerifier(model, known, tolerance=1e-5), AnswerVerifier(model, known)
    assert (near.is_corrupted(), near.current_digest(), exact.is_corrupted()) == (False, known.digest, True)
    # An answer that contradicts the signature is checked with the same tolerance.
    noise.large = 3
    assert shape_of(near, model, batch(5)) == (1, 3)


# --- without a self-test -------------------------------------------------------------------------------------------

SIX = BATCHED._replace(outputs=(TensorSignature("y", "FP32", (1, 2, 60)),))
OF_SIX = {"x": np.ones((1, 2, 60), np.float32)}


class IncorruptibleEngine(FakeEngine):
    may_corrupt = False


def test_without_selftest_unknown_shapes_pass() -> None:
    assert not verifier_of(FakeEngine(fails, BATCHED), sizes=()).is_corrupted()
    unknown = FakeEngine(twice, BATCHED._replace(outputs=(TensorSignature("y", "FP32", None),)))
    assert shape_of(verifier_of(unknown, sizes=()), unknown, batch(5)) == (5, 3)


def test_accepts_every_answer_of_incorruptible_model() -> None:
    """The output was declared inexactly, as by an export with a batch of 1."""
    model = IncorruptibleEngine(twice, SIX)
    proof = verifier_of(model, sizes=())
    shape_of(proof, model, OF_SIX)
    for size in (5, 1, 5):
        assert shape_of(proof, model, batch(size)) == (size, 3)
    assert len(model.received_inputs) == 4


def test_first_answer_decides_whether_signature_holds() -> None:
    untrue, true = FakeEngine(twice, SIX), FakeEngine(twice, SIX)
    proof = verifier_of(untrue, sizes=())
    for size in (5, 1):
        assert shape_of(proof, untrue, batch(size)) == (size, 3)
    proof = verifier_of(true, sizes=())
    shape_of(proof, true, OF_SIX)
    with pytest.raises(ModelCorrupted, match=r"expected \[1, 2, 60\]; without a self-test, the answer is unproven$"):
        shape_of(proof, true, batch(5))


def test_checks_only_shape_of_random_model() -> None:
    model = FakeEngine(random, SIX)
    # The only input had the declared shape; no answer shows whether others differ.
    proof = AnswerVerifier(model, selftest.from_answers(({"x": (1, 2, 60)},), [random(OF_SIX)])._replace(digest=""))
    assert not proof.is_corrupted()
    assert shape_of(proof, model, batch(5)) == (5, 3)
    for broken in (rows(2), fails):
        model.answer = broken
        assert proof.is_corrupted()
