"""Throughput of batched requests, against mosec with batching and against the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import flight, material
from benchmarks.material import MLP, MLP_WIDTH, SHORT, SHORT_SHAPE, Arrays, Reference, Setup, UnavailableError
from benchmarks.mosec_server import PYTHON, MosecServer
from benchmarks.report import Ratio, Result, Target, percentile, progress, ratio, spread
from benchmarks.rounds import seconds_of
from testkit.plain import PlainProcess
from testkit.service import Service

WORKERS = 2
MAX_ROWS = 32
IN_FLIGHT = 32  # requests of one row
RIVAL_WAIT_MS = 1  # time for which mosec waits for a full batch; mosec is fastest with this value
WARM_UP_S = 3.0
ROUNDS = 9  # of each side, alternating
SECONDS = 1.0  # per round
LONE_REQUESTS = 20  # per round
LONE_ROUNDS = 20
# The gain of the engine is compared with the gain of one worker whose queue always holds a full batch.
TABLE_WARM_UP_S = 2.0
TABLE_ROUNDS = 7
TABLE_IN_FLIGHT = 2 * MAX_ROWS
TABLE_SECONDS = 0.6
TABLE: Mapping[str, tuple[int, ...]] = {MLP: (MLP_WIDTH,), SHORT: SHORT_SHAPE}

_OFF, _ON, _MOSEC = "off", "on", "mosec"
_TABLE = {"max_rows": MAX_ROWS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batching(Result):
    """Medians of the rounds; ratios are compared round by round.

    Attributes:
        gain: requests/s of the MLP with `in_flight` requests of one row: batching on divided by batching off.
        rival_ratio: requests/s with batching on divided by requests/s of mosec with the same max_batch_size and
            number of workers; None without mosec.
        lone_ratio: p50 of a client with one request at a time: batching on divided by batching off. Both are measured
            with the same processes, which a reload switches, because two sets of processes differ by more.
        rps: requests/s of each side.
        rows_per_batch: mean number of requests in a batch.
        lone_p50_ms: p50 of the client with one request at a time.
        engine_gain: for each model, rows/s of a bare engine process with `max_rows` rows per predict, divided by
            rows/s with single rows.
        service_gain: requests/s of one worker whose queue always holds `max_rows` requests, divided by requests/s with
            batching off.
        shares: `service_gain` divided by `engine_gain`.
        share: the smallest of the shares.
        spreads: quartiles of the ratios.
    """

    benchmark = "batching"
    max_rows: int
    in_flight: int
    gain: float
    rival_ratio: float | None
    lone_ratio: float
    rps: Mapping[str, float]
    rows_per_batch: float
    lone_p50_ms: Mapping[str, float]
    engine_gain: Mapping[str, float]
    service_gain: Mapping[str, float]
    shares: Mapping[str, float]
    share: float
    spreads: Mapping[str, tuple[float, float]]

    def targets(self) -> Sequence[Target]:
        """Return the bounds of the ratios."""
        return [
            Target("gain", 3.0, at_least=True),
            *([Target("rival_ratio", 1.0, at_least=True)] if self.rival_ratio is not None else []),
            Target("lone_ratio", 1.05),
            Target("share", 0.9, at_least=True),
        ]

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the table."""
        rows = [
            (f"{MLP}, {self.in_flight} in flight, {who}", f"{each:8.1f} requests/s") for who, each in self.rps.items()
        ]
        rows.append((f"{MLP}, rows of a batch", f"{self.rows_per_batch:8.1f}"))
        if self.rival_ratio is None:
            rows.append((_MOSEC, f"not installed in {PYTHON.parent.parent}; run `make bench-rival`"))
        rows += [(f"{MLP}, a lone client, {who}", f"p50 {each:6.2f} ms") for who, each in self.lone_p50_ms.items()]
        rows += [
            (f"{name}, one worker", f"gain {self.service_gain[name]:.2f}, the engine's {self.engine_gain[name]:.2f}")
            for name in self.shares
        ]
        return rows + [(name, spread(each)) for name, each in self.spreads.items()]


def run(setup: Setup) -> Batching:
    """Measure everything, with alternating sides."""
    if setup.engine != "onnxruntime":
        raise UnavailableError("batching: expected --engine onnxruntime, because mosec runs it too")
    load = _measure_load(setup)
    lone = _lone(setup)
    table = {name: _table(name, shape) for name, shape in TABLE.items()}
    compared = {
        "gain": ratio(load.rps[_ON], load.rps[_OFF]),
        **({"rival_ratio": ratio(load.rps[_ON], load.rps[_MOSEC])} if _MOSEC in load.rps else {}),
        "lone_ratio": ratio(lone[_ON], lone[_OFF]),
        **{f"share, {name}": each.share for name, each in table.items()},
    }
    shares = {name: each.share.median for name, each in table.items()}
    return Batching(
        engine=setup.engine,
        workers=setup.workers,
        n=ROUNDS,
        max_rows=MAX_ROWS,
        in_flight=IN_FLIGHT,
        gain=compared["gain"].median,
        rival_ratio=compared["rival_ratio"].median if "rival_ratio" in compared else None,
        lone_ratio=compared["lone_ratio"].median,
        rps={who: statistics.median(each) for who, each in load.rps.items()},
        rows_per_batch=load.rows_per_batch,
        lone_p50_ms={who: 1e3 * statistics.median(each) for who, each in lone.items()},
        engine_gain={name: each.engine for name, each in table.items()},
        service_gain={name: each.service for name, each in table.items()},
        shares=shares,
        share=min(shares.values()),
        spreads={name: each.spread for name, each in compared.items()},
    )


