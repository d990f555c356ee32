"""Latency of one tenant while another tenant overloads the daemon, against its latency alone.

Tenants A and B are two users of this host with one process each, and have equal weights by default. B sends one request
at a time to the same daemon, in rounds alternately alone and beside A, which overloads the daemon. The ratios are
medians over the rounds. Each of B's answers is compared with the bare engine's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import material
from benchmarks.material import (
    LARGEST,
    MLP,
    MLP_WIDTH,
    RELU,
    TINY,
    TINY_WIDTH,
    TRANSFORMER,
    TRANSFORMER_SHAPE,
    Arrays,
    DifferenceError,
    Setup,
    UnavailableError,
)
from benchmarks.report import Result, Target, percentile, progress, ratio
from benchmarks.rounds import BackgroundThread, seconds_of
from testkit import loads, models, users
from testkit.gatewayprocess import GatewayProcess
from testkit.limited import LimitedService, MemoryGroup, NoControlGroup
from testkit.loads import OK, WRONG, LoadResult
from testkit.memory import pss_total
from testkit.plain import PlainProcess
from testkit.ports import free_ports
from testkit.service import Service
from testkit.users import User
from weightd import Client, RequestError
from weightd_gateway.grpc.schema import INFERENCE
from weightd_gateway.grpc.schema import INFERENCE_SERVICE as GRPC_SERVICE

WORKERS = 1

ROUNDS = 7
ROUND_S = 1.0  # for B alone, and for B beside A
SHARES_S = 30.0
QUICK_ROUNDS, QUICK_ROUND_S, QUICK_SHARES_S = 3, 0.5, 5.0

WEIGHTS = (1, 3, 10)
BACKLOG = 32  # requests in flight of each of two tenants that always have queued requests
QUEUE = 64  # maximum queue of the model whose queue A fills
REQUESTS_WHILE_FULL = 36  # requests of B while the queue is full
LARGE_BYTES = 8 * 1024 * 1024
LONG_ROWS = 1024
LONG_PREDICT_ROWS = 8000
MAX_ROWS = 16  # of a request of A, if there are tenants
CONNECTIONS = 3000
MANY_USERS = 600
SHARED_BYTES = 600_000  # of an array that is passed in shared memory
SPARSE_BYTES = 8 * 1024 * 1024  # of an input in unallocated shared memory, and of the region for its output
SPARSE_OPEN_FDS = 50
ENDINGS = 1000  # requests of A that end at the same time
MEMORY_LIMIT = 768 * 1024 * 1024
FRAMED_LENGTH = 131_072  # elements of an input that crashes workers: 1 MiB
JSON_ROWS = 16  # rows of a request: 20 KiB of JSON
MANY_FIELDS, MANY_VALUES = 1_000_000, 1_000_000
POISON_WORKERS = 3
POISON_S = 8.0
QUICK_POISON_S = 4.0
CURVE_ROUNDS, CURVE_REQUESTS = 11, 100

POISONED = "poisoned"
FLOORED = "floored"

COMPUTING = "computing"
"""Prefix of the names of the control measurements, in which A sends nothing."""

_ANY: Mapping[str, Mapping[str, object]] = {"default": {}}


class Moment(NamedTuple):
    """Latency of B's requests in one phase of an attack, in seconds."""

    p50: float
    p99: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fairness(Result):
    """Ratios of B's p50 beside A to its p50 alone, medians of the rounds; None for parts that were not measured.

    Attributes:
        tenants: whether A and B are separate tenants; otherwise there is no table [tenants].
        p50_ratio_64: ratio while A has 64 requests in flight on the same model.
        p50_ratio_1000: ratio while A has 1,000 requests in flight on the same model.
        refused: rejected requests of B, out of `sent`, while A fills the queue.
        sent: requests of B while A fills the queue.
        large_ratio: ratio while A has 8 requests of 8 MiB each in flight, on another model.
        long_batches_ratio: B's p99 while A runs long batches on every worker, divided by the sum of B's p99 alone and
            the duration of a batch with the `max_rows` of A.
        long_batches_p99_s: B's p99 while A runs long batches on every worker.
        poison: B's errors while A sends inputs that crash workers.
        poison_workers_lost: largest number of workers, out of three, that were missing at the same time.
        storms: largest of the `storm_ratios`.
        storm_ratios: ratios while A sends one kind of message as fast as it can, by kind.
        connections: closed or rejected connections of B while A opens 3,000.
        share_error_percent: largest of the `share_errors`.
        share_errors: difference between the share of the tenant with the larger weight and the share that its weight
            demands, in percent of the latter, while both tenants always have queued requests.
        work_conserving: requests per second of both tenants together, divided by one tenant's alone.
        curve_ratio: p50 of a small request over TCP with CURVE, divided by p50 without CURVE.
        special_values: B's requests per second after A has sent ordinary values, divided by those after special values.
        attack_p50_ratio: the largest ratio of B's p50 during an attack to its p50 before the attack.
        attack_p99_excess_ms: the largest difference between B's p99 during an attack and before the attack.
        attack_after_p50_ratio: the largest ratio of B's p50 one second after an attack to its p50 before the attack.
        attack_failed: requests of B that failed or were refused during and after all attacks.
        attacks: B's latency before, during and one second after each attack.
        gateway_mib: PSS of the gateway in MiB before, during and one second after each attack.
        log_lines: lines that the daemon logged during the attacks on its log.
        events_lost: events from before these attacks that the daemon no longer had after them.
        sparse_bytes: memory that the service has allocated in memfds of A.
        memory_kills: processes of the service that the kernel killed because of a memory limit.
        seconds: p50 of B alone and beside A, by part.
        spreads: quartiles of the ratios.
    """

    benchmark = "fairness"
    tenants: bool
    p50_ratio_64: float | None = None
    p50_ratio_1000: float | None = None
    refused: int | None = None
    sent: int | None = None
    large_ratio: float | None = None
    long_batches_ratio: float | None = None
    long_batches_p99_s: float | None = None
    poison: int | None = None
    poison_workers_lost: int | None = None
    storms: float | None = None
    storm_ratios: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    connections: int | None = None
    share_error_percent: float | None = None
    share_errors: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    work_conserving: float | None = None
    curve_ratio: float | None = None
    special_values: float | None = None
    attack_p50_ratio: float | None = None
    attack_p99_excess_ms: float | None = None
    attack_after_p50_ratio: float | None = None
    attack_failed: int | None = None
    log_lines: int | None = None
    events_lost: int | None = None
    attacks: Mapping[str, tuple[Moment, Moment, Moment]] = dataclasses.field(
        default_factory=dict[str, tuple["Moment", "Moment", "Moment"]]
    )
    gateway_mib: Mapping[str, tuple[float, float, float]] = dataclasses.field(
        default_factory=dict[str, tuple[float, float, float]]
    )
    sparse_bytes: int | None = None
    memory_kills: int | None = None
    seconds: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict[str, tuple[float, float]])
    spreads: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict[str, tuple[float, float]])

    def targets(self) -> Sequence[Target]:
        """Return the bounds of the measured parts."""
        bounds = [
            Target("p50_ratio_64", 2.2),
            Target("p50_ratio_1000", 2.2),
            Target("refused", 0),
            Target("large_ratio", 3.0),
            Target("long_batches_ratio", 2.0),
            Target("poison", 0),
            Target("poison_workers_lost", 1),
            Target("storms", 1.5),
            Target("connections", 0),
            Target("share_error_percent", 5.0),
            Target("curve_ratio", 2.0),
            Target("special_values", 1.5),
            Target("attack_p50_ratio", 2.0),
            Target("attack_p99_excess_ms", 10.0),
            Target("attack_after_p50_ratio", 1.5),
            Target("attack_failed", 0),
            Target("log_lines", 100),
            Target("events_lost", 0),
            Target("sparse_bytes", 0),
            Target("memory_kills", 0),
        ]
        return [each for each in bounds if getattr(self, each.key) is not None]

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the table."""
        rows = [("separate tenants", "yes" if self.tenants else "no, without [tenants]")]
        for part, (alone, beside) in self.seconds.items():
            low, high = self.spreads[part]
            rows.append(
                (
                    f"B, {part}",
                    f"p50 {1e3 * alone:8.2f} ms alone {1e3 * beside:8.2f} ms   {low:.2f} to {high:.2f} times",
                )
            )
        for name, moments in self.attacks.items():
            text = ", ".join(
                f"{when} p50 {1e3 * each.p50:.2f} p99 {1e3 * each.p99:.2f} ms"
                for when, each in zip(("alone", "during", "1 s after"), moments, strict=True)
            )
            rows.append((f"B, attack {name}", text))
        for name, sizes in self.gateway_mib.items():
            text = ", ".join(
                f"{when} {each:.0f} MiB" for when, each in zip(("alone", "during", "1 s after"), sizes, strict=True)
            )
            rows.append((f"gateway, attack {name}", text))
        if self.sparse_bytes is not None:
            rows.append(("sparse memory", f"{self.sparse_bytes / 2**20:.0f} MiB allocated by the service"))
        rows += [(f"shares {name}", f"{error:.1f} % off") for name, error in self.share_errors.items()]
        return rows


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Number and duration of the rounds."""

    setup: Setup

    @property
    def rounds(self) -> int:
        return QUICK_ROUNDS if self.setup.quick else ROUNDS

    @property
    def round_s(self) -> float:
        return QUICK_ROUND_S if self.setup.quick else ROUND_S

    def tenants(self, **weights: float) -> dict[str, dict[str, object]]:
        """Return the tables of A and B, of an idle tenant and of the watcher; empty without tenants."""
        if not self.setup.tenants:
            return {}
        given = {"a": 1.0, "b": 1.0, **weights}
        tables: dict[str, dict[str, object]] = {
            "a": {"uids": [users.ALICE], "weight": given["a"]},
            "b": {"uids": [users.BOB], "weight": given["b"]},
            "idle": {"uids": [users.CAROL], "weight": 5.0},
        }
        # The benchmark itself, which reads the status, runs as root.
        tables["watcher"] = {"uids": [0], "may": ["infer", "status", "operate"]}
        return tables


