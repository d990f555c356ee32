"""Runs of a self-test, and checks whether a worker still answers correctly.

A corrupted model may answer without an error with data of an earlier request. A failed predict, an output whose size
does not fit the request, or a wrong answer to the self-test shows that a model may be corrupted. So `AnswerVerifier`
checks each answer of a worker against the model's signature, and runs the self-test if they contradict each other.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from weightd_common.rowtest.rows import generate_values
from weightd_protocol.datatypes import NUMPY_DTYPE
from weightd_protocol.errors import RequestError
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.worker_common import SelfTestCase, SelfTestCases
from weightd_worker.engines.engine import Arrays, Engine, ModelCorrupted, ModelSignature


class SelfTestRun(NamedTuple):
    """One run of a self-test.

    Attributes:
        cases: the shapes of the inputs in each predict of the self-test; empty if the model has no self-test.
        digest: the digest of the answers; "" without a self-test, or if the model does not repeat its answers.
        output_shapes: the shapes of the outputs for each case.
        answers: the outputs for each case; empty if they are stored elsewhere or not needed.
        note: why the model has no self-test or no digest, for the operator; otherwise "".
    """

    cases: SelfTestCases
    digest: str
    output_shapes: Sequence[Dict[str, Tuple[int, ...]]] = ()
    answers: Sequence[Arrays] = ()
    note: str = ""


def run(engine: Engine, cases: SelfTestCases, sample: Optional[Arrays] = None) -> SelfTestRun:
    """Run the self-test on the engine and return the run.

    Args:
        engine: an engine that has built the model.
        cases: the shapes of the inputs for each predict.
        sample: the inputs of the self-test; None to generate inputs.

    Raises:
        InvalidArgument: the engine rejects the inputs.
        ModelCorrupted: the predict failed.
    """
    return from_answers(cases, [engine.predict(sample or make_inputs(engine.signature, case)) for case in cases])


def run_twice(
    engine: Engine, cases: SelfTestCases, sample: Optional[Arrays] = None, known_digest: str = ""
) -> Tuple[SelfTestRun, SelfTestRun]:
    """Run each case of the self-test twice in a row and return both runs. Arguments and errors are as in `run`.

    If the answers have the digest `known_digest`, which another process has computed, the second run would show nothing
    new: each case is run once, and both results are this run.
    """
    if known_digest:
        only = run(engine, cases, sample)
        if only.digest == known_digest:
            return only, only
    case_inputs = [sample or make_inputs(engine.signature, case) for case in cases]
    pairs = [(engine.predict(each), engine.predict(each)) for each in case_inputs]
    return from_answers(cases, [one for one, _ in pairs]), from_answers(cases, [other for _, other in pairs])


def from_answers(cases: SelfTestCases, answers: Sequence[Arrays]) -> SelfTestRun:
    """Return the run of a self-test in which the model has given these answers to the cases."""
    state = hashlib.sha256()
    for outputs in answers:
        for name, array in outputs.items():
            state.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            state.update(array.tobytes())
    shapes = [{name: tuple(array.shape) for name, array in each.items()} for each in answers]
    return SelfTestRun(cases, state.hexdigest() if cases else "", shapes, answers)


def is_conclusive(selftest: SelfTestRun) -> bool:
    """Return whether the answers contain a finite number.

    If all numbers are infinite or NaN, wrong weights might give the same answers.
    """
    return any(np.isfinite(array).any() for outputs in selftest.answers for array in outputs.values())


def difference(one: SelfTestRun, other: SelfTestRun) -> float:
    """Return the difference between the answers of two runs of a self-test.

    It is the largest difference between two numbers, divided by the largest absolute value in the same output. It is 0
    if the answers are equal bit for bit, and infinite if shapes, datatypes, integers or non-finite values differ.
    """
    if one.digest == other.digest:
        return 0.0
    if len(one.answers) != len(other.answers):
        return float("inf")
    return max(map(answer_difference, one.answers, other.answers))


def with_observed_outputs(signature: ModelSignature, selftest: SelfTestRun) -> ModelSignature:
    """Return the signature, but with output shapes from the self-test's answers where the engine reports none.

    If an input may have any rank, the signature is returned unchanged: an output may then have any rank as well, but
    the self-test shows only one of its ranks.
    """
    if any(each.shape is None for each in signature.inputs):
        return signature
    return signature._replace(
        outputs=tuple(_observed_output(each, selftest.output_shapes) for each in signature.outputs)
    )


def _observed_output(output: TensorSignature, output_shapes: Sequence[Dict[str, Tuple[int, ...]]]) -> TensorSignature:
    seen = [each[output.name] for each in output_shapes if output.name in each]
    if len({len(shape) for shape in seen}) != 1:
        return output
    if output.shape is not None and len(seen[0]) == len(output.shape):
        # A dimension is free if its size in a run of the self-test differs from the size that the engine reports: for a
        # free dimension, an engine may report the largest size.
        dims = tuple(dim if {dim}.issuperset(each) else -1 for dim, *each in zip(output.shape, *seen))
        return TensorSignature(output.name, output.datatype, dims)
    dims = tuple(each[0] if len(set(each)) == 1 and len(seen) > 1 else -1 for each in zip(*seen))
    return TensorSignature(output.name, output.datatype, dims)


def make_inputs(signature: ModelSignature, case: SelfTestCase) -> Arrays:
    """Return generated inputs with the shapes in `case`."""
    return {each.name: generate_values(each, case[each.name]) for each in signature.inputs}


def answer_difference(one: Arrays, other: Arrays) -> float:
    """Return the difference between two answers, computed as in `difference`."""
    if one.keys() != other.keys():
        return float("inf")
    return max((_array_difference(one[name], other[name]) for name in one), default=0.0)


def _array_difference(one: Any, other: Any) -> float:
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if one.tobytes() == other.tobytes():
        return 0.0
    if one.dtype.kind != "f":
        return float("inf")
    a, b = one.astype(np.float64), other.astype(np.float64)
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    largest = float(abs(a[finite]).max(initial=0.0))
    max_difference = float(abs(a[finite] - b[finite]).max(initial=0.0))
    if max_difference == 0:
        return 0.0  # 0 and -0
    return max_difference / largest if largest else float("inf")


_log = logging.getLogger("weightd.worker")


class AnswerVerifier:
    """Checks a worker's answers against the model's signature and self-test.

    Args:
        engine: the worker's engine, which has built the model and attached to the shared weights.
        reference: the run of the self-test with the known answers. Its digest is "" if the model does not repeat its
            answers.
        sample: the self-test's inputs; None if they are generated.
        tolerance: the largest allowed difference from the known answers (`difference`).
    """

    def __init__(
        self, engine: Engine, reference: SelfTestRun, sample: Optional[Arrays] = None, tolerance: float = 0.0
    ) -> None:
        self._engine = engine
        self._reference = reference if tolerance else reference._replace(answers=())
        self._sample = sample
        self._tolerance = tolerance
        signature = with_observed_outputs(engine.signature, reference)
        self._outputs: Dict[str, TensorSignature] = {each.name: each for each in signature.outputs}
        self._is_only_batch_free = all(
            each.shape is not None and all(dim >= 0 for dim in each.shape[1:]) for each in signature.inputs
        )
        self._inputs_with_batch = {each.name for each in signature.inputs if (each.shape or ())[:1] == (-1,)}
        self._reference_shapes = reference.output_shapes
        self._outputs_with_batch = {name for name in self._outputs if self._has_batch_dim(name)}
        # Whether no predict has run yet that could have corrupted the model. Without a self-test, the first request is
        # the first predict.
        self._is_untouched = not reference.cases

    def current_digest(self) -> str:
        """Run the self-test. Return the known digest if the answers are within the tolerance, else their own digest.

        The result is "" if the model has no self-test.

        Raises:
            InvalidArgument: the engine rejects the self-test.
            ModelCorrupted: the predict failed.
        """
        current = self._run_selftest()
        return self._reference.digest if self._is_near_reference(current) else current.digest

    def is_corrupted(self) -> bool:
        """Run the self-test and return whether it shows a corrupted model; False without a self-test."""
        if not self._reference.cases:
            return False
        try:
            current = self._run_selftest()
        except RequestError:
            return True
        # If the model does not repeat its answers, compare only the shapes of the outputs.
        return (
            not self._is_near_reference(current)
            if self._reference.digest
            else current.output_shapes != self._reference_shapes
        )

    def verify(self, inputs: Arrays, outputs: Arrays) -> Arrays:
        """Check the outputs of a predict, and return the outputs to send to the client.

        The result is also valid for later requests with inputs and outputs of the same layouts.

        Outputs that contradict the model's signature may still be correct, because the signature may be wrong:

        - If the model has a self-test, they are accepted if the model passes the self-test and then gives the same
          answer to these inputs again.
        - If it has no self-test, they are accepted if the engine cannot corrupt its model, or in the first predict.

        After the signature was found to be wrong, outputs are no longer checked against it.

        Raises:
            ModelCorrupted: the outputs contradict the signature, and the model may be corrupted.
        """
        if self._engine.was_rebuilt_larger:
            outputs = self._verify_after_rebuild(inputs, outputs)
        contradiction = self._find_contradiction(inputs, outputs)
        is_untouched, self._is_untouched = self._is_untouched, False
        if not contradiction:
            return outputs
        if self._reference.cases:
            is_legitimate = not self.is_corrupted() and self._is_same_answer(self._engine.predict(inputs), outputs)
        else:
            is_legitimate = is_untouched or not self._engine.may_corrupt
        if not is_legitimate:
            unproven = "" if self._reference.cases else "; without a self-test, the answer is unproven"
            raise ModelCorrupted(f"the answer contradicts the model's signature: {contradiction}{unproven}")
        _log.warning("the model's signature is wrong; answers are no longer checked against it: %s", contradiction)
        self._outputs.clear()
        return outputs

    def _verify_after_rebuild(self, inputs: Arrays, outputs: Arrays) -> Arrays:
        """Run the self-test after the engine has built the model again for larger shapes. Return correct outputs.

        If the self-test fails, answers depend on the shapes of earlier predicts. The engine then builds the model again
        at each change of shape from now on, and computes the outputs again.

        Raises:
            ModelCorrupted: the self-test fails again after that.
        """
        self._engine.was_rebuilt_larger = False
        if not self.is_corrupted():
            return outputs
        _log.warning("answers depend on earlier shapes; rebuilding the model at each change of shape")
        self._engine.should_rebuild_per_shape = True
        if self.is_corrupted():
            raise ModelCorrupted("the model no longer gives the known answers after it was rebuilt for a larger shape")
        return self._engine.predict(inputs)

    def _find_contradiction(self, inputs: Arrays, outputs: Arrays) -> str:
        if not self._outputs:
            return ""
        if outputs.keys() != self._outputs.keys():
            return f"outputs {', '.join(outputs)}, expected {', '.join(self._outputs)}"
        batch = self._batch_size({name: array.shape for name, array in inputs.items()})
        for name, array in outputs.items():
            expected = self._outputs[name]
            if array.dtype.str != NUMPY_DTYPE[expected.datatype]:
                return f"output {name} is {array.dtype}, expected {expected.datatype}"
            if not _is_shape_allowed(expected, array.shape):
                return f"output {name} has shape {list(array.shape)}, expected {expected.shape_text}"
            if batch is not None and name in self._outputs_with_batch and array.shape[0] != batch:
                return f"output {name} has shape {list(array.shape)} for a batch of {batch}"
        return ""

    def _batch_size(self, shapes: Mapping[str, Sequence[int]]) -> Optional[int]:
        """Return the batch size of inputs with these shapes.

        The result is None if the first dimensions of the inputs differ, or if a dimension other than the first is
        free.
        """
        sizes = {shapes[name][0] for name in self._inputs_with_batch}
        return sizes.pop() if self._is_only_batch_free and len(sizes) == 1 else None

    def _has_batch_dim(self, name: str) -> bool:
        """Return whether the output's first dimension was the batch size in all cases of the self-test.

        The result is False if all cases have the same batch size, because the output's dimension may then equal the
        batch size by chance.
        """
        batches = [self._batch_size(case) for case in self._reference.cases]
        return len(set(batches)) > 1 and all(
            shapes.get(name, ())[:1] == (batch,) for batch, shapes in zip(batches, self._reference_shapes)
        )

    def _run_selftest(self) -> SelfTestRun:
        return run(self._engine, self._reference.cases, self._sample)

    def _is_near_reference(self, current: SelfTestRun) -> bool:
        return self._is_near(self._reference, current)

    def _is_same_answer(self, one: Arrays, other: Arrays) -> bool:
        """Return whether two answers to the same request are equal within the tolerance.

        If the model does not repeat its answers, only the shapes are compared.
        """
        first, second = from_answers(({},), [one]), from_answers(({},), [other])
        return self._is_near(first, second) if self._reference.digest else first.output_shapes == second.output_shapes

    def _is_near(self, one: SelfTestRun, other: SelfTestRun) -> bool:
        if not self._tolerance:
            return one.digest == other.digest
        return difference(one, other) <= self._tolerance


def _is_shape_allowed(expected: TensorSignature, shape: Sequence[int]) -> bool:
    if expected.shape is None:
        return True
    return len(shape) == len(expected.shape) and all(wanted in (dim, -1) for dim, wanted in zip(shape, expected.shape))
