"""Tests of the self-test: its inputs, digests and the search for inputs on which a model runs."""

from __future__ import annotations

import tracemalloc
import zipfile
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import pytest

from testkit import cases
from testkit.fakeengine import Answer, FakeEngine
from weightd_protocol.datatypes import ITEM_BYTES, NUMPY_DTYPE
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.worker import Build
from weightd_protocol.messages.worker_common import SelfTestCase, SelfTestCases
from weightd_worker.engines.engine import Arrays, BuildError, ModelCorrupted, ModelSignature
from weightd_worker.selftest import sample, search, selftest

Shape = Optional[Tuple[int, ...]]

FAR = float("inf")


def tensor(name: str, *shape: int, datatype: str = "FP32") -> TensorSignature:
    return TensorSignature(name, datatype, shape)


EVERYTHING = ModelSignature(
    tuple(tensor(datatype.lower(), -1, 2, datatype=datatype) for datatype in sorted(ITEM_BYTES)),
    (tensor("y", -1),),
)


class UnrebuildableEngine(FakeEngine):
    """An engine that cannot rebuild: only a new process frees the memory of its build."""

    can_rebuild = False


def everything(inputs: Arrays) -> Arrays:
    return {"y": np.concatenate([np.frombuffer(array.tobytes(), np.uint8) for array in inputs.values()])}


def constantly(answer: Any) -> Answer:
    return lambda _: {"y": answer}


def row_sums(inputs: Arrays) -> Arrays:
    return {"y": inputs["x"].sum(axis=1)}


def picky(*sizes: int, error: Exception) -> Answer:
    """Return a model that only runs if the first dimension of x has one of these sizes."""

    def answer(inputs: Arrays) -> Arrays:
        if len(inputs["x"]) not in sizes:
            raise error
        return {"y": inputs["x"]}

    return answer


FREE = ModelSignature((tensor("x", -1, 4),), (tensor("y", -1),))
FIXED = ModelSignature((tensor("x", 2, 4),), (tensor("y", 2, 4),))


def test_input_is_the_same_in_every_numpy() -> None:
    """The digest is the same for numpy 1.21 on Python 3.7 and numpy 2.4 on Python 3.11."""
    answer = selftest.run(FakeEngine(everything, EVERYTHING), cases.of(EVERYTHING, 1, 2))
    assert answer.digest == "e1d2a8995705ae30764a120cb4bb6c3116fba8d3cf0c813539750965122f73ff"
    assert answer.output_shapes == [{"y": (2 * sum(ITEM_BYTES.values()),)}, {"y": (4 * sum(ITEM_BYTES.values()),)}]


def test_inputs_match_signature() -> None:
    engine = FakeEngine(everything, EVERYTHING)
    selftest.run(engine, cases.of(EVERYTHING, 1, 3))
    for size, inputs in zip((1, 3), engine.received_inputs):
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


def test_inputs_differ_to_reveal_a_swap() -> None:
    signature = ModelSignature((tensor("a", -1, 4), tensor("b", -1, 4)), (tensor("y", -1, 4),))
    values = selftest.make_inputs(signature, {"a": (1, 4), "b": (1, 4)})
    assert not np.array_equal(values["a"], values["b"])


def test_digest_ignores_only_memory_layout() -> None:
    def digest(array: Any, name: str = "y") -> str:
        return selftest.from_answers(({},), [{name: array}]).digest

    zeros = np.zeros((2, 3), np.float32)
    assert digest(zeros) == digest(np.asfortranarray(zeros))
    others: List[Any] = [zeros + 1e-30, -zeros, np.zeros((2, 3)), zeros.ravel(), zeros[:1], zeros.view(np.int32)]
    assert digest(zeros) not in [digest(zeros, "z"), *map(digest, others)]


def of_rank(rank: int) -> Answer:
    def answer(inputs: Arrays) -> Arrays:
        if inputs["x"].ndim != rank:
            raise InvalidArgument("rank")
        return {"y": inputs["x"]}

    return answer


