"""The input with a known answer."""

from __future__ import annotations

from typing import Any, Callable, ClassVar, Dict, List, Optional, Sequence, Tuple

import numpy as np
import pytest

from weightd.protocol.datatypes import ITEM_BYTES
from weightd.protocol.errors import InvalidArgument
from weightd.protocol.messages import TensorSignature
from weightd.protocol.tensors import NUMPY_DTYPE
from weightd.protocol.worker_messages import DeviceMemory, Traits
from weightd.worker import canary
from weightd.worker.engines.base import Arrays, Engine, Shared, Signature, Spoilt

Answer = Callable[[Arrays], Arrays]
Shape = Optional[Tuple[int, ...]]


def tensor(name: str, *shape: int, datatype: str = "FP32") -> TensorSignature:
    return TensorSignature(name, datatype, shape)


EVERYTHING = Signature(
    tuple(tensor(datatype.lower(), -1, 2, datatype=datatype) for datatype in sorted(ITEM_BYTES)),
    (tensor("y", -1),),
)


class Fake(Engine):
    """A model that is a function of its inputs."""

    name: ClassVar[str] = "fake"
    traits = Traits(pids_fixed_at_build=False, holder_must_outlive=False, attach_rewrites_weights=False)

    def __init__(self, answer: Answer, signature: Signature) -> None:
        self.answer = answer
        self._signature = signature
        self.asked: List[Arrays] = []
        self.builds = 0

    @property
    def signature(self) -> Signature:
        return self._signature

    def predict(self, inputs: Arrays) -> Arrays:
        self.asked.append(inputs)
        return self.answer(inputs)

    def rebuild(self) -> None:
        self.builds += 1

    def versions(self) -> Dict[str, str]:
        raise NotImplementedError

    def current_pid(self) -> str:
        raise NotImplementedError

    def allow(self, pids: Sequence[str]) -> None:
        raise NotImplementedError

    def update_weights(self, weights: Arrays) -> None:
        raise NotImplementedError

    def memory(self) -> Optional[DeviceMemory]:
        raise NotImplementedError

    def build(self, model: str, *, pids: Sequence[str] = (), handle: str = "") -> None:
        raise NotImplementedError

    def export(self, store: str) -> Shared:
        raise NotImplementedError

    def attach(self, handle: str) -> Shared:
        raise NotImplementedError

    def settle(self, handle: str) -> None:
        raise NotImplementedError


def everything(inputs: Arrays) -> Arrays:
    return {"y": np.concatenate([np.frombuffer(array.tobytes(), np.uint8) for array in inputs.values()])}


def constantly(answer: Any) -> Answer:
    return lambda _: {"y": answer}


def row_sums(inputs: Arrays) -> Arrays:
    return {"y": inputs["x"].sum(axis=1)}


def picky(*sizes: int, error: Exception) -> Answer:
    """A model that only runs on these sizes of x's first dimension."""

    def answer(inputs: Arrays) -> Arrays:
        if len(inputs["x"]) not in sizes:
            raise error
        return {"y": inputs["x"]}

    return answer


FREE = Signature((tensor("x", -1, 4),), (tensor("y", -1),))
FIXED = Signature((tensor("x", 2, 4),), (tensor("y", 2, 4),))


def test_every_process_and_every_numpy_makes_the_same_input() -> None:
    """The digest was made by numpy 1.21 on Python 3.7 and by numpy 2.4 on Python 3.11."""
    answer = canary.run(Fake(everything, EVERYTHING), (1, 2))
    assert answer.digest == "e1d2a8995705ae30764a120cb4bb6c3116fba8d3cf0c813539750965122f73ff"
    assert answer.shapes == [{"y": (2 * sum(ITEM_BYTES.values()),)}, {"y": (4 * sum(ITEM_BYTES.values()),)}]


def test_inputs_are_what_the_signature_says() -> None:
    engine = Fake(everything, EVERYTHING)
    canary.run(engine, (1, 3))
    for size, inputs in zip((1, 3), engine.asked):
        for each in EVERYTHING.inputs:
            array = inputs[each.name]
            assert array.dtype == NUMPY_DTYPE[each.datatype]
            assert array.shape == (size, 2)
            assert array.flags.c_contiguous
            if array.dtype.kind == "f":
                assert abs(array).max() <= 1
                assert abs(array).min() > 0
            else:
                assert set(array.ravel().tolist()) <= {0, 1}


