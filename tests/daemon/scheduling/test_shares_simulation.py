"""Fair shares of tenants in a simulation that accounts the devices' time exactly."""

from __future__ import annotations

import heapq
import itertools
import random
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit import dispatching
from testkit.dispatching import IgnoringSink
from testkit.examples import examples
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_daemon.scheduling.batching.policy import NO_BATCHING, BatchingPolicy
from weightd_daemon.scheduling.dispatcher import Dispatcher, SharedScheduling
from weightd_daemon.scheduling.fair_share import ACTIVE_S, MULTI_TENANT_HOLD_S, Durations, FairClocks, Users
from weightd_daemon.scheduling.request import ClientOrigin, Request
from weightd_daemon.scheduling.shared_process import SharedProcessScheduler
from weightd_daemon.tenants.tenant import Tenant
from weightd_protocol.errors import RequestError
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSpec
from weightd_protocol.messages.worker import BeginBatch, CancelPredict, ChildOrder, Predict, PredictResult

SHARES_FOR_S = 8.0
ERROR = 0.05
DEVICES = ["ascend:0", "ascend:1"]
CRASH = ExitCause(-signal.SIGSEGV)
ASKED = [RequestDescription("m", (TensorSpec("x", "UINT8", (rows, 1)),)) for rows in range(9)]
ANSWERED = ResponseDescription("m", (TensorSpec("y", "UINT8", (1, 1)),))
ROWS = BatchingPolicy(1, frozenset("x"), frozenset("y"), max_rows=8)


def tenant(name: str, weight: float = 1.0) -> Tenant:
    return Tenant(name, TenantConfig(weight=weight))


@dataclass
class SimulatedWorker:
    """A worker; it has run the first of its batches since `since`, until `ends`."""

    model: Model
    device: str
    batches: deque[list[int]] = field(default_factory=deque[list[int]])
    missing: int = 0
    since: float = 0.0
    ends: float = 0.0


class Model(IgnoringSink):
    """A dispatcher and its replies and orders."""

    def __init__(
        self,
        sim: Simulation,
        max_queue: int,
        max_queue_bytes: int,
        workers: int,
        predict_timeout: float,
        users: Users | None = None,
    ) -> None:
        config = ModelConfig(
            path="/m.onnx",
            engine="onnxruntime",
            max_queue=max_queue,
            max_queue_bytes=max_queue_bytes,
            predict_timeout=predict_timeout,
            workers=workers,
        )
        shared = SharedScheduling(clocks=sim.clocks, users=users)
        self.dispatcher = Dispatcher("m", config, self, self.send_order, lambda _: None, shared)
        self.sim = sim

    def reply_result(self, request: Request, result: PredictResult, frames: Sequence[Any]) -> None:
        self.sim.ended(request, "")

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        self.sim.ended(request, error.code)

    def send_order(self, process: str, order: ChildOrder, frames: Sequence[Any], _: object) -> None:
        worker = self.sim.workers.get(process)
        match order:
            case CancelPredict(number):
                if worker is not None:
                    for batch in itertools.islice(worker.batches, 1, None):
                        batch[:] = [each for each in batch if each != number]
                    worker.batches = deque(batch for batch in worker.batches if batch)
            case BeginBatch(items):
                assert worker is not None
                worker.missing = items
                worker.batches.append([])
            case Predict(number):
                assert worker is not None
                self.sim.ordered.append(number)
                if worker.missing:
                    worker.missing -= 1
                    worker.batches[-1].append(number)
                else:
                    worker.batches.append([number])
                if not worker.missing:
                    self.sim.start_if_idle(process, worker)
            case _:
                raise AssertionError(order)


