"""weightd and mosec with the same models, engine and number of workers, measured in turn within one run.

mosec (https://github.com/mosecorg/mosec, Apache-2.0) had the lowest latency of the model servers for Python programs.
`make bench-rival` installs a pinned version in a separate environment. Each side uses its cheapest path: mosec raw
bytes over persistent HTTP connections, TCP_NODELAY, and a client that reads only the status and length of a response
(benchmarks/mosec_server.py); weightd its client. Neither batches, ONNX Runtime has one thread on both, and all other
settings are defaults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from benchmarks import material
from benchmarks.material import LARGEST, MLP, MLP_WIDTH, TINY, TINY_WIDTH, Arrays, Reference, Setup, UnavailableError
from benchmarks.mosec_server import MosecServer
from benchmarks.report import MB, Result, Target, median_over_blocks, percentile, progress, ratio, spread
from benchmarks.rounds import Ask, Threads, seconds_of
from testkit.memory import pss_total
from testkit.plain import PlainProcess
from testkit.service import Service
from weightd import WeightdError

WORKERS = 2
LARGE_WORKERS = 4  # of the 192 MiB model, for the measurements of start and memory
ROUNDS = 20  # of each side, alternating
REQUESTS = 250  # per round of latency
INPUT_BYTES, INPUT_REQUESTS = 600_000, 40
THREADS = (1, 8)
THREAD_ROUNDS, THREAD_SECONDS = 10, 0.8
STARTS = 3
KILLS = 3

_LOAD_THREADS = 4
_QUIET_S = 1.0
_LIMIT_S = 120.0

# A value for each side, "weightd" and "mosec".
Both = Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rival(Result):
    """Medians; each ratio is weightd divided by mosec, compared round by round.

    Attributes:
        latency_ratio: p50 of tiny requests, one at a time.
        throughput_ratio: tiny requests per second of 8 threads in one client process.
        one_thread_ratio: tiny requests per second of one thread.
        input_600k_ratio: p50 of requests with an input of 600,000 bytes and one number as output.
        first_answer_ratio: ratio of `first_answer_s`.
        all_ready_ratio: ratio of `all_ready_s`.
        first_answer_s: time from the start to the first correct answer, for the 192 MiB model with `large_workers`
            workers and the files in the page cache.
        all_ready_s: time from the start until every worker can answer, for the same model.
        pss_mb: memory of all processes together after each worker has answered, for the same model.
        killed_recovery_ms: time from kill -9 of a worker under load until there are as many workers as before.
        killed_errors: failed requests over all kills.
        killed_longest_ms: longest duration of a request during the kills.
    """

    benchmark = "rival"
    transport: str
    latency_ratio: float
    latency_spread: tuple[float, float]
    throughput_ratio: float
    throughput_spread: tuple[float, float]
    one_thread_ratio: float
    one_thread_spread: tuple[float, float]
    input_600k_ratio: float
    input_600k_spread: tuple[float, float]
    first_answer_ratio: float
    first_answer_spread: tuple[float, float]
    all_ready_ratio: float
    all_ready_spread: tuple[float, float]
    large_workers: int
    p50_us: Both
    p99_us: Both
    rps_8_threads: Both
    rps_1_thread: Both
    input_600k_p50_us: Both
    first_answer_s: Both
    all_ready_s: Both
    pss_mb: Both
    killed_recovery_ms: Both
    killed_errors: Both
    killed_longest_ms: Both

    def targets(self) -> Sequence[Target]:
        """Return the bounds of the ratios."""
        return [
            Target("latency_ratio", 0.8),
            Target("throughput_ratio", 1.25, at_least=True),
            Target("first_answer_ratio", 1.2),
            Target("all_ready_ratio", 1.2),
        ]

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the table."""
        large = f"192 MiB, {self.large_workers} workers"
        return [
            (f"weightd over {self.transport}, mosec", ""),
            ("tiny request, p50", _both(self.p50_us, "us")),
            ("tiny request, p99", _both(self.p99_us, "us")),
            ("latency_ratio", spread(self.latency_spread)),
            ("tiny requests/s, 8 threads", _both(self.rps_8_threads, "requests/s")),
            ("throughput_ratio", spread(self.throughput_spread)),
            ("tiny requests/s, 1 thread", _both(self.rps_1_thread, "requests/s", self.one_thread_ratio)),
            ("input of 600 KB, p50", _both(self.input_600k_p50_us, "us", self.input_600k_ratio)),
            (f"first answer, {large}", _both(self.first_answer_s, "s")),
            ("first_answer_ratio", spread(self.first_answer_spread)),
            (f"all ready, {large}", _both(self.all_ready_s, "s")),
            ("all_ready_ratio", spread(self.all_ready_spread)),
            (f"memory, {large}", _both(self.pss_mb, "MB")),
            ("worker killed under load: recovered", _both(self.killed_recovery_ms, "ms")),
            ("… errors", _both(self.killed_errors, "")),
            ("… longest request", _both(self.killed_longest_ms, "ms")),
        ]


