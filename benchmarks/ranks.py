"""Two ranks of the real MindSpore under weightd, against the same two ranks called directly.

Time is measured with small slices, whose predict is as short as possible for two ranks, so that the overhead of a
request is most visible. Memory is measured with slices of 100 MB: the daemon, its ZeroMQ proxy and its fork server have
a constant size, which next to a tiny model would not be representative. Even so, most of the memory belongs to the
library's processes.

The bare ranks have as many threads as weightd's. They predict without pauses and are compiled for a single shape, while
weightd's model accepts any number of rows.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.material import DifferenceError, Setup, UnavailableError
from benchmarks.report import MB, Result, Target, progress
from testkit import ranks
from testkit.memory import pss_total
from testkit.ranks import Arrays, Group, Slices
from testkit.service import Service
from weightd import Client

WORKERS = 1
MODEL = "mlp"
HIDDEN = 8192  # for the measurement of time
HIDDEN_LARGE = 2 * 1024 * 1024  # for the measurement of memory: 100 MB for each rank, exported in ten seconds
ROWS = 4
ROUNDS = 9  # of latency, alternating
REQUESTS = 300  # per round
STARTS = 3  # of the bare group, and as many killed ranks

_LIMIT_S = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranks(Result):
    """Medians of `rounds` alternating rounds of latency, and of `n` starts and kills.

    Attributes:
        added_ms: `request_ms` less `predict_ms`, compared round by round.
        predict_ms: duration of a predict of the bare group, measured by the ranks.
        request_ms: duration of a request to weightd.
        recovery_ratio: `recovery_s` divided by `start_s`.
        recovery_s: time from kill -9 of a rank to the next answer.
        start_s: time from the start of the bare group to its first answer.
        first_s: time from the start of weightd to its first answer.
        memory_ratio: `memory_mb` divided by `bare_memory_mb`.
        memory_mb: PSS of the daemon, its helpers, the ranks and the scheduler.
        bare_memory_mb: PSS of the bare group, measured while weightd is not running.
        rounds: number of rounds of latency.
    """

    benchmark = "ranks"
    added_ms: float
    predict_ms: float
    request_ms: float
    recovery_ratio: float
    recovery_s: float
    start_s: float
    first_s: float
    memory_ratio: float
    memory_mb: float
    bare_memory_mb: float
    rounds: int = ROUNDS

    def targets(self) -> Sequence[Target]:
        """Return the bounds."""
        return [
            Target("added_ms", 1.0 + 0.1 * self.predict_ms),
            Target("recovery_ratio", 1.15),
            Target("memory_ratio", 1.05),
        ]

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the table."""
        return [
            ("a predict of the bare group, p50", f"{self.predict_ms:8.3f} ms"),
            ("a request, p50", f"{self.request_ms:8.3f} ms"),
            ("start of the bare group", f"{self.start_s:8.1f} s"),
            ("weightd's first answer", f"{self.first_s:8.1f} s"),
            ("next answer after kill -9 of a rank", f"{self.recovery_s:8.1f} s"),
            ("the bare group", f"{self.bare_memory_mb:8,.0f} MB"),
            ("weightd with the same model", f"{self.memory_mb:8,.0f} MB"),
        ]


def run(setup: Setup) -> Ranks:
    """Measure the memory of the bare group, then weightd's, then the time of both in turn."""
    if ranks.interpreter() is None:
        raise UnavailableError(ranks.HOW_TO_GET_IT)
    with tempfile.TemporaryDirectory(prefix="weightd-") as directory:
        sample = ranks.inputs(ROWS)
        memory, bare_memory = _memory(setup, ranks.export(Path(directory, "large"), hidden=HIDDEN_LARGE), sample)
        slices = ranks.export(Path(directory, "small"), hidden=HIDDEN)
        right = _answer_of(slices, sample)
        progress("weightd")
        with Service({MODEL: _table(slices)}) as service, setup.client(service, _LIMIT_S) as client:
            _ask(client, sample, right)
            first = time.perf_counter() - service.begin
            predicts, requests = _latency(client, slices, sample, right)
            starts, agains = _starts(service, client, slices, sample, right)
    return Ranks(
        engine="mindspore",
        workers=setup.workers,
        n=STARTS,
        added_ms=1e3 * statistics.median(ours - theirs for ours, theirs in zip(requests, predicts, strict=True)),
        predict_ms=1e3 * statistics.median(predicts),
        request_ms=1e3 * statistics.median(requests),
        recovery_ratio=statistics.median(ours / theirs for ours, theirs in zip(agains, starts, strict=True)),
        recovery_s=statistics.median(agains),
        start_s=statistics.median(starts),
        first_s=first,
        memory_ratio=memory / bare_memory,
        memory_mb=memory / MB,
        bare_memory_mb=bare_memory / MB,
    )


def _memory(setup: Setup, slices: Slices, sample: Arrays) -> tuple[int, int]:
    """Return the bytes of weightd with these slices, and of the bare group, which has exited before."""
    progress("memory of the bare group")
    with Group(slices.paths, plain=True) as bare:
        right = bare.ask("predict", sample)[-1]
        bare_memory = pss_total(each.pid for each in (bare.scheduler, *bare.ranks))
    progress("memory of weightd")
    with Service({MODEL: _table(slices)}) as service, setup.client(service, _LIMIT_S) as client:
        _ask(client, sample, right)
        return sum(service.pss_at_rest().values()), bare_memory


def _answer_of(slices: Slices, sample: Arrays) -> Arrays:
    with Group(slices.paths, plain=True) as bare:
        return bare.ask("predict", sample)[-1]


def _latency(client: Client, slices: Slices, sample: Arrays, right: Arrays) -> tuple[list[float], list[float]]:
    """Return the medians of the bare group's predicts and of the requests, by round."""
    predicts: list[float] = []
    requests: list[float] = []
    times = {**sample, "times": np.array(REQUESTS)}
    with Group(slices.paths, plain=True) as bare:
        for number in range(ROUNDS):
            progress(f"round {number + 1} of {ROUNDS}")
            predicts.append(float(np.median(bare.ask("measure", times)[-1]["seconds"])))
            requests.append(statistics.median(_ask(client, sample, right) for _ in range(REQUESTS)))
    return predicts, requests


def _starts(
    service: Service, client: Client, slices: Slices, sample: Arrays, right: Arrays
) -> tuple[list[float], list[float]]:
    """Return the seconds of each start of a bare group, and from each kill of a rank to the next answer."""
    starts: list[float] = []
    agains: list[float] = []
    for number in range(STARTS):
        progress(f"start {number + 1} of {STARTS}")
        with Group(slices.paths, plain=True) as bare:
            starts.append(bare.start_s)
        victim = next(each.pid for each in service.processes() if each.role == "rank")
        begun = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        _ask(client, sample, right)
        agains.append(time.perf_counter() - begun)
    return starts, agains


def _ask(client: Client, sample: Arrays, right: Arrays) -> float:
    """Send a request and compare its answer with the bare group's, bit by bit; return its seconds."""
    started_at = time.perf_counter()
    answer = client.infer(MODEL, sample)
    took = time.perf_counter() - started_at
    for name, array in right.items():
        if answer[name].tobytes() != array.tobytes():
            raise DifferenceError(f"output {name} differs from the output of the bare group")
    return took


def _table(slices: Slices) -> dict[str, object]:
    return {
        "engine": "mindspore",
        "path": slices.pattern,
        "python": ranks.interpreter(),
        "selftest": slices.selftest_path,
        "selftest_tolerance": 1e-5,
        "timeout": _LIMIT_S,
        "ranks": {"size": len(slices.paths)},
    }
