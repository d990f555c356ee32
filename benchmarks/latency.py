"""Latency of a small request, against a two-hop ZeroMQ echo of frames of about the same sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import material
from benchmarks.echo import Echo
from benchmarks.material import TINY, TINY_WIDTH, Reference, Setup
from benchmarks.report import Result, Target, median_over_blocks, percentile, progress, ratio, spread
from benchmarks.rounds import Ask, seconds_of, warm_up
from testkit.plain import PlainProcess
from testkit.service import Service

WORKERS = 1
ROUNDS = 20  # of each side, alternating
REQUESTS = 250  # per round
HEADER = bytes(128)  # of the echo's request and answer: one frame, shorter than the headers of weightd

_BOUNDS = {"unix": 0.8, "zmq": 1.6}
_DAEMON_CPU_US = 65.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latency(Result):
    """Latencies in microseconds, medians of the rounds' percentiles; ratios of p50, compared round by round.

    Attributes:
        p50_us: a request to weightd over `transport`, measured in the client from input array to output array.
        proxy_p50_us: the same over ZeroMQ, through the proxy.
        two_hop_p50_us: frames of the same sizes over ZeroMQ to a worker and back, without any processing.
        ratio: `p50_us` divided by `two_hop_p50_us`.
        proxy_ratio: `proxy_p50_us` divided by `two_hop_p50_us`.
        bare_predict_us: the part of `p50_us` that the engine takes; the echo runs no engine.
        daemon_cpu_us: the processor time of the daemon for a request over `transport`, median of the rounds.
    """

    benchmark = "latency"
    transport: str
    p50_us: float
    p99_us: float
    proxy_p50_us: float
    two_hop_p50_us: float
    two_hop_p99_us: float
    ratio: float
    ratio_spread: tuple[float, float]
    proxy_ratio: float
    proxy_ratio_spread: tuple[float, float]
    bare_predict_us: float
    daemon_cpu_us: float
    daemon_cpu_spread_us: tuple[float, float]

    def targets(self) -> Sequence[Target]:
        """Return the bounds of the ratios and of the daemon's processor time."""
        return [
            Target("ratio", _BOUNDS[self.transport]),
            Target("proxy_ratio", _BOUNDS["zmq"]),
            Target("daemon_cpu_us", _DAEMON_CPU_US),
        ]

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the table."""
        low, high = self.daemon_cpu_spread_us
        return [
            (f"weightd over {self.transport}", f"p50 {self.p50_us:5.0f} us   p99 {self.p99_us:5.0f} us"),
            ("weightd through the ZeroMQ proxy", f"p50 {self.proxy_p50_us:5.0f} us"),
            ("two-hop echo", f"p50 {self.two_hop_p50_us:5.0f} us   p99 {self.two_hop_p99_us:5.0f} us"),
            ("of which the engine", f"p50 {self.bare_predict_us:5.0f} us"),
            (
                "processor time of the daemon",
                f"{self.daemon_cpu_us:9.0f} us   half of the rounds {low:.0f} to {high:.0f} us",
            ),
            ("ratio", spread(self.ratio_spread)),
            ("proxy_ratio", spread(self.proxy_ratio_spread)),
        ]


def run(setup: Setup) -> Latency:
    """Measure rounds of requests to weightd and to the echo in turn."""
    path = material.model(TINY, setup.engine)
    inputs = material.inputs(TINY_WIDTH)
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(PlainProcess(path, setup.engine))
        reference = Reference(bare, inputs)
        predict = bare.times(inputs[0], 2 * REQUESTS)[REQUESTS:]
        answer = [len(HEADER), *(array.nbytes for array in bare.infer(inputs[0]).values())]
        echo = stack.enter_context(Echo(answer))
        service = stack.enter_context(Service({TINY: {"path": path, "workers": setup.workers}}))
        service.ready()
        senders: dict[str, Ask] = {}
        for transport in {setup.transport: None, "zmq": None}:
            client = stack.enter_context(material.client(service, transport))
            senders[transport] = functools.partial(client.infer, TINY)
        messages = [[HEADER, each["x"].tobytes()] for each in inputs]

        seconds: dict[str, list[list[float]]] = {name: [] for name in (*senders, "echo")}
        cpu_us: dict[str, list[float]] = {name: [] for name in senders}
        for number in range(ROUNDS):
            progress(f"round {number + 1} of {ROUNDS}")
            for transport, ask in senders.items():
                before_us = _cpu_us(service.pid)
                seconds[transport].append(seconds_of(ask, inputs, REQUESTS, reference.check))
                cpu_us[transport].append((_cpu_us(service.pid) - before_us) / (REQUESTS + warm_up(REQUESTS)))
            seconds["echo"].append(seconds_of(echo.ask, messages, REQUESTS))
    medians = {name: [percentile(each, 50) for each in rounds] for name, rounds in seconds.items()}
    ours, proxy = (ratio(medians[transport], medians["echo"]) for transport in (setup.transport, "zmq"))
    low, daemon_cpu_us, high = statistics.quantiles(cpu_us[setup.transport], n=4)
    return Latency(
        engine=setup.engine,
        workers=setup.workers,
        n=ROUNDS * REQUESTS,
        transport=setup.transport,
        p50_us=1e6 * median_over_blocks(seconds[setup.transport], 50),
        p99_us=1e6 * median_over_blocks(seconds[setup.transport], 99),
        proxy_p50_us=1e6 * median_over_blocks(seconds["zmq"], 50),
        two_hop_p50_us=1e6 * median_over_blocks(seconds["echo"], 50),
        two_hop_p99_us=1e6 * median_over_blocks(seconds["echo"], 99),
        ratio=ours.median,
        ratio_spread=ours.spread,
        proxy_ratio=proxy.median,
        proxy_ratio_spread=proxy.spread,
        bare_predict_us=1e6 * float(np.median(predict)),
        daemon_cpu_us=daemon_cpu_us,
        daemon_cpu_spread_us=(low, high),
    )


def _cpu_us(pid: int) -> float:
    """Return the processor time of a process's main thread so far, in microseconds."""
    return int(Path(f"/proc/{pid}/schedstat").read_text("ascii").split()[0]) / 1000