def test_two_inputs_are_never_equal_and_so_a_swap_shows() -> None:
    signature = Signature((tensor("a", -1, 4), tensor("b", -1, 4)), (tensor("y", -1, 4),))
    right = canary.run(Fake(lambda inputs: {"y": inputs["a"] - inputs["b"]}, signature), (1,))
    swapped = canary.run(Fake(lambda inputs: {"y": inputs["b"] - inputs["a"]}, signature), (1,))
    assert right.digest != swapped.digest


def test_a_scalar_input() -> None:
    engine = Fake(lambda inputs: {"y": inputs["x"]}, Signature((tensor("x"),), (tensor("y"),)))
    assert canary.find(engine, engine.rebuild).shapes == [{"y": ()}]
    assert engine.asked[0]["x"].shape == ()


def test_no_input_at_all() -> None:
    engine = Fake(lambda _: {"y": np.zeros(2)}, Signature((), (tensor("y", 2),)))
    assert canary.find(engine, engine.rebuild).sizes == (1,)


def test_the_digest_tells_every_bit_and_the_form() -> None:
    zeros = np.zeros(3, np.float32)
    right = canary.run(Fake(lambda _: {"y": zeros}, FREE), (1,))
    assert right.digest == canary.run(Fake(lambda _: {"y": zeros.copy()}, FREE), (1,)).digest
    others: List[Any] = [zeros + 1e-30, -zeros, np.zeros(3), zeros.reshape(3, 1), zeros[:2], zeros.view(np.int32)]
    for other in others:
        assert right.digest != canary.run(Fake(constantly(other), FREE), (1,)).digest


def test_the_digest_tells_the_name_but_not_how_an_output_lies_in_memory() -> None:
    array = np.arange(6).reshape(2, 3)
    right = canary.run(Fake(lambda _: {"y": array}, FREE), (1,))
    assert right.digest == canary.run(Fake(lambda _: {"y": np.asfortranarray(array)}, FREE), (1,)).digest
    assert right.digest != canary.run(Fake(lambda _: {"z": array}, FREE), (1,)).digest


def test_free_dimensions_are_one_and_then_two() -> None:
    engine = Fake(row_sums, FREE)
    known = canary.find(engine, engine.rebuild)
    assert (known.sizes, known.note, engine.builds) == ((1, 2), "", 0)
    assert known.digest == canary.run(engine, known.sizes).digest
    assert [len(inputs["x"]) for inputs in engine.asked[:4]] == [1, 2, 1, 2]


def test_a_fixed_model_is_asked_once_and_once_more() -> None:
    engine = Fake(row_sums, FIXED)
    assert canary.find(engine, engine.rebuild).sizes == (1,)
    assert [len(inputs["x"]) for inputs in engine.asked] == [2, 2]


@pytest.mark.parametrize(("error", "builds"), [(Spoilt("failed"), 1), (InvalidArgument("refused"), 0)])
def test_a_model_that_runs_on_one_alone(error: Exception, builds: int) -> None:
    engine = Fake(picky(1, error=error), FREE)
    known = canary.find(engine, engine.rebuild)
    assert (known.sizes, known.note) == ((1,), "")
    assert engine.builds == builds


@pytest.mark.parametrize(("error", "builds"), [(Spoilt("failed"), 2), (InvalidArgument("refused"), 0)])
def test_a_model_that_runs_on_neither_has_no_canary_and_is_whole(error: Exception, builds: int) -> None:
    engine = Fake(picky(3, error=error), FREE)
    known = canary.find(engine, engine.rebuild)
    assert known == canary.Canary((), "", [])
    assert known.note == "no canary: the model does not run on an input made from its signature"
    assert engine.builds == builds


