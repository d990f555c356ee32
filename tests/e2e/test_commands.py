"""The commands weightd and weightctl, as an operator types them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit.service import Service
from weightd.protocol.version import VERSION

from .support import (
    EACH_ENGINE,
    ONE_ENGINE,
    Bare,
    Place,
    Question,
    Weightd,
    Zoo,
    ask_all,
    interpreter,
    pairs,
    processes,
    weightd,
)

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

BAD_CONFIG = 78
WRONG_COMMAND_LINE = 64
SCRIPTS = Path(sys.executable).parent


def weightctl(service: Service, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weightd.ctl", "--socket", service.address, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def as_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one object that the command printed."""
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


@pytest.mark.parametrize("name", ["weightd", "weightctl"])
def test_the_commands_are_installed(name: str) -> None:
    done = subprocess.run([SCRIPTS / name, "--version"], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, f"{name} {VERSION}\n")


def test_help_names_the_commands_and_the_exit_statuses() -> None:
    done = weightd("--help")
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("serve", "run", "check", "weightctl"))
    done = weightd("serve", "--help")
    assert all(word in done.stdout for word in ("SIGTERM", "73", "78"))


def test_no_command_is_a_wrong_command_line() -> None:
    done = weightd()
    assert done.returncode == 64
    assert "COMMAND" in done.stderr


# --- weightd check and serve ------------------------------------------------------------------------------------


def test_check_says_that_a_configuration_is_good(engine: str, zoo: Zoo, place: Place) -> None:
    path = zoo.path("two_inputs", engine)
    done = weightd("check", place.config({"sums": {"path": path, "workers": 3}}))
    assert done.returncode == 0, done.stderr
    assert f"sums: {engine}, 3 workers, {path}" in done.stdout
    assert place.address in done.stdout
    assert place.left == []


def test_check_loads_each_model_and_leaves_nothing(engine: str, zoo: Zoo, place: Place, tmp_path: Path) -> None:
    path = zoo.path("two_inputs", engine)
    bad = tmp_path / path.name
    # What is a model for the daemon, and none for the engine.
    bad.write_bytes(b"\x08\x08" if engine == "onnxruntime" else b"a model")
    tables = {"sums": {"path": path}, "bad": {"path": bad}}
    config = place.config({**tables, "gone": {"path": path.with_stem("gone")}})
    done = weightd("check", "--load", config)
    assert done.returncode == BAD_CONFIG
    assert "models.gone.path: " in done.stderr
    assert "gone on cpu" not in done.stderr
    config = place.config(tables)
    done = weightd("check", "--load", config)
    assert (done.returncode, done.stdout) == (1, "")
    assert "sums on cpu: loading, 1 of 2" in done.stderr
    assert re.search(r"sums on cpu: loaded in \d+\.\d s; ", done.stderr)
    assert f"{config}: models.bad: does not load on cpu: holder: build: " in done.stderr
    assert place.left == []
    assert weightd("check", "--load", place.config({"sums": {"path": path}})).returncode == 0


BAD_CONFIGS = {
    "no TOML": ("[daemon", "not TOML"),
    "two at once": ("[models.m]\npath = 'm.bin'\nworkers = 0", "models.m.workers: ", "models.m.path: "),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_serve_refuses_a_wrong_configuration_and_names_file_key_and_expectation(case: str, tmp_path: Path) -> None:
    text, *problems = BAD_CONFIGS[case]
    config = tmp_path / "weightd.toml"
    config.write_text(text, encoding="utf-8")
    done = weightd("serve", config)
    assert done.returncode == BAD_CONFIG
    lines = done.stderr.splitlines()
    assert len(lines) >= len(problems)
    assert all(line.startswith(f"weightd: {config}: ") for line in lines), lines
    assert [each for each in problems if each not in done.stderr] == [], lines


# --- weightd run ------------------------------------------------------------------------------------------------


def test_run_serves_one_model_without_a_configuration(
    engine: str, zoo: Zoo, bare: Bare, place: Place, tmp_path: Path
) -> None:
    path = zoo.path("two_inputs", engine)
    options = ("--python", interpreter(engine), "--socket", place.address, "--cache-dir", place.cache)
    with Weightd(tmp_path / "log", "run", path, "--workers", 3, *options) as daemon:
        with daemon.client(place.address) as client:
            ask_all(client, "two_inputs", bare.questions(path, pairs((2, 1))))
            daemon.wait_for("two_inputs.1: serving")
            [model] = client.status().models
            assert sum(each.role == "worker" for each in model.generations[0].processes) == 3
        os.kill(daemon.pid, signal.SIGINT)
        assert daemon.wait() == 0
    assert place.left == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("model.bin",), "MODEL: expected a file that ends in .onnx or .mindir, got 'model.bin'"),
        (("model.onnx", "--workers", "0"), "--workers: expected"),
        (("model.onnx", "--workers", "0", "--device", "cpu:1"), "--device[0]: expected"),
        (("model.onnx", "--threads", "-1"), "--threads: expected"),
        (("model.onnx", "--name", "a/b"), "--name: expected a model name"),
        (("model.onnx", "--socket", "here"), "--socket: expected"),
    ],
)
def test_run_refuses_wrong_options_and_names_them(arguments: tuple[str, ...], problem: str) -> None:
    done = weightd("run", *arguments)
    assert done.returncode == WRONG_COMMAND_LINE
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


# --- weightctl --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(engine: str, zoo: Zoo) -> Iterator[Service]:
    with Service({"two_inputs": {"path": zoo.path("two_inputs", engine), "workers": 2}}) as service:
        service.ready()
        yield service


@pytest.fixture
def question(engine: str, zoo: Zoo, bare: Bare) -> Question:
    return bare.questions(zoo.path("two_inputs", engine), pairs((3,)))[0]


@pytest.fixture
def files(question: Question, tmp_path: Path) -> list[str]:
    """The options --input for the question."""
    options: list[str] = []
    for name, array in question.inputs.items():
        np.save(tmp_path / f"{name}.npy", array)
        options += ["--input", f"{name}={tmp_path / name}.npy"]
    return options


def test_status_shows_models_processes_and_memory(engine: str, service: Service) -> None:
    done = weightctl(service, "status")
    assert done.returncode == 0, done.stderr
    assert f"pid {service.pid}" in done.stdout
    assert f"two_inputs: SERVING, {engine}, " in done.stdout
    for each in (*processes(service, "two_inputs", "holder"), *processes(service, "two_inputs", "worker")):
        name = each.name.rsplit(".", 1)[1]
        assert re.search(rf"^ *{name} +{each.role} +{each.state} +{each.pid} ", done.stdout, re.MULTILINE)


@EACH_ENGINE
def test_predict_prints_the_engines_answer(service: Service, files: list[str], question: Question) -> None:
    done = weightctl(service, "predict", "two_inputs", *files, "--json")
    assert done.returncode == 0, done.stderr
    outputs = {each["name"]: each for each in as_json(done)["outputs"]}
    assert set(outputs) == {"sum", "difference"}
    for name, output in outputs.items():
        assert (output["datatype"], output["shape"]) == ("FP32", [3, 4])
        got = np.array(output["data"], np.float32)
        assert got.tobytes() == question.answer[name].tobytes()
    done = weightctl(service, "predict", "two_inputs", *files)
    assert done.returncode == 0, done.stderr
    assert "sum: FP32 [3, 4]" in done.stdout