class Simulation:
    """Models on devices, tenants that send requests, and a clock that advances from event to event."""

    def __init__(self, max_batch_seconds: float = 0.1) -> None:
        self.clocks = FairClocks(max_batch_seconds)
        self.now = 100.0
        self.workers: dict[str, SimulatedWorker] = {}
        self.models: list[Model] = []
        self.requests: dict[int, Request] = {}
        self.seconds: dict[int, float] = {}
        self.model_of: dict[int, Model] = {}
        self.started: list[int] = []
        self.ordered: list[int] = []
        self.answers: dict[int, str] = {}
        self.waited: dict[int, float] = {}
        self.used: Counter[str] = Counter()
        self.batches: list[list[int]] = []
        self.on_end: dict[int, Callable[[], object]] = {}
        self._numbers = itertools.count(1)
        self._events: list[tuple[float, int, Callable[[], object]]] = []

    def model(
        self,
        *devices: str,
        max_queue: int = 20_000,
        policy: BatchingPolicy = NO_BATCHING,
        max_queue_bytes: int = 2**40,
        predict_timeout: float = 1000.0,
    ) -> Model:
        made = Model(self, max_queue, max_queue_bytes, max(1, len(devices)), predict_timeout)
        self.models.append(made)
        for device in devices:
            self.add_worker(made, device, policy)
        return made

    def shared_models(self, models: int, processes: int) -> list[Model]:
        """Return models that are all served by each of the processes, one batch at a time."""
        users = Users()
        made = [Model(self, 1000, 2**40, processes, 1000.0, users) for _ in range(models)]
        self.models += made
        for _ in range(processes):
            name, turns = f"w{next(self._numbers)}", SharedProcessScheduler()
            self.workers[name] = SimulatedWorker(made[0], "ascend:0")
            for index, each in enumerate(made):
                each.dispatcher.processes.add_shared(name, turns, index, self.now, device="ascend:0")
        return made

    def add_worker(self, model: Model, device: str, policy: BatchingPolicy = NO_BATCHING) -> str:
        name = f"w{next(self._numbers)}"
        self.workers[name] = SimulatedWorker(model, device)
        model.dispatcher.processes.add(name, device=device, policy=policy)
        model.dispatcher.dispatch(self.now)
        return name

    def ask(
        self,
        model: Model,
        owner: Tenant,
        seconds: float,
        then: Callable[[], object] | None = None,
        *,
        rows: int = 1,
        nbytes: int = 0,
        level: int = 0,
    ) -> Request:
        number = next(self._numbers)
        origin = ClientOrigin(owner.name, f"tenant {owner.name}")
        request = Request(
            number,
            owner.name.encode(),
            f"id{number}",
            ASKED[rows],
            (b"",),
            self.now,
            1e9,
            nbytes or rows,
            origin,
            tenant=owner,
            priority_level=level,
        )
        self.requests[number], self.seconds[number], self.model_of[number] = request, seconds, model
        if then is not None:
            self.on_end[number] = then
        owner.quota.add_request(owner.config, request.description, request.nbytes)
        try:
            model.dispatcher.infer(request, self.now)
        except RequestError as error:
            self.ended(request, error.code)
        self.gather(model)
        return request

    def keep_in_flight(self, model: Model, owner: Tenant, seconds: Callable[[], float], depth: int) -> None:
        """Keep `depth` requests of a tenant in flight."""

        def ask() -> None:
            self.ask(model, owner, seconds(), lambda: self.call_at(self.now, ask))

        for _ in range(depth):
            ask()

    def gather(self, model: Model) -> None:
        dispatching.run_turns(model.dispatcher, self.now)

    def call_at(self, when: float, what: Callable[[], object]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what))

    def start_if_idle(self, name: str, worker: SimulatedWorker) -> None:
        if len(worker.batches) == 1:
            self.begin(name, worker)

    def begin(self, name: str, worker: SimulatedWorker) -> None:
        batch = worker.batches[0]
        self.started += batch
        self.batches.append([*batch])
        for number in batch:
            self.waited[number] = self.now - self.requests[number].arrived_at
        worker.since, worker.ends = self.now, self.now + sum(self.seconds[number] for number in batch)
        self.call_at(worker.ends, lambda: self.finish(name, batch))

    def finish(self, name: str, batch: list[int]) -> None:
        worker = self.workers.get(name)
        if worker is None or not worker.batches or worker.batches[0] is not batch:
            return
        worker.batches.popleft()
        for number in batch:
            self.used[self.requests[number].tenant.name] += self.seconds[number]  # type: ignore[assignment]
        if worker.batches:
            self.begin(name, worker)
        for number in batch:
            self.model_of[number].dispatcher.results.on_result(name, PredictResult(number, ANSWERED), (b"",), self.now)
        self.gather(worker.model)

    def die(self, name: str, end: ExitCause = CRASH) -> None:
        worker = self.workers.pop(name)
        for number in worker.batches[0] if worker.batches else ():
            self.used[self.requests[number].tenant.name] += self.now - worker.since  # type: ignore[assignment]
        worker.model.dispatcher.results.on_exit(name, end, self.now)
        worker.model.dispatcher.dispatch(self.now)

    def ended(self, request: Request, code: str) -> None:
        assert request.number not in self.answers
        self.answers[request.number] = code
        request.tenant.quota.end_request(request.nbytes, has_started=request.has_started)
        on_end = self.on_end.pop(request.number, None)
        if on_end is not None:
            on_end()

    def unfinished(self, owner: Tenant) -> tuple[int, int, int]:
        """Return the number of a tenant's unfinished requests, and the number and bytes of those not started."""
        there = [each for number, each in self.requests.items() if each.tenant is owner and number not in self.answers]
        waiting = [each.nbytes for each in there if not each.has_started]
        return len(there), len(waiting), sum(waiting)

    def run(self, seconds: float) -> Mapping[str, float]:
        """Advance the time; return the seconds that each tenant used."""
        end, before = self.now + seconds, self.used_so_far()
        while self._events and self._events[0][0] <= end:
            self.now, _, what = heapq.heappop(self._events)
            what()
        self.now = end
        after = self.used_so_far()
        return {name: after[name] - before[name] for name in after}

    def finish_all(self) -> None:
        """Run until all requests have ended, even if they must wait for a time-out first."""
        for _ in range(50):
            self.run(20.0)
            for model in self.models:
                model.dispatcher.dispatch(self.now)

    def used_so_far(self) -> Counter[str]:
        """Return the seconds used by each tenant, including running batches."""
        used = self.used.copy()
        for worker in self.workers.values():
            total = sum(self.seconds[number] for number in worker.batches[0]) if worker.batches else 0.0
            for number in worker.batches[0] if worker.batches else ():
                share = self.seconds[number] / total
                used[self.requests[number].tenant.name] += (self.now - worker.since) * share  # type: ignore[assignment]
        return used

    def is_work_conserving(self) -> bool:
        """Return whether no slot idles while a request waits that it could run and that is not a long one."""
        return all(
            worker.batches or not any(not each.isolation and each not in queue.long for each in queue)
            for worker in self.workers.values()
            for queue in [worker.model.dispatcher._scheduler.queue]
        )


