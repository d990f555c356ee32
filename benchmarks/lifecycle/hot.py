"""Latency of a loaded model while other models load and unload, against alone."""

from __future__ import annotations

import itertools
import threading
from typing import NamedTuple

from benchmarks import material
from benchmarks.lifecycle.material import WIDTH, FactorModels
from benchmarks.material import TINY, TINY_WIDTH, Reference
from benchmarks.report import median_over_blocks, progress
from benchmarks.rounds import BackgroundThread, seconds_of
from testkit.plain import PlainProcess
from testkit.service import Service

ROUNDS = 8
REQUESTS = 1000  # per block
_MODELS, _MIB = 6, 30
_BUDGET_MODELS = 2  # that fit into the budget


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
                churn.answered.wait()
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


class LoadingClient(BackgroundThread):
    """A client in a thread that requests the models in turn, so that each request loads one, until the block ends.

    Attributes:
        count: the requests that were answered.
        answered: set after the first answer.
    """

    def __init__(self, service: Service, models: list[str]) -> None:
        super().__init__()
        self._service = service
        self._models = models
        self.count = 0
        self.answered = threading.Event()

    def _run(self) -> None:
        [x] = material.inputs(WIDTH, count=1)
        try:
            with self._service.client() as client:
                for name in itertools.cycle(self._models):
                    client.infer(name, x)
                    self.count += 1
                    self.answered.set()
                    if self._stop.is_set():
                        return
        finally:
            self.answered.set()  # an error ends the wait for the first answer
