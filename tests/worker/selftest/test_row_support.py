"""Tests of the search for row support: whether a model's rows can be batched and answer as they do alone."""

from __future__ import annotations

import importlib.util
import re
import types
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import numpy as np
import pytest

from testkit import cases
from testkit.fakeengine import FakeEngine
from weightd_common.rowtest import comparison
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.worker import Build
from weightd_protocol.messages.worker_common import RowSupport, SelfTestCases
from weightd_worker.engines.engine import BuildError, Engine, ModelCorrupted, ModelSignature
from weightd_worker.selftest import row_support, search, selftest

X, Y = TensorSignature("x", "FP32", (-1, 3)), TensorSignature("y", "FP32", (-1, 3))
SIGNATURE = ModelSignature((X,), (Y,))


def found(engine: Engine, rows: int = 8, known: Optional[selftest.SelfTestRun] = None, **order: Any) -> RowSupport:
    """Return the row support that is found for a model after its self-test; fail if the model is corrupted."""
    build = Build((), max_rows=rows, **order)
    if known is None:
        known = search.find_selftest(engine, build, lambda: None, _ignore)
    rows_of = row_support.find_row_support(engine, build, known, lambda: None, lambda _: None)
    assert rows_of is not None
    return rows_of


def _ignore(trying: SelfTestCases, unfit: SelfTestCases) -> None:
    pass


def fake(answer: Callable[[Any], Any], signature: ModelSignature = SIGNATURE) -> FakeEngine:
    return FakeEngine(lambda inputs: {"y": answer(inputs["x"])}, signature)


# --- real models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wide", "convolution", "integers", "embedding", "two_inputs"])
def test_models_with_equal_rows(built: Callable[[str], Engine], name: str) -> None:
    engine = built(name)
    rows = found(engine)
    signature = engine.signature
    names = tuple(tuple(each.name for each in tensors) for tensors in signature)
    assert ((rows.inputs, rows.outputs), rows.is_equal, rows.note) == (names, True, "")


NOTES = {
    "softmax": r"output y: \d of 8 rows .* differ .*, by up to \S+ where the largest value is 1",
    "centred": r"output y: 8 of 8 rows .* differ",
    "log": r"output y: \d of \d rows .* differ .*, by up to \S+ where the largest value is \S+",
    "quantized": r"output y: [5-8] of 8 rows .* differ",
    "elu": r"output y: \d of \d rows .* differ",
    "fixed": r"input x has no rows: its shape is \[2, 3\], whose first dimension is not free",
    "threes": "the model does not run on (1|[2578]) rows: ",
    "total": r"output y has shape \[\] for 1 rows",
    "any_rank": "input x has no rows: it may be of any rank",
    "random_output": "the model gives different answers to the same input",
    "no_inputs": "the model has no inputs",
}
FOR_BOTH = ("centred", "log", "fixed")


# MindSpore Lite's Gather returns an answer for an index that is out of range.
EMBEDDING_VALUES = {"onnxruntime": "indices", "mindspore_lite": "scaled"}


def test_tests_float_indices_with_indices(built: Callable[[str], Engine]) -> None:
    engine = built("embedding")
    rows = found(engine)
    assert (rows.is_equal, rows.row_kind) == (True, EMBEDDING_VALUES[engine.name])


@pytest.mark.parametrize("name", FOR_BOTH if importlib.util.find_spec("mindspore_lite") else NOTES)
def test_note_names_unequal_or_missing_rows(built: Callable[[str], Engine], name: str) -> None:
    rows = found(built(name))
    assert not rows.is_equal
    assert re.match(NOTES[name], rows.note)


@pytest.mark.skipif(importlib.util.find_spec("mindspore_lite") is not None, reason="ONNX Runtime's Floor")
def test_runs_nans_alone_if_tail_values_differ(
    built: Callable[[str], Engine],
) -> None:
    rows = found(built("floored"))
    assert (rows.is_equal, rows.note, rows.unequal_specials) == (True, "", ("nan",))


# --- models that are Python functions -------------------------------------------------------------------------------


def chosen(x: Any) -> Any:
    """Return other rows than alone if one row is far larger than the others."""
    return x if abs(x).max() < 50 or len(x) == 1 else x + 1


Function = Callable[[Any], Any]


