"""Traps of the MindSpore Lite library: each test shows that a trap exists and that the engine avoids it."""

from __future__ import annotations

import importlib
import weakref
from pathlib import Path
from typing import Any, Callable, ContextManager, List
from unittest import mock

import numpy as np
import pytest

from testkit import cases
from weightd_protocol.errors import RequestError
from weightd_protocol.messages.inference import TensorSignature
from weightd_worker.engines.engine import BuildError, Engine, ModelCorrupted
from weightd_worker.selftest import selftest

mslite: Any = pytest.importorskip("mindspore_lite", reason=".venv-mslite runs these")

Built = Callable[[str], Engine]
Model = Callable[[str], Path]
NativeLogFile = Callable[[], ContextManager[Path]]

module: Any = importlib.import_module("weightd_worker.engines.mindspore_lite.model")


@pytest.fixture
def bare(model: Model) -> Callable[[str], Any]:
    """Return a function that builds a model with the library alone."""

    def build(name: str) -> Any:
        context = mslite.Context()
        context.target = ["cpu"]
        context.cpu.thread_num = 1
        built = mslite.Model()
        built.build_from_file(str(model(name)), mslite.ModelType.MINDIR, context)
        return built

    return build


def bare_predict(model: Any, *arrays: Any) -> List[Any]:
    tensors = model.get_inputs()
    for tensor, array in zip(tensors, arrays):
        tensor.set_data_from_numpy(array)
    return [each.get_data_to_numpy() for each in model.predict(tensors)]


def ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


def test_engine_binds_inputs_by_name(bare: Any, built: Built) -> None:
    plain = bare("two_inputs")
    plain.resize(plain.get_inputs(), [[1, 4], [1, 4]])
    a, b = ones(1, 4) * 5, ones(1, 4) * 2
    assert bare_predict(plain, b, a)[1].tolist() == (b - a).tolist()
    assert built("two_inputs").predict({"b": b, "a": a})["difference"].tolist() == (a - b).tolist()


def test_library_misreads_other_memory_layouts(bare: Any) -> None:
    """`weightd_worker.sessions.model` converts the layout and the engine checks the shape; their own tests cover
    both."""
    plain = bare("fixed")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    twice = (bare_predict(plain, x)[0] * 2).tolist()
    assert bare_predict(plain, x * 2)[0].tolist() == twice
    assert bare_predict(plain, np.asfortranarray(x * 2))[0].tolist() != twice
    assert bare_predict(plain, (x * 2).astype(">f4"))[0].tolist() != twice
    assert bare_predict(plain, ones(3, 2))[0].shape == (2, 5)


def test_library_outputs_are_views_but_not_the_engines(bare: Any, built: Built) -> None:
    plain = bare("fixed")
    x = ones(2, 3)
    (first,) = bare_predict(plain, x)
    kept = first.copy()
    (tensor,) = plain.get_inputs()
    tensor.set_data_from_numpy(x)
    x *= 2
    assert plain.predict([tensor])[0].get_data_to_numpy().tolist() == (kept * 2).tolist()
    assert first.tolist() != kept.tolist()
    # The caller of the engine blocks until the predict has ended, and the call keeps the arrays alive.
    answer = built("fixed").predict({"x": ones(2, 3)})["y"]
    built("fixed").predict({"x": ones(2, 3) * 2})
    assert answer.tolist() == kept.tolist()


# --- a failed predict corrupts the model ----------------------------------------------------------------------


def test_library_answers_wrongly_after_failed_predict(bare: Any) -> None:
    plain = bare("two_batches")
    plain.resize(plain.get_inputs(), [[2, 4], [2, 4]])
    assert bare_predict(plain, ones(2, 4), ones(2, 4))[0].tolist() == (ones(2, 4) * 2).tolist()
    plain.resize(plain.get_inputs(), [[2, 4], [3, 4]])
    with pytest.raises(RuntimeError, match="predict failed!"):
        bare_predict(plain, ones(2, 4), ones(3, 4))
    plain.resize(plain.get_inputs(), [[5, 4], [5, 4]])
    try:
        wrong = bare_predict(plain, ones(5, 4), ones(5, 4) * 2)[0]
    except RuntimeError:
        return
    assert wrong.tolist() != (ones(5, 4) * 3).tolist()


def test_failed_predict_is_reported_as_corruption(fresh: Built, native_log: NativeLogFile) -> None:
    engine = fresh("two_batches")
    engine.predict({"a": ones(2, 4), "b": ones(2, 4)})
    with native_log(), pytest.raises(ModelCorrupted, match=r"^predict failed!: InferShape fail! \| run kernel Pre"):
        engine.predict({"a": ones(2, 4), "b": ones(3, 4)})
    engine = fresh("two_batches")
    assert engine.predict({"a": ones(5, 4), "b": ones(5, 4) * 2})["sum"].tolist() == (ones(5, 4) * 3).tolist()