def share_error(used: Mapping[str, float], expected: Mapping[str, float]) -> float:
    """Return the largest relative error of a tenant's share."""
    total, parts = sum(used.values()), sum(expected.values())
    return max(abs(used[name] / total - part / parts) / (part / parts) for name, part in expected.items())


def counts_are_right(models: Iterable[Model]) -> bool:
    """Return whether each queue counts the waiting requests of each tenant correctly."""
    queues = [model.dispatcher._scheduler.queue for model in models]
    return all(Counter(queue.counts_by_tenant) == Counter(request.tenant for request in queue) for queue in queues)


def constant(seconds: float) -> Callable[[], float]:
    return lambda: seconds


# --- shares ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "of_a", "of_b", "workers"),
    [(1.0, 0.01, 0.01, 1), (3.0, 0.005, 0.05, 3), (10.0, 0.05, 0.005, 3), (10.0, 0.005, 0.05, 1)],
)
def test_busy_tenants_share_by_weight(weight: float, of_a: float, of_b: float, workers: int) -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b", weight)
    model = sim.model(*["cpu"] * workers)
    sim.keep_in_flight(model, a, constant(of_a), 64)
    sim.keep_in_flight(model, b, constant(of_b), 64)
    assert share_error(sim.run(SHARES_FOR_S), {"a": 1.0, "b": weight}) < ERROR


def test_unused_share_goes_to_the_others() -> None:
    sim = Simulation()
    model = sim.model("cpu", "cpu")
    idle = tenant("idle", 5.0)
    sim.ask(model, idle, 0.01)
    for each, weight in (("a", 1.0), ("b", 2.0)):
        sim.keep_in_flight(model, tenant(each, weight), constant(0.02), 20)
    used = sim.run(SHARES_FOR_S)
    assert share_error({"a": used["a"], "b": used["b"]}, {"a": 1.0, "b": 2.0}) < ERROR
    assert used["a"] + used["b"] == pytest.approx(2 * SHARES_FOR_S, rel=0.01)