def nudged(x: Any) -> Any:
    """Return another value for one row of forty, unless it runs alone."""
    return x * (1 + 0.5 * (len(x) > 1) * ((x[:, :1] * 1000) % 40 < 1)).astype(x.dtype)


DIFFERENT: List[Tuple[Function, str]] = [
    (chosen, "output y: 8 of 8 rows that were batched differ from the same rows run alone, by up to 1 where"),
    (nudged, "output y: 1 of 8 rows"),
    (lambda x: x + (len(x) == 5), "output y: 5 of 5 rows"),
    (lambda x: x[:, : 4 - len(x)], "output y: float32 [8, 0] together, float32 [8, 3] alone"),
    (lambda x: x[: len(x) % 8], "output y has shape [0, 3] for 8 rows"),
    (lambda x: x.astype("f4" if len(x) == 1 else "f8"), "output y: float64 [8, 3] together, float32 [8, 3] alone"),
    (lambda x: x if len(x) == 1 else x * np.float32("nan"), "and in which values are finite"),
    (lambda x: np.copysign(0 * x, x if len(x) == 1 else -x), "by up to 0 where the largest value is 0"),
]


FLUSHES = importlib.util.find_spec("mindspore_lite") is not None
"""MindSpore Lite makes the processor treat subnormal floats as zeros, also in numpy."""

SPECIAL = ("nan", "infinity", "subnormal", "negative zero")


KINDS: List[Tuple[Function, Tuple[str, ...]]] = [
    (lambda x: x, ()),
    (lambda x: np.where(np.isnan(x) & (len(x) > 2), np.float32(np.nan), x), ("nan",)),
    (lambda x: np.where(np.isinf(x), np.float32(len(x)), x), ("infinity",)),
    # A special value changes the other rows.
    (lambda x: np.add(x, np.isnan(x).any()), ("nan",)),
    (lambda x: np.multiply(x, 1 + int(np.isinf(x).any())), ("infinity",)),
]
SMALL: List[Tuple[Function, Tuple[str, ...]]] = [
    (lambda x: x if len(x) == 1 else np.where(abs(x) < 1e-38, abs(x), x), ("subnormal", "negative zero")),
    (lambda x: x if len(x) == 1 else np.where(x == 0, abs(x), x), ("negative zero",)),
]


@pytest.mark.parametrize(("answer", "special"), KINDS if FLUSHES else KINDS + SMALL)
def test_tests_each_kind_of_special_values(answer: Function, special: Tuple[str, ...]) -> None:
    rows = found(fake(answer), known=selftest.run(fake(lambda x: x), cases.of(SIGNATURE, 1, 2)))
    assert rows.is_equal
    assert rows.unequal_specials == special


def test_runs_untestable_special_values_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def finite(x: Any) -> Any:
        if not np.isfinite(x).all():
            raise InvalidArgument("it is not finite")
        return x

    assert found(fake(finite), known=selftest.run(fake(finite), cases.of(SIGNATURE, 1))).unequal_specials == (
        "nan",
        "infinity",
    )
    monkeypatch.setattr(comparison, "MAX_SPECIAL_VALUES_S", 0.0)
    rows = found(fake(lambda x: x))
    assert (rows.is_equal, rows.unequal_specials) == (True, SPECIAL)


@pytest.mark.parametrize(("answer", "note"), DIFFERENT)
def test_finds_and_names_difference(answer: Function, note: str) -> None:
    rows = found(fake(answer), known=selftest.run(fake(lambda x: x), cases.of(SIGNATURE, 1, 2)))
    assert not rows.is_equal
    assert note in rows.note


def test_input_without_rows_excludes_padding() -> None:
    signature = ModelSignature((X, TensorSignature("s", "FP32", (3,))), (Y,))
    engine = FakeEngine(lambda inputs: {"y": inputs["x"] * inputs["s"]}, signature)
    known = selftest.run(engine, cases.of(signature, 1))
    assert found(engine, known=known) == RowSupport(("x",), ("y",), is_equal=True, compared_rows=8)
    assert found(engine, known=known, allowed_batch_sizes=(2, 8)).note.startswith(
        "input s has no rows: its shape is [3]"
    )


