"""Models that differ in one factor, so that each answer shows which model has computed it."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from onnx import external_data_helper, helper, numpy_helper

from benchmarks.material import Arrays
from testkit import mindir, models
from testkit.plain import PlainProcess

WIDTH = 1024
_MIB = 2**20
_LAYER_BYTES = 4 * WIDTH * WIDTH


class FactorModels:
    """`count` ONNX models of about `mib` MiB: "x" FP32 [N, WIDTH] -> "y", the same network times another factor.

    The weights are a file beside each model, and a hard link to one copy.

    Attributes:
        paths: the model files by the names of the models.
    """

    def __init__(self, count: int, mib: int) -> None:
        self._directory = mindir.REPOSITORY / "build" / "models" / f"factor-{mib}"
        self._layers = max(1, round(mib * _MIB / _LAYER_BYTES))
        self.paths = {f"factor-{number:03}": self._directory / f"{number:03}" / "model.onnx" for number in range(count)}
        for number, path in enumerate(self.paths.values()):
            if not path.exists():
                self._write(path, number)

    def answers(self, engine: str, inputs: Sequence[Arrays]) -> dict[str, list[bytes]]:
        """Return the bytes of "y" of each model for each of `inputs`.

        One model runs in the bare engine. The others' answers are its answers times their factors, which is exact,
        because the multiplication is the last operation; the last model's answers are compared with the engine's.
        """
        names = list(self.paths)
        with PlainProcess(self.paths[names[0]], engine) as bare:
            base = [bare.infer(each)["y"] for each in inputs]
        answers = {name: [(y * _factor(number)).tobytes() for y in base] for number, name in enumerate(names)}
        with PlainProcess(self.paths[names[-1]], engine) as bare:
            if [bare.infer(each)["y"].tobytes() for each in inputs] != answers[names[-1]]:
                raise RuntimeError(f"{names[-1]}: the engine does not multiply by the factor as NumPy does")
        return answers

    def _write(self, path: Path, number: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        weights, linked = self._weights(), path.parent / "weights.bin"
        linked.unlink(missing_ok=True)
        os.link(weights, linked)
        names = ["x", *(f"h{index}" for index in range(self._layers))]
        nodes = [helper.make_node("Mul", [names[-1], "factor"], ["y"])]
        arrays = [numpy_helper.from_array(_factor(number).reshape(1), "factor")]
        for index, (before, after) in enumerate(itertools.pairwise(names)):
            weight = numpy_helper.from_array(np.zeros((1, 1), np.float32), f"w{index}")
            weight.dims[:] = [WIDTH, WIDTH]
            external_data_helper.set_external_data(
                weight, location=linked.name, offset=index * _LAYER_BYTES, length=_LAYER_BYTES
            )
            weight.ClearField("raw_data")
            arrays.append(weight)
            nodes.insert(-1, helper.make_node("MatMul", [before, f"w{index}"], [f"m{index}"]))
            nodes.insert(-1, helper.make_node("Relu", [f"m{index}"], [after]))
        unfinished = path.with_suffix(f".{os.getpid()}")
        x, y = (models.fp32(name, "N", WIDTH) for name in "xy")
        models.save(unfinished, nodes, [x], [y], arrays).rename(path)

    def _weights(self) -> Path:
        path = self._directory / "weights.bin"
        if not path.exists():
            rng = np.random.default_rng(0)
            with path.with_suffix(f".{os.getpid()}").open("wb") as file:
                for _ in range(self._layers):
                    weights = rng.standard_normal((WIDTH, WIDTH), dtype=np.float32)
                    file.write((weights * np.float32(np.sqrt(2 / WIDTH))).tobytes())
            Path(file.name).rename(path)
        return path


def copy(path: Path, directory: Path, count: int) -> list[Path]:
    """Copy a model file `count` times; return the paths of the copies."""
    return [Path(shutil.copyfile(path, directory / f"{number}{path.suffix}")) for number in range(count)]


def _factor(number: int) -> np.ndarray[tuple[()], np.dtype[np.float32]]:
    return np.asarray(1 + number / 256, np.float32)