@pytest.mark.parametrize(
    ("known", "shapes", "expected"),
    [
        # The rank that the engine reports is used ...
        ((2, 4), [(2, 4)], (2, 4)),
        # ... but a dimension counts as free if another size was observed, ...
        ((8, 4), [(1, 4)], (-1, 4)),
        ((2, 4), [(1, 4), (2, 4)], (-1, 4)),
        ((), [(1, 4), (2, 4)], (-1, 4)),
        # The engine knows no shape for some outputs.
        (None, [(1, 4), (2, 4)], (-1, 4)),
        (None, [(), ()], ()),
        # One observation cannot tell which dimensions are free.
        (None, [(1, 4)], (-1, -1)),
        # A varying rank has no shape in the signature.
        (None, [(1, 4), (2, 4, 1)], None),
        (None, [], None),
    ],
)
def test_observes_unknown_output_shapes(known: Shape, shapes: List[Tuple[int, ...]], expected: Shape) -> None:
    signature = ModelSignature((), (TensorSignature("y", "BOOL", known),))
    seen = selftest.from_answers(({}, {}), [{"y": np.zeros(shape)} for shape in shapes])
    assert selftest.with_observed_outputs(signature, seen).outputs == (TensorSignature("y", "BOOL", expected),)


# --- answers within a tolerance ---------------------------------------------------------------------------------


def answers(*arrays: Any) -> selftest.SelfTestRun:
    return selftest.from_answers(({},), [{"y": np.asarray(each)} for each in arrays])


ONES = np.ones((2, 2), np.float32)
NAN = np.array([1, np.nan], np.float32)


@pytest.mark.parametrize(
    ("one", "other", "far"),
    [
        (ONES, ONES, 0.0),
        (ONES * 4, ONES * 5, 0.25),
        (np.array([0, -4], np.float16), np.array([1, -4], np.float16), 0.25),
        (np.array([0.0], np.float32), np.array([-0.0], np.float32), 0.0),
        (np.array([0.0], np.float32), np.array([1e-30], np.float32), FAR),
        (NAN, NAN * np.float32(2), 1.0),
        (NAN, np.array([np.nan, 1], np.float32), FAR),
        (np.array([1, np.inf], np.float32), np.array([1, -np.inf], np.float32), FAR),
        (np.array([1], np.int32), np.array([2], np.int32), FAR),
        (ONES, ONES.ravel(), FAR),
        (ONES, ONES.astype(np.float64), FAR),
        (ONES[:0], ONES[:0], 0.0),
    ],
)
def test_difference_is_relative_to_largest_value(one: Any, other: Any, far: float) -> None:
    assert selftest.difference(answers(one), answers(other)) == far


def test_difference_of_other_outputs_is_infinite() -> None:
    assert selftest.difference(answers(ONES), selftest.from_answers(({},), [{"z": ONES}])) == FAR
    assert selftest.difference(answers(ONES), answers(ONES, ONES)) == FAR


# --- the search -------------------------------------------------------------------------------------------------


class SentMessages:
    """Records the messages to the daemon; it can end the process at chosen messages."""

    def __init__(self, deadly: Sequence[SelfTestCase] = ()) -> None:
        self.deadly = deadly
        self.tried: List[SelfTestCases] = []
        self.unfit: SelfTestCases = ()

    def __call__(self, trying: SelfTestCases, unfit: SelfTestCases) -> None:
        self.tried.append(trying)
        self.unfit = unfit
        if any(case in self.deadly for case in trying):
            raise SystemExit


SEARCH = Build(())


def found(
    engine: FakeEngine, order: Build = SEARCH, sent: Optional[SentMessages] = None, **more: Any
) -> selftest.SelfTestRun:
    return search.find_selftest(engine, order, lambda: engine.build("again"), sent or SentMessages(), **more)


def rebuilds(engine: FakeEngine) -> int:
    return engine.done.count("build again")


def x(*shape: int) -> SelfTestCase:
    return {"x": shape}


@pytest.mark.parametrize("inputs", [{}, {"x": ()}, {"x": (2, 4)}])
def test_runs_fixed_model_twice(inputs: SelfTestCase) -> None:
    signature = ModelSignature(tuple(tensor(name, *shape) for name, shape in inputs.items()), (tensor("y", 2),))
    engine = FakeEngine(constantly(np.zeros(2)), signature)
    assert found(engine).cases == (inputs,)
    assert [{name: array.shape for name, array in each.items()} for each in engine.received_inputs] == [inputs] * 2


def test_free_dimensions_are_one_and_two() -> None:
    engine, sent = FakeEngine(row_sums, FREE), SentMessages()
    known = found(engine, sent=sent)
    assert (known.cases, known.note, rebuilds(engine)) == (cases.of(FREE, 1, 2), "", 0)
    assert known.digest == selftest.run(engine, known.cases).digest
    assert [len(each["x"]) for each in engine.received_inputs[:4]] == [1, 1, 2, 2]
    assert sent.tried == [(x(1, 4),), (x(2, 4),), ()]


