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

# Address schemes by transport: the Unix socket, or ZeroMQ through the proxy.
TRANSPORTS: Mapping[str, str] = {"unix": "unix://", "zmq": "ipc://"}
DEFAULT_TRANSPORT = "unix"

# Each model has an input x, FP32 [N, width] unless a shape is given, and an output y of the same shape unless stated.
MLP, MLP_WIDTH = "mlp", 2048  # 12 layers, 192 MiB of weights
TINY, TINY_WIDTH = "tiny", 64
CONV, CONV_SHAPE = "conv", (3, 224, 224)  # 53 convolutions, 10 MB of weights: y is FP32 [N, 1000]
TRANSFORMER, TRANSFORMER_SHAPE = "transformer", (64, 256)  # 4 layers, 13 MB of weights
SHORT, SHORT_SHAPE = "short", (8, 256)  # the same with 8 tokens
RELU = "relu"  # any width
LARGEST = "largest"  # any width: y is the largest element of each row, FP32 [N, 1]

# Number of different inputs, used in turn, so that the check detects an answer to another request.
INPUTS = 4

Arrays = Mapping[str, NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Setup:
    """Settings from the command line."""

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
    """The benchmark cannot run on this machine; the text states what is missing."""


class DifferenceError(Exception):
    """An answer differs from the bare engine's."""


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
    """Compile weightd to bytecode, as an installation does; otherwise each new process would compile it."""
    roots = [str(mindir.REPOSITORY / each) for each in ("protocol", "worker", "daemon")]
    compileall = ["-m", "compileall", "-q"]
    subprocess.run([sys.executable, *compileall, *roots], check=True)
    if engine != ENGINES[0] and (python := mindir.interpreter()) is not None:
        # This interpreter does not run the daemon, and may be too old to compile it.
        subprocess.run([str(python), *compileall, *roots[:-1]], check=True)


def model(name: str, engine: str) -> Path:
    """Return the model's file for `engine`, creating it if it is missing (`make clean` removes it)."""
    directory = mindir.REPOSITORY / "build" / "models"
    directory.mkdir(parents=True, exist_ok=True)
    onnx = directory / f"{name}.onnx"
    if not onnx.exists():
        # The file is renamed when it is complete, so that an interruption leaves no incomplete model.
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
    """Return `count` inputs of `rows` rows of this shape, the same in every run."""
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((rows, *shape), dtype=np.float32)} for _ in range(count)]


class Reference:
    """The bare engine's answers to `inputs`, in the same order."""

    def __init__(self, bare: PlainProcess, inputs: list[Arrays]) -> None:
        self._answers = [bare.infer(each) for each in inputs]

    def check(self, index: int, answer: Arrays) -> None:
        """Compare the answer to request number `index` with the bare engine's, bit by bit. Inputs are used in turn.

        Raises:
            DifferenceError: the answers differ.
        """
        expected = self._answers[index % len(self._answers)]
        if answer.keys() != expected.keys():
            raise DifferenceError(f"answer {index}: expected outputs {list(expected)}, got {list(answer)}")
        for name, array in expected.items():
            other = answer[name]
            if (other.dtype, other.shape) != (array.dtype, array.shape) or other.tobytes() != array.tobytes():
                raise DifferenceError(f"answer {index}: {name} differs from the bare engine's")
