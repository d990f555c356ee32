"""Tests of the ONNX Runtime engine on the real library."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Callable, List, cast

import numpy as np
import pytest

from testkit import cases
from weightd_protocol.errors import InvalidArgument
from weightd_worker.engines import onnxruntime as engine_module
from weightd_worker.engines.engine import BuildError, BuildSettings, Engine, ModelCorrupted
from weightd_worker.engines.onnxruntime import OnnxRuntime
from weightd_worker.process_memory import MallocTuner, private_bytes
from weightd_worker.selftest import selftest

onnxruntime: Any = pytest.importorskip("onnxruntime", reason="MindSpore Lite's interpreter runs its own engine's tests")

Built = Callable[[str], Engine]
Model = Callable[[str], Path]


def never() -> None:
    pytest.fail("the model is intact")


def ones(*shape: int, dtype: Any = np.float32) -> Any:
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    ("name", "inputs", "text"),
    [
        ("integers", {"ids": np.array([[0, 1, 99]])}, "idx=99"),
        ("two_batches", {"a": ones(2, 4), "b": ones(3, 4)}, "2 by 3"),
        ("threes", {"x": ones(2, 4)}, "Reshape"),
        ("relu", {"x": ones(2, 5)}, "Expected: 4"),
        ("relu", {"x": ones(2, 4, dtype=np.float64)}, "double"),
        ("filled", {"shape": np.array([2**40, 4])}, "bad_alloc|allocate"),
        ("filled", {"shape": np.array([2**62, 4])}, "overflow"),
        ("filled", {"shape": np.array([-1, 4])}, ">= 0"),
    ],
)
def test_session_is_intact_after_rejected_request(name: str, inputs: Any, text: str, built: Built) -> None:
    engine = built(name)
    good = {
        each.name: ones(*(3 if dim < 0 else dim for dim in each.shape), dtype="q" if each.datatype == "INT64" else "f")
        for each in engine.signature.inputs
        if each.shape is not None
    }
    expected = engine.predict(good)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=text):
            engine.predict(inputs)
        for key, array in engine.predict(good).items():
            assert np.array_equal(array, expected[key])


def test_unexpected_exception_counts_as_corruption(built: Built) -> None:
    engine = built("two_inputs")
    with pytest.raises(ModelCorrupted, match="onnxruntime: "):
        engine.predict({"a": ones(1, 4), "b": cast(Any, object())})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("strings", r"words: tensor\(string\) is not a supported datatype; expected one of tensor\(bool\)"),
        ("sequence", r"many: seq\(tensor\(float\)\) is not a supported datatype"),
    ],
)
def test_build_error_names_unsupported_datatype(name: str, text: str, engine: Engine, model: Model) -> None:
    with pytest.raises(BuildError, match=text):
        engine.build(str(model(name)))


def test_finds_external_weights_beside_model(engine: Engine, onnx: Path, tmp_path: Path) -> None:
    for path in onnx.glob("with_external_data.*"):
        if path.suffix != ".mindir":
            shutil.copy(str(path), str(tmp_path))
    engine.build(str(tmp_path / "with_external_data.onnx"))
    assert np.isfinite(engine.predict({"x": ones(2, 64)})["y"]).all()
    (tmp_path / "with_external_data.w1.bin").unlink()
    with pytest.raises(BuildError, match=r"with_external_data\.w1\.bin"):
        engine.build(str(tmp_path / "with_external_data.onnx"))


def test_runs_model_without_inputs(built: Built) -> None:
    engine = built("no_inputs")
    assert engine.signature.inputs == ()
    assert engine.predict({})["y"].tolist() == ones(2, 3).tolist()
    assert cases.found(engine, never).note == ""


def test_random_model_has_no_selftest_digest(built: Built) -> None:
    engine = built("random_output")
    known = cases.found(engine, never)
    assert known.note.startswith("the model gives different answers to the same input, which differ by ")
    assert selftest.with_observed_outputs(engine.signature, known).outputs[0].shape == (-1, 4)


@pytest.mark.parametrize(
    ("name", "draws"),
    [("relu", False), ("random_output", True), ("rarely_random", True), ("dropout", False), ("trained", True)],
)
def test_finds_random_nodes_in_file(built: Built, model: Model, name: str, draws: bool) -> None:
    assert built(name).is_stochastic(str(model(name))) == draws


def test_node_with_two_types_counts_as_random(model: Model, tmp_path: Path) -> None:
    """The library uses the last type."""
    content, path = model("random_output").read_bytes(), tmp_path / "two.onnx"
    declared, both = b"\x22\x11RandomUniformLike", b"\x22\x04Relu\x22\x0bMultinomial"
    assert content.count(declared) == 1
    path.write_bytes(content.replace(declared, both))
    assert engine_module.is_stochastic(path)


def test_missing_file_counts_as_random(tmp_path: Path) -> None:
    assert engine_module.is_stochastic(tmp_path / "gone")


def test_tells_unknown_rank_from_scalar(built: Built) -> None:
    """The library reports [] for both; the file tells them apart."""
    engine = built("scalar")
    assert [each.shape for each in engine.signature.inputs] == [(-1, 4), ()]
    engine = built("any_rank")
    assert [each.shape for each in (*engine.signature.inputs, *engine.signature.outputs)] == [None, None]
    assert cases.found(engine, never).note == ""
    for shape in ((), (3,), (2, 4)):
        assert engine.predict({"x": ones(*shape)})["y"].shape == shape
    engine = built("reshape")
    assert engine.signature.outputs[0].shape is None
    answer = engine.predict({"x": ones(2, 4), "shape": np.array([2, 2, 2])})["y"]
    assert answer.shape == (2, 2, 2)


def test_keeps_scalar_output(built: Built) -> None:
    engine = built("total")
    known = cases.found(engine, never)
    assert selftest.with_observed_outputs(engine.signature, known).outputs[0].shape == ()
    assert engine.predict({"x": ones(2, 4)})["y"].tolist() == 8


def test_copies_outputs_that_are_inputs_or_weights(built: Built) -> None:
    engine = built("constant")
    for _ in range(2):
        answer = engine.predict({"x": ones(2, 4)})
        assert (answer["x"].tolist(), answer["k"].tolist()) == (ones(2, 4).tolist(), [0, 1, 2, 3])
        if answer["k"].flags.writeable:
            answer["k"][:] = 9


def test_library_accepts_big_endian_as_native(built: Built) -> None:
    """The library runs an empty batch and reads F-order correctly, but silently reads a big-endian array as native."""
    engine = built("relu")
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    assert engine.predict({"x": x[:0]})["y"].shape == (0, 4)
    assert engine.predict({"x": np.asfortranarray(x)})["y"].tolist() == x.tolist()
    assert engine.predict({"x": x.astype(">f4")})["y"].tolist() != x.tolist()


def test_sets_threads_per_predict(model: Model) -> None:
    engine: Any = OnnxRuntime(BuildSettings(3, "cpu"))
    engine.build(str(model("relu")))
    options = engine._session.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 1)


@pytest.mark.parametrize("name", ["convolution", "wide"])
def test_answers_equal_those_of_default_options(name: str, built: Built, model: Model) -> None:
    options: Any = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    bare = onnxruntime.InferenceSession(str(model(name)), options, providers=["CPUExecutionProvider"])
    engine = built(name)
    (x,) = engine.signature.inputs
    rng = np.random.default_rng(1)
    for rows in (1, 5, 2):
        inputs = {"x": rng.standard_normal((rows, *(x.shape or ())[1:]), np.float32)}
        (expected,) = bare.run(None, inputs)
        for _ in range(2):
            assert engine.predict(inputs)["y"].tobytes() == expected.tobytes()
            engine.release_cached_memory()


def test_releases_arena_memory(fresh: Callable[[str], Engine]) -> None:
    engine = fresh("relu")
    malloc = MallocTuner(engine.release_cached_memory)
    x = ones(4_000_000, 4)
    malloc.trim()
    before = private_bytes()
    engine.predict({"x": x})
    assert private_bytes() - before > x.nbytes * 0.9
    engine.release_cached_memory()
    # In a worker, and in this process after other tests, malloc keeps freed blocks in its heap.
    malloc.trim()
    assert private_bytes() - before < x.nbytes * 0.1


@pytest.mark.parametrize("name", ["scalar", "integers", "two_batches", "any_rank", "filled"])
def test_releases_memory_without_a_predict(name: str, fresh: Callable[[str], Engine]) -> None:
    engine: Any = fresh(name)
    errors: List[str] = []

    class Session:
        def run(self, *arguments: Any) -> None:
            try:
                session.run(*arguments)
            except Exception as error:
                errors.append(str(error))
                raise

    session, engine._session = engine._session, Session()
    engine.release_cached_memory()
    assert len(errors) == 1
    assert "terminate" in errors[0]
