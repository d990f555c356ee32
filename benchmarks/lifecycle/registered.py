"""The cost of models that are registered and not loaded."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks import material
from benchmarks.lifecycle.zipf import service_pss
from benchmarks.material import TINY, TINY_WIDTH, Reference
from benchmarks.report import progress
from testkit import memory
from testkit.plain import PlainProcess
from testkit.service import Service

MANY = 1000
_REST_S = 30.0
_TINY_MODELS = 20


class Registered(NamedTuple):
    """The cost of `MANY` models on demand, none of which is loaded.

    Attributes:
        daemon_extra_bytes: PSS of the daemon, minus the PSS of a daemon with one model.
        start_s: time from the start of the daemon until its socket answers.
        start_one_s: the same with one model.
        cpu_share: CPU seconds per second of all processes of the service at rest.
    """

    daemon_extra_bytes: int
    start_s: float
    start_one_s: float
    cpu_share: float


class TinyModels(NamedTuple):
    """PSS of a service with tiny models on demand, in bytes.

    Attributes:
        before: before the first request.
        after: after each model was loaded and unloaded again.
    """

    before: int
    after: int


def measure(engine: str, rest_s: float = _REST_S) -> Registered:
    """Start a service with one model and a service with `MANY`, both idle."""
    path = material.model(TINY, engine)
    progress("one registered model")
    with Service({TINY: {"path": path, "load": "on_demand"}}) as service:
        start_one = time.perf_counter() - service.begin
        one = _daemon_pss(service)
    progress(f"{MANY:,} registered models")
    with Service({f"{TINY}-{number}": {"path": path, "load": "on_demand"} for number in range(MANY)}) as service:
        start = time.perf_counter() - service.begin
        many = _daemon_pss(service)
        begin, cpu_before = time.monotonic(), _cpu_seconds(service)
        time.sleep(rest_s)
        share = (_cpu_seconds(service) - cpu_before) / (time.monotonic() - begin)
    return Registered(many - one, start, start_one, share)


def measure_tiny(engine: str) -> TinyModels:
    """Measure the service before any request, and after each model has answered and was unloaded."""
    path = material.model(TINY, engine)
    inputs = material.inputs(TINY_WIDTH, count=1)
    with PlainProcess(path, engine) as plain:
        reference = Reference(plain, inputs)
    table = {"path": path, "load": "on_demand", "idle_unload": 0.5}
    names = [f"{TINY}-{number}" for number in range(_TINY_MODELS)]
    progress(f"{_TINY_MODELS} tiny models on demand")
    with Service(dict.fromkeys(names, table), {"min_resident": 0.0}) as service, service.client() as client:
        service.pss_at_rest()
        before = service_pss(service)
        for name in names:
            reference.check(0, client.infer(name, inputs[0]))
        # Without loaded models, the fork server stops after some time, too.
        while any(each.generations for each in service.status().models) or service.status().fork_servers:
            time.sleep(0.1)
        service.pss_at_rest()
        return TinyModels(before, service_pss(service))


def _daemon_pss(service: Service) -> int:
    service.pss_at_rest()
    return memory.pss(service.pid)


def _cpu_seconds(service: Service) -> float:
    """Return the CPU seconds of all processes of a service."""
    ticks = 0
    for pid in service.pids():
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