@dataclasses.dataclass(frozen=True)
class _RequestSample:
    """B's requests with the correct answers."""

    model: str
    inputs: Sequence[Arrays]
    answers: Sequence[Arrays]


@dataclasses.dataclass(frozen=True)
class _ConnectedService:
    """A daemon, and the processes of A and B connected to it."""

    service: Service
    a: User
    b: User

    def measure(self, sample: _RequestSample, seconds: float, min_count: int = 3) -> LoadResult:
        """Let B send requests for `seconds`, and at least `min_count`."""
        return _checked(self.b.do(loads.ask, sample.model, sample.inputs, sample.answers, seconds, min_count))


Found = dict[str, Any]
Part = Callable[[_Plan], Found]


def run(setup: Setup) -> Fairness:
    """Measure the selected parts."""
    if os.getuid() != 0:
        raise UnavailableError("fairness: must run as root, to start processes of two other users")
    plan = _Plan(setup)
    found: Found = {"n": 0, "seconds": {}, "spreads": {}}
    for name, part in PARTS.items():
        if not setup.parts or name in setup.parts:
            progress(name)
            for key, value in part(plan).items():
                if key == "n":
                    found["n"] += value
                elif key in ("seconds", "spreads"):
                    found[key].update(value)
                elif key == "attacks":
                    _add_attacks(found, value)
                else:
                    found[key] = value
    return Fairness(engine=setup.engine, workers=setup.workers, tenants=setup.tenants, **found)


# --- the parts ----------------------------------------------------------------------------------------------------


def _in_flight(key: str, count: int) -> Part:
    def part(plan: _Plan) -> Found:
        sample = _make_sample(TRANSFORMER, plan, *TRANSFORMER_SHAPE)
        # The queue must accept 1,000 requests.
        with _stage(plan, {TRANSFORMER: {"max_queue": 2000}}) as stage:
            a = (loads.keep, TRANSFORMER, sample.inputs, count)
            found, timings = _compared(plan, stage, sample, a, f"{count} in flight")
        return {**timings, key: found}

    return part


def _full(plan: _Plan) -> Found:
    sample = _make_sample(TRANSFORMER, plan, *TRANSFORMER_SHAPE)
    with _stage(plan, {TRANSFORMER: {"max_queue": QUEUE}}) as stage:
        stage.a.begin(loads.keep, TRANSFORMER, sample.inputs, 4 * QUEUE)
        stage.a.wait_for_report()
        result = stage.measure(sample, 0.0, REQUESTS_WHILE_FULL)
        stage.a.end()
    return {"refused": _failed(result), "sent": REQUESTS_WHILE_FULL, "n": REQUESTS_WHILE_FULL}


