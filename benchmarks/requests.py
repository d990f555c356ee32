"""Requests of many kinds of clients to weightd and to mosec, in turn within one run.

One request at a time, from 8 threads of one process, from 8 processes, and 8 in flight from one thread; over HTTP with
binary tensors; small tensors, 600 KB and 8 MB. `rival` compares the starts, the memory and the kills of the two
servers. Both have the settings of `rival`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import material
from benchmarks.gateway import RawBinary
from benchmarks.material import LARGEST, TINY, TINY_WIDTH, Arrays, Reference, Setup, UnavailableError
from benchmarks.mosec_server import MosecClient, MosecServer
from benchmarks.raw_http import RawHttp
from benchmarks.report import Result, Target, percentile, progress, ratio, spread
from benchmarks.rounds import Ask, Threads, seconds_of
from testkit.gatewayprocess import GatewayProcess
from testkit.plain import PlainProcess
from testkit.service import Service
from weightd import Client, Pending

WORKERS = 2
ROUNDS = 12  # of each side, alternating
REQUESTS = 300  # per round of latency
SENDERS = 8
SECONDS = 1.0  # per round of throughput

# Bytes of the input, and requests per round.
SIZES: Mapping[str, tuple[int, int]] = {"600 KB": (600_000, 40), "8 MB": (8_000_000, 10)}

Connect = Callable[[], AbstractContextManager[Ask]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requests(Result):
    """Ratios of weightd to mosec: medians over the rounds, each with its quartiles.

    Attributes:
        p50_ratio: p50 of small requests, one at a time.
        threads_ratio: requests per second of 8 threads of one client process.
        processes_ratio: requests per second of 8 client processes.
        in_flight_ratio: requests per second of one thread with 8 requests in flight, against mosec with 8 threads.
        http_p50_ratio: p50 of small requests over HTTP, with binary tensors, through weightd's gateway.
        http_threads_ratio: requests per second over HTTP of 8 threads of one client process.
        p50_600k_ratio: p50 of requests with an input of 600 KB.
        p50_8m_ratio: the same with 8 MB.
        spreads: the quartiles, by the name of the ratio.
        medians: the medians of weightd and of mosec, in microseconds or requests per second, by the name of the ratio.
    """

    benchmark = "requests"
    p50_ratio: float
    threads_ratio: float
    processes_ratio: float
    in_flight_ratio: float
    http_p50_ratio: float
    http_threads_ratio: float
    p50_600k_ratio: float
    p50_8m_ratio: float
    spreads: Mapping[str, tuple[float, float]]
    medians: Mapping[str, tuple[float, float]]

    def targets(self) -> Sequence[Target]:
        """Return the bounds of the ratios."""
        is_one = self.workers == 1
        return [
            Target("p50_ratio", 0.6 if is_one else 0.4),
            Target("threads_ratio", 2.2 if is_one else 1.05, at_least=True),
            *([] if is_one else [Target("processes_ratio", 1.5, at_least=True)]),
            *([Target("in_flight_ratio", 2.0, at_least=True)] if is_one else []),
            Target("http_p50_ratio", 1.3),
            Target("http_threads_ratio", 1.0, at_least=True),
            Target("p50_600k_ratio", 0.3),
            Target("p50_8m_ratio", 0.3),
        ]

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the table."""
        return [
            (name, f"weightd {ours:,.0f}, mosec {theirs:,.0f}; {spread(self.spreads[name])}")
            for name, (ours, theirs) in self.medians.items()
        ]


