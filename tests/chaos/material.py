"""Models of a run, and requests with the answers of the engine without weightd, which are compared bit by bit."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from testkit import mindir, models
from testkit.plain import PlainProcess

from . import cut, guests

QUESTIONS = 40
# The number of all crashing requests.
POISONED = -1
MAX_BYTES = 8 * 1024 * 1024

_ROWS = 1_572_864
_WIDTH = 512
_LAYERS = 4
# MindSpore Lite is slow for larger batches; the elastic model has the large tensors.
_MAX_BATCH = 512

Arrays = Mapping[str, NDArray[Any]]


class NoEngineError(RuntimeError):
    """MindSpore Lite is not installed, but the run needs it."""


@dataclass(frozen=True)
class Model:
    """A model of the run.

    Attributes:
        name: name of the model.
        path: path of its file.
        engine: name of the engine.
        python: interpreter with this engine.
        dense: whether each answer depends on all weights.
        table: further keys of its configuration, if the model is split over ranks.
    """

    name: str
    path: Path
    engine: str
    python: Path
    dense: bool
    table: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True)
class SampleRequest:
    """Inputs, and the bytes of the expected answer."""

    inputs: Arrays
    answer: Mapping[str, tuple[str, tuple[int, ...], bytes]]

    def answered_by(self, outputs: Mapping[str, Any]) -> bool:
        """Return whether the outputs equal the answer: names, datatypes, shapes and bits."""
        return set(outputs) == set(self.answer) and all(
            (array.dtype.str, array.shape) == self.answer[name][:2] and array.tobytes() == self.answer[name][2]
            for name, array in outputs.items()
        )


def make(directory: Path, seed: int, *, real_ranks: bool = False) -> list[Model]:
    """Write the models and their requests into the directory; ranks run the real MindSpore, or are simulated.

    Raises:
        NoEngineError: MindSpore Lite is not installed and CI=true; otherwise ONNX Runtime replaces it, with a message.
    """
    here = Path(sys.executable)
    tiny = Model("tiny", models.negated(directory / "tiny.onnx"), "onnxruntime", here, dense=True)
    elastic = Model("elastic", _table(directory / "elastic.onnx"), "onnxruntime", here, dense=False)
    dense = models.mlp(directory / "dense.onnx", layers=_LAYERS, width=_WIDTH)
    python = mindir.interpreter()
    if python is not None:
        path = mindir.convert(dense, dense.with_suffix(".mindir"), python)
        mlp = Model("dense", path, "mindspore_lite", python, dense=True)
    elif os.environ.get("CI") == "true":
        raise NoEngineError(mindir.HOW_TO_GET_IT)
    else:
        print(f"MINDSPORE LITE NOT FOUND, using ONNX Runtime instead: {mindir.HOW_TO_GET_IT}", flush=True)
        mlp = Model("dense", dense, "onnxruntime", here, dense=True)
    chosen = [tiny, elastic, mlp]
    for number, model in enumerate(chosen):
        _ask(model, np.random.default_rng([seed, number]))
    made = cut.make(directory, QUESTIONS, np.random.default_rng([seed, len(chosen)]), is_real=real_ranks)
    _keep(made.path, made.questions)
    return [*chosen, Model(cut.NAME, made.path, made.engine, made.python, dense=True, table=made.table)]


def make_guests(directory: Path, seed: int) -> list[Model]:
    """Write the guests and their requests; the table of each guest has other values."""
    here = Path(sys.executable)
    made: list[Model] = []
    for number, name in enumerate(guests.NAMES, 1):
        made.append(Model(name, _table(directory / f"{name}.onnx", number), "onnxruntime", here, dense=False))
        _ask(made[-1], np.random.default_rng([seed, 100 + number]))
    return made


def make_two(directory: Path, seed: int) -> list[Model]:
    """Write two models and their requests; the model "slow" computes for long on small inputs."""
    here = Path(sys.executable)
    made = [
        Model("tiny", models.negated(directory / "tiny.onnx"), "onnxruntime", here, dense=True),
        Model("slow", models.transformer(directory / "slow.onnx"), "onnxruntime", here, dense=True),
    ]
    for number, model in enumerate(made):
        _ask(model, np.random.default_rng([seed, number]))
    return made


def load(model: Path) -> list[SampleRequest]:
    """Read the requests that `make` has written for the model at this path."""
    with np.load(_pool(model)) as pool:
        order = json.loads(str(pool["order"]))
        return [
            SampleRequest(
                {name: pool[f"{i}.in.{name}"] for name in inputs},
                {name: frozen(pool[f"{i}.out.{name}"]) for name in outputs},
            )
            for i, (inputs, outputs) in enumerate(order)
        ]


def frozen(array: NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    """Return the compared parts of an array: datatype, shape and bytes."""
    return array.dtype.str, array.shape, array.tobytes()


def _pool(model: Path) -> Path:
    return model.with_name(f"{model.stem}.questions.npz")


def _ask(model: Model, rng: np.random.Generator) -> None:
    with PlainProcess(model.path, model.engine, model.python) as plain:
        asked = [_INPUTS[model.name](rng, i) for i in range(QUESTIONS)]
        _keep(model.path, [(inputs, plain.infer(inputs)) for inputs in asked])


def _keep(path: Path, questions: Iterable[tuple[Arrays, Arrays]]) -> None:
    """Write requests with their answers for the model at this path."""
    arrays: dict[str, NDArray[Any]] = {}
    order: list[tuple[list[str], list[str]]] = []
    for i, (inputs, outputs) in enumerate(questions):
        order.append((list(inputs), list(outputs)))
        arrays.update({f"{i}.in.{name}": array for name, array in inputs.items()})
        arrays.update({f"{i}.out.{name}": array for name, array in outputs.items()})
    np.savez(_pool(path), allow_pickle=False, order=np.array(json.dumps(order)), **arrays)


def _table(path: Path, seed: int = 0) -> Path:
    """Write a model with a table of 12 MiB: "ids" INT64 [N, 2] -> "rows" FP32 [N, 2, 2]; 16 bytes per row."""
    values = np.random.default_rng(seed).standard_normal((_ROWS, 2), dtype=np.float32)
    nodes = [helper.make_node("Gather", ["table", "ids"], ["rows"], axis=0)]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", 2])
    table = numpy_helper.from_array(values, "table")
    return models.save(path, nodes, [ids], [models.fp32("rows", "N", 2, 2)], [table])


def poison(number: int) -> Arrays:
    """Return inputs that crash each worker of the tiny model; they differ for each number."""
    return {"a": np.array([number, -(2**63)], np.int64)}


def _size(rng: np.random.Generator, number: int, most: int) -> int:
    """Return the minimum first, the maximum second, then log-uniformly distributed sizes between them."""
    return (1, most)[number] if number < 2 else int(math.exp(rng.uniform(0, math.log(most))))


_INPUTS: Mapping[str, Callable[[np.random.Generator, int], Arrays]] = {
    "tiny": lambda rng, _: {"a": rng.integers(-(2**63) + 1, 2**63, 6, np.int64)},
    "slow": lambda rng, number: {"x": rng.standard_normal((1 + number % 3, 64, 256), dtype=np.float32)},
    "elastic": lambda rng, number: {"ids": rng.integers(0, _ROWS, (_size(rng, number, MAX_BYTES // 16), 2))},
    **dict.fromkeys(guests.NAMES, lambda rng, number: {"ids": rng.integers(0, _ROWS, (_size(rng, number, 1024), 2))}),
    "dense": lambda rng, number: {"x": rng.standard_normal((_size(rng, number, _MAX_BATCH), _WIDTH), dtype=np.float32)},
}
