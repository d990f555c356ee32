"""Requests per second of a large model against concurrent bare engine processes, and of a tiny model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Generator, Mapping, Sequence

from benchmarks import material
from benchmarks.load import answers
from benchmarks.material import MLP, MLP_WIDTH, TINY, TINY_WIDTH, Arrays, Reference, Setup
from benchmarks.parallel_runner import ParallelRunner
from benchmarks.report import MB, Result, Target, progress, ratio, spread
from benchmarks.rounds import Ask, Threads
from testkit.memory import pss_total
from testkit.plain import PlainProcess, concurrent_times
from testkit.service import Service
from weightd import Client

WORKERS = 2
IN_FLIGHT = 4  # requests for each worker
ROUNDS = 10  # of each side, alternating
REQUESTS = 100  # for each worker, per round
THREADS = (1, 8)
SECONDS = 0.5  # per round of tiny requests
WARM_UP = 10
PARALLEL = "parallel"  # name of the large model with parallel workers in one process


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput(Result):
    """Requests per second with single rows, medians of the rounds.

    Attributes:
        rps: one client of weightd over `transport`, with `in_flight` requests in flight.
        bare_rps: `workers` processes that only run predicts, without a client.
        ratio: `rps` divided by `bare_rps`, median of the rounds.
        tiny_rps: a model with a negligible predict, by the number of threads in one client process; each thread has a
            separate client and one request at a time.
        model_parallel_runner_rps: MindSpore Lite's ModelParallelRunner with `workers` workers in one process, used by
            twice as many threads; None for other engines.
        parallel_workers_rps: weightd with such a runner, one process with `parallel_workers` = `workers`; None for
            other engines.
        pss_mb: memory of all processes of the large model: "processes", and "parallel" with parallel workers.
    """

    benchmark = "throughput"
    transport: str
    in_flight: int
    rps: float
    bare_rps: float
    ratio: float
    ratio_spread: tuple[float, float]
    tiny_rps: Mapping[str, float]
    model_parallel_runner_rps: float | None
    parallel_workers_rps: float | None
    pss_mb: Mapping[str, float]

    def targets(self) -> Sequence[Target]:
        """Return the bound of the ratio."""
        return [Target("ratio", 0.97, at_least=True)]

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the table."""
        rows = [
            (f"weightd over {self.transport}, {self.in_flight} in flight", f"{self.rps:7.1f} requests/s"),
            (f"{self.workers} bare processes", f"{self.bare_rps:7.1f} requests/s"),
            ("ratio", spread(self.ratio_spread)),
        ]
        if self.parallel_workers_rps is not None:
            name = f"weightd, one process, parallel_workers = {self.workers}"
            rows.append((name, f"{self.parallel_workers_rps:7.1f} requests/s"))
        if self.model_parallel_runner_rps is not None:
            rows.append(("ModelParallelRunner", f"{self.model_parallel_runner_rps:7.1f} requests/s"))
        for how, megabytes in self.pss_mb.items():
            rows.append((f"memory, {how}", f"{megabytes:7.1f} MB"))
        for threads, rps in self.tiny_rps.items():
            rows.append((f"tiny requests, {threads} thread{'s' if threads != '1' else ''}", f"{rps:7.0f} requests/s"))
        return rows


def run(setup: Setup) -> Throughput:
    """Measure alternating rounds of all sides."""
    engine, workers = setup.engine, setup.workers
    path = material.model(MLP, engine)
    tiny = material.model(TINY, engine)
    inputs, tiny_inputs = material.inputs(MLP_WIDTH), material.inputs(TINY_WIDTH)
    in_flight = IN_FLIGHT * workers
    count = REQUESTS * workers
    rps: list[float] = []
    bare_rps: list[float] = []
    runner_rps: list[float] = []
    parallel_rps: list[float] = []
    tiny_rps: dict[int, list[float]] = {threads: [] for threads in THREADS}
    with contextlib.ExitStack() as stack:
        bare = [stack.enter_context(PlainProcess(path, engine)) for _ in range(workers)]
        reference = Reference(bare[0], inputs)
        with PlainProcess(tiny, engine) as bare_tiny:
            tiny_reference = Reference(bare_tiny, tiny_inputs)
        tables: dict[str, dict[str, object]] = {
            name: {"path": each, "workers": workers} for name, each in ((MLP, path), (TINY, tiny))
        }
        if engine == "mindspore_lite":
            tables[PARALLEL] = {"path": path, "workers": 1, engine: {"parallel_workers": workers}}
        service = stack.enter_context(Service(tables))
        service.ready()
        client = stack.enter_context(setup.client(service))
        runner = stack.enter_context(ParallelRunner(path, workers, inputs)) if engine == "mindspore_lite" else None

        @contextlib.contextmanager
        def connect() -> Generator[Ask, None, None]:
            with setup.client(service) as client:
                yield functools.partial(client.infer, TINY)

        concurrent_times(bare, inputs[0], WARM_UP)
        ways = {MLP: rps, PARALLEL: parallel_rps} if PARALLEL in tables else {MLP: rps}
        for name in ways:
            _weightd(client, name, inputs, WARM_UP * workers, in_flight, reference)
        for number in range(ROUNDS):
            progress(f"round {number + 1} of {ROUNDS}")
            for name, each in ways.items():
                each.append(_weightd(client, name, inputs, count, in_flight, reference))
            seconds = concurrent_times(bare, inputs[0], REQUESTS)
            bare_rps.append(count / max(float(each.sum()) for each in seconds))
            if runner is not None:
                runner_rps.append(runner.requests_per_second(count, reference))
            for threads in THREADS:
                clients = Threads(connect, tiny_inputs, threads)
                tiny_rps[threads].append(clients.requests_per_second(SECONDS, tiny_reference))
        pss_mb = {"processes" if name == MLP else PARALLEL: _pss(service, name) / MB for name in ways}
    compared = ratio(rps, bare_rps)
    return Throughput(
        engine=engine,
        workers=workers,
        n=ROUNDS * count,
        transport=setup.transport,
        in_flight=in_flight,
        rps=statistics.median(rps),
        bare_rps=statistics.median(bare_rps),
        ratio=compared.median,
        ratio_spread=compared.spread,
        tiny_rps={str(threads): statistics.median(each) for threads, each in tiny_rps.items()},
        model_parallel_runner_rps=statistics.median(runner_rps) if runner_rps else None,
        parallel_workers_rps=statistics.median(parallel_rps) if parallel_rps else None,
        pss_mb=pss_mb,
    )


def _pss(service: Service, model: str) -> int:
    """Return the PSS of all processes of a model, with half of the memory shared with the other model."""
    with service.client() as client:
        [status] = [each for each in client.status().models if each.name == model]
    return pss_total([process.pid for generation in status.generations for process in generation.processes])


def _weightd(
    client: Client, model: str, inputs: list[Arrays], count: int, in_flight: int, reference: Reference
) -> float:
    """Return requests per second, from the start of the first request to the last answer."""
    begin = time.perf_counter()
    received = list(answers(client, model, inputs, count, in_flight))
    seconds = time.perf_counter() - begin
    for index, answer in received:
        reference.check(index, answer)
    return count / seconds
