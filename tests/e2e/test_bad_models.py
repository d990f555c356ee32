"""Model files that cannot be served, and model files that change while they are served."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from testkit import mindir, models
from testkit.service import Service
from testkit.waiting import until
from weightd import FailedPrecondition, RequestError, Unavailable

from .support import (
    ONE_ENGINE,
    BareEngine,
    DaemonPaths,
    Weightd,
    Zoo,
    ask_all,
    cause_of_failure,
    children_of,
    interpreter,
    model_status,
    pairs,
    ready_workers,
)

pytestmark = pytest.mark.e2e


MISSING, DIRECTORY, TRUNCATED, FOREIGN, MINDIR = "missing", "directory", "truncated", "foreign", "mindir"

# Patterns of the reasons. The daemon itself rejects a path that is not a file or not protobuf; the engine reports the
# rest. Unreadable files are not tested, because root may read every file.
CAUSES = {
    MISSING: "No such file or directory",
    DIRECTORY: "expected a file, got a directory|Is a directory",
    TRUNCATED: "expected an ONNX model",
    FOREIGN: r"\.holder: onnxruntime: \[ONNXRuntimeError\].* Missing opset",
    MINDIR: r"\.holder: build_from_file failed.*: .*Failed to load MindIR model",
}

# The first bytes of a MindIR file.
MINDIR_BYTES = b"\x0a\x050.1.1\x12\x09MindSpore*\x052.0.0:\x0a\x0a\x08\x0a\x01x\x0a\x01y\x1a\x00"


@pytest.fixture(scope="module")
def bad_paths(mlp: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("bad")
    paths = {name: made / f"{name}{'.mindir' if name == MINDIR else '.onnx'}" for name in CAUSES}
    paths[DIRECTORY].mkdir()
    paths[TRUNCATED].write_bytes(mlp.read_bytes()[: mlp.stat().st_size // 2])
    # An old modification time, so that the daemon does not assume that the file is still being copied.
    os.utime(paths[TRUNCATED], (1e9, 1e9))
    paths[FOREIGN].write_bytes(MINDIR_BYTES)
    shutil.copyfile(mlp, paths[MINDIR])
    if mindir.interpreter() is None and os.environ.get("CI") != "true":
        del paths[MINDIR]
    return paths


@pytest.fixture(scope="module")
def service(zoo: Zoo, bad_paths: dict[str, Path]) -> Iterator[Service]:
    """A daemon with one good model and the bad ones."""
    tables = {name: {"path": path} for name, path in bad_paths.items()}
    tables["good"] = {"path": zoo.path("two_inputs", "onnxruntime")}
    with Service(tables, verbose=True) as service:
        yield service


@ONE_ENGINE
@pytest.mark.parametrize("name", CAUSES)
def test_bad_file_fails_only_its_model(
    name: str, engine: str, service: Service, bad_paths: dict[str, Path], zoo: Zoo, bare: BareEngine
) -> None:
    if name not in bad_paths:
        pytest.skip(mindir.HOW_TO_GET_IT)
    cause = cause_of_failure(service, name)
    assert re.search(CAUSES[name], cause)
    assert ".holder: " in cause or str(bad_paths[name]) in cause
    with service.client() as client:
        for call in (lambda: client.infer(name, {"x": 1.0}), lambda: client.metadata(name)):
            expected: type[RequestError] = Unavailable if name == MISSING else FailedPrecondition
            with pytest.raises(expected) as caught:
                call()
            assert str(caught.value) == f"{name} failed: {cause}"
        until(lambda: not model_status(service, name).generations[0].processes, "its processes exit")
        ask_all(client, "good", bare.questions(zoo.path("two_inputs", engine), pairs((2, 1))))
    assert f"{name}.1 failed: {cause[:40]}" in service.log
    # The holder and its worker, each started once.
    assert len(set(re.findall(rf"{name}\.1\.(?:holder|w\d+)(?=: spawned)", service.log))) <= 2


@ONE_ENGINE
def test_run_exits_with_status_1_if_model_fails(
    engine: str, bad_paths: dict[str, Path], place: DaemonPaths, tmp_path: Path
) -> None:
    options = ("--python", interpreter(engine), "--socket", place.address, "--cache-dir", place.cache)
    with Weightd(tmp_path / "log", "run", bad_paths[FOREIGN], *options) as daemon:
        assert daemon.wait() == 1
        assert re.search(rf"ERROR .*{CAUSES[FOREIGN]}", daemon.log)
    assert place.left == []
    assert children_of(place.cache) == set()


@ONE_ENGINE
def test_serves_model_after_its_file_was_repaired(mlp: Path, tmp_path: Path) -> None:
    late, bad = tmp_path / "late.onnx", tmp_path / "bad.onnx"
    bad.write_bytes(b"not a model")
    os.utime(bad, (1e9, 1e9))
    with Service({"late": {"path": late}, "bad": {"path": bad}, "other": {"path": bad}}) as service:
        assert "No such file" in cause_of_failure(service, "late")
        causes = [cause_of_failure(service, name) for name in ("bad", "other")]
        assert all("expected an ONNX model" in each for each in causes)
        status = {model.name: model.retry_s is not None for model in service.status().models}
        assert (status["bad"], status["other"]) == (False, False)
        for path in (late, bad):
            shutil.copyfile(mlp, path)
        with service.client() as client:
            assert client.update("bad", str(bad)).path == str(bad)
            # The daemon retries a missing file by itself, and an invalid one after its file has changed.
            until(lambda: model_status(service, "late").state == "serving", "the late model serves")
            until(lambda: model_status(service, "other").state == "serving", "the other model serves")


# --- files that change while they are served ----------------------------------------------------------------------


def test_new_worker_serves_original_weights_after_file_change(bare: BareEngine, tmp_path: Path) -> None:
    path = models.with_external_data(tmp_path / "model.onnx")
    random = np.random.default_rng(1)
    questions = bare.questions(path, [{"x": random.standard_normal((2, 64), dtype=np.float32)}])
    with Service({"model": {"path": path}}) as service, service.client() as client:
        ask_all(client, "model", questions)
        for file in tmp_path.glob("model.*.bin"):
            file.write_bytes(bytes(file.stat().st_size))
        os.truncate(path, 100)
        ask_all(client, "model", questions)
        [worker] = ready_workers(service, "model")
        os.kill(worker.pid, signal.SIGKILL)
        ask_all(client, "model", questions)
        [successor] = ready_workers(service, "model")
        assert successor.name != worker.name


# --- valid models with surprises ----------------------------------------------------------------------------------


def test_self_test_avoids_sizes_that_crash_the_engine(
    tmp_path: Path,
) -> None:
    python = mindir.interpreter()
    assert python, mindir.HOW_TO_GET_IT
    path = mindir.convert(models.dies_of_small_images(tmp_path / "m.onnx"), tmp_path / "m.mindir", python)
    image = np.random.default_rng(1).standard_normal((1, 3, 192, 256), dtype=np.float32)
    tables: dict[str, dict[str, object]] = {
        "auto": {"path": path},
        "deadly": {"path": path, "selftest": {"x": [1, 3, 64, 64]}},
    }
    with Service(tables) as service, service.client() as client:
        cause = cause_of_failure(service, "deadly")
        assert "SIGSEGV" in cause
        assert "the holder was running the configured self-test, x [1, 3, 64, 64]" in cause
        assert client.infer("auto", {"x": image})["y"].shape == (1, 3, 3, 4)
        model = model_status(service, "auto")
        [generation] = model.generations
        assert generation.selftest == "x [1, 3, 224, 224] and x [2, 3, 448, 448]"
        assert model.unexpected_exits == 0
        assert "the holder was lost while trying x [" in service.log


def test_wrong_output_declaration_loses_no_answer_or_worker(tmp_path: Path) -> None:
    plain, random = tmp_path / "plain.onnx", tmp_path / "random.onnx"
    models.declared_for_one(plain)
    models.declared_for_one(random, "RandomNormalLike")
    tables: dict[str, dict[str, object]] = {
        "off": {"path": plain, "selftest": "off"},
        "random": {"path": random, "selftest": {"x": [1, 2, 3]}},
    }
    with Service(tables) as service, service.client() as client:
        for batch in (1, 4, 2, 4):
            x = np.ones((batch, 2, 3), np.float32)
            assert np.array_equal(client.infer("off", {"x": x})["y"], x)
            assert client.infer("random", {"x": x})["y"].shape == x.shape
        for name, selftest in (
            ("off", "none: the key selftest is off"),
            ("random", "none: the model gives different answers"),
        ):
            model = model_status(service, name)
            assert (model.unexpected_exits, model.failed) == (0, 0)
            assert model.generations[0].selftest.startswith(selftest)
            assert f"{name}.1: no {selftest.replace('none', 'self-test')}" in service.log