@pytest.mark.parametrize("should_search", [True, False])
def test_runs_once_if_answers_are_known(should_search: bool) -> None:
    digest = selftest.run(FakeEngine(row_sums, FREE), cases.of(FREE, 1, 2)).digest
    order = Build((), should_search, cases.of(FREE, 1, 2), selftest_digest=digest)
    engine = FakeEngine(row_sums, FREE)
    assert found(engine, order).digest == digest
    assert [len(each["x"]) for each in engine.received_inputs] == [1, 2]
    changed = FakeEngine(lambda inputs: {"y": inputs["x"].sum(axis=1) + 1}, FREE)
    assert found(changed, order).digest not in ("", digest)
    assert [len(each["x"]) for each in changed.received_inputs] == [1, 2, 1, 1, 2, 2]


@pytest.mark.parametrize(("error", "builds"), [(ModelCorrupted("failed"), 1), (InvalidArgument("refused"), 0)])
@pytest.mark.parametrize(("sizes", "expected", "failures"), [((1,), (1,), 1), ((48, 3), (48,), 7), ((3,), (), 9)])
def test_skips_failing_cases_and_rebuilds(
    sizes: Tuple[int, ...], expected: Tuple[int, ...], failures: int, error: Exception, builds: int
) -> None:
    engine, sent = FakeEngine(picky(*sizes, error=error), FREE), SentMessages()
    known = found(engine, sent=sent)
    assert known.cases == cases.of(FREE, *expected)
    assert (rebuilds(engine), len(sent.unfit)) == (builds * failures, failures)
    none = "the model runs on none of 9 inputs generated from its signature; set the key selftest to an input"
    assert known.note == ("" if expected else none)


IMAGE = ModelSignature((tensor("x", -1, 3, -1, -1), tensor("n", -1)), (tensor("y", -1),))


def test_starts_images_with_common_sizes() -> None:
    sizes = [each["x"][2:] for each in search.candidate_cases(IMAGE)]
    assert sizes == [(64, 64), (224, 224), (32, 32), (48, 48), (1, 1), (2, 2)]
    assert {(each["x"][0], each["n"]) for each in search.candidate_cases(IMAGE)} == {(1, (1,))}
    known = found(FakeEngine(lambda inputs: {"y": inputs["x"][:, 0, 0, 0]}, IMAGE))
    assert known.cases == ({"x": (1, 3, 64, 64), "n": (1,)}, {"x": (2, 3, 128, 128), "n": (2,)})


def test_generates_no_large_inputs() -> None:
    volume = ModelSignature((tensor("x", -1, 8, -1, -1, -1),), ())
    assert [each["x"][2] for each in search.candidate_cases(volume)] == [64, 32, 48, 1, 2]
    assert search.double_case(volume, x(1, 8, 64, 64, 64)) is None
    huge = ModelSignature((tensor("x", -1, 2**22),), ())
    assert list(search.candidate_cases(huge)) == [x(1, 2**22)]
    assert list(search.candidate_cases(ModelSignature((tensor("x", -1, 2**29),), ()))) == []


