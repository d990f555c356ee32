"""Inputs with a known answer: a worker that does not give the holder's answer never serves.

What is run is a list of cases, each a shape for every input; the values are made from name and shape alone, so every
process makes the same, or come from a sample that every process has. How the holder finds the cases: `search`.
"""

from __future__ import annotations

import hashlib
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from weightd_common.rowtest.rows import generate_values
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.worker_common import SelfTestCase, SelfTestCases
from weightd_worker.engines.engine import Arrays, Engine, ModelSignature


class SelfTestRun(NamedTuple):
    """What it was run on, the digest of the answers, their shapes for each case, and the answers themselves.

    No cases: there is none. No digest: the model does not repeat its own answer. No answers: they are kept elsewhere,
    or not needed. `note` says why, to an operator.
    """

    cases: SelfTestCases
    digest: str
    output_shapes: Sequence[Dict[str, Tuple[int, ...]]] = ()
    answers: Sequence[Arrays] = ()
    note: str = ""


def run(engine: Engine, cases: SelfTestCases, sample: Optional[Arrays] = None) -> SelfTestRun:
    """Return the self-test with the answers that `engine` gives now; `sample` is what it asks, if it is not made up.

    Raises:
        InvalidArgument: the engine refuses the inputs.
        ModelCorrupted: the predict failed.
    """
    return from_answers(cases, [engine.predict(sample or make_inputs(engine.signature, case)) for case in cases])


def run_twice(engine: Engine, cases: SelfTestCases, sample: Optional[Arrays] = None) -> Tuple[SelfTestRun, SelfTestRun]:
    """Return two runs, each case of the second one right after that of the first; errors as in `run`."""
    case_inputs = [sample or make_inputs(engine.signature, case) for case in cases]
    pairs = [(engine.predict(each), engine.predict(each)) for each in case_inputs]
    return from_answers(cases, [one for one, _ in pairs]), from_answers(cases, [other for _, other in pairs])


def from_answers(cases: SelfTestCases, answers: Sequence[Arrays]) -> SelfTestRun:
    """Return the self-test with these answers."""
    state = hashlib.sha256()
    for outputs in answers:
        for name, array in outputs.items():
            state.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            state.update(array.tobytes())
    shapes = [{name: tuple(array.shape) for name, array in each.items()} for each in answers]
    return SelfTestRun(cases, state.hexdigest() if cases else "", shapes, answers)


def is_conclusive(selftest: SelfTestRun) -> bool:
    """Return whether the answers could be other ones: without a finite number in them, any weights give the same."""
    return any(np.isfinite(array).any() for outputs in selftest.answers for array in outputs.values())


def difference(one: SelfTestRun, other: SelfTestRun) -> float:
    """Return how far two runs are apart: the largest difference as a share of the largest value of that output.

    0 if they are equal bit for bit; infinite where they differ in their form, in whole numbers, or in what is finite.
    """
    if one.digest == other.digest:
        return 0.0
    if len(one.answers) != len(other.answers):
        return float("inf")
    return max(map(answer_difference, one.answers, other.answers))


def with_observed_outputs(signature: ModelSignature, selftest: SelfTestRun) -> ModelSignature:
    """Return `signature` with the shapes of outputs that the engine did not know, as the self-test showed them.

    Where an input may have any rank, the self-test shows only one of them: then so may an output.
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
        # Of a free dimension an engine may tell how large it can be.
        dims = tuple(dim if {dim}.issuperset(each) else -1 for dim, *each in zip(output.shape, *seen))
        return TensorSignature(output.name, output.datatype, dims)
    dims = tuple(each[0] if len(set(each)) == 1 and len(seen) > 1 else -1 for each in zip(*seen))
    return TensorSignature(output.name, output.datatype, dims)


def make_inputs(signature: ModelSignature, case: SelfTestCase) -> Arrays:
    """Return the inputs of one case."""
    return {each.name: generate_values(each, case[each.name]) for each in signature.inputs}


def answer_difference(one: Arrays, other: Arrays) -> float:
    """Return how far two answers are apart, as `difference` does."""
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