class Processes:
    """Client processes, each with a separate connection and one request at a time.

    Args:
        connect: creates a connection; can be pickled.
        inputs: the inputs of the requests, used in turn.
        reference: checks the answers.
    """

    def __init__(self, connect: Connect, inputs: Sequence[Arrays], reference: Reference) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection[Any, Any]] = []
        self._processes: list[Any] = []
        for _ in range(SENDERS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_send_in_rounds, args=(connect, inputs, reference, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Processes:
        for pipe in self._pipes:
            pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()

    def requests_per_second(self, seconds: float) -> float:
        """Send requests for `seconds`; the processes check the answers afterwards."""
        for pipe in self._pipes:
            pipe.send(seconds)
        rates: list[float] = [pipe.recv() for pipe in self._pipes]
        return sum(rates)


def _send_in_rounds(
    connect: Connect, inputs: Sequence[Arrays], reference: Reference, pipe: Connection[Any, Any]
) -> None:
    with connect() as ask, contextlib.suppress(EOFError):
        ask(inputs[0])
        pipe.send("ready")
        while True:
            seconds = pipe.recv()
            answers: list[Arrays] = []
            begin = now = time.perf_counter()
            while now < begin + seconds:
                answers.append(ask(inputs[len(answers) % len(inputs)]))
                now = time.perf_counter()
            for index, answer in enumerate(answers):
                reference.check(index, answer)
            pipe.send(len(answers) / (now - begin))


def run(setup: Setup) -> Requests:
    """Measure everything, with alternating sides."""
    if setup.engine != "onnxruntime":
        raise UnavailableError("requests: expected --engine onnxruntime, which mosec's environment has")
    found: dict[str, tuple[list[float], list[float]]] = {}
    with _both(TINY, setup.workers) as (service, server):
        inputs, reference = _material(TINY, TINY_WIDTH)
        ours, theirs = _weightd(service, TINY), _mosec(server)
        progress("one request at a time")
        found["p50_ratio"] = _latency(ours, theirs, inputs, reference, REQUESTS)
        progress("8 threads; 8 requests in flight")
        in_flight: list[float] = []
        found["threads_ratio"] = _throughput(
            ours,
            theirs,
            inputs,
            reference,
            lambda: in_flight.append(_keep_in_flight(service.address, inputs, reference)),
        )
        found["in_flight_ratio"] = in_flight, found["threads_ratio"][1]
        progress("8 processes")
        processes: tuple[list[float], list[float]] = [], []
        with Processes(ours, inputs, reference) as own, Processes(theirs, inputs, reference) as others:
            for _ in range(ROUNDS):
                processes[0].append(own.requests_per_second(SECONDS))
                processes[1].append(others.requests_per_second(SECONDS))
        found["processes_ratio"] = processes
        progress("HTTP")
        with (
            tempfile.TemporaryDirectory(prefix="gateway-", dir="/tmp") as directory,
            GatewayProcess(Path(directory), f"unix://{service.address}.unix") as gateway,
        ):
            http = functools.partial(_ask_gateway, gateway.port("http"), TINY)
            found["http_p50_ratio"] = _latency(http, theirs, inputs, reference, REQUESTS)
            found["http_threads_ratio"] = _throughput(http, theirs, inputs, reference)
    with _both(LARGEST, setup.workers) as (service, server):
        ours, theirs = _weightd(service, LARGEST), _mosec(server)
        for name, (nbytes, count) in SIZES.items():
            progress(f"inputs of {name}")
            inputs, reference = _material(LARGEST, nbytes // 4)
            key = "p50_600k_ratio" if nbytes < 1_000_000 else "p50_8m_ratio"
            found[key] = _latency(ours, theirs, inputs, reference, count)
    ratios = {name: ratio(*sides) for name, sides in found.items()}
    return Requests(
        engine=setup.engine,
        workers=setup.workers,
        n=ROUNDS,
        **{name: each.median for name, each in ratios.items()},
        spreads={name: each.spread for name, each in ratios.items()},
        medians={name: (percentile(sides[0], 50), percentile(sides[1], 50)) for name, sides in found.items()},
    )


@contextlib.contextmanager
def _both(model: str, workers: int) -> Generator[tuple[Service, MosecServer], None, None]:
    path = material.model(model, "onnxruntime")
    with Service({model: {"path": path, "workers": workers}}) as service, MosecServer(path, workers) as server:
        service.ready()
        server.ready()
        yield service, server


def _material(name: str, width: int) -> tuple[list[Arrays], Reference]:
    inputs = material.inputs(width)
    with PlainProcess(material.model(name, "onnxruntime")) as bare:
        return inputs, Reference(bare, inputs)


def _weightd(service: Service, model: str) -> Connect:
    return functools.partial(_ask_weightd, service.address, model)


@contextlib.contextmanager
def _ask_weightd(address: str, model: str) -> Generator[Ask, None, None]:
    with Client(address, timeout=60.0) as client:
        yield functools.partial(client.infer, model)


def _mosec(server: MosecServer) -> Connect:
    return functools.partial(_ask_mosec, server.port)


@contextlib.contextmanager
def _ask_gateway(port: int, model: str) -> Generator[Ask, None, None]:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        yield RawBinary(RawHttp(connection), model).infer


@contextlib.contextmanager
def _ask_mosec(port: int) -> Generator[Ask, None, None]:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        yield MosecClient(connection).infer


def _latency(
    ours: Connect, theirs: Connect, inputs: list[Arrays], reference: Reference, count: int
) -> tuple[list[float], list[float]]:
    """Return the p50 of each round in microseconds, of weightd and of mosec."""
    medians: tuple[list[float], list[float]] = [], []
    with ours() as ask_weightd, theirs() as ask_mosec:
        for _ in range(ROUNDS):
            for found, ask in zip(medians, (ask_weightd, ask_mosec), strict=True):
                found.append(1e6 * percentile(seconds_of(ask, inputs, count, reference.check), 50))
    return medians


def _throughput(
    ours: Connect,
    theirs: Connect,
    inputs: list[Arrays],
    reference: Reference,
    after_round: Callable[[], object] = lambda: None,
) -> tuple[list[float], list[float]]:
    """Return the requests per second of 8 threads in each round, of weightd and of mosec."""
    rates: tuple[list[float], list[float]] = [], []
    for _ in range(ROUNDS):
        for found, connect in zip(rates, (ours, theirs), strict=True):
            found.append(Threads(connect, inputs, SENDERS).requests_per_second(SECONDS, reference))
        after_round()
    return rates


def _keep_in_flight(address: str, inputs: Sequence[Arrays], reference: Reference) -> float:
    """Return the requests per second of one thread with 8 requests in flight."""
    answers: list[Arrays] = []
    pending: collections.deque[Pending] = collections.deque()
    with Client(address, timeout=60.0) as client:
        # The client gets its direct channel after a few answers.
        for index in range(20):
            client.infer(TINY, inputs[index % len(inputs)])
        begin = time.perf_counter()
        sent = 0
        while time.perf_counter() < begin + SECONDS:
            while len(pending) < SENDERS:
                pending.append(client.submit(TINY, inputs[sent % len(inputs)]))
                sent += 1
            answers.append(pending.popleft().result())
        took = time.perf_counter() - begin
        for each in pending:
            each.result()
    for index, answer in enumerate(answers):
        reference.check(index, answer)
    return len(answers) / took