class Contender(Protocol):
    """A running service of one model."""

    begin: float

    def connect(self) -> AbstractContextManager[Ask]:
        """Connect, as soon as it listens."""
        ...

    def ready(self) -> None:
        """Wait until every worker can answer."""
        ...

    def pids(self) -> list[int]:
        """Return the pids of all processes of the service."""
        ...

    def kill_worker(self) -> Callable[[], None]:
        """Kill a worker; return a function that waits until it is replaced."""
        ...


# Starts a service of a model with a number of workers.
Start = Callable[[str, int], AbstractContextManager[Contender]]


class _Weightd:
    def __init__(self, setup: Setup, service: Service, name: str, workers: int) -> None:
        self._setup = setup
        self._service = service
        self._name = name
        self._workers = workers
        self.begin = service.begin

    @contextlib.contextmanager
    def connect(self) -> Generator[Ask, None, None]:
        with self._setup.client(self._service) as client:
            yield functools.partial(client.infer, self._name)

    def ready(self) -> None:
        self._service.ready()

    def pids(self) -> list[int]:
        return self._service.pids()

    def kill_worker(self) -> Callable[[], None]:
        struck = self._ready_workers()[0]
        os.kill(struck, signal.SIGKILL)

        def wait() -> None:
            _until(lambda: len(set(self._ready_workers()) - {struck}) == self._workers)

        return wait

    def _ready_workers(self) -> list[int]:
        return [each.pid for each in self._service.processes() if each.role == "worker" and each.state == "ready"]


class _Mosec:
    def __init__(self, server: MosecServer) -> None:
        self._server = server
        self.begin = server.begin

    @contextlib.contextmanager
    def connect(self) -> Generator[Ask, None, None]:
        with self._server.client() as client:
            yield client.infer

    def ready(self) -> None:
        self._server.ready()

    def pids(self) -> list[int]:
        return self._server.pids()

    def kill_worker(self) -> Callable[[], None]:
        connected = self._server.connected()
        os.kill(self._server.workers()[0], signal.SIGKILL)
        return functools.partial(self._server.until_connected, connected + 1)


