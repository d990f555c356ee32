"""Materials of the benchmarks: models that are generated once, inputs, and the bare engine's answers."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from testkit import mindir, models
from testkit.plain import PlainProcess
from testkit.service import Service
from weightd import Client
from weightd_protocol.errors import InvalidArgument, Unavailable

ENGINES = ("onnxruntime", "mindspore_lite")

# How a client reaches the daemon: over the unix socket, or over ZeroMQ and through the proxy.
TRANSPORTS: Mapping[str, str] = {"unix": "unix://", "zmq": "ipc://"}
DEFAULT_TRANSPORT = "unix"

# Each has one input x, FP32 [N, width] unless a shape is given, and one output y: of the same shape unless it is told.
MLP, MLP_WIDTH = "mlp", 2048  # 12 layers, 192 MiB of weights
TINY, TINY_WIDTH = "tiny", 64
CONV, CONV_SHAPE = "conv", (3, 224, 224)  # 53 convolutions, 10 MB of weights: y is FP32 [N, 1000]
TRANSFORMER, TRANSFORMER_SHAPE = "transformer", (64, 256)  # 4 layers, 13 MB of weights: y is of the shape of x
SHORT, SHORT_SHAPE = "short", (8, 256)  # the same with 8 tokens
RELU = "relu"  # of any width: the answer is as long as the input
LARGEST = "largest"  # of any width: y is the largest element, FP32 [N, 1]

# Different ones, in turn: an answer that reaches the wrong request shows.
INPUTS = 4

Arrays = Mapping[str, NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Setup:
    """What the command line chooses."""

    engine: str
    workers: int
    transport: str = DEFAULT_TRANSPORT
    model: str = MLP
    models: int = 1
    parts: tuple[str, ...] = ()
    quick: bool = False
    tenants: bool = True

    def client(self, service: Service, timeout: float = 60.0) -> Client:
        """Return a client of `service` over the transport."""
        return client(service, self.transport, timeout)


def client(service: Service, transport: str, timeout: float = 60.0) -> Client:
    """Return a client of `service` over `transport`."""
    address = TRANSPORTS[transport] + service.address
    try:
        return Client(address, timeout=timeout)
    except (InvalidArgument, Unavailable) as error:
        raise UnavailableError(f"--transport {transport}: {error}") from None


class UnavailableError(Exception):
    """The benchmark cannot run here; the text says what is missing."""


class DifferenceError(Exception):
    """An answer is not the bare engine's."""


def _relu(path: Path) -> Path:
    x, y = (models.fp32(name, "N", "M") for name in "xy")
    return models.save(path, [helper.make_node("Relu", ["x"], ["y"])], [x], [y])


def _largest(path: Path) -> Path:
    node = helper.make_node("ReduceMax", ["x"], ["y"], axes=[1], keepdims=1)
    return models.save(path, [node], [models.fp32("x", "N", "M")], [models.fp32("y", "N", 1)])


_WRITERS: Mapping[str, Callable[[Path], Path]] = {
    MLP: models.mlp,
    TINY: models.tiny,
    CONV: models.convolutions,
    TRANSFORMER: models.transformer,
    SHORT: functools.partial(models.transformer, tokens=SHORT_SHAPE[0]),
    RELU: _relu,
    LARGEST: _largest,
}


def compile_weightd(engine: str) -> None:
    """Have the bytecode there that comes with an installation: else each process that is started compiles weightd."""
    roots = [str(mindir.REPOSITORY / each) for each in ("protocol", "worker", "daemon")]
    compileall = ["-m", "compileall", "-q"]
    subprocess.run([sys.executable, *compileall, *roots], check=True)
    if engine != ENGINES[0] and (python := mindir.interpreter()) is not None:
        # It runs nothing of the daemon, and may be too old to read it.
        subprocess.run([str(python), *compileall, *roots[:-1]], check=True)


def model(name: str, engine: str) -> Path:
    """Return the model's file for `engine`; made where it is missing (make clean removes it)."""
    directory = mindir.REPOSITORY / "build" / "models"
    directory.mkdir(parents=True, exist_ok=True)
    onnx = directory / f"{name}.onnx"
    if not onnx.exists():
        # Renamed when complete: who is interrupted leaves no half model.
        _WRITERS[name](directory / f"{name}.{os.getpid()}.onnx").rename(onnx)
    if engine == "onnxruntime":
        return onnx
    python = mindir.interpreter()
    if python is None:
        raise UnavailableError(mindir.HOW_TO_GET_IT)
    converted = onnx.with_suffix(".mindir")
    if not converted.exists():
        mindir.convert(onnx, directory / f"{name}.{os.getpid()}.mindir", python).rename(converted)
    return converted


def inputs(*shape: int, count: int = INPUTS, rows: int = 1) -> list[Arrays]:
    """Return requests of so many rows, each of this shape, the same in every run."""
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((rows, *shape), dtype=np.float32)} for _ in range(count)]


class Reference:
    """The bare engine's answers to `inputs`, in the same order."""

    def __init__(self, bare: PlainProcess, inputs: list[Arrays]) -> None:
        self._answers = [bare.infer(each) for each in inputs]

    def check(self, index: int, answer: Arrays) -> None:
        """Compare the answer to request number `index`, of which each has the next of the inputs, bit by bit.

        Raises:
            DifferenceError: it is another one.
        """
        expected = self._answers[index % len(self._answers)]
        if answer.keys() != expected.keys():
            raise DifferenceError(f"outputs {list(answer)} instead of {list(expected)}")
        for name, array in expected.items():
            other = answer[name]
            if (other.dtype, other.shape) != (array.dtype, array.shape) or other.tobytes() != array.tobytes():
                raise DifferenceError(f"answer {index}: {name} differs from the bare engine's")