def test_a_fixed_model_that_refuses_its_input_is_built_again_once() -> None:
    engine = Fake(picky(3, error=Spoilt("failed")), FIXED)
    assert canary.find(engine, engine.rebuild).sizes == ()
    assert engine.builds == 1


class Once(Fake):
    """Only a new process gives back what its build took."""

    can_rebuild = False


def test_an_engine_that_cannot_be_rebuilt_is_asked_for_one_alone_and_left_as_it_is() -> None:
    free = Once(row_sums, FREE)
    assert canary.find(free, free.rebuild).sizes == (1,)
    for signature in (FREE, FIXED):
        spoilt = Once(picky(error=Spoilt("died")), signature)
        assert canary.find(spoilt, spoilt.rebuild) == canary.Canary((), "", [])
        assert (len(spoilt.asked), spoilt.builds) == (1, 0)


def test_a_model_that_is_random_has_shapes_but_no_digest() -> None:
    random = np.random.RandomState(0)
    engine = Fake(lambda inputs: {"y": random.rand(len(inputs["x"]), 7)}, FREE)
    known = canary.find(engine, engine.rebuild)
    assert (known.sizes, known.digest) == ((1, 2), "")
    assert known.note == "no canary: the model gives different answers to the same input"
    assert canary.observed(FREE, known).outputs == (tensor("y", -1, 7),)


def test_an_error_that_is_no_answer_is_not_swallowed() -> None:
    engine = Fake(picky(3, error=RuntimeError("bug")), FREE)
    with pytest.raises(RuntimeError, match="bug"):
        canary.find(engine, engine.rebuild)


def test_without_sizes_nothing_is_run() -> None:
    engine = Fake(row_sums, FREE)
    assert canary.run(engine, ()) == canary.Canary((), "", [])
    assert not engine.asked


def of_rank(rank: int) -> Answer:
    def answer(inputs: Arrays) -> Arrays:
        if inputs["x"].ndim != rank:
            raise InvalidArgument("rank")
        return {"y": inputs["x"]}

    return answer


@pytest.mark.parametrize("rank", [0, 1, 2, 3, 4])
def test_of_an_input_that_may_have_any_rank_one_is_found_that_works(rank: int) -> None:
    engine = Fake(
        of_rank(rank), Signature((TensorSignature("x", "FP32", None),), (TensorSignature("y", "FP32", None),))
    )
    known = canary.find(engine, engine.rebuild)
    assert (known.rank, known.note) == (rank, "")
    assert [each["y"] for each in known.shapes] == [(size,) * rank for size in known.sizes]
    assert known == canary.run(engine, known.sizes, known.rank)
    # That is one rank of many.
    assert canary.observed(engine.signature, known) == engine.signature


@pytest.mark.parametrize(
    ("known", "shapes", "expected"),
    [
        # What the engine says of the rank is believed ...
        ((-1, 4), [(1, 4), (2, 4)], (-1, 4)),
        ((2, 4), [(2, 4)], (2, 4)),
        ((), [()], ()),
        # ... but not that a dimension is fixed which is seen to be another, ...
        ((8, 4), [(1, 4)], (-1, 4)),
        ((2, 4), [(1, 4), (2, 4)], (-1, 4)),
        ((), [(1, 4), (2, 4)], (-1, 4)),
        # Of some they know nothing.
        (None, [(1, 4), (2, 4)], (-1, 4)),
        (None, [(1,), (2,)], (-1,)),
        (None, [(1, 3, 8, 8), (2, 3, 8, 8)], (-1, 3, 8, 8)),
        (None, [(), ()], ()),
        # One observation cannot tell what is free.
        (None, [(1, 4)], (-1, -1)),
        # A rank that changes cannot be written down.
        (None, [(1, 4), (2, 4, 1)], None),
        (None, [], None),
    ],
)
def test_output_shapes_that_the_engine_does_not_know_are_seen(
    known: Shape, shapes: List[Tuple[int, ...]], expected: Shape
) -> None:
    signature = Signature((), (TensorSignature("y", "BOOL", known),))
    seen = canary.Canary((1, 2), "", [{"y": shape} for shape in shapes])
    assert canary.observed(signature, seen).outputs == (TensorSignature("y", "BOOL", expected),)