def _large(plan: _Plan) -> Found:
    sample = _make_sample(TINY, plan, TINY_WIDTH)
    inputs = material.inputs(LARGE_BYTES // 4, count=2)
    with _stage(plan, {TINY: {}, LARGEST: {}}) as stage:
        found, timings = _compared(plan, stage, sample, (loads.keep, LARGEST, inputs, 8), "large")
    return {**timings, "large_ratio": found}


def _long_batches(plan: _Plan) -> Found:
    sample = _make_sample(MLP, plan, MLP_WIDTH)
    rows = MAX_ROWS if plan.setup.tenants else LONG_ROWS
    tenants = plan.tenants()
    if tenants:
        tenants["a"]["max_rows"] = MAX_ROWS
    long, short = (material.inputs(MLP_WIDTH, count=1, rows=each) for each in (LONG_ROWS, MAX_ROWS))
    with _stage(plan, {MLP: {}}, tenants) as stage:
        alone = stage.measure(sample, plan.rounds * plan.round_s / 2)
        batch_s = statistics.median(stage.b.do(loads.time_of, MLP, short[0], 5))
        if tenants:
            with contextlib.suppress(RequestError):
                stage.a.ask("infer", MLP, long[0])
                raise DifferenceError(f"expected a rejected request: {LONG_ROWS} rows exceed max_rows, {MAX_ROWS}")
        stage.a.begin(loads.keep, MLP, short if tenants else long, 4)
        stage.a.wait_for_report()
        beside = stage.measure(sample, plan.rounds * plan.round_s, 10)
        stage.a.end()
    p99 = percentile(beside.seconds, 99)
    progress(
        f"A has batches of {rows} rows; one of {MAX_ROWS} takes {1e3 * batch_s:.0f} ms, B's p99 is {1e3 * p99:.0f} ms"
    )
    return {
        "long_batches_ratio": p99 / (percentile(alone.seconds, 99) + batch_s),
        "long_batches_p99_s": p99,
        "n": len(beside.seconds),
    }


def _poison(plan: _Plan) -> Found:
    path = _poisoned()
    inputs = [{"a": np.arange(1, 7, dtype=np.int64) + number} for number in range(4)]
    sample = _RequestSample(POISONED, inputs, [{"y": -each["a"]} for each in inputs])
    seconds = QUICK_POISON_S if plan.setup.quick else POISON_S
    with _stage(plan, {POISONED: {"path": path, "workers": POISON_WORKERS}}) as stage, _Watch(stage.service) as watch:
        stage.a.begin(loads.poison, POISONED, [{"a": np.array([-(2**63)], np.int64)}], 8)
        stage.a.wait_for_report()
        result = stage.measure(sample, seconds)
        outcomes = stage.a.end().outcomes
    progress(f"outcomes of A's requests {outcomes}, of B's requests {result.outcomes}")
    return {
        "poison": _failed(result),
        "poison_workers_lost": POISON_WORKERS - watch.min_ready,
        "n": sum(result.outcomes.values()),
    }


def _storms(plan: _Plan) -> Found:
    sample = _make_sample(TINY, plan, TINY_WIDTH)
    found: Found = {"n": 0, "seconds": {}, "spreads": {}}
    ratios: dict[str, float] = {}
    with _stage(plan, {TINY: {}}) as stage:
        for kind in loads.STORMS:
            storm = (loads.storm, f"{stage.service.address}.unix", kind, TINY)
            ratios[kind], timings = _compared(plan, stage, sample, storm, f"{kind} storm")
            found["n"] += timings["n"]
            found["seconds"].update(timings["seconds"])
            found["spreads"].update(timings["spreads"])
    return {**found, "storm_ratios": ratios, "storms": max(ratios.values())}


def _connections(plan: _Plan) -> Found:
    sample = _make_sample(TINY, plan, TINY_WIDTH)
    with _stage(plan, {TINY: {}}) as stage:
        stage.measure(sample, 0.1)
        addresses = [f"{stage.service.address}.unix", stage.service.address]
        stage.b.begin(loads.ask_until_stopped, TINY, sample.inputs, sample.answers)
        stage.b.wait_for_report()
        stage.a.begin(loads.hold_connections, addresses, CONNECTIONS)
        stage.a.wait_for_report()
        result = _checked(stage.b.end())
        bad = _failed(result)
        for address in ("unix://", "ipc://"):
            try:
                stage.b.connect(address + stage.service.address, timeout=5.0)
                bad += _failed(stage.measure(sample, 0.0, 10))
            except RequestError:
                bad += 1
        progress(f"connections of A {stage.a.end()}, outcomes of B's requests {result.outcomes}")
    return {"connections": bad, "n": CONNECTIONS}


def _computing(plan: _Plan) -> Found:
    """Measure the control for the attacks: A keeps one core busy and sends nothing."""
    tiny, mlp = _make_sample(TINY, plan, TINY_WIDTH), _make_sample(MLP, plan, MLP_WIDTH)
    attacks: dict[str, Attack] = {}
    with (
        _stage(plan, {TINY: {}, MLP: {"workers": 2}}) as stage,
        tempfile.TemporaryDirectory() as directory,
        User(users.BOB, imports=("encodings.idna", "grpc")) as b,
        _gateway_process(stage, directory) as gateway,
    ):
        load = (loads.compute,)
        attacks[f"{COMPUTING}, Unix"] = _attack(plan, stage, tiny, load)
        attacks[f"{COMPUTING}, Unix, a large model"] = _attack(plan, stage, mlp, load)
        for protocol in ("http", "grpc"):
            sent = _gateway_sample(protocol, gateway.port(protocol), tiny)
            ask = functools.partial(b.do, loads.ask_gateway, sent)
            attacks[f"{COMPUTING}, B over {protocol}"] = _attack_on(plan, stage, ask, load)
        stage.b.connect(f"ipc://{stage.service.address}", timeout=60.0)
        attacks[f"{COMPUTING}, ZeroMQ"] = _attack(plan, stage, tiny, load)
    return {"attacks": attacks, "n": sum(each.request_count for each in attacks.values())}


def _connection_storm(plan: _Plan) -> Found:
    """A opens and closes connections to the Unix socket and to the ZeroMQ listener as fast as it can."""
    sample = _make_sample(TINY, plan, TINY_WIDTH)
    attacks: dict[str, Attack] = {}
    with _stage(plan, {TINY: {}}) as stage, contextlib.ExitStack() as stack:
        unix, zeromq = f"{stage.service.address}.unix", stage.service.address
        attacks["connection storm, Unix"] = _attack(plan, stage, sample, (loads.reconnect, unix))
        others = [stack.enter_context(User(uid)) for uid in (users.ALICE, users.CAROL, users.CAROL)]
        attacks["connection storm, Unix, 4 processes of 2 users"] = _attack(
            plan, stage, sample, (loads.reconnect, unix), others=others
        )
        stack.close()
        stage.b.connect(f"ipc://{zeromq}", timeout=60.0)
        attacks["connection storm, ZeroMQ"] = _attack(plan, stage, sample, (loads.reconnect, zeromq))
        load = (loads.reconnect, zeromq, loads.ZMTP_GREETING)
        attacks["connection storm with greetings, ZeroMQ"] = _attack(plan, stage, sample, load)
    return {"attacks": attacks, "n": sum(each.request_count for each in attacks.values())}


class _FewDescriptors(Service):
    """A service with the default limit of file descriptors."""

    def _popen(self, command: list[str]) -> subprocess.Popen[str]:
        return super()._popen(["prlimit", "--nofile=1024:1024", *command])


def _many_users(plan: _Plan) -> Found:
    """Many users without a tenant open a connection each, up to the limit; B uses an old and a new connection."""
    sample = _make_sample(TINY, plan, TINY_WIDTH)
    attacks: dict[str, Attack] = {}
    with _stage(plan, {TINY: {}}, service=_FewDescriptors) as stage, User(0) as root, User(users.BOB) as other:
        other.connect(f"unix://{stage.service.address}", timeout=60.0)
        outside = dataclasses.replace(stage, a=root)
        for name, scheme, suffix in (("Unix", "unix", ".unix"), ("ZeroMQ", "ipc", "")):
            stage.b.connect(f"{scheme}://{stage.service.address}", timeout=60.0)
            load = (loads.connect_as_many_users, [f"{stage.service.address}{suffix}"], MANY_USERS)
            attacks[f"many users, {name}"] = _attack(plan, outside, sample, load)
    return {"attacks": attacks, "n": sum(each.request_count for each in attacks.values())}


def _gateway(plan: _Plan) -> Found:
    """A floods the gateway over gRPC and HTTP, with a token only for JSON; B sends requests over both."""
    sample = _make_sample(TINY, plan, TINY_WIDTH)
    attacks: dict[str, Attack] = {}
    memory: dict[str, tuple[float, float, float]] = {}
    with (
        _stage(plan, {TINY: {}}) as stage,
        tempfile.TemporaryDirectory() as directory,
        User(users.BOB, imports=("encodings.idna", "grpc")) as b,
        _gateway_process(stage, directory) as gateway,
    ):
        ports = {protocol: gateway.port(protocol) for protocol in ("http", "grpc")}
        for name, load in _floods(ports).items():
            for protocol, port in ports.items():
                result = _gateway_sample(protocol, port, sample)
                ask = functools.partial(b.do, loads.ask_gateway, result)
                sizes: list[float] = []
                found = _attack_on(plan, stage, ask, load, at=functools.partial(_look, sizes, gateway.pid))
                attacks[f"{name}, B over {protocol}"] = found
                memory[f"{name}, B over {protocol}"] = sizes[0], sizes[1], sizes[2]
    return {"attacks": attacks, "gateway_mib": memory, "n": sum(each.request_count for each in attacks.values())}


def _gateway_helper(plan: _Plan) -> Found:
    """A sends requests that take long to parse; B sends JSON, which the gateway also parses outside its event loop."""
    sample = _make_sample(TINY, plan, TINY_WIDTH, rows=JSON_ROWS)
    imports = ("encodings.idna", "encodings.raw_unicode_escape", "grpc")
    attacks: dict[str, Attack] = {}
    memory: dict[str, tuple[float, float, float]] = {}
    with (
        _stage(plan, {TINY: {}}) as stage,
        tempfile.TemporaryDirectory() as directory,
        User(users.ALICE, imports=imports) as a,
        User(users.BOB, imports=imports) as b,
        _gateway_process(stage, directory) as gateway,
    ):
        ports = {protocol: gateway.port(protocol) for protocol in ("http", "grpc")}
        metadata = (("authorization", "Bearer a"),)
        path = f"/{GRPC_SERVICE}/ModelInfer"
        loads_of_a: dict[str, Sequence[Any]] = {
            f"gRPC, {name}": (loads.call_grpc, ports["grpc"], path, message, metadata)
            for name, message in _expensive_messages().items()
        }
        for count in (1_000_000, 10_000):
            loads_of_a[f"JSON of {count:,} values"] = (loads.pour, ports["http"], b"", _json_post(count))
        ask = functools.partial(b.do, loads.ask_gateway, _gateway_sample("json", ports["http"], sample))
        for name, load in loads_of_a.items():
            sizes: list[float] = []
            look = functools.partial(_look, sizes, gateway.pid)
            attacks[f"{name}, B over JSON"] = _attack_on(plan, dataclasses.replace(stage, a=a), ask, load, at=look)
            memory[f"{name}, B over JSON"] = sizes[0], sizes[1], sizes[2]
    return {"attacks": attacks, "gateway_mib": memory, "n": sum(each.request_count for each in attacks.values())}


def _expensive_messages() -> Mapping[str, bytes]:
    """Return a request with many small fields, and one with many values."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, MANY_VALUES]}
    many: dict[str, Any] = {"parameters": {str(number): {} for number in range(MANY_FIELDS)}}
    values = {"contents": {"fp32_contents": [0.5] * MANY_VALUES}}
    return {
        name: INFERENCE["ModelInferRequest"](model_name=TINY, inputs=[{**tensor, **rest}]).SerializeToString()
        for name, rest in (("a million parameters", many), ("a million values", values))
    }


@contextlib.contextmanager
def _gateway_process(stage: _ConnectedService, directory: str) -> Generator[GatewayProcess, None, None]:
    """Run a gateway with the tokens "a" and "b"."""
    tokens = Path(directory, "tokens")
    tokens.write_text("".join(f"{hashlib.sha256(name.encode()).hexdigest()} - {name}\n" for name in "ab"), "utf-8")
    tables = {"gateway": {"tokens": str(tokens), "anonymous": ""}}
    with GatewayProcess(Path(directory), stage.service.address, tables) as gateway:
        yield gateway


def _floods(ports: Mapping[str, int]) -> Mapping[str, Sequence[Any]]:
    """Return A's loads on a gateway, by name."""
    floods: dict[str, Sequence[Any]] = {
        f"gRPC {kind}": (loads.pour, ports["grpc"], loads.HTTP2 + begins, repeats)
        for kind, (begins, repeats) in loads.HTTP2_FLOODS.items()
    }
    floods["JSON of a million values"] = (loads.pour, ports["http"], b"", _json_post(1_000_000))
    floods["connection storm, HTTP"] = (loads.reconnect, ("127.0.0.1", ports["http"]))
    floods["connection storm, gRPC"] = (loads.reconnect, ("127.0.0.1", ports["grpc"]), loads.HTTP2)
    return floods


def _json_post(count: int) -> bytes:
    """Return an HTTP request of A with `count` values in JSON."""
    shape, values = b'"shape":[1,%d]' % count, (count - 1) * b"0.125," + b"1"
    body = b'{"inputs":[{"name":"x","datatype":"FP32",%s,"data":[%s]}]}' % (shape, values)
    lines = (
        f"POST /v2/models/{TINY}/infer HTTP/1.1",
        "Host: localhost",
        "Authorization: Bearer a",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join((*lines, "\r\n")).encode() + body


def _gateway_sample(protocol: str, port: int, sample: _RequestSample) -> loads.GatewayRequest:
    """Return the sample as requests to the gateway: "grpc" or "http" with binary tensors, or "json" over HTTP."""
    bearer = {"authorization": "Bearer b"}
    requests: list[bytes] = []
    ends = [next(iter(answer.values())).tobytes() for answer in sample.answers]
    for inputs in sample.inputs:
        ((name, array),) = inputs.items()
        if protocol == "grpc":
            message = INFERENCE["ModelInferRequest"](model_name=sample.model)
            message.inputs.add(name=name, datatype="FP32", shape=array.shape)
            message.raw_input_contents.append(array.tobytes())
            requests.append(message.SerializeToString())
        elif protocol == "json":
            values = {"name": name, "datatype": "FP32", "shape": array.shape, "data": array.ravel().tolist()}
            requests.append(json.dumps({"inputs": [values], "parameters": {"binary_data_output": True}}).encode())
        else:
            given: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": array.shape}
            given["parameters"] = {"binary_data_size": array.nbytes}
            header = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
            bearer["Inference-Header-Content-Length"] = str(len(header))
            requests.append(header + array.tobytes())
    path = f"/{GRPC_SERVICE}/ModelInfer" if protocol == "grpc" else f"/v2/models/{sample.model}/infer"
    return loads.GatewayRequest("grpc" if protocol == "grpc" else "http", port, path, bearer, requests, ends)


def _look(sizes: list[float], pid: int, moment: str) -> None:
    """Append the PSS of a process and its children, in MiB, at the end of each phase."""
    if moment == "begun":
        return
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
    sizes.append(pss_total([pid, *map(int, children)]) / 2**20)


def _descriptors(plan: _Plan) -> Found:
    """A sends descriptors whose close blocks; B sends descriptors of shared memory with its arrays."""
    sample = _make_sample(LARGEST, plan, SHARED_BYTES // 4)
    with _stage(plan, {LARGEST: {}}) as stage:
        attack = _attack(plan, stage, sample, (loads.pass_unclosable, f"{stage.service.address}.unix"), renew=True)
    return {"attacks": {"descriptors that cannot be closed": attack}, "n": attack.request_count}


def _kernel_buffers(plan: _Plan) -> Found:
    """A sends requests over thousands of connections and reads no answers, which fill the kernel's buffers."""
    sample = _make_sample(TINY, plan, TINY_WIDTH)
    with _stage(plan, {TINY: {}}) as stage:
        attack = _attack(plan, stage, sample, (loads.hoard, f"{stage.service.address}.unix", TINY))
    return {"attacks": {"unread answers, many connections": attack}, "n": attack.request_count}


def _log_flood(plan: _Plan) -> Found:
    """A sends invalid data, so that the daemon closes each of its connections and logs the reason."""
    sample = _make_sample(TINY, plan, TINY_WIDTH)
    attacks: dict[str, Attack] = {}
    lines = 0
    with _stage(plan, {TINY: {}}) as stage, stage.service.client() as watcher:
        unix, zeromq = f"{stage.service.address}.unix", stage.service.address
        stage.b.do(loads.garbage, unix, 0.0)
        before = _events(watcher)
        if not any(f"uid {users.BOB}" in each for each in before):
            raise UnavailableError("fairness: expected an event about B's invalid data, got none")
        for name, load in {"Unix": (loads.garbage, unix), "ZeroMQ": (loads.overlong, zeromq)}.items():
            count = stage.service.log.count("\n")
            attacks[f"log flood, {name}"] = _attack(plan, stage, sample, load)
            more = stage.service.log.count("\n") - count
            lines += more
            progress(f"log lines: {more}")
        after = _events(watcher)
    return {
        "attacks": attacks,
        "log_lines": lines,
        "events_lost": sum(each not in after for each in before),
        "n": sum(each.request_count for each in attacks.values()),
    }


def _events(client: Client) -> list[str]:
    """Return the texts of all events that the daemon keeps."""
    texts: list[str] = []
    answer = client.events()
    while True:
        texts += [each.text for each in answer.events]
        if not answer.remaining:
            return texts
        answer = client.events(answer.last)


def _long_predicts(plan: _Plan) -> Found:
    """A keeps requests of several seconds each in flight, for a model with two workers and without splitting."""
    sample = _make_sample(MLP, plan, MLP_WIDTH)
    long = material.inputs(MLP_WIDTH, count=1, rows=LONG_PREDICT_ROWS)
    attacks: dict[str, Attack] = {}
    with _stage(plan, {MLP: {"workers": 2}}) as stage:
        load = (loads.keep, MLP, long, 4, 0)
        attacks["long predicts, Unix"] = _attack(plan, stage, sample, load)
        stage.a.connect(f"ipc://{stage.service.address}", timeout=60.0)
        attacks["long predicts, ZeroMQ"] = _attack(plan, stage, sample, load)
    return {"attacks": attacks, "n": sum(each.request_count for each in attacks.values())}


def _sparse(plan: _Plan) -> Found:
    """A registers unallocated shared memory for inputs and outputs, and keeps it open after unregistering it."""
    sample = _make_sample(TINY, plan, TINY_WIDTH)
    with _stage(plan, {TINY: {}, LARGEST: {}, RELU: {}}) as stage:
        path = f"{stage.service.address}.unix"
        attacks = {
            f"sparse memory, {name}": _attack(
                plan, stage, sample, (loads.share_holes, path, model, SPARSE_BYTES, SPARSE_OPEN_FDS)
            )
            for name, model in (("inputs", LARGEST), ("inputs and outputs", RELU))
        }
    return {
        "attacks": attacks,
        "sparse_bytes": sum(each.load_result["bytes"] for each in attacks.values()),
        "n": sum(each.request_count for each in attacks.values()),
    }


def _framed(plan: _Plan) -> Found:
    """A crashes workers with inputs in shared memory, and overwrites them with B's inputs before the daemon reads them.

    The daemon must not put B's inputs in quarantine.
    """
    inputs = [{"a": np.arange(1, FRAMED_LENGTH + 1, dtype=np.int64) + number} for number in range(4)]
    sample = _RequestSample(POISONED, inputs, [{"y": -each["a"]} for each in inputs])
    with _stage(plan, {POISONED: {"path": _poisoned(), "workers": POISON_WORKERS}}) as stage:
        path = f"{stage.service.address}.unix"
        load = (loads.frame_innocent, path, POISONED, [each["a"] for each in inputs])
        attack = _attack(plan, stage, sample, load)
    return {"attacks": {"quarantine of innocent content": attack}, "n": attack.request_count}


def _memory_limit(plan: _Plan) -> Found:
    """A tries to make the service exceed its memory limit."""
    sample = _make_sample(TINY, plan, TINY_WIDTH)
    large = material.inputs(LARGE_BYTES // 4, count=2)
    attacks: dict[str, Attack] = {}
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(MemoryGroup(MEMORY_LIMIT))
        except NoControlGroup as error:
            raise UnavailableError(f"fairness: {error}") from None
        tables: dict[str, dict[str, object]] = {TINY: {}, LARGEST: {}, RELU: {}}
        stage = stack.enter_context(_stage(plan, tables, service=functools.partial(LimitedService, group)))
        unix, zeromq = f"{stage.service.address}.unix", f"ipc://{stage.service.address}"
        loads_of_a: dict[str, Sequence[Any]] = {
            "sparse memory": (loads.share_holes, unix, RELU, SPARSE_BYTES, 2 * SPARSE_OPEN_FDS),
            "large requests, Unix": (loads.keep, LARGEST, large, 64),
            "large requests, ZeroMQ": (loads.keep, LARGEST, large, 64, 1, zeromq),
            "unread answers": (loads.leave_unread, unix, LARGEST, 200),
            "empty frames": (loads.send_empty_frames, unix, 64),
        }
        daemon = stage.service.pid
        kills: dict[str, int] = {}
        for name, load in loads_of_a.items():
            progress(name)
            before = group.kills
            attacks[f"{name}, memory limit"] = _attack(plan, stage, sample, load)
            kills[name] = group.kills - before
            progress(f"killed by the kernel: {kills[name]}; peak so far {group.peak >> 20} MiB")
        if stage.service.status().pid != daemon:
            raise UnavailableError("fairness: the daemon was killed")
    return {
        "attacks": attacks,
        "memory_kills": sum(kills.values()),
        "n": sum(each.request_count for each in attacks.values()),
    }


def _slow_headers(plan: _Plan) -> Found:
    """A, or a user without a tenant, sends headers that are slow to unpack, on the Unix socket and over ZeroMQ."""
    sample = _make_sample(TINY, plan, TINY_WIDTH)
    attacks: dict[str, Attack] = {}
    with _stage(plan, {TINY: {}}) as stage, User(users.DAVE) as stranger:
        for scheme, name in (("unix", "Unix"), ("ipc", "ZeroMQ")):
            address = f"{scheme}://{stage.service.address}" + (".unix" if scheme == "unix" else "")
            stage.b.connect(f"{scheme}://{stage.service.address}", timeout=60.0)
            load = (loads.slow_headers, address, TINY)
            attacks[f"slow headers, {name}"] = _attack(plan, stage, sample, load)
            outside = dataclasses.replace(stage, a=stranger)
            attacks[f"slow headers without a tenant, {name}"] = _attack(plan, outside, sample, load)
    return {"attacks": attacks, "n": sum(each.request_count for each in attacks.values())}


def _special_values(plan: _Plan) -> Found:
    """A sends rows of signalling NaNs, for which the outputs of the model depend on the batch."""
    path = _written(FLOORED, functools.partial(models.floored, width=TINY_WIDTH))
    inputs = material.inputs(TINY_WIDTH)
    sample = _RequestSample(FLOORED, inputs, [{"y": np.floor(each["x"])} for each in inputs])
    special = [{"x": np.full((1, TINY_WIDTH), 0x7F800001, np.uint32).view(np.float32)}]
    with _stage(plan, {FLOORED: {"path": path, "batching": {"max_rows": MAX_ROWS}}}) as stage:

        def rate() -> float:
            stage.b.begin(loads.keep, FLOORED, inputs, BACKLOG, BACKLOG)
            stage.b.wait_for_report()
            time.sleep(2 * plan.round_s)
            ended = stage.b.end()
            return float(ended.outcomes[OK] / ended.busy_s)

        def beside(values: Sequence[Arrays]) -> float:
            """Return B's rate after batches with rows of both tenants."""
            stage.a.begin(loads.keep, FLOORED, values, BACKLOG)
            stage.a.wait_for_report()
            rate()
            stage.a.end()
            return rate()

        before = beside(inputs)
        attack = _attack(plan, stage, sample, (loads.keep, FLOORED, special, BACKLOG))
        after = beside(special)
    progress(f"B: {before:.0f} requests/s after ordinary values of A, {after:.0f} after special values")
    return {"attacks": {"special values": attack}, "special_values": before / after, "n": attack.request_count}


def _empty_frames(plan: _Plan) -> Found:
    """A sends messages of 20 million empty frames to the ZeroMQ listener."""
    sample = _make_sample(TINY, plan, TINY_WIDTH)
    with _stage(plan, {TINY: {}}) as stage:
        stage.b.connect(f"ipc://{stage.service.address}", timeout=60.0)
        attack = _attack(plan, stage, sample, (loads.send_millions_of_frames, stage.service.address))
    return {"attacks": {"empty frames, ZeroMQ": attack}, "n": attack.request_count}


def _cancellations(plan: _Plan) -> Found:
    """A sends requests, each with its cancellation, to the Unix socket and to the ZeroMQ listener as fast as it can."""
    sample = _make_sample(TINY, plan, TINY_WIDTH)
    attacks: dict[str, Attack] = {}
    with _stage(plan, {TINY: {}}) as stage:
        unix, zeromq = f"{stage.service.address}.unix", stage.service.address
        load = (loads.request_and_cancel, unix, TINY, sample.inputs[0])
        attacks["requests and cancellations, Unix"] = _attack(plan, stage, sample, load)
        stage.b.connect(f"ipc://{zeromq}", timeout=60.0)
        load = (loads.request_and_cancel, zeromq, TINY, sample.inputs[0])
        attacks["requests and cancellations, ZeroMQ"] = _attack(plan, stage, sample, load)
    return {"attacks": attacks, "n": sum(each.request_count for each in attacks.values())}


def _costly_replies(plan: _Plan) -> Found:
    """A sends requests for status, metrics and events to a service with many models, which are slow to answer."""
    sample = _make_sample(TINY, plan, TINY_WIDTH)
    attacks: dict[str, Attack] = {}
    others = {f"other{number}": {"workers": 1, **_path(TINY, plan)} for number in range(20)}
    with _stage(plan, {TINY: {}, **others}, {}) as stage:
        unix, zeromq = f"{stage.service.address}.unix", stage.service.address
        for kind in ("status", "metrics", "events"):
            attacks[f"{kind}, Unix"] = _attack(plan, stage, sample, (loads.ask_for, unix, kind))
        stage.b.connect(f"ipc://{zeromq}", timeout=60.0)
        attacks["metrics, ZeroMQ"] = _attack(plan, stage, sample, (loads.ask_for, zeromq, "metrics"))
    return {"attacks": attacks, "n": sum(each.request_count for each in attacks.values())}


def _endings(plan: _Plan) -> Found:
    """A queues requests for a slow model and makes all of them end at the same time, or by their deadlines."""
    sample = _make_sample(TINY, plan, TINY_WIDTH)
    (inputs,) = material.inputs(MLP_WIDTH, count=1)
    attacks: dict[str, Attack] = {}
    with _stage(plan, {TINY: {}, MLP: {"max_queue": 2 * ENDINGS}}) as stage:
        for way, name in (
            ("close", "its client disconnects"),
            ("deadline", "at their deadline"),
            ("cancel", "by one cancellation"),
            ("expire", "one by one at their deadlines behind as many others"),
        ):
            load = (loads.end_many, f"{stage.service.address}.unix", MLP, inputs, ENDINGS, way)
            attacks[f"{ENDINGS} requests end, {name}"] = _attack(plan, stage, sample, load)
    return {"attacks": attacks, "n": sum(each.request_count for each in attacks.values())}


def _shares(plan: _Plan) -> Found:
    sample = _make_sample(TRANSFORMER, plan, *TRANSFORMER_SHAPE)
    errors: dict[str, float] = {}
    count = 0
    seconds = QUICK_SHARES_S if plan.setup.quick else SHARES_S
    combined_rate = alone = 0.0
    for weight in WEIGHTS:
        with _stage(plan, {TRANSFORMER: {}}, plan.tenants(a=1.0, b=float(weight))) as stage:
            load = (loads.keep, TRANSFORMER, sample.inputs, BACKLOG, BACKLOG)
            if not alone:
                stage.a.begin(*load)
                stage.a.wait_for_report()
                time.sleep(seconds / 3)
                ended = stage.a.end()
                alone = ended.outcomes[OK] / ended.busy_s
            for user in (stage.a, stage.b):
                user.begin(*load)
            for user in (stage.a, stage.b):
                user.wait_for_report()
            before = _slot_seconds(stage.service)
            begin = time.perf_counter()
            time.sleep(seconds)
            after = _slot_seconds(stage.service)
            took = time.perf_counter() - begin
            a, b = (user.end() for user in (stage.a, stage.b))
            rates = [each.outcomes.get(OK, 0) / each.busy_s for each in (a, b)]
            if after:
                mine = [after[name] - before.get(name, 0.0) for name in ("a", "b")]
                progress(f"1:{weight}: slot seconds {mine[0]:.2f} and {mine[1]:.2f} of {took:.1f}, requests {rates}")
            else:
                mine = rates
            share = mine[1] / sum(mine)
            wanted = weight / (1 + weight)
            errors[f"1:{weight}"] = 100 * abs(share - wanted) / wanted
            combined_rate = max(combined_rate, sum(rates))
            count += a.outcomes.get(OK, 0) + b.outcomes.get(OK, 0)
    return {
        "share_errors": errors,
        "share_error_percent": max(errors.values()),
        "work_conserving": combined_rate / alone,
        "n": count,
    }


def _curve(plan: _Plan) -> Found:
    inputs = material.inputs(TINY_WIDTH)
    path = material.model(TINY, plan.setup.engine)
    plain, curve = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(PlainProcess(path, plan.setup.engine))
        reference = material.Reference(bare, inputs)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours, theirs = directory / "ours", directory / "theirs"
        made = [sys.executable, "-m", "weightctl", "keygen", str(ours), str(theirs)]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
        listeners: dict[str, dict[str, object]] = {
            "plain": {"address": plain, "insecure": True},
            "curve": {"address": curve, "security": "curve", "key": f"{theirs}.key"},
        }
        tables = {TINY: {"path": path, "workers": 1}}
        service = stack.enter_context(Service(tables, tenants=_ANY, listeners=listeners))
        service.ready()
        clients = {
            "plain": stack.enter_context(Client(plain)),
            "curve": stack.enter_context(Client(curve, key=f"{ours}.key", server_key=f"{theirs}.pub")),
        }
        p50: dict[str, list[float]] = {name: [] for name in clients}
        for _ in range(CURVE_ROUNDS):
            for name, client in clients.items():
                ask = functools.partial(client.infer, TINY)
                p50[name].append(percentile(seconds_of(ask, inputs, CURVE_REQUESTS, reference.check), 50))
    found = ratio(p50["curve"], p50["plain"])
    label = "TCP, and CURVE"
    return {
        "curve_ratio": found.median,
        "seconds": {label: (statistics.median(p50["plain"]), statistics.median(p50["curve"]))},
        "spreads": {label: found.spread},
        "n": 2 * CURVE_ROUNDS * CURVE_REQUESTS,
    }


def _slot_seconds(service: Service) -> dict[str, float]:
    """Return the slot seconds of each tenant from the daemon's accounts; empty without tenants."""
    with service.client() as client:
        tenants = client.status().tenants
    return {each.name: sum(account.slot_seconds for account in each.accounts) for each in tenants}


def _make_sample(model: str, plan: _Plan, *shape: int, rows: int = 1) -> _RequestSample:
    inputs = material.inputs(*shape, rows=rows)
    with PlainProcess(material.model(model, plan.setup.engine), plan.setup.engine) as bare:
        return _RequestSample(model, inputs, [bare.infer(each) for each in inputs])


@contextlib.contextmanager
def _stage(
    plan: _Plan,
    tables: Mapping[str, Mapping[str, object]],
    tenants: Mapping[str, Mapping[str, object]] | None = None,
    service: Callable[..., Service] = Service,
) -> Generator[_ConnectedService, None, None]:
    """Serve models to A and B; tables without `path` or `workers` get defaults."""
    tables = {
        name: {"workers": plan.setup.workers, **({} if "path" in table else _path(name, plan)), **table}
        for name, table in tables.items()
    }
    tenants = plan.tenants() if tenants is None else tenants
    with (
        service(tables, tenants=tenants, gid=users.CLIENTS_GID) as running,
        User(users.ALICE) as a,
        User(users.BOB) as b,
    ):
        running.ready()
        for each in (a, b):
            each.connect(f"unix://{running.address}", timeout=60.0)
        yield _ConnectedService(running, a, b)


def _path(name: str, plan: _Plan) -> dict[str, object]:
    return {"path": material.model(name, plan.setup.engine)}


def _poisoned() -> Path:
    """Return the path of a model that crashes on some inputs; it is always for ONNX Runtime."""
    return _written(POISONED, models.negated)


def _written(name: str, write: Callable[[Path], Path]) -> Path:
    """Return the path of a model for ONNX Runtime, writing the file if it does not exist."""
    path = material.model(TINY, material.ENGINES[0]).with_name(f"{name}.onnx")
    return path if path.exists() else write(path)


def _compared(
    plan: _Plan, stage: _ConnectedService, sample: _RequestSample, load: Sequence[Any], name: str
) -> tuple[float, Found]:
    """Measure B alone and beside A in turn; return the ratio, and the details for the result."""
    alone: list[float] = []
    beside: list[float] = []
    count = 0
    stage.measure(sample, 0.2)
    for _ in range(plan.rounds):
        result = stage.measure(sample, plan.round_s)
        stage.a.begin(*load)
        stage.a.wait_for_report()
        pressed = stage.measure(sample, plan.round_s)
        stage.a.end()
        if not (result.seconds and pressed.seconds):
            raise UnavailableError(f"fairness: {name}: B got no answers: {pressed.outcomes}")
        alone.append(_p50(result))
        beside.append(_p50(pressed))
        count += len(result.seconds) + len(pressed.seconds)
    found = ratio(beside, alone)
    progress(f"{name}: {found.median:.2f} times ({found.spread[0]:.2f} to {found.spread[1]:.2f})")
    p50 = statistics.median(alone), statistics.median(beside)
    return found.median, {"n": count, "seconds": {name: p50}, "spreads": {name: found.spread}}


@dataclasses.dataclass(frozen=True)
class Attack:
    """Result of an attack: B's latency before, during and one second after it, and B's requests in all phases.

    Attributes:
        moments: latency before, during and one second after the attack.
        request_count: requests of B.
        failed: failed requests of B.
        load_result: result of A's load.
    """

    moments: tuple[Moment, Moment, Moment]
    request_count: int
    failed: int
    load_result: Any


def _attack(
    plan: _Plan,
    stage: _ConnectedService,
    sample: _RequestSample,
    load: Sequence[Any],
    *,
    renew: bool = False,
    others: Sequence[User] = (),
) -> Attack:
    """Measure B alone, while A runs `load`, and from one second after A has stopped.

    With `renew`, B connects again after the attack has begun. `others` run the load in addition to A.
    """

    def at(moment: str) -> None:
        if renew and moment == "begun":
            stage.b.connect(f"unix://{stage.service.address}", timeout=60.0)

    return _attack_on(plan, stage, lambda seconds: stage.measure(sample, seconds), load, at=at, others=others)


def _attack_on(
    plan: _Plan,
    stage: _ConnectedService,
    ask: Callable[[float], LoadResult],
    load: Sequence[Any],
    *,
    at: Callable[[str], None] = lambda _: None,
    others: Sequence[User] = (),
) -> Attack:
    """Measure an attack as `_attack` does, with a function that makes B send requests for a number of seconds.

    `at` is called with "alone", "during" and "after" at the end of these phases, and with "begun" after the attack has
    begun.
    """
    attackers = [stage.a, *others]
    seconds = 2 * plan.round_s
    ask(0.2)
    phases = [_checked(ask(seconds))]
    at("alone")
    for each in attackers:
        each.begin(*load)
        each.wait_for_report()
    at("begun")
    phases.append(_checked(ask(seconds)))
    at("during")
    load_results = [each.end() for each in attackers]
    progress(f"A: {load_results}")
    time.sleep(1.0)
    phases.append(_checked(ask(seconds)))
    at("after")
    if not all(each.seconds for each in phases):
        raise UnavailableError(f"fairness: B got no answers: {[each.outcomes for each in phases]}")
    before, during, after = (Moment(_p50(each), percentile(each.seconds, 99)) for each in phases)
    progress(f"B: {before} alone, {during} during the attack, {after} one second after the attack")
    if any(map(_failed, phases)):
        progress(f"outcomes of B's requests {[each.outcomes for each in phases]}")
    count = sum(sum(each.outcomes.values()) for each in phases)
    return Attack((before, during, after), count, sum(map(_failed, phases)), load_results[0])


def _add_attacks(found: Found, attacks: Mapping[str, Attack]) -> None:
    """Add attacks to the result, and update the bounds over all attacks."""
    for name, attack in attacks.items():
        before, during, after = attack.moments
        found.setdefault("attacks", {})[name] = attack.moments
        found["attack_failed"] = found.get("attack_failed", 0) + attack.failed
        if name.startswith(COMPUTING):
            continue
        for key, value in (
            ("attack_p50_ratio", during.p50 / before.p50),
            ("attack_p99_excess_ms", 1e3 * (during.p99 - before.p99)),
            ("attack_after_p50_ratio", after.p50 / before.p50),
        ):
            found[key] = max(found.get(key, value), value)


def _p50(result: LoadResult) -> float:
    return percentile(result.seconds, 50)


def _checked(result: LoadResult) -> LoadResult:
    if result.outcomes.get(WRONG):
        raise DifferenceError(f"{result.outcomes[WRONG]} of B's answers differ from the bare engine's")
    return result


def _failed(result: LoadResult) -> int:
    return sum(count for code, count in result.outcomes.items() if code != OK)


class _Watch(BackgroundThread):
    """Counts the READY workers of a model until the end of the block; `min_ready` is the smallest number."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self.min_ready = POISON_WORKERS
        self._service = service

    def _run(self) -> None:
        with self._service.client() as client:
            while not self._stop.wait(0.05):
                (model,) = client.status().models
                ready = [each for each in model.generations[-1].processes if (each.role, each.state) == _READY]
                self.min_ready = min(self.min_ready, len(ready))


_READY = ("worker", "ready")

PARTS: Mapping[str, Part] = {
    "64": _in_flight("p50_ratio_64", 64),
    "1000": _in_flight("p50_ratio_1000", 1000),
    "refused": _full,
    "large": _large,
    "long": _long_batches,
    "poison": _poison,
    "storms": _storms,
    "connections": _connections,
    "computing": _computing,
    "connection-storm": _connection_storm,
    "many-users": _many_users,
    "gateway": _gateway,
    "gateway-helper": _gateway_helper,
    "descriptors": _descriptors,
    "kernel-buffers": _kernel_buffers,
    "long-predicts": _long_predicts,
    "log-flood": _log_flood,
    "sparse": _sparse,
    "framed": _framed,
    "memory-limit": _memory_limit,
    "slow-headers": _slow_headers,
    "special-values": _special_values,
    "empty-frames": _empty_frames,
    "cancellations": _cancellations,
    "costly-replies": _costly_replies,
    "endings": _endings,
    "shares": _shares,
    "curve": _curve,
}
