"""Requests per second of a large model, against as many bare processes of the engine that run at once."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Sequence

from benchmarks import material
from benchmarks.load import answers
from benchmarks.material import MLP, MLP_WIDTH, Arrays, Reference
from benchmarks.parallel_runner import ParallelRunner
from benchmarks.report import Result, Target, progress
from testkit.plain import PlainProcess, times_together
from testkit.service import Service
from weightd.client import Client

WORKERS = 2
IN_FLIGHT = 4  # requests for each worker
BLOCKS = 10  # of each, in turn
BLOCK = 100  # requests for each worker
WARM_UP = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput(Result):
    """Figures in requests per second, batch 1, medians of the blocks.

    Attributes:
        rps: one client of weightd, with `in_flight` requests under way.
        bare_rps: `workers` processes that do nothing but predict, with no client at all.
        ratio: the former by the latter.
        model_parallel_runner_rps: MindSpore Lite's own ModelParallelRunner with `workers` workers in one process
            and twice as many threads that ask it; None for the other engine.
    """

    benchmark = "throughput"
    in_flight: int
    rps: float
    bare_rps: float
    ratio: float
    model_parallel_runner_rps: float | None

    def targets(self) -> Sequence[Target]:
        """Return the bound of the ratio."""
        return [Target("ratio", 0.95, at_least=True)]

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the table."""
        rows = [
            (f"weightd, {self.in_flight} in flight", f"{self.rps:7.1f} requests/s"),
            (f"{self.workers} bare processes", f"{self.bare_rps:7.1f} requests/s"),
        ]
        if self.model_parallel_runner_rps is not None:
            rows.append(("ModelParallelRunner", f"{self.model_parallel_runner_rps:7.1f} requests/s"))
        return rows


def run(engine: str, workers: int = WORKERS) -> Throughput:
    """Measure blocks of each in turn."""
    path = material.model(MLP, engine)
    inputs = material.inputs(MLP_WIDTH)
    in_flight = IN_FLIGHT * workers
    count = BLOCK * workers
    with contextlib.ExitStack() as stack:
        bare = [stack.enter_context(PlainProcess(path, engine)) for _ in range(workers)]
        reference = Reference(bare[0], inputs)
        service = stack.enter_context(Service({MLP: {"path": path, "workers": workers}}))
        service.ready()
        client = stack.enter_context(service.client())
        runner = stack.enter_context(ParallelRunner(path, workers, inputs)) if engine == "mindspore_lite" else None

        times_together(bare, inputs[0], WARM_UP)
        _weightd(client, inputs, WARM_UP * workers, in_flight, reference)
        rps: list[float] = []
        bare_rps: list[float] = []
        runner_rps: list[float] = []
        for block in range(BLOCKS):
            progress(f"block {block + 1} of {BLOCKS}")
            rps.append(_weightd(client, inputs, count, in_flight, reference))
            seconds = times_together(bare, inputs[0], BLOCK)
            bare_rps.append(count / max(float(each.sum()) for each in seconds))
            if runner is not None:
                runner_rps.append(runner.requests_per_second(count, reference))
    return Throughput(
        engine=engine,
        workers=workers,
        n=BLOCKS * count,
        in_flight=in_flight,
        rps=statistics.median(rps),
        bare_rps=statistics.median(bare_rps),
        ratio=statistics.median(rps) / statistics.median(bare_rps),
        model_parallel_runner_rps=statistics.median(runner_rps) if runner_rps else None,
    )


def _weightd(client: Client, inputs: list[Arrays], count: int, in_flight: int, reference: Reference) -> float:
    """Return requests per second, from the first one's start to the last one's answer."""
    begin = time.perf_counter()
    received = list(answers(client, MLP, inputs, count, in_flight))
    seconds = time.perf_counter() - begin
    for index, answer in received:
        reference.check(index, answer)
    return count / seconds