def test_idle_tenant_earns_no_credit() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    model = sim.model("cpu")
    sim.keep_in_flight(model, b, constant(0.01), 1)
    sim.keep_in_flight(model, a, constant(0.01), 64)
    sim.run(1.0)
    sim.on_end.clear()
    sim.keep_in_flight(model, a, constant(0.01), 64)
    sim.run(5.0)
    sim.keep_in_flight(model, b, constant(0.01), 64)
    assert share_error(sim.run(1.0), {"a": 1.0, "b": 1.0}) < ERROR


def test_unused_device_time_is_not_charged_later() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    model = sim.model("cpu")
    sim.ask(model, b, 0.01)
    sim.keep_in_flight(model, a, constant(0.01), 64)
    sim.run(5.0)
    sim.keep_in_flight(model, b, constant(0.01), 64)
    assert share_error(sim.run(1.0), {"a": 1.0, "b": 1.0}) < ERROR


def test_new_tenant_waits_for_one_batch_at_most() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    model = sim.model("cpu")
    for _ in range(10_000):
        sim.ask(model, a, 0.05)
    sim.run(3.01)
    # One request of A runs and one is queued on the slot; the queued one is recalled.
    first = sim.ask(model, b, 0.05)
    sim.run(1.0)
    assert sim.waited[first.number] <= 0.05
    waits: list[float] = []
    for _ in range(20):
        each = sim.ask(model, b, 0.05)
        sim.run(0.13)
        waits.append(sim.waited[each.number])
    assert max(waits) <= 0.05
    assert not sim.on_end