def test_runs_distinct_rows_alone_and_in_all_batch_sizes() -> None:
    engine = fake(lambda x: x)
    assert found(engine, rows=300, known=selftest.run(engine, cases.of(SIGNATURE, 1))).is_equal
    asked = [each["x"] for each in engine.received_inputs[2:]]
    # Rows with special values come last.
    asked = asked[: -16 - 5]
    alone = {each.tobytes() for each in asked if len(each) == 1}
    assert len(alone) == 200
    for size in (2, 3, 5, 7, 300):
        assert {row.tobytes() for each in asked if len(each) == size for row in each} == alone


@pytest.mark.parametrize(
    ("rows", "sizes", "compared"), [(8, (), 8), (300, (), 65), (64, (2, 8, 16), 16), (8, (2, 4, 8, 16), 8)]
)
def test_reports_number_of_compared_rows(rows: int, sizes: Sequence[int], compared: int) -> None:
    engine = fake(lambda x: x)
    known = selftest.run(engine, cases.of(SIGNATURE, min(sizes, default=1)))
    assert found(engine, rows=rows, known=known, allowed_batch_sizes=sizes).compared_rows == compared
    asked = {len(each["x"]) for each in engine.received_inputs}
    assert asked.issuperset(set(sizes or range(2, rows + 1)) & set(range(compared + 1)))


def test_runs_only_allowed_batch_sizes() -> None:
    engine = fake(lambda x: x)
    known = selftest.run(engine, cases.of(SIGNATURE, 2))
    assert found(engine, rows=8, known=known, allowed_batch_sizes=(2, 4, 8, 16)).is_equal
    assert {len(each["x"]) for each in engine.received_inputs} == {2, 4, 8}


def test_worker_repeats_a_tested_predict() -> None:
    engine = fake(lambda x: x)
    for rows, sizes, expected in ((8, (), 8), (300, (), 7), (8, (2, 4, 8), 8), (9, (4, 8), 8), (256, (128, 256), 128)):
        assert row_support.rows_digest(engine, cases.of(SIGNATURE, 1), rows, sizes)
        assert len(engine.received_inputs[-1]["x"]) == expected
    # If rows have many bytes, the worker and the holder both run fewer.
    width = 2**23
    signature = ModelSignature((TensorSignature("x", "INT8", (-1, width)),), (Y,))
    engine = fake(lambda x: x[:, :3], signature)
    row_support.rows_digest(engine, ({"x": (1, width)},), 300)
    assert len(engine.received_inputs[-1]["x"]) == 8


def test_rows_resemble_the_sample() -> None:
    signature = ModelSignature((TensorSignature("x", "INT32", (-1, -1)), TensorSignature("z", "FP32", (-1, 1))), (Y,))
    sample = {"x": np.array([[7, 8], [9, 10]], np.int32), "z": np.array([[4], [8]], np.float32)}
    engine = FakeEngine(lambda inputs: {"y": inputs["z"]}, signature)
    known = selftest.run(engine, ({"x": (2, 2), "z": (2, 1)},), sample)
    assert row_support.find_row_support(
        engine, Build((), max_rows=2), known, lambda: None, lambda _: None, sample
    ) == RowSupport(("x", "z"), ("y",), is_equal=True, compared_rows=2)
    assert {tuple(row) for each in engine.received_inputs for row in each["x"]} == {(7, 8), (9, 10)}
    # Each value is 0.5 to 1.5 times the sample's, scaled by 1, 100 or 0.01.
    ordinary = engine.received_inputs[: -16 - 1]
    values = np.unique([float(each["z"][0, 0]) for each in ordinary if len(each["z"]) == 1])
    assert len(values) == 200
    assert (2 / 100 <= values.min() < 12 / 100, 200 < values.max() <= 1200) == (True, True)


# --- models that do not accept all values ---------------------------------------------------------------------------

WIDE = ModelSignature((TensorSignature("x", "FP32", (-1, 9)),), (Y,))


class Table:
    """An embedding with float indices: an index out of range is rejected, or its answer is not finite."""

    def __init__(self, size: int, error: Optional[Exception] = None) -> None:
        self._size = size
        self._error = error
        self.seen: List[Any] = []

    def __call__(self, x: Any) -> Any:
        indices = x.astype(int)
        wrong = (abs(indices) >= self._size).any(axis=1)
        if wrong.any() and self._error is not None:
            raise self._error
        self.seen.extend(map(tuple, x))
        return np.where(wrong[:, None], np.nan, indices @ np.arange(1, x.shape[1] + 1)[:, None]).astype(np.float32)


