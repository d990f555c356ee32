"""Latency of a loaded model while other models load and unload, against alone."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from benchmarks import material
from benchmarks.lifecycle.material import WIDTH, FactorModels
from benchmarks.material import TINY, TINY_WIDTH, Reference
from benchmarks.report import median_over_blocks, progress
from benchmarks.rounds import seconds_of
from testkit.plain import PlainProcess
from testkit.service import Service

ROUNDS = 8
REQUESTS = 1000  # per block
_MODELS, _MIB = 6, 30
_BUDGET_MODELS = 2  # that fit into the budget
_CHILD = Path(__file__).with_name("loading_child.py")


class HotModel(NamedTuple):
    """Latencies in microseconds, medians of the blocks' percentiles.

    Attributes:
        alone_p50_us: the hot model alone.
        alone_p99_us: the same.
        loading_p50_us: the hot model while one client has other models loaded and unloaded.
        loading_p99_us: the same.
        loads_per_s: the loads of the other models per second.
    """

    alone_p50_us: float
    alone_p99_us: float
    loading_p50_us: float
    loading_p99_us: float
    loads_per_s: float


def measure(engine: str, rounds: int = ROUNDS) -> HotModel:
    """Measure blocks of requests, in turn alone and beside a client whose requests load and unload models."""
    path = material.model(TINY, engine)
    inputs = material.inputs(TINY_WIDTH)
    with PlainProcess(path, engine) as plain:
        reference = Reference(plain, inputs)
    others = FactorModels(_MODELS, _MIB)
    tables: dict[str, dict[str, object]] = {
        name: {"path": path, "load": "on_demand"} for name, path in others.paths.items()
    }
    tables["hot"] = {"path": path}
    budget = int((_BUDGET_MODELS + 0.5) * 1.7 * _MIB * 2**20)
    alone: list[list[float]] = []
    loading: list[list[float]] = []
    seconds = loads = 0.0
    with (
        Service(tables, {"max_model_bytes": budget, "min_resident": 0.0}) as service,
        service.client() as client,
    ):
        client.infer("hot", inputs[0])
        for number in range(rounds):
            progress(f"hot model, round {number + 1} of {rounds}")
            alone.append(seconds_of(lambda each: client.infer("hot", each), inputs, REQUESTS, reference.check))
            with LoadingClient(service, list(others.paths)) as churn:
                loading.append(seconds_of(lambda each: client.infer("hot", each), inputs, REQUESTS, reference.check))
            loads += churn.count
            seconds += sum(loading[-1])
    micro = 1e6
    return HotModel(
        micro * median_over_blocks(alone, 50),
        micro * median_over_blocks(alone, 99),
        micro * median_over_blocks(loading, 50),
        micro * median_over_blocks(loading, 99),
        loads / seconds,
    )


class LoadingClient:
    """A client process that requests the models in turn, so that each request loads one, until the block ends.

    It is a separate process, because a thread would share the interpreter lock with the measured client.

    Attributes:
        count: the requests that were answered during the block.
    """

    def __init__(self, service: Service, models: list[str]) -> None:
        self._address = service.address
        self._models = models
        self.count = 0

    def __enter__(self) -> LoadingClient:
        [x] = material.inputs(WIDTH, count=1)
        with tempfile.NamedTemporaryFile(suffix=".npy") as file:
            np.save(file, x["x"])
            file.flush()
            command = [sys.executable, str(_CHILD), self._address, file.name, *self._models]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert self._process.stdout
            if not self._process.stdout.readline():
                raise RuntimeError("the client that loads models has failed")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        is_running = self._process.poll() is None
        self._process.kill()
        output, _ = self._process.communicate()
        self.count = output.count("\n")
        if error is None and not is_running:
            raise RuntimeError("the client that loads models has failed")
