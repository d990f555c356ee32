"""Files for the tests: models, slow or hanging interpreters, and requests with their answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from testkit import mindir, models
from testkit.plain import PlainProcess

from .manager import Manager

HOME = "/srv/weightd"
MODEL = f"{HOME}/mlp.onnx"
OTHER_MODEL = f"{HOME}/other.onnx"
MINDIR = f"{HOME}/mlp.mindir"
GREEDY = f"{HOME}/greedy.onnx"
BROKEN = f"{HOME}/broken.onnx"
QUESTIONS = f"{HOME}/questions.npz"
MINDIR_QUESTIONS = f"{HOME}/mindir-questions.npz"

STUCK_PYTHON = f"{HOME}/stuck-python"
STUCK = f"{HOME}/stuck"

# Shadows the real module on the path; building a model hangs.
_STUCK = """\
import sys, time
sys.path.remove(__file__.rpartition("/")[0])
del sys.modules["onnxruntime"]
import onnxruntime
onnxruntime.InferenceSession = lambda *_, **__: time.sleep(1000)
"""

# Large enough that a holder saves memory: 16 MiB.
LAYERS, WIDTH = 4, 1024


def install(manager: Manager, scratch: Path) -> None:
    """Create the files where every unit can read them."""
    onnx = models.mlp(scratch / "mlp.onnx", layers=LAYERS, width=WIDTH)
    _questions(onnx, "onnxruntime", scratch / "questions.npz")
    models.mlp(scratch / "other.onnx", layers=LAYERS, width=WIDTH, seed=1)
    _greedy(scratch / "greedy.onnx")
    (scratch / "broken.onnx").write_bytes(b"no model")
    python = mindir.interpreter()
    if python:
        converted = mindir.convert(onnx, scratch / "mlp.mindir", python)
        _questions(converted, "mindspore_lite", scratch / "mindir-questions.npz")
    home = manager.path(HOME)
    home.mkdir(mode=0o755)
    for each in scratch.iterdir():
        shutil.copyfile(each, home / each.name)
        (home / each.name).chmod(0o644)
    manager.write(STUCK_PYTHON, f'#!/bin/sh\nPYTHONPATH={STUCK} exec {manager.python} "$@"\n', 0o755)
    manager.write(f"{STUCK}/onnxruntime.py", _STUCK)


def slow_python(manager: Manager, seconds: int) -> str:
    """Return the path of an interpreter that sleeps this long before it starts."""
    path = f"{HOME}/slow-python-{seconds}"
    manager.write(path, f'#!/bin/sh\nsleep {seconds}\nexec {manager.python} "$@"\n', 0o755)
    return path


def _questions(model: Path, engine: str, out: Path) -> None:
    random = np.random.default_rng(5)
    inputs = [random.standard_normal((rows, WIDTH), dtype=np.float32) for rows in (1, 2, 3)]
    with PlainProcess(model, engine) as plain:
        answers = [plain.infer({"x": each})["y"] for each in inputs]
    np.savez(out, *inputs, *answers)


def _greedy(path: Path) -> Path:
    """Write a model: input "n" INT64 [1] -> "y" FP32 [1] = 1, which fills in n numbers of four bytes on the way."""
    one = helper.make_tensor("value", TensorProto.FLOAT, [1], [1.0])
    nodes = [
        helper.make_node("ConstantOfShape", ["n"], ["many"], value=one),
        helper.make_node("ReduceMax", ["many"], ["y"], keepdims=1),
    ]
    inputs = [helper.make_tensor_value_info("n", TensorProto.INT64, [1])]
    return models.save(path, nodes, inputs, [models.fp32("y", 1)])
