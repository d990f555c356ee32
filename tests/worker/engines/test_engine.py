"""The common contract of the engines, tested on the engine of this interpreter. Each engine also has a file for its
own behaviour."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path
from typing import Any, Callable, List

import numpy as np
import pytest

from testkit import cases
from weightd_protocol.errors import RequestError
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.worker_common import SelfTestCases
from weightd_worker.engines import ENGINES
from weightd_worker.engines.engine import SHARING_IS_OFF, BuildError, BuildSettings, Engine, EngineMissing
from weightd_worker.pagesharing.chunks import LARGE_BLOCK_BYTES, MIN_BLOCK_BYTES
from weightd_worker.pagesharing.libc import Libc
from weightd_worker.selftest import selftest

Built = Callable[[str], Engine]
Model = Callable[[str], Path]

WIDE: SelfTestCases = ({"x": (1, 1024)}, {"x": (2, 1024)})


def rows(*values: float, width: int = 4) -> Any:
    """Return one row of equal numbers for each value."""
    return np.repeat(np.array(values, np.float32)[:, None], width, axis=1)


def wide_weights() -> Any:
    i, j = np.ogrid[:1024, :1024]
    return ((i + 3 * j) % 5 - 2).astype(np.float32)


# --- before the build -----------------------------------------------------------------------------------------


def test_reports_version_and_pid_before_build(engine: Engine) -> None:
    library = importlib.import_module(engine.name)
    assert engine.versions() == {engine.name: library.__version__}
    assert engine.sharing.current_pid() == str(os.getpid())


@pytest.mark.parametrize(
    ("name", "hint"),
    [("onnxruntime", "pip install './weightd[onnxruntime]'"), ("mindspore_lite", "vendor's wheel of mindspore_lite")],
)
def test_missing_library_is_an_error_with_a_hint(name: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # import then raises ImportError
    with pytest.raises(EngineMissing, match=rf"(?s){name}.*{hint}".replace("[", r"\[")):
        ENGINES[name](BuildSettings(1, "cpu"))


@pytest.mark.parametrize("name", ["onnxruntime", "mindspore_lite"])
@pytest.mark.parametrize(
    "device", ["", "cpu:", "cpu:00", "ascend", "ascend:", "ascend:-1", "ascend:01", "ascend:0 ", "Ascend:0"]
)
def test_invalid_device_is_an_error(device: str, name: str, engine: Engine) -> None:
    with pytest.raises(BuildError, match=r"^device: expected cpu, cpu:N or ascend:N, got '"):
        ENGINES[name](BuildSettings(1, device))


def test_unsupported_settings_are_errors(engine: Engine) -> None:
    with pytest.raises(BuildError, match="device: onnxruntime runs on the cpu only, got ascend:0"):
        ENGINES["onnxruntime"](BuildSettings(1, "ascend:0"))
    for name in ENGINES:
        with pytest.raises(BuildError, match=r"^options\.colour: unknown"):
            ENGINES[name](BuildSettings(1, "cpu", options={"colour": "red"}))


def test_cpu_has_no_attach_list_card_or_weights_update(built: Built) -> None:
    engine = built("relu")
    engine.sharing.allow(["1", "2"])
    assert engine.memory() is None
    with pytest.raises(BuildError, match=f"{engine.name} cannot update weights on the CPU"):
        engine.update_weights({"w": np.zeros(1, np.float32)})


def test_sharing_off_neither_exports_nor_attaches(engine: Engine, model: Model, tmp_path: Path) -> None:
    alone = ENGINES[engine.name](BuildSettings(1, "cpu", is_sharing=False))
    alone.build(str(model("relu")))
    assert alone.sharing.export(str(tmp_path / "store")) == alone.sharing.attach("") == SHARING_IS_OFF
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("handle", ["", "/no/such/store"])
def test_raises_mmap_threshold_without_shared_pages(
    handle: str, engine: Engine, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Asking malloc instead would depend on the free blocks that other tests left in its heap.
    mapped_from: List[int] = []
    give = Libc.set_mmap_threshold

    def record(c: Libc, size: int) -> None:
        mapped_from.append(size)
        give(c, size)

    monkeypatch.setattr(Libc, "set_mmap_threshold", record)
    engine.build(str(model("relu")))
    assert mapped_from[-1] == MIN_BLOCK_BYTES
    engine.sharing.attach(handle)
    assert mapped_from[-1] == LARGE_BLOCK_BYTES


# --- building -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["empty", "text", "half", "one byte short", "other format", "directory", "missing"])
def test_builds_after_an_invalid_file(damage: str, engine: Engine, model: Model, onnx: Path, tmp_path: Path) -> None:
    bad = tmp_path / f"bad{model('relu').suffix}"
    whole = model("wide").read_bytes()
    other = (onnx / "relu.onnx").read_bytes() if engine.name == "mindspore_lite" else b"MSL2" * 100
    content = {
        "empty": b"",
        "text": b"no model\n" * 100,
        "half": whole[: len(whole) // 2],
        "one byte short": whole[:-1],
    }
    if damage == "directory":
        bad.mkdir()
    elif damage != "missing":
        bad.write_bytes({**content, "other format": other}[damage])
    for _ in range(2):
        with pytest.raises(BuildError):
            engine.build(str(bad))
    engine.build(str(model("relu")))
    assert engine.predict({"x": rows(-1, 2)})["y"].tolist() == rows(0, 2).tolist()


def test_second_build_replaces_first(engine: Engine, model: Model) -> None:
    for name in ("two_inputs", "relu", "two_inputs"):
        engine.build(str(model(name)), pids=("1", "2"), handle="")
    assert [each.name for each in engine.signature.inputs] == ["a", "b"]
    assert engine.predict({"a": rows(3), "b": rows(1)})["sum"].tolist() == rows(4).tolist()


# --- the signature and the self-test ----------------------------------------------------------------------------------


def test_signature_shapes(built: Built) -> None:
    assert built("relu").signature.inputs == (TensorSignature("x", "FP32", (-1, 4)),)
    fixed = built("fixed").signature
    assert fixed.inputs == (TensorSignature("x", "FP32", (2, 3)),)
    assert fixed.outputs == (TensorSignature("y", "FP32", (2, 5)),)
    engine = built("scalar")
    assert engine.signature.inputs[1] == TensorSignature("b", "FP32", ())
    assert engine.predict({"a": rows(1, 2), "b": np.array(3, np.float32)})["y"].tolist() == rows(4, 5).tolist()


@pytest.mark.parametrize(
    ("name", "shape"), [("relu", (-1, 4)), ("wide", (-1, 1024)), ("fixed", (2, 5)), ("positive", (-1, 4))]
)
def test_selftest_reveals_unknown_output_shape(name: str, shape: Any, built: Built) -> None:
    engine = built(name)
    known = cases.found(engine, rebuild=lambda: pytest.fail("the model is intact"))
    assert known.note == ""
    assert selftest.with_observed_outputs(engine.signature, known).outputs[0].shape == shape


def test_selftest_reveals_flipped_bits(built: Built, engine: Engine, model: Model, tmp_path: Path) -> None:
    right = selftest.run(built("wide"), WIDE).digest
    content = bytearray(model("wide").read_bytes())
    middle = len(content) // 2 & ~3
    content[middle : middle + 64] = bytes(64)
    flipped = tmp_path / model("wide").name
    flipped.write_bytes(bytes(content))
    engine.build(str(flipped))
    assert selftest.run(engine, WIDE).digest != right


@pytest.mark.parametrize(("name", "sizes"), [("single", (1,)), ("threes", (48, 96)), ("fives", ())])
def test_model_is_intact_after_failed_selftest_cases(name: str, sizes: Any, fresh: Built, model: Model) -> None:
    engine = fresh(name)
    known = cases.found(engine, rebuild=lambda: engine.build(str(model(name))))
    assert known.cases == cases.of(engine.signature, *sizes)
    x = rows(1) if sizes == (1,) else rows(1, -2, 3) if sizes else rows(1, -2, 3, -4, 5)
    assert engine.predict({"x": x})["y"].ravel().tolist() == np.maximum(x, 0).ravel().tolist()


# --- predicting -----------------------------------------------------------------------------------------------


def test_answers_equal_numpy_for_changing_batches(built: Built) -> None:
    engine = built("wide")
    for size in (1, 4, 64, 2, 2, 1, 128, 3, 64):
        x = (np.arange(size * 1024) % 5 - size % 3).astype(np.float32).reshape(size, 1024)
        assert np.array_equal(engine.predict({"x": x})["y"], x @ wide_weights())
    answer = built("positive").predict({"x": rows(-1, 1, 0)})["y"]
    assert answer.dtype == bool
    assert answer.tolist() == (rows(-1, 1, 0) > 0).tolist()


def test_outputs_are_copies(built: Built) -> None:
    engine = built("two_inputs")
    values = ((1, 2), (3, 4), (5,))
    answers = [engine.predict({"a": rows(*each), "b": rows(*each) * 10}) for each in values]
    for each, answer in zip(values, answers):
        assert answer["sum"].tolist() == (rows(*each) * 11).tolist()
    arrays = [array for answer in answers for array in answer.values()]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])
    # A caller that modifies an output does not change the next answer.
    for array in arrays:
        if array.flags.writeable:
            array[:] = 99
    assert engine.predict({"a": rows(5), "b": rows(1)})["sum"].tolist() == rows(6).tolist()


def test_binds_inputs_by_name_and_only_reads_them(built: Built) -> None:
    engine = built("two_inputs")
    inputs = {"a": np.frombuffer(rows(5).tobytes(), np.float32).reshape(1, 4), "b": rows(2)}
    for names in ("ab", "ba", "ab"):
        answer = engine.predict({name: inputs[name] for name in names})["difference"]
        assert answer.tolist() == rows(3).tolist()
    assert [inputs["a"].tolist(), inputs["b"].tolist()] == [rows(5).tolist(), rows(2).tolist()]
    inputs["b"][:] = 7
    assert answer.tolist() == rows(3).tolist()


def test_inputs_live_until_the_predict_ends(built: Built) -> None:
    engine = built("wide")
    for value in range(4):
        answer = engine.predict({"x": np.full((8, 1024), value, np.float32)})["y"]
        gc.collect()
        assert np.array_equal(answer[0], value * wide_weights().sum(axis=0))


@pytest.mark.parametrize(
    "x",
    [
        *(np.ones(shape, np.float32) for shape in ((3, 2), (6,), (2, 3, 1), (2, 4))),
        *(np.ones((2, 3), dtype) for dtype in ("f8", "f2", "i4", "?")),
    ],
)
def test_rejects_wrong_shape_and_datatype(x: Any, fresh: Built) -> None:
    """The daemon rejects such inputs earlier; an engine must not treat shape (3, 2) as (2, 3) either."""
    with pytest.raises(RequestError):
        fresh("fixed").predict({"x": x})