@pytest.mark.parametrize("shape", [(0, 4), (2, 5), (2, 4, 1)])
def test_rejects_impossible_shapes(shape: Any, fresh: Built) -> None:
    with pytest.raises(RequestError):
        fresh("two_inputs").predict({"a": ones(*shape), "b": ones(2, 4)})


# --- a failed build leaves an unusable Model object, and its exception has no cause ---------------------------


def test_library_model_cannot_be_built_twice(bare: Any, model: Model) -> None:
    with pytest.raises(RuntimeError):
        bare("fixed").build_from_file(str(model("fixed")), mslite.ModelType.MINDIR, mslite.Context())


def test_releases_model_before_next_build(fresh: Built, model: Model) -> None:
    """Two models at once would be two copies of the weights, and a card accepts only one model."""
    engine: Any = fresh("fixed")
    before = weakref.ref(engine._model)
    seen: List[Any] = []

    kind = engine._model.__class__
    build_from_file = kind.build_from_file

    def watched(self: Any, *arguments: Any) -> None:
        seen.append(before())
        build_from_file(self, *arguments)

    with mock.patch.object(kind, "build_from_file", watched):
        engine.build(str(model("integers")))
    assert seen == [None]
    assert [each.name for each in engine.signature.inputs] == ["ids"]


@pytest.mark.parametrize("kind", ["alone"], indirect=True)
def test_failed_build_reports_cause_from_native_log(
    engine: Engine, model: Model, tmp_path: Path, native_log: NativeLogFile
) -> None:
    half = tmp_path / "half.mindir"
    half.write_bytes(model("wide").read_bytes()[:1000])
    with native_log() as log, pytest.raises(BuildError) as info:
        engine.build(str(half))
    text = str(info.value)
    assert text.startswith("build_from_file failed! Error is Common error code.: ")
    causes = text.partition("code.: ")[2].split(" | ")
    assert 1 <= len(causes) <= 4
    assert all(cause in log.read_text() for cause in causes)
    assert not any("[" in cause.split(" ")[0] for cause in causes)


# --- the signature --------------------------------------------------------------------------------------------


def test_converts_int64_to_int32(fresh: Built) -> None:
    engine = fresh("integers")
    assert engine.signature.inputs == (TensorSignature("ids", "INT32", (-1, 3)),)
    answer = engine.predict({"ids": np.array([[0, 1, 0], [2, 2, 2]], np.int32)})["vectors"]
    assert answer.shape == (2, 3, 4)
    assert np.array_equal(answer[0, 0], answer[0, 2])
    with pytest.raises(ModelCorrupted, match="data type not equal"):
        engine.predict({"ids": np.array([[0, 1, 0]])})


def test_strips_names_and_rejects_unsupported_datatypes() -> None:
    tensor = mock.Mock(dtype=mslite.DataType.FLOAT32, shape=[-1, 4])
    tensor.name = "words   "
    assert module._tensor_signature(tensor) == TensorSignature("words", "FP32", (-1, 4))
    tensor.dtype = mslite.DataType.UNKNOWN
    with pytest.raises(BuildError, match=r"words: DataType\.UNKNOWN is not a supported datatype"):
        module._tensor_signature(tensor)
    # Each remaining datatype of the library has no datatype in the protocol.
    assert {each.name for each in mslite.DataType} - set(module._DATATYPE) <= {"UNKNOWN", "INVALID"}


@pytest.mark.parametrize(
    ("name", "shape"), [("two_inputs", (-1, 4)), ("convolution", (-1, 256, 8, 8)), ("integers", (-1, 3, 4))]
)
def test_selftest_finds_shape_of_dynamic_output(name: str, shape: Any, built: Built) -> None:
    engine = built(name)
    assert engine.signature.outputs[0].shape is None
    known = cases.found(engine, rebuild=lambda: pytest.fail("the model is intact"))
    assert selftest.with_observed_outputs(engine.signature, known).outputs[0].shape == shape


@pytest.mark.parametrize("kind", ["alone"], indirect=True)
def test_resizes_only_for_a_new_shape(fresh: Built) -> None:
    engine: Any = fresh("two_inputs")
    with mock.patch.object(engine._model, "resize", wraps=engine._model.resize) as resize:
        for size, calls in ((3, 1), (3, 1), (1, 2), (1, 2), (3, 3)):
            engine.predict({"a": ones(size, 4), "b": ones(size, 4)})
            assert resize.call_count == calls
