"""The first answer of a model that is not loaded, against a session that is built in a process of the engine."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from benchmarks import material
from benchmarks.lifecycle.material import copy
from benchmarks.material import Arrays, Reference
from benchmarks.report import progress
from testkit import mindir
from testkit.plain import PlainProcess
from testkit.service import Service

REPEATS = 8
_CHILD = Path(__file__).with_name("bare_child.py")
_UNLOAD_LIMIT_S = 60.0


class ColdStart(NamedTuple):
    """Medians of seconds until the answer to a request.

    Attributes:
        first_s: a model that the daemon has never loaded.
        again_s: the same model after it was unloaded.
        bare_s: build and run in a process that has loaded the engine.
        first_ratio: `first_s` for `bare_s`, repeat by repeat.
        again_ratio: `again_s` for `bare_s`, repeat by repeat.
    """

    first_s: float
    again_s: float
    bare_s: float
    first_ratio: float
    again_ratio: float


def measure(name: str, engine: str, shape: Sequence[int]) -> ColdStart:
    """Measure `REPEATS` copies of a model in turn: bare, never loaded, and unloaded meanwhile."""
    path = material.model(name, engine)
    inputs = material.inputs(*shape, count=1)
    with PlainProcess(path, engine) as plain:
        reference = Reference(plain, inputs)
    bare: list[float] = []
    first: list[float] = []
    again: list[float] = []
    with tempfile.TemporaryDirectory(dir=mindir.REPOSITORY / "build") as directory:
        paths = copy(path, Path(directory), REPEATS + 1)
        table = {"load": "on_demand", "idle_unload": 0.2}
        names = {f"cold-{number}": {**table, "path": each} for number, each in enumerate(paths)}
        np.save(f"{directory}/x.npy", inputs[0]["x"])
        # min_resident = 0, so that a model is unloaded soon after its answer.
        with Service(names, {"min_resident": 0.0}) as service, Bare(Path(directory, "x.npy")) as process:
            for number, each in enumerate(names):
                progress(f"cold start of {name}, {number} of {REPEATS}")
                bare_s = process.seconds(paths[number])
                first_s = _first_answer(service, each, inputs, reference)
                _wait_unloaded(service, each)
                again_s = _first_answer(service, each, inputs, reference)
                _wait_unloaded(service, each)
                if number:  # the first one starts the fork server
                    bare.append((bare_s + process.seconds(paths[number])) / 2)
                    first.append(first_s)
                    again.append(again_s)
    return ColdStart(
        statistics.median(first),
        statistics.median(again),
        statistics.median(bare),
        statistics.median(ours / theirs for ours, theirs in zip(first, bare, strict=True)),
        statistics.median(ours / theirs for ours, theirs in zip(again, bare, strict=True)),
    )


class Bare:
    """A process that has loaded the engine and builds models one after another.

    Args:
        inputs: the path of an .npy file with the input x of each run.
    """

    def __init__(self, inputs: Path) -> None:
        self._inputs = inputs

    def __enter__(self) -> Bare:
        command = [sys.executable, str(_CHILD), str(self._inputs)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.communicate()

    def seconds(self, path: Path) -> float:
        """Return the seconds of building and running a model."""
        assert self._process.stdin
        assert self._process.stdout
        print(path, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


def _first_answer(service: Service, model: str, inputs: Sequence[Arrays], reference: Reference) -> float:
    with service.client() as client:
        client.server()
        begin = time.perf_counter()
        answer = client.infer(model, inputs[0])
        seconds = time.perf_counter() - begin
    reference.check(0, answer)
    return seconds


def _wait_unloaded(service: Service, model: str) -> None:
    deadline = time.monotonic() + _UNLOAD_LIMIT_S
    while any(each.name == model and each.reserved_bytes for each in service.status().models):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{model} was not unloaded within {_UNLOAD_LIMIT_S:g} s")
        time.sleep(0.02)
