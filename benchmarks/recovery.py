"""Duration of faults under load, until every worker is ready again, and their cost for clients."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks import material
from benchmarks.load_clients import LoadClients
from benchmarks.material import MLP, MLP_WIDTH, Arrays, Reference, Setup
from benchmarks.report import Result, Target, progress
from testkit.plain import PlainProcess
from testkit.service import Service
from weightd import Pending
from weightd_protocol.errors import RequestError
from weightd_protocol.messages.status import ProcessStatus, StatusResponse

WORKERS = 2
REPEATS = 5
PREDICT_TIMEOUT_S = 1.0
WATCHDOG_S = 2.0

_IN_FLIGHT = 4
_QUIET_S = 1.0  # of load before and after each fault
_LIMIT_S = 120.0

# killed_worker_recovery_ms
_MAX_RECOVERY_MS = {"onnxruntime": 200.0, "mindspore_lite": 4000.0}

# Causes a fault and returns the pids of the affected workers; None if the fault is impossible here.
Strike = Callable[[Service], set[int] | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recovery(Result):
    """Medians over the repeats, for a model of 192 MiB with a constant number of requests in flight.

    Impossible faults are skipped: if workers are forked from the process that built the model, there is no page store
    to truncate.

    Attributes:
        recovery_ms: milliseconds until as many workers as before, except the affected ones, are READY; by fault.
        gap_ms: longest time without an answer, by fault.
        errors: failed requests by code, over all repeats; by fault.
        killed_worker_errors: failed requests of the fault "worker killed".
        killed_worker_recovery_ms: `recovery_ms` of the fault "worker killed".
    """

    benchmark = "recovery"
    recovery_ms: Mapping[str, float]
    gap_ms: Mapping[str, float]
    errors: Mapping[str, Mapping[str, int]]
    killed_worker_errors: int
    killed_worker_recovery_ms: float

    def targets(self) -> Sequence[Target]:
        """Return the bounds: a killed worker causes no failed request and is soon replaced."""
        return [Target("killed_worker_errors", 0), Target("killed_worker_recovery_ms", _MAX_RECOVERY_MS[self.engine])]

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the table."""
        return [
            (
                fault,
                (
                    f"recovered after {self.recovery_ms[fault]:7.0f} ms, longest gap {self.gap_ms[fault]:6.0f} ms, "
                    f"errors {', '.join(f'{count} {code}' for code, count in self.errors[fault].items()) or 'none'}"
                ),
            )
            for fault in self.recovery_ms
        ]


class _Load(LoadClients):
    """One client that compares every answer and counts the errors."""

    def __init__(self, service: Service, inputs: list[Arrays], reference: Reference) -> None:
        super().__init__(service, inputs, clients=1, in_flight=_IN_FLIGHT)
        self.answered: list[float] = []
        self.errors: collections.Counter[str] = collections.Counter()
        self._reference = reference

    def take(self, number: int, pending: Pending) -> None:
        """Compare the answer, or count the error."""
        try:
            self._reference.check(number, pending.result())
        except RequestError as error:
            self.errors[error.code] += 1
        else:
            self.answered.append(time.perf_counter())


def run(setup: Setup) -> Recovery:
    """Cause each fault in turn, always after the service has recovered from the previous one."""
    engine, workers = setup.engine, setup.workers
    path = material.model(MLP, engine)
    inputs = material.inputs(MLP_WIDTH)
    recovery_times: dict[str, list[float]] = {fault: [] for fault in _FAULTS}
    gaps: dict[str, list[float]] = {fault: [] for fault in _FAULTS}
    errors: dict[str, collections.Counter[str]] = {fault: collections.Counter() for fault in _FAULTS}
    table = {"path": path, "workers": workers, "predict_timeout": PREDICT_TIMEOUT_S, "watchdog": WATCHDOG_S}
    with PlainProcess(path, engine) as bare, Service({MLP: table}) as service:
        reference = Reference(bare, inputs)
        for repeat in range(REPEATS):
            progress(f"repeat {repeat + 1} of {REPEATS}")
            for fault, strike in _FAULTS.items():
                service.ready()
                with _Load(service, inputs, reference) as load:
                    time.sleep(_QUIET_S)
                    struck, begun = strike(service), time.perf_counter()
                    if struck is None:
                        continue
                    recovery_times[fault].append(_wait_recovered(service, struck, workers) - begun)
                    time.sleep(_QUIET_S)
                gaps[fault].append(_longest_gap(load.answered, begun))
                errors[fault] += load.errors
    return Recovery(
        engine=engine,
        workers=workers,
        n=REPEATS,
        recovery_ms={fault: 1e3 * statistics.median(each) for fault, each in recovery_times.items() if each},
        gap_ms={fault: 1e3 * statistics.median(each) for fault, each in gaps.items() if each},
        errors={fault: errors[fault] for fault, each in recovery_times.items() if each},
        killed_worker_errors=errors["worker killed"].total(),
        killed_worker_recovery_ms=1e3 * statistics.median(recovery_times["worker killed"]),
    )


def _wait_recovered(service: Service, struck: set[int], workers: int) -> float:
    """Wait until as many workers as before, without the affected ones, are READY; return the time."""
    with service.client() as client:
        limit = time.perf_counter() + _LIMIT_S
        while time.perf_counter() < limit:
            ready = [each.pid for each in _processes(client.status(), "worker") if each.state == "ready"]
            if len(ready) == workers and not struck & set(ready):
                return time.perf_counter()
            time.sleep(0.01)
    raise TimeoutError(f"the service has not recovered within {_LIMIT_S:g} s")


def _longest_gap(answered: Sequence[float], struck_at: float) -> float:
    after = [struck_at, *(each for each in answered if each > struck_at)]
    return max((later - earlier for earlier, later in itertools.pairwise(after)), default=0.0)


def _processes(status: StatusResponse, role: str) -> list[ProcessStatus]:
    [model] = status.models
    return [each for generation in model.generations for each in generation.processes if each.role == role]


def _signal_worker(number: signal.Signals) -> Callable[[Service], set[int]]:
    def strike(service: Service) -> set[int]:
        worker = next(each for each in _processes(service.status(), "worker") if each.state == "ready")
        os.kill(worker.pid, number)
        return {worker.pid}

    return strike


def _kill_holder(service: Service) -> set[int]:
    for holder in _processes(service.status(), "holder"):
        os.kill(holder.pid, signal.SIGKILL)
    return set()


def _kill_worker_and_holder(service: Service) -> set[int]:
    """Kill a worker together with the holder, so that the next worker may need another build of the model."""
    _kill_holder(service)
    return _signal_worker(signal.SIGKILL)(service)


def _kill_worker_and_fork_server(service: Service) -> set[int] | None:
    servers = [pid for pid, role in service.roles().items() if role == "fork server"]
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
    return _signal_worker(signal.SIGKILL)(service) if servers else None


def _truncate_store(service: Service) -> set[int] | None:
    workers = {each.pid for each in _processes(service.status(), "worker")}
    stores = [*service.cache.glob("*/*/pages")]
    for store in stores:
        os.truncate(store, 4096)
    return workers if stores else None


# After each fault, the service returns to its previous state, except after "holder killed": the fault that needs a new
# holder follows it.
_FAULTS: Mapping[str, Strike] = {
    "worker killed": _signal_worker(signal.SIGKILL),
    "worker stopped": _signal_worker(signal.SIGSTOP),
    "worker and fork server killed": _kill_worker_and_fork_server,
    "holder killed": _kill_holder,
    "worker and holder killed": _kill_worker_and_holder,
    "store truncated": _truncate_store,
}