def run(setup: Setup) -> Rival:
    """Measure everything, with alternating sides."""
    if setup.engine != "onnxruntime":
        raise UnavailableError(
            "rival: expected --engine onnxruntime, because mosec has no environment with MindSpore Lite"
        )
    sides: dict[str, Start] = {"weightd": functools.partial(_weightd, setup), "mosec": _mosec}
    progress("latency, throughput, large inputs")
    with _services(sides, TINY, setup.workers) as tiny:
        inputs, reference = _material(TINY, TINY_WIDTH)
        latency = _latency(tiny, inputs, reference, ROUNDS, REQUESTS)
        rps = {threads: _throughput(tiny, inputs, reference, threads) for threads in THREADS}
    with _services(sides, LARGEST, setup.workers) as largest:
        inputs, reference = _material(LARGEST, INPUT_BYTES // 4)
        large_input = _latency(largest, inputs, reference, ROUNDS, INPUT_REQUESTS)
    inputs, reference = _material(MLP, MLP_WIDTH)
    starts: dict[str, list[tuple[float, float, float]]] = {who: [] for who in sides}
    for number in range(STARTS):
        progress(f"start {number + 1} of {STARTS}")
        for who, start in sides.items():
            starts[who].append(_start(start, inputs, reference))
    kills: dict[str, _KillResult] = {}
    for who, start in sides.items():
        progress(f"kills, {who}")
        with start(MLP, setup.workers) as service:
            kills[who] = _kills(service, inputs, reference)
    compared = {
        "latency": ratio(*(_medians(latency[who]) for who in sides)),
        "large_input": ratio(*(_medians(large_input[who]) for who in sides)),
        **{f"rps {threads}": ratio(*each.values()) for threads, each in rps.items()},
        "first_answer": ratio(*([each[0] for each in starts[who]] for who in sides)),
        "all_ready": ratio(*([each[1] for each in starts[who]] for who in sides)),
    }
    return Rival(
        engine=setup.engine,
        workers=setup.workers,
        n=ROUNDS * REQUESTS,
        transport=setup.transport,
        latency_ratio=compared["latency"].median,
        latency_spread=compared["latency"].spread,
        throughput_ratio=compared["rps 8"].median,
        throughput_spread=compared["rps 8"].spread,
        one_thread_ratio=compared["rps 1"].median,
        one_thread_spread=compared["rps 1"].spread,
        input_600k_ratio=compared["large_input"].median,
        input_600k_spread=compared["large_input"].spread,
        first_answer_ratio=compared["first_answer"].median,
        first_answer_spread=compared["first_answer"].spread,
        all_ready_ratio=compared["all_ready"].median,
        all_ready_spread=compared["all_ready"].spread,
        large_workers=LARGE_WORKERS,
        p50_us={who: 1e6 * median_over_blocks(latency[who], 50) for who in sides},
        p99_us={who: 1e6 * median_over_blocks(latency[who], 99) for who in sides},
        rps_8_threads={who: statistics.median(rps[8][who]) for who in sides},
        rps_1_thread={who: statistics.median(rps[1][who]) for who in sides},
        input_600k_p50_us={who: 1e6 * median_over_blocks(large_input[who], 50) for who in sides},
        first_answer_s={who: statistics.median(each[0] for each in starts[who]) for who in sides},
        all_ready_s={who: statistics.median(each[1] for each in starts[who]) for who in sides},
        pss_mb={who: statistics.median(each[2] for each in starts[who]) / MB for who in sides},
        killed_recovery_ms={who: 1e3 * statistics.median(kills[who].recovery_times) for who in sides},
        killed_errors={who: kills[who].errors for who in sides},
        killed_longest_ms={who: 1e3 * kills[who].longest for who in sides},
    )


@contextlib.contextmanager
def _weightd(setup: Setup, name: str, workers: int) -> Generator[Contender, None, None]:
    with Service({name: {"path": material.model(name, setup.engine), "workers": workers}}) as service:
        yield _Weightd(setup, service, name, workers)


@contextlib.contextmanager
def _mosec(name: str, workers: int) -> Generator[Contender, None, None]:
    with MosecServer(material.model(name, "onnxruntime"), workers) as server:
        yield _Mosec(server)


@contextlib.contextmanager
def _services(sides: Mapping[str, Start], name: str, workers: int) -> Generator[Mapping[str, Contender], None, None]:
    with contextlib.ExitStack() as stack:
        services = {who: stack.enter_context(start(name, workers)) for who, start in sides.items()}
        for service in services.values():
            service.ready()
        yield services


def _material(name: str, width: int) -> tuple[list[Arrays], Reference]:
    inputs = material.inputs(width)
    with PlainProcess(material.model(name, "onnxruntime")) as bare:
        return inputs, Reference(bare, inputs)


def _medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [percentile(each, 50) for each in rounds]


def _latency(
    services: Mapping[str, Contender], inputs: list[Arrays], reference: Reference, rounds: int, count: int
) -> dict[str, list[list[float]]]:
    """Return the seconds of each request, by side and round."""
    seconds: dict[str, list[list[float]]] = {who: [] for who in services}
    with contextlib.ExitStack() as stack:
        senders = {who: stack.enter_context(service.connect()) for who, service in services.items()}
        for _ in range(rounds):
            for who, ask in senders.items():
                seconds[who].append(seconds_of(ask, inputs, count, reference.check))
    return seconds


def _throughput(
    services: Mapping[str, Contender], inputs: list[Arrays], reference: Reference, threads: int
) -> dict[str, list[float]]:
    """Return requests per second, by side and round."""
    rps: dict[str, list[float]] = {who: [] for who in services}
    for _ in range(THREAD_ROUNDS):
        for who, service in services.items():
            clients = Threads(service.connect, inputs, threads)
            rps[who].append(clients.requests_per_second(THREAD_SECONDS, reference))
    return rps


def _start(start: Start, inputs: list[Arrays], reference: Reference) -> tuple[float, float, float]:
    """Return the seconds until the first answer and until all workers are ready, and the bytes of all processes."""
    with start(MLP, LARGE_WORKERS) as service:
        with service.connect() as ask:
            reference.check(0, ask(inputs[0]))
        first_answer = time.perf_counter() - service.begin
        service.ready()
        all_ready = time.perf_counter() - service.begin
        # With more threads than workers, each worker receives requests.
        Threads(service.connect, inputs, 2 * LARGE_WORKERS).requests_per_second(2.0, reference)
        return first_answer, all_ready, pss_total(service.pids())


@dataclasses.dataclass
class _KillResult:
    recovery_times: list[float]
    errors: int = 0
    longest: float = 0.0


def _kills(service: Contender, inputs: list[Arrays], reference: Reference) -> _KillResult:
    """Kill a worker several times under the load of threads with one request each."""
    service.ready()
    found = _KillResult([])
    for _ in range(KILLS):
        with _Load(service, inputs, reference) as load:
            time.sleep(_QUIET_S)
            begin = time.perf_counter()
            load.longest = 0.0
            service.kill_worker()()
            found.recovery_times.append(time.perf_counter() - begin)
            time.sleep(_QUIET_S)
        found.errors += load.errors
        found.longest = max(found.longest, load.longest)
    return found


class _Load:
    """Threads that send requests until the end of the block, even if requests fail.

    Attributes:
        errors: number of failed requests.
        longest: longest duration of a request in seconds, since it was last set to 0.
    """

    def __init__(self, service: Contender, inputs: list[Arrays], reference: Reference) -> None:
        self.errors = 0
        self.longest = 0.0
        self._service = service
        self._inputs = inputs
        self._reference = reference
        self._stop = False
        self._lock = threading.Lock()
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(_LOAD_THREADS)]

    def __enter__(self) -> _Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        for thread in self._threads:
            thread.join()
        for failure in self._failures:
            raise failure

    def _run(self) -> None:
        try:
            while not self._stop:
                with self._service.connect() as ask:
                    self._ask(ask)
        except BaseException as error:  # noqa: BLE001 - raised again at the end of the block
            self._failures.append(error)

    def _ask(self, ask: Ask) -> None:
        """Send requests until one fails, after which the caller connects again."""
        index = failed = 0
        while not self._stop and not failed:
            begin = time.perf_counter()
            try:
                self._reference.check(index, ask(self._inputs[index % len(self._inputs)]))
            except (OSError, WeightdError):
                failed = 1
            took = time.perf_counter() - begin
            index += 1
            with self._lock:
                self.errors += failed
                self.longest = max(self.longest, took)


def _until(check: Callable[[], bool]) -> None:
    limit = time.monotonic() + _LIMIT_S
    while not check():
        if time.monotonic() > limit:
            raise TimeoutError(f"the service has not recovered within {_LIMIT_S:g} s")
        time.sleep(0.01)


def _both(values: Both, unit: str, compared: float | None = None) -> str:
    text = " / ".join(f"{who} {value:,.{0 if value >= 100 else 2}f}" for who, value in values.items())
    return f"{text} {unit}" + (f"   ratio {compared:.2f}" if compared is not None else "")