def test_large_input_needs_little_extra_memory() -> None:
    count = 40 * 2**20
    signature = ModelSignature((tensor("x", count, datatype="UINT8"),), ())
    tracemalloc.start()
    try:
        array = selftest.make_inputs(signature, {"x": (count,)})["x"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert array.shape == (count,)
    assert len(set(array[-7:].tolist())) > 1
    assert peak < 3 * array.nbytes


def test_next_process_skips_case_that_killed_the_last() -> None:
    """The test acts as the daemon; the model accepts sizes 32 and 64 and kills its process for any other size."""
    deadly = cases.of(FREE, 1, 2, 64)
    unfit: SelfTestCases = ()
    for _ in range(3):
        sent = SentMessages(deadly)
        with pytest.raises(SystemExit):
            found(FakeEngine(picky(32, error=ModelCorrupted("failed")), FREE), Build((), failed_cases=unfit), sent)
        unfit = (*sent.unfit, *sent.tried[-1])
    assert unfit == cases.of(FREE, 1, 2, 4, 8, 16, 64)
    sent = SentMessages(deadly)
    assert found(
        FakeEngine(picky(32, error=ModelCorrupted("failed")), FREE), Build((), failed_cases=unfit), sent
    ).cases == (x(32, 4),)
    assert sent.tried == [(x(32, 4),), ()]


def test_tries_known_case_before_a_search() -> None:
    before = cases.of(FREE, 48, 96)
    sent = SentMessages()
    assert found(FakeEngine(row_sums, FREE), Build((), selftest_cases=before), sent).cases == before
    assert sent.tried == [before, ()]
    engine = FakeEngine(picky(1, 2, error=ModelCorrupted("failed")), FREE)
    assert found(engine, Build((), selftest_cases=before)).cases == cases.of(FREE, 1, 2)
    assert rebuilds(engine) == 1


@pytest.mark.parametrize("rank", [0, 1, 2, 3, 4])
def test_finds_rank_of_input_with_unknown_rank(rank: int) -> None:
    engine = FakeEngine(
        of_rank(rank), ModelSignature((TensorSignature("x", "FP32", None),), (TensorSignature("y", "FP32", None),))
    )
    known = found(engine)
    assert ({len(case["x"]) for case in known.cases}, known.note) == ({rank}, "")
    assert [each["y"] for each in known.output_shapes] == [case["x"] for case in known.cases]
    assert known.digest == selftest.run(engine, known.cases).digest
    # The input may still have other ranks.
    assert selftest.with_observed_outputs(engine.signature, known) == engine.signature


def test_tries_only_the_gears() -> None:
    signature = ModelSignature((tensor("x", -1, 2), tensor("z", 3, -1)), (tensor("y", -1, 2),))
    refused = InvalidArgument("no")
    for runs_on, cases_found in ((4, ({"x": (4, 2), "z": (3, 7)},)), (8, ({"x": (8, 2), "z": (3, 7)},)), (1, ())):
        known = found(FakeEngine(picky(runs_on, error=refused), signature, gears=((4, 7), (8, 7))))
        assert known.cases == cases_found
    assert known.note.startswith("the model runs on none of 2 inputs")


def test_next_try_without_rebuild_needs_new_process() -> None:
    assert found(UnrebuildableEngine(row_sums, FREE)).cases == (x(1, 4),)
    with pytest.raises(BuildError, match=r"^the model does not run on the self-test input x \[1, 4\]: died$"):
        found(UnrebuildableEngine(picky(error=ModelCorrupted("died")), FREE))
    for signature, unfit in ((FREE, cases.of(FREE, 1, 2, 4, 8, 16, 32, 48, 64)), (FIXED, ())):
        last = UnrebuildableEngine(picky(error=ModelCorrupted("died")), signature)
        assert found(last, Build((), failed_cases=unfit)).cases == ()
        assert (len(last.received_inputs), rebuilds(last)) == (1, 0)


@pytest.mark.parametrize(
    ("unfit", "note"),
    [
        ((), "the key selftest is off, so weightd cannot check the answers of workers"),
        ((x(1, 4),), "the search was given up: it took too long or crashed too many processes; "),
    ],
)
def test_runs_nothing_without_search(unfit: SelfTestCases, note: str) -> None:
    engine = FakeEngine(row_sums, FREE)
    known = found(engine, Build((), search_selftest=False, failed_cases=unfit))
    assert (known.cases, known.digest, known.note[: len(note)], engine.received_inputs) == ((), "", note, [])


def test_runs_configured_case_or_reports_error() -> None:
    sent = SentMessages()
    assert found(
        FakeEngine(row_sums, FREE), Build((), search_selftest=False, selftest_cases=(x(7, 4),)), sent
    ).cases == (x(7, 4),)
    assert sent.tried == [(x(7, 4),), ()]
    wrong: Sequence[Tuple[SelfTestCase, str]] = (
        ({"z": (1, 4)}, "selftest: expected inputs x, got z"),
        (x(1, 5), r"selftest.x: expected a shape like \[-1, 4\], got \[1, 5\]"),
        (x(4), r"selftest.x: expected a shape like \[-1, 4\], got \[4\]"),
        (x(2**27, 4), "selftest: expected at most 1073741824 bytes, got 2147483648"),
        (x(3, 4), r"the model does not run on the configured self-test input, x \[3, 4\]: refused"),
    )
    for case, cause in wrong:
        with pytest.raises(BuildError, match=f"^{cause}$"):
            found(
                FakeEngine(picky(1, error=InvalidArgument("refused")), FREE),
                Build((), search_selftest=False, selftest_cases=(case,)),
            )


def test_random_model_has_digest_only_within_tolerance() -> None:
    random = np.random.RandomState(0)
    known = found(FakeEngine(lambda inputs: {"y": 1 + random.rand(len(inputs["x"]), 7)}, FREE))
    assert (known.cases, known.digest) == (cases.of(FREE, 1, 2), "")
    assert known.note.startswith("the model gives different answers to the same input, which differ by 0.")
    assert "of the largest value; selftest_tolerance is 0: raise it or make the model deterministic" in known.note
    assert selftest.with_observed_outputs(FREE, known).outputs == (tensor("y", -1, 7),)

    noisy = FakeEngine(lambda inputs: {"y": inputs["x"] * (1 + 1e-6 * random.rand())}, FREE)
    assert found(noisy, tolerance=1e-5).digest
    assert not found(noisy, tolerance=1e-9).digest


def test_passes_on_unexpected_errors() -> None:
    with pytest.raises(RuntimeError, match="bug"):
        found(FakeEngine(picky(3, error=RuntimeError("bug")), FREE))


# --- a sample ---------------------------------------------------------------------------------------------------


def test_runs_sample(tmp_path: Path) -> None:
    path = str(tmp_path / "s.npz")
    np.savez(path, x=np.asfortranarray(np.arange(12, dtype=">f4").reshape(3, 4)))
    engine = FakeEngine(row_sums, FREE)
    known = found(engine, Build((), search_selftest=False), sample=sample.load(path, FREE))
    assert (known.cases, known.answers[0]["y"].tolist()) == ((x(3, 4),), [6, 22, 38])
    assert engine.received_inputs[0]["x"].flags.c_contiguous
    assert engine.received_inputs[0]["x"].dtype == np.dtype("<f4")


@pytest.mark.parametrize("rows", [np.full((2, 4), np.nan, np.float32), np.zeros((0, 4), np.float32)])
def test_rejects_answer_without_finite_number(rows: Any) -> None:
    engine = FakeEngine(row_sums, FREE)
    known = found(engine, Build((), search_selftest=False), sample={"x": rows})
    assert (known.digest, known.note) == ("", "the model's answer has no finite number, so it cannot be compared")
    # A search tries the next case.
    known = found(FakeEngine(lambda inputs: {"y": inputs["x"][8:, 0]}, FREE))
    assert known.cases[0] == x(16, 4)
    assert known.digest


def test_rejects_invalid_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.npz"

    def cause() -> str:
        with pytest.raises(BuildError) as caught:
            sample.load(str(path), FREE)
        assert str(caught.value).startswith(f"selftest: {path}: ")
        return str(caught.value)[len(f"selftest: {path}: ") :]

    assert cause() == "No such file or directory"
    path.write_bytes(b"no zip")
    assert cause().startswith("expected an .npz of plain arrays")
    array = np.zeros((1, 4), np.float32)
    for arrays, expected in (
        ({"z": array}, "expected arrays x, got z"),
        ({"x": array.astype(np.float64)}, "x: expected float32, got float64"),
        ({"x": np.array([object()])}, "expected an .npz of plain arrays: Object arrays cannot be loaded"),
        ({f"x{i}": array for i in range(65)}, "expected at most 64 arrays, got 65"),
    ):
        everything_in_it: Dict[str, Any] = dict(arrays)
        np.savez(str(path), **everything_in_it)
        assert cause().startswith(expected)
    np.savez(str(path), x=array)
    encrypted = bytearray(path.read_bytes())
    for sign, offset in ((b"PK\1\2", 8), (b"PK\3\4", 6)):
        encrypted[encrypted.index(sign) + offset] |= 1
    path.write_bytes(encrypted)
    assert cause().startswith("expected an .npz of plain arrays: File ")
    with zipfile.ZipFile(str(path), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x", b"no array")
    assert cause() == "expected an .npz of plain arrays, got x in it"
    monkeypatch.setattr(sample, "MAX_BYTES", 2**20)
    with zipfile.ZipFile(str(path), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", bytes(2**20 + 1))
    assert cause() == "expected at most 1048576 bytes, got 1048577"


def test_reads_saved_answers_unchanged(tmp_path: Path) -> None:
    path = str(tmp_path / "answers")
    known = selftest.from_answers(cases.of(FREE, 1, 2), [{"y": ONES, "a/b": NAN}, {"y": ONES * 2, "a/b": NAN}])
    sample.save_answers(path, known.answers)
    assert sample.load_answers(path, known.cases).digest == known.digest
    with pytest.raises(BuildError, match="expected answers to 1 inputs"):
        sample.load_answers(path, known.cases[:1])