REFUSALS = [InvalidArgument("idx=82 out of data bounds"), ModelCorrupted("idx=82 out of data bounds"), None]


@pytest.mark.parametrize("error", REFUSALS)
@pytest.mark.parametrize("exact", [True, False])
def test_tests_indices_if_scaled_rows_fail(error: Optional[Exception], exact: bool) -> None:
    table = Table(12, error)
    engine = fake(table, WIDE)
    rows = found(engine, known=selftest.run(engine, cases.of(WIDE, 1)), exact=exact)
    if not exact:
        assert (rows.outputs, rows.is_equal) == (("y",), False)
        return
    assert (rows.outputs, rows.is_equal, rows.compared_rows, rows.row_kind) == (("y",), True, 8, "indices")
    # Every table has the indices 0 and 1; the rows still differ.
    assert {value for row in table.seen[-200:] for value in row} == {0.0, 1.0}
    assert len(set(table.seen[-200:])) > 100


@pytest.mark.parametrize("dtype", ["f4", "i4"])
def test_permutes_rows_of_sample(dtype: str) -> None:
    signature = ModelSignature((TensorSignature("x", "FP32" if dtype == "f4" else "INT32", (-1, 9)),), (Y,))
    table = Table(12, InvalidArgument("idx=82 out of data bounds"))
    engine = fake(table, signature)
    sample = {"x": np.array([[3, 11, 5, 0, 2, 2, 7, 1, 9]], dtype)}
    known = selftest.run(engine, ({"x": (1, 9)},), sample)
    rows = row_support.find_row_support(engine, Build((), max_rows=8), known, lambda: None, lambda _: None, sample)
    assert rows == RowSupport(
        ("x",),
        ("y",),
        is_equal=True,
        compared_rows=8,
        row_kind="permuted",
        unequal_specials=SPECIAL if dtype == "f4" else (),
    )
    assert {tuple(sorted(row)) for row in table.seen} == {tuple(sorted(sample["x"][0]))}
    assert len(set(table.seen)) > 100
    # A worker that attaches runs the same rows.
    table.seen.clear()
    assert row_support.rows_digest(engine, known.cases, 8, (), sample, rows.row_kind)
    assert len(set(table.seen)) == 8


def test_keeps_sample_columns_with_separate_ranges() -> None:
    def columns(x: Any) -> Any:
        if (x >= [3, 100]).any() or (x < 0).any() or (x != x.astype(int)).any():
            raise InvalidArgument("out of data bounds")
        return x[:, :1] * 100 + x[:, 1:]

    signature = ModelSignature((TensorSignature("x", "FP32", (-1, 2)),), (Y,))
    sample = {"x": np.array([[1, 50], [2, 99], [0, 7]], np.float32)}
    engine = fake(columns, signature)
    known = selftest.run(engine, ({"x": (3, 2)},), sample)
    rows = row_support.find_row_support(engine, Build((), max_rows=8), known, lambda: None, lambda _: None, sample)
    assert rows == RowSupport(
        ("x",), ("y",), is_equal=True, compared_rows=8, row_kind="sample", unequal_specials=SPECIAL
    )


def test_finds_difference_between_index_rows() -> None:
    table = Table(12, InvalidArgument("out of data bounds"))
    engine = fake(lambda x: table(x) + (len(x) == 5), WIDE)
    rows = found(engine, known=selftest.run(engine, cases.of(WIDE, 1)))
    assert not rows.is_equal
    assert rows.note.startswith("output y: 5 of 5 rows that were batched differ")


ONE_ANSWER: List[Tuple[Function, str]] = [
    (
        lambda x: 0 * x[:, :1] + 1,
        "the test is inconclusive: the model gives the same answer to all 200 test rows; set `selftest`",
    ),
    (lambda x: np.float32("nan") * x, "the test is inconclusive"),
    (
        Table(0, InvalidArgument("out of data bounds")),
        "the model does not run on 1 rows: out of data bounds; set `selftest` of the model to an .npz file",
    ),
]


@pytest.mark.parametrize(("answer", "note"), ONE_ANSWER)
def test_note_has_advice_if_no_rows_are_testable(answer: Function, note: str) -> None:
    rows = found(fake(answer), known=selftest.run(fake(lambda x: x), cases.of(SIGNATURE, 1)))
    assert not rows.is_equal
    assert rows.note.startswith(note)