def test_single_requests_take_twice_as_long_beside_a_flood() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    model = sim.model("cpu", "cpu")
    sim.keep_in_flight(model, a, constant(0.01), 1000)
    latencies: list[float] = []

    def ask() -> None:
        request = sim.ask(model, b, 0.01)
        sim.on_end[request.number] = lambda: answered(request)

    def answered(request: Request) -> None:
        latencies.append(sim.now - request.arrived_at)
        sim.call_at(sim.now + 0.0003, ask)

    ask()
    sim.run(5.0)
    assert sorted(latencies)[len(latencies) // 2] <= 2.0 * 0.01 + 1e-9
    assert max(latencies[1:]) <= 2.0 * 0.01 + 1e-9


def test_wrong_estimates_are_corrected() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    model = sim.model("cpu", "cpu")
    rng = random.Random(1)
    sim.keep_in_flight(model, a, lambda: rng.choice([0.002, 0.2]), 64)
    sim.keep_in_flight(model, b, constant(0.002), 64)
    assert share_error(sim.run(SHARES_FOR_S), {"a": 1.0, "b": 1.0}) < ERROR


def test_second_model_on_a_device_gives_no_second_share() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    one, other = sim.model("cpu", "cpu", "cpu"), sim.model("cpu")
    for model in (one, other):
        sim.keep_in_flight(model, a, constant(0.01), 20)
    sim.keep_in_flight(one, b, constant(0.01), 20)
    assert share_error(sim.run(SHARES_FOR_S), {"a": 1.0, "b": 1.0}) < ERROR


def test_devices_have_separate_shares() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    one, other = sim.model("ascend:0"), sim.model("ascend:1")
    sim.keep_in_flight(one, a, constant(0.01), 20)
    for model in (one, other):
        sim.keep_in_flight(model, b, constant(0.01), 20)
    assert share_error(sim.run(SHARES_FOR_S), {"a": 1.0, "b": 3.0}) < ERROR


def test_sets_of_cores_are_one_device() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    one, other = sim.model("cpu:0"), sim.model("cpu:1")
    sim.keep_in_flight(one, a, constant(0.01), 20)
    for model in (one, other):
        sim.keep_in_flight(model, b, constant(0.01), 20)
    # Tenant A uses one set, tenant B the other.
    assert share_error(sim.run(SHARES_FOR_S), {"a": 1.0, "b": 1.0}) < ERROR


def test_narrow_model_earns_no_credit_for_all_slots() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    wide, narrow = sim.model(*["cpu"] * 8), sim.model("cpu")
    sim.keep_in_flight(wide, a, constant(0.04), 100)
    sim.keep_in_flight(narrow, b, constant(0.04), 10)
    sim.run(10.0)
    sim.keep_in_flight(wide, b, constant(0.04), 100)
    # B may have all eight workers for half a second at most, to make up for its share.
    used = sim.run(2.0)
    assert used["a"] > 0.5 * used["b"]


def test_lost_slot_is_charged_until_its_exit() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    model = sim.model("cpu")
    sim.keep_in_flight(model, b, constant(0.01), 20)
    sim.ask(model, a, 1000.0)
    sim.run(0.1)
    victim = next(name for name, worker in sim.workers.items() if sim.requests[worker.batches[0][0]].tenant is a)
    sim.run(1.0)
    sim.die(victim)
    sim.add_worker(model, "cpu")
    # A runs again only when B has used as much.
    before = sim.used["b"]
    sim.run(0.9)
    assert sim.used["b"] - before == pytest.approx(0.9, abs=0.011)
    sim.run(0.5)
    assert sim.used["b"] - before == pytest.approx(1.0, abs=0.1)


def test_changed_weight_applies_from_then_on() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    model = sim.model("cpu")
    for each in (a, b):
        sim.keep_in_flight(model, each, constant(0.01), 20)
    sim.run(5.0)
    b.set_config(TenantConfig(weight=4.0))
    assert share_error(sim.run(SHARES_FOR_S), {"a": 1.0, "b": 4.0}) < ERROR


@pytest.mark.parametrize("weight", [0.01, 1.0])
def test_increased_weight_reduces_earlier_charges(weight: float) -> None:
    sim, a, b = Simulation(), tenant("a", 0.01), tenant("b")
    model = sim.model("cpu")
    sim.keep_in_flight(model, b, constant(0.01), 8)
    batch = sim.ask(model, a, 1.0)
    sim.run(1.2)
    assert batch.number in sim.answers
    a.set_config(TenantConfig(weight=weight))
    first = sim.ask(model, a, 1.0)
    sim.run(2.0)
    assert (first.number in sim.waited) == (weight == 1.0)


def test_requeued_request_of_an_inactive_tenant_runs() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    model = sim.model("cpu")
    sim.ask(model, b, 1000.0)
    sim.keep_in_flight(model, a, constant(0.01), 3)
    sim.run(2 * MULTI_TENANT_HOLD_S)
    sim.die(next(iter(sim.workers)))
    sim.on_end.clear()
    sim.ask(model, b, 0.01)
    for _ in range(2):
        sim.add_worker(model, "cpu")
    sim.run(2000.0)
    assert {*sim.answers.values()} == {""}
    assert len(sim.answers) == len(sim.requests)
    assert len(sim.clocks.clock_of("cpu")) == 0


def test_running_batch_is_charged_once() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    model = sim.model("cpu", "cpu")
    for _ in range(2):
        sim.ask(model, a, 0.01)
        sim.ask(model, b, 100.0)
        sim.run(2 * MULTI_TENANT_HOLD_S)
        model.dispatcher.dispatch(sim.now)
        assert not model.dispatcher._scheduler.queue.is_multi_tenant
    sim.run(200.0)
    sim.ask(model, a, 0.01)
    sim.run(1.0)
    assert len(sim.answers) == len(sim.requests)
    assert len(sim.clocks.clock_of("cpu")) == 0


# --- rows -----------------------------------------------------------------------------------------------------------


def test_batch_of_several_tenants_is_charged_by_rows() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b", 3.0)
    model = sim.model("cpu", policy=ROWS)
    sim.keep_in_flight(model, a, constant(0.002), 64)
    sim.keep_in_flight(model, b, constant(0.002), 64)
    used = sim.run(SHARES_FOR_S)
    assert share_error(used, {"a": 1.0, "b": 3.0}) < ERROR
    assert any(len({sim.requests[number].tenant for number in batch}) == 2 for batch in sim.batches)


def test_batches_are_short_while_another_tenant_is_active() -> None:
    sim, a, b = Simulation(max_batch_seconds=0.05), tenant("a"), tenant("b")
    model = sim.model("cpu", policy=ROWS)
    sim.keep_in_flight(model, a, constant(0.02), 64)
    sim.run(1.0)
    assert max(map(len, sim.batches)) == 8
    sim.keep_in_flight(model, b, constant(0.02), 1)
    sim.run(1.0)
    sim.batches.clear()
    sim.run(2.0)
    # Also batches that begin while B has no request waiting, shortly after its answer.
    assert len({sim.requests[number].tenant for batch in sim.batches for number in batch}) == 2
    assert max(map(len, sim.batches)) <= 3


# --- long requests ----------------------------------------------------------------------------------------------------


class Sized(NamedTuple):
    """Size and duration of requests."""

    nbytes: int
    seconds: float


LONG, SHORT = Sized(8000, 3.0), Sized(16, 0.018)


def one_after_another(sim: Simulation, model: Model, owner: Tenant, each: Sized) -> list[float]:
    """Let a tenant send one request at a time; return the list that collects its waiting times."""
    waits: list[float] = []

    def ask() -> None:
        sent = sim.now

        def answered() -> None:
            waits.append(sim.now - sent - each.seconds)
            sim.call_at(sim.now + 0.001, ask)

        sim.ask(model, owner, each.seconds, answered, nbytes=each.nbytes)

    ask()
    return waits


def in_flight(
    sim: Simulation, model: Model, owner: Tenant, sizes: Callable[[], Sized], depth: int, level: int = 0
) -> None:
    """Keep `depth` requests of a tenant in flight, of random sizes."""

    def ask() -> None:
        size = sizes()
        on_end = lambda: sim.call_at(sim.now, ask)  # noqa: E731
        sim.ask(model, owner, size.seconds, on_end, nbytes=size.nbytes, level=level)

    for _ in range(depth):
        ask()


def beside_long(sim: Simulation, model: Model, long: Model | None = None, level: int = 0) -> list[float]:
    """Return the waiting times of B, which sends one request at a time while A has four long requests in flight."""
    a, b = tenant("a"), tenant("b")
    waits = one_after_another(sim, model, b, SHORT)
    sim.run(1.0)
    # A's requests are known to be long only after one of them has run.
    in_flight(sim, long or model, a, lambda: LONG, 4, level)
    sim.run(2 * LONG.seconds)
    waits.clear()
    sim.run(20.0)
    assert sim.used["a"] > 15.0
    return waits


@pytest.mark.parametrize("level", [0, 1])
def test_long_requests_leave_one_worker_to_others(level: int) -> None:
    sim = Simulation()
    waits = beside_long(sim, sim.model("cpu", "cpu"), level=level)
    assert max(waits) < 1e-6
    assert len(waits) > 600


def test_long_requests_leave_one_shared_process_to_others() -> None:
    sim = Simulation()
    model, other = sim.shared_models(2, 2)
    waits = beside_long(sim, model, other)
    assert max(waits) < 1e-6
    assert len(waits) > 600


def test_long_requests_get_only_their_share_of_one_worker() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    model = sim.model("cpu")
    waits = one_after_another(sim, model, b, SHORT)
    in_flight(sim, model, a, lambda: LONG, 4)
    sim.run(8.0)
    waits.clear()
    used = sim.run(30.0)
    assert sorted(waits)[len(waits) * 99 // 100] < 1e-6
    assert used["a"] == pytest.approx(15.0, abs=LONG.seconds)


@pytest.mark.parametrize("workers", [1, 2])
def test_long_requests_get_all_workers_without_other_tenants(workers: int) -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    long_s = 9.0
    model = sim.model(*["cpu"] * workers)
    sim.ask(model, b, SHORT.seconds)
    sim.ask(model, a, long_s, nbytes=LONG.nbytes)
    sim.run(long_s + 0.1)
    sim.ask(model, b, SHORT.seconds)
    for _ in range(20):
        sim.ask(model, a, long_s, nbytes=LONG.nbytes)
    sim.run(0.5)
    assert sum(bool(worker.batches) for worker in sim.workers.values()) == workers - 1
    # Only the clock ends the activity of B.
    due = model.dispatcher.next_event_at
    assert due <= sim.now + ACTIVE_S
    sim.run(due - sim.now)
    model.dispatcher.dispatch(sim.now)
    assert sum(bool(worker.batches) for worker in sim.workers.values()) == workers
    sim.finish_all()
    assert len(sim.answers) == len(sim.requests)


def test_rare_requests_find_a_free_worker() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    model = sim.model("cpu", "cpu")
    sim.ask(model, b, SHORT.seconds)
    in_flight(sim, model, a, lambda: LONG, 4)
    sim.run(2 * LONG.seconds)
    for _ in range(5):
        rare = sim.ask(model, b, SHORT.seconds)
        sim.run(0.5 * ACTIVE_S)
        assert sim.waited[rare.number] == 0.0
    sim.run(2 * ACTIVE_S)
    model.dispatcher.dispatch(sim.now)
    assert not model.dispatcher._scheduler.queue.is_multi_tenant
    assert all(worker.batches for worker in sim.workers.values())


def test_requests_of_similar_length_use_all_workers() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    model = sim.model("cpu", "cpu")
    for each, seconds in ((a, 0.5), (b, 0.3)):
        sim.keep_in_flight(model, each, constant(seconds), 8)
    used = sim.run(SHARES_FOR_S)
    assert sum(used.values()) == pytest.approx(2 * SHARES_FOR_S, rel=0.01)
    assert share_error(used, {"a": 1.0, "b": 1.0}) < ERROR


def test_expected_duration_is_computed_once_per_request(monkeypatch: pytest.MonkeyPatch) -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    model = sim.model("cpu")
    for owner in (a, b) * 2:
        sim.ask(model, owner, 0.5)
    sim.run(10.0)
    requests: list[str] = []

    def expected(_: object, owner: Tenant, nbytes: int) -> float:
        requests.append(owner.name)
        return 0.0

    monkeypatch.setattr(Durations, "expected_s", expected)
    sim.ask(model, a, 0.5)
    assert requests == ["a"]


def test_short_requests_pass_long_ones_of_their_tenant() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    model = sim.model("cpu", "cpu")
    one_after_another(sim, model, b, SHORT)
    in_flight(sim, model, a, lambda: LONG, 4)
    sim.run(2 * LONG.seconds)
    short = sim.ask(model, a, SHORT.seconds, nbytes=SHORT.nbytes)
    sim.run(1.0)
    assert short.number in sim.answers


def test_hung_request_counts_as_long() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    model = sim.model("cpu", "cpu", predict_timeout=5.0)
    waits = one_after_another(sim, model, b, SHORT)
    sim.ask(model, a, 1000.0, nbytes=LONG.nbytes)
    sim.run(5.0)
    for name, _ in list(model.dispatcher.processes.overdue(sim.now)):
        sim.workers.pop(name)
    assert len(sim.workers) == 1
    sim.add_worker(model, "cpu")
    waits.clear()
    for _ in range(4):
        sim.ask(model, a, 1000.0, nbytes=LONG.nbytes)
    sim.run(4.0)
    assert len(waits) > 100
    assert max(waits) < 1e-6


@settings(max_examples=examples(20), deadline=None)
@given(
    st.lists(st.builds(Sized, st.integers(1, 10_000), st.floats(0.01, 3.0)), min_size=1, max_size=5),
    st.integers(2, 4),
    st.integers(1, 12),
    st.integers(0, 2**32),
)
def test_each_long_size_delays_others_twice_at_most(sizes: list[Sized], workers: int, depth: int, seed: int) -> None:
    """A size is known to be long after one run; another request of that size may have begun in the meantime."""
    by_size = {each.nbytes.bit_length(): each for each in sizes}
    sim, a, b, rng = Simulation(), tenant("a"), tenant("b"), random.Random(seed)
    model = sim.model(*["cpu"] * workers)
    waits = one_after_another(sim, model, b, SHORT)
    sim.run(0.1)
    in_flight(sim, model, a, lambda: rng.choice([*by_size.values()]), depth)
    sim.run(8.0)
    normal = max(sim.clocks.max_batch_s, 2 * SHORT.seconds) + 1e-6
    assert sum(each > normal for each in waits) <= 2 * len(by_size)


def test_rare_long_requests_of_a_short_size_delay_others_briefly() -> None:
    sim, a, b, rng = Simulation(), tenant("a"), tenant("b"), random.Random(1)
    model = sim.model("cpu", "cpu")
    waits = one_after_another(sim, model, b, SHORT)
    in_flight(sim, model, a, lambda: Sized(1000, 0.5 if rng.random() < 0.05 else 0.01), 8)
    sim.run(5.0)
    waits.clear()
    sim.run(10.0)
    assert max(waits) <= 0.01


# --- full queue -------------------------------------------------------------------------------------------------------


def test_full_queue_evicts_newest_of_the_largest_tenant() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    model = sim.model(max_queue=10)
    of_a = [sim.ask(model, a, 1.0).number for _ in range(9)]
    of_b = [sim.ask(model, b, 1.0).number for _ in range(4)]
    assert sim.answers == dict.fromkeys(of_a[:5:-1], "RESOURCE_EXHAUSTED")
    # B's own newest request is evicted once B has the most.
    of_b += [sim.ask(model, b, 1.0).number for _ in range(3)]
    assert sim.answers == dict.fromkeys([*of_a[5:], *of_b[5:]], "RESOURCE_EXHAUSTED")


def test_weights_apply_to_the_queue() -> None:
    sim, a, b = Simulation(), tenant("a", 4.0), tenant("b")
    model = sim.model(max_queue=10)
    for each in (a, b):
        for _ in range(10):
            sim.ask(model, each, 1.0)
    left = Counter(each.tenant.name for each in model.dispatcher._scheduler.queue)
    assert left == {"a": 8, "b": 2}


def test_full_bytes_evict_requests_with_enough_bytes() -> None:
    sim, a, b = Simulation(), tenant("a"), tenant("b")
    model = sim.model(max_queue_bytes=20)
    of_a = [sim.ask(model, a, 1.0, rows=8).number for _ in range(2)]
    small = sim.ask(model, b, 1.0, rows=6).number
    assert sim.answers == {of_a[1]: "RESOURCE_EXHAUSTED"}
    large = sim.ask(model, b, 1.0, rows=8).number
    assert sim.answers.keys() == {of_a[1], large}
    assert [each.number for each in model.dispatcher._scheduler.queue] == [of_a[0], small]


# --- random operations ------------------------------------------------------------------------------------------------


def quota_counts(owner: Tenant) -> tuple[int, int, int]:
    return owner.quota.in_flight, owner.quota.waiting, owner.quota.waiting_bytes


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32), merges=st.booleans(), tenants=st.integers(1, 4), models=st.integers(1, 3))
def test_random_operations_keep_the_invariants(seed: int, merges: bool, tenants: int, models: int) -> None:
    sim, rng = Simulation(), random.Random(seed)
    owner = [tenant(f"t{index}", rng.choice([0.5, 1.0, 10.0])) for index in range(tenants)]
    policy = ROWS if merges else NO_BATCHING
    made = [sim.model(*rng.choices(["ascend:0", "ascend:1"], k=rng.randrange(3)), policy=policy) for _ in range(models)]
    for _ in range(150):
        model = rng.choice(made)
        match rng.randrange(12):
            case 0:
                sim.add_worker(model, rng.choice(DEVICES), policy)
            case 1 if sim.workers:
                sim.die(rng.choice([*sim.workers]), ExitCause(-signal.SIGKILL))
            case 2 if sim.requests:
                number = rng.choice([*sim.requests])
                if number not in sim.answers:
                    each = sim.requests[number]
                    sim.model_of[number].dispatcher.cancel(each.client, each.id, sim.now)
            case 3:
                sim.run(rng.choice([0.5, 5.0, 20.0]))
            case 4 | 5 | 6:
                sim.run(rng.choice([0.001, 0.01, 0.1]))
            case _:
                rows = rng.randrange(1, 9)
                sim.ask(model, rng.choice(owner), rng.choice([0.001, 0.01, 0.3, 15.0]), rows=rows)
        assert sim.is_work_conserving()
        assert counts_are_right(made)
        assert all(quota_counts(each) == sim.unfinished(each) for each in owner)
    for model in made:
        sim.add_worker(model, DEVICES[0], policy)
    sim.finish_all()
    assert sim.answers.keys() == sim.requests.keys()
    assert all(quota_counts(each) == (0, 0, 0) for each in owner)
    assert all(model.dispatcher.is_idle for model in made)
    for model in made:
        model.dispatcher.dispatch(sim.now)
    assert [len(sim.clocks.clock_of(device)) for device in DEVICES] == [0, 0]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.sampled_from(["ask", "ask", "run", "add_worker"]), max_size=60), st.booleans())
def test_single_tenant_is_served_in_order(events: Iterable[str], is_second: bool) -> None:
    """Without other tenants, each slot has one running and one queued batch."""
    sim, a = Simulation(), tenant("a")
    model = sim.model("cpu")
    if is_second:
        # Another tenant was active earlier.
        sim.ask(model, tenant("b"), 0.01)
        sim.run(20.0)
        sim.ordered.clear()
    requests: list[int] = []
    for event in events:
        match event:
            case "ask":
                requests.append(sim.ask(model, a, 0.05).number)
            case "run":
                sim.run(0.05)
            case _:
                sim.add_worker(model, "cpu")
    sim.run(100.0)
    assert sim.ordered == requests
    for _ in range(2):
        sim.ask(model, a, 0.05)
        sim.run(20.0)
    assert not model.dispatcher._scheduler.queue.is_multi_tenant