@dataclasses.dataclass(frozen=True)
class _LoadResult:
    """Requests per second by side and round, and the rows of a batch."""

    rps: Mapping[str, list[float]]
    rows_per_batch: float


def _measure_load(setup: Setup) -> _LoadResult:
    path, inputs, reference = _material(MLP, (MLP_WIDTH,))
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(_service(path, setup.workers))
        sides = {who: flight.weightd(service.address, who, inputs, IN_FLIGHT) for who in (_OFF, _ON)}
        if PYTHON.exists():
            server = stack.enter_context(MosecServer(path, setup.workers, MAX_ROWS, RIVAL_WAIT_MS))
            server.ready()
            sides[_MOSEC] = flight.mosec(server, inputs, IN_FLIGHT)
        rps: dict[str, list[float]] = {who: [] for who in sides}
        rows: list[float] = []
        flight.requests_per_second(sides[_ON], WARM_UP_S, reference)
        for number in range(ROUNDS):
            progress(f"round {number + 1} of {ROUNDS}")
            for who, fly in sides.items():
                before = _served(service)
                rps[who].append(flight.requests_per_second(fly, SECONDS, reference))
                if who == _ON:
                    requests, batches = (now - then for now, then in zip(_served(service), before, strict=True))
                    rows.append(requests / batches)
    return _LoadResult(rps, statistics.median(rows))


def _lone(setup: Setup) -> Mapping[str, list[float]]:
    """Return the seconds of a lone client's requests (p50), by side and round."""
    path, inputs, reference = _material(MLP, (MLP_WIDTH,))
    tables = _tables(path, setup.workers)
    lone: dict[str, list[float]] = {who: [] for who in tables}
    with _ReadyService({MLP: tables[_ON]}) as service, setup.client(service) as client:
        ask = functools.partial(client.infer, MLP)
        pids = service.pids()
        for number in range(LONE_ROUNDS):
            progress(f"a lone client, round {number + 1} of {LONE_ROUNDS}")
            for who in (_OFF, _ON) if number % 2 else (_ON, _OFF):
                service.reload({MLP: tables[who]})
                lone[who].append(percentile(seconds_of(ask, inputs, LONE_REQUESTS, reference.check), 50))
        if service.pids() != pids:
            raise UnavailableError("batching: a reload has replaced processes, so the measurements cannot be compared")
    return lone


def _served(service: Service) -> tuple[int, int]:
    """Return the numbers of answered requests and of their batches, for the model with batching on."""
    status = next(each for each in service.status().models if each.name == _ON)
    return status.served, status.executions.count if status.executions else 0


@dataclasses.dataclass(frozen=True)
class _Gains:
    """Median gains of a model by batching."""

    engine: float
    service: float
    share: Ratio


def _table(name: str, shape: tuple[int, ...]) -> _Gains:
    path, inputs, reference = _material(name, shape)
    full_batch = material.inputs(*shape, count=1, rows=MAX_ROWS)[0]
    engine: list[float] = []
    service_gains: list[float] = []
    with _service(path, 1) as service, PlainProcess(path) as bare:
        sides = {who: flight.weightd(service.address, who, inputs, TABLE_IN_FLIGHT) for who in (_OFF, _ON)}
        flight.requests_per_second(sides[_ON], TABLE_WARM_UP_S, reference)
        for number in range(TABLE_ROUNDS):
            progress(f"{name}, round {number + 1} of {TABLE_ROUNDS}")
            one, many = (_row_seconds(bare, each) for each in (inputs[0], full_batch))
            engine.append(one / many)
            off, on = (flight.requests_per_second(fly, TABLE_SECONDS, reference) for fly in sides.values())
            service_gains.append(on / off)
    return _Gains(statistics.median(engine), statistics.median(service_gains), ratio(service_gains, engine))


def _row_seconds(bare: PlainProcess, inputs: Arrays) -> float:
    """Return the engine's seconds per row."""
    rows = len(inputs["x"])
    return float(percentile(list(bare.times(inputs, 3 + 2 * MAX_ROWS // (rows + 1))[1:]), 50)) / rows


def _service(path: Path, workers: int) -> Service:
    return _ReadyService(_tables(path, workers))


def _tables(path: Path, workers: int) -> Mapping[str, Mapping[str, object]]:
    table = {"path": path, "workers": workers}
    return {_OFF: table, _ON: {**table, "batching": _TABLE}}


class _ReadyService(Service):
    def __enter__(self) -> Service:
        super().__enter__()
        try:
            self.ready()
        except BaseException:
            self.__exit__(None)
            raise
        return self


def _material(name: str, shape: tuple[int, ...]) -> tuple[Path, list[Arrays], Reference]:
    path = material.model(name, "onnxruntime")
    inputs = material.inputs(*shape, count=IN_FLIGHT)
    with PlainProcess(path) as bare:
        return path, inputs, Reference(bare, inputs)
