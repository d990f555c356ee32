"""Load of ten times the capacity for a minute: the daemon's memory, and the requests that still succeed."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence

from benchmarks import material
from benchmarks.load import answers
from benchmarks.load_clients import LoadClients
from benchmarks.material import MLP, MLP_WIDTH, Arrays, Reference, Setup
from benchmarks.report import MB, Result, Target, progress
from testkit.memory import pss
from testkit.plain import PlainProcess
from testkit.service import Service
from weightd import Pending
from weightd_protocol.errors import ResourceExhausted

WORKERS = 2
MAX_QUEUE = 64
CLIENTS = 4
SECONDS = 60.0

_SETTLE_S = 10.0
_CALM = 400  # requests


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overload(Result):
    """Results of one minute of overload; `n` is the number of requests sent in it.

    Attributes:
        calm_rps: answered requests per second without overload.
        rps: answered requests per second under overload, without rejected ones.
        overload: number of requests sent, divided by the number answered.
        pss_mb: the daemon's PSS after the first seconds of overload.
        growth_mb: growth of the PSS until the end of the minute.
    """

    benchmark = "overload"
    calm_rps: float
    rps: float
    overload: float
    pss_mb: float
    growth_mb: float

    def targets(self) -> Sequence[Target]:
        """Return the bounds: the load is ten times the capacity, and the daemon's memory does not grow."""
        return [Target("overload", 10.0, at_least=True), Target("growth_mb", 4.0)]

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the table."""
        return [
            ("without overload", f"{self.calm_rps:8.1f} requests/s"),
            ("answered under overload", f"{self.rps:8.1f} requests/s"),
            ("requests sent per answered request", f"{self.overload:8.1f}"),
            ("the daemon", f"{self.pss_mb:8.1f} MB, then {self.growth_mb:+.1f} MB"),
        ]


class _OverloadClients(LoadClients):
    """Clients that send the next request immediately after a rejection."""

    def __init__(self, service: Service, inputs: list[Arrays], reference: Reference) -> None:
        super().__init__(service, inputs, clients=CLIENTS, in_flight=10 * MAX_QUEUE // CLIENTS)
        self.sent = 0
        self.answered = 0
        self._reference = reference
        self._lock = threading.Lock()

    def take(self, number: int, pending: Pending) -> None:
        """Compare the answer, or count the rejection."""
        try:
            self._reference.check(number, pending.result())
            answered = 1
        except ResourceExhausted:
            answered = 0
        with self._lock:
            self.sent += 1
            self.answered += answered


def run(setup: Setup) -> Overload:
    """Measure without overload, then under overload."""
    engine, workers = setup.engine, setup.workers
    path = material.model(MLP, engine)
    inputs = material.inputs(MLP_WIDTH)
    table = {"path": path, "workers": workers, "max_queue": MAX_QUEUE}
    with PlainProcess(path, engine) as bare, Service({MLP: table}) as service:
        reference = Reference(bare, inputs)
        service.ready()
        with service.client() as client:
            begin = time.perf_counter()
            for index, answer in list(answers(client, MLP, inputs, _CALM, 4 * workers)):
                reference.check(index, answer)
            calm = _CALM / (time.perf_counter() - begin)
        progress(f"{_SETTLE_S:g} s, then {SECONDS:g} s of overload")
        with _OverloadClients(service, inputs, reference) as clients:
            time.sleep(_SETTLE_S)
            sent, answered, before = clients.sent, clients.answered, pss(service.pid)
            time.sleep(SECONDS)
            sent, answered, after = clients.sent - sent, clients.answered - answered, pss(service.pid)
    return Overload(
        engine=engine,
        workers=workers,
        n=sent,
        calm_rps=calm,
        rps=answered / SECONDS,
        overload=sent / max(1, answered),
        pss_mb=before / MB,
        growth_mb=(after - before) / MB,
    )