def test_inexact_search_checks_only_shapes() -> None:
    engine = fake(nudged)
    rows = found(engine, known=selftest.run(engine, cases.of(SIGNATURE, 1)), exact=False)
    assert (rows.inputs, rows.outputs, rows.is_equal) == (("x",), ("y",), False)
    assert rows.note.startswith("equality of batched and single answers was not tested")
    assert len(engine.received_inputs) == 1 + 2


def test_model_without_selftest_is_not_run() -> None:
    engine = fake(lambda x: x)
    rows = found(engine, known=selftest.SelfTestRun((), "", note="the key selftest is off"))
    assert (rows.note, rows.outputs) == ("rows cannot be checked without a self-test: the key selftest is off", ())
    assert not engine.received_inputs


@pytest.mark.parametrize(
    ("seconds", "note", "predicts"),
    [(0.1, "", 116), (2.0, "the model takes too long: only 3 rows", 6), (1.0, "the model takes too long: not all", 11)],
)
def test_takes_at_most_ten_seconds(monkeypatch: pytest.MonkeyPatch, seconds: float, note: str, predicts: int) -> None:
    now = [0.0]

    def slow(x: Any) -> Any:
        now[0] += seconds
        return x

    engine = fake(slow)
    known = selftest.run(engine, cases.of(SIGNATURE, 1))
    monkeypatch.setattr(f"{comparison.__name__}.time", types.SimpleNamespace(monotonic=lambda: now[0]))
    rows = found(engine, known=known)
    assert rows.note.startswith(note)
    assert rows.is_equal == (not note)
    assert predicts <= len(engine.received_inputs) <= predicts + 8
    assert now[0] <= 10 + (0 if note else comparison.MAX_SPECIAL_VALUES_S) + 5 * seconds


def test_reports_only_sizes_run_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def slow(x: Any) -> Any:
        now[0] += 10.0 * (len(x) == 4)
        return x

    engine = fake(slow)
    known = selftest.run(engine, cases.of(SIGNATURE, 1))
    monkeypatch.setattr(f"{comparison.__name__}.time", types.SimpleNamespace(monotonic=lambda: now[0]))
    # 8, 7, 5, 3 and 2 rows run first, then 4; no time is left for 6.
    assert found(engine, rows=8, known=known).compared_rows == 5


def refusing(error: Exception) -> Callable[[Any], Any]:
    def answer(x: Any) -> Any:
        if len(x) == 7:
            raise error
        return x

    return answer


@pytest.mark.parametrize("error", [InvalidArgument("too many"), ModelCorrupted("too many")])
def test_reports_attempts_and_rebuilds_failed_model(error: Exception) -> None:
    engine = fake(refusing(error))
    reported: List[Union[str, SelfTestCases]] = []
    known = selftest.run(engine, cases.of(SIGNATURE, 1))
    order = Build((), max_rows=8)
    rows = row_support.find_row_support(engine, order, known, lambda: reported.append("rebuilt"), reported.append)
    assert rows is not None
    assert (rows.is_equal, rows.outputs == ()) == (False, isinstance(error, ModelCorrupted))
    assert re.match("the model does not run on (7|so many) rows: too many", rows.note)
    tried = [({"x": (8, 3)},), ({"x": (7, 3)},), ()]
    assert reported == [*tried, "rebuilt", ()] if isinstance(error, ModelCorrupted) else reported == tried
    # A case that killed an earlier process does not run again.
    again = found(engine, known=known, failed_cases=({"x": (8, 3)},))
    assert (again.note, again.is_equal) == ("the process that built the model crashed with 8 rows", False)


def test_fails_if_corrupted_model_cannot_be_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake(refusing(ModelCorrupted("too many")))
    known = selftest.run(engine, cases.of(SIGNATURE, 1))
    monkeypatch.setattr(FakeEngine, "can_rebuild", False)
    with pytest.raises(BuildError, match="does not run on several rows: too many; turn batching off"):
        found(engine, known=known)


def test_no_search_without_batching() -> None:
    engine = fake(lambda x: x)
    assert (
        row_support.find_row_support(engine, Build(()), selftest.SelfTestRun((), ""), lambda: None, lambda _: None)
        is None
    )
