"""Tenants that share slots, in a simulated world: what each has had of the devices is counted, to the last second."""

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

from testkit import desks
from testkit.desks import IgnoringSink
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
    """A worker: the first of its batches runs since then, and is over at `ends`."""

    model: Model
    device: str
    jobs: deque[list[int]] = field(default_factory=deque[list[int]])
    missing: int = 0
    since: float = 0.0
    ends: float = 0.0


class Model(IgnoringSink):
    """A dispatcher, and what it is told to do."""

    def __init__(
        self,
        world: World,
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
        shared = SharedScheduling(clocks=world.clocks, users=users)
        self.desk = Dispatcher("m", config, self, self.send_order, lambda _: None, shared)
        self.world = world

    def reply_result(self, request: Request, result: PredictResult, frames: Sequence[Any]) -> None:
        self.world.ended(request, "")

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        self.world.ended(request, error.code)

    def send_order(self, process: str, order: ChildOrder, frames: Sequence[Any], _: object) -> None:
        seat = self.world.seats.get(process)
        match order:
            case CancelPredict(number):
                if seat is not None:
                    for job in itertools.islice(seat.jobs, 1, None):
                        job[:] = [each for each in job if each != number]
                    seat.jobs = deque(job for job in seat.jobs if job)
            case BeginBatch(parts):
                assert seat is not None
                seat.missing = parts
                seat.jobs.append([])
            case Predict(number):
                assert seat is not None
                self.world.ordered.append(number)
                if seat.missing:
                    seat.missing -= 1
                    seat.jobs[-1].append(number)
                else:
                    seat.jobs.append([number])
                if not seat.missing:
                    self.world.given(process, seat)
            case _:
                raise AssertionError(order)


class World:
    """Models on devices, tenants who ask, and a clock that runs from event to event."""

    def __init__(self, max_batch_seconds: float = 0.1) -> None:
        self.clocks = FairClocks(max_batch_seconds)
        self.now = 100.0
        self.seats: dict[str, SimulatedWorker] = {}
        self.models: list[Model] = []
        self.asked: dict[int, Request] = {}
        self.seconds: dict[int, float] = {}
        self.whose: dict[int, Model] = {}
        self.begun: list[int] = []
        self.ordered: list[int] = []
        self.answers: dict[int, str] = {}
        self.waited: dict[int, float] = {}
        self.had: Counter[str] = Counter()
        self.jobs: list[list[int]] = []
        self.again: dict[int, Callable[[], object]] = {}
        self._numbers = itertools.count(1)
        self._events: list[tuple[float, int, Callable[[], object]]] = []

    def model(
        self,
        *devices: str,
        max_queue: int = 20_000,
        terms: BatchingPolicy = NO_BATCHING,
        max_queue_bytes: int = 2**40,
        predict_timeout: float = 1000.0,
    ) -> Model:
        made = Model(self, max_queue, max_queue_bytes, max(1, len(devices)), predict_timeout)
        self.models.append(made)
        for device in devices:
            self.enlist(made, device, terms)
        return made

    def household(self, models: int, processes: int) -> list[Model]:
        """Return models that are served by each of some processes, one batch at a time."""
        users = Users()
        made = [Model(self, 1000, 2**40, processes, 1000.0, users) for _ in range(models)]
        self.models += made
        for _ in range(processes):
            name, turns = f"w{next(self._numbers)}", SharedProcessScheduler()
            self.seats[name] = SimulatedWorker(made[0], "ascend:0")
            for index, each in enumerate(made):
                each.desk.processes.add_shared(name, turns, index, self.now, device="ascend:0")
        return made

    def enlist(self, model: Model, device: str, terms: BatchingPolicy = NO_BATCHING) -> str:
        name = f"w{next(self._numbers)}"
        self.seats[name] = SimulatedWorker(model, device)
        model.desk.processes.add(name, device=device, policy=terms)
        model.desk.dispatch(self.now)
        return name

    def ask(
        self,
        model: Model,
        who: Tenant,
        seconds: float,
        then: Callable[[], object] | None = None,
        *,
        rows: int = 1,
        nbytes: int = 0,
        level: int = 0,
    ) -> Request:
        number = next(self._numbers)
        origin = ClientOrigin(who.name, f"tenant {who.name}")
        request = Request(
            number,
            who.name.encode(),
            f"id{number}",
            ASKED[rows],
            (b"",),
            self.now,
            1e9,
            nbytes or rows,
            origin,
            tenant=who,
            priority_level=level,
        )
        self.asked[number], self.seconds[number], self.whose[number] = request, seconds, model
        if then is not None:
            self.again[number] = then
        who.quota.add_request(who.config, request.description, request.nbytes)
        try:
            model.desk.infer(request, self.now)
        except RequestError as error:
            self.ended(request, error.code)
        self.gather(model)
        return request

    def load(self, model: Model, who: Tenant, seconds: Callable[[], float], depth: int) -> None:
        """So many are asked, and another one whenever one of them is answered."""

        def ask() -> None:
            self.ask(model, who, seconds(), lambda: self.at(self.now, ask))

        for _ in range(depth):
            ask()

    def gather(self, model: Model) -> None:
        desks.run_turns(model.desk, self.now)

    def at(self, when: float, what: Callable[[], object]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what))

    def given(self, name: str, seat: SimulatedWorker) -> None:
        if len(seat.jobs) == 1:
            self.begin(name, seat)

    def begin(self, name: str, seat: SimulatedWorker) -> None:
        job = seat.jobs[0]
        self.begun += job
        self.jobs.append([*job])
        for number in job:
            self.waited[number] = self.now - self.asked[number].arrived_at
        seat.since, seat.ends = self.now, self.now + sum(self.seconds[number] for number in job)
        self.at(seat.ends, lambda: self.finish(name, job))

    def finish(self, name: str, job: list[int]) -> None:
        seat = self.seats.get(name)
        if seat is None or not seat.jobs or seat.jobs[0] is not job:
            return
        seat.jobs.popleft()
        for number in job:
            self.had[self.asked[number].tenant.name] += self.seconds[number]  # type: ignore[assignment]
        if seat.jobs:
            self.begin(name, seat)
        for number in job:
            self.whose[number].desk.results.on_result(name, PredictResult(number, ANSWERED), (b"",), self.now)
        self.gather(seat.model)

    def die(self, name: str, end: ExitCause = CRASH) -> None:
        seat = self.seats.pop(name)
        for number in seat.jobs[0] if seat.jobs else ():
            self.had[self.asked[number].tenant.name] += self.now - seat.since  # type: ignore[assignment]
        seat.model.desk.results.on_exit(name, end, self.now)
        seat.model.desk.dispatch(self.now)

    def ended(self, request: Request, code: str) -> None:
        assert request.number not in self.answers
        self.answers[request.number] = code
        request.tenant.quota.end_request(request.nbytes, has_started=request.has_started)
        again = self.again.pop(request.number, None)
        if again is not None:
            again()

    def standing(self, who: Tenant) -> tuple[int, int, int]:
        """Return how many of a tenant have not ended, how many of those never began, and the bytes of these."""
        there = [each for number, each in self.asked.items() if each.tenant is who and number not in self.answers]
        waiting = [each.nbytes for each in there if not each.has_started]
        return len(there), len(waiting), sum(waiting)

    def run(self, seconds: float) -> Mapping[str, float]:
        """Time passes; return what each tenant has had in it."""
        end, before = self.now + seconds, self.running()
        while self._events and self._events[0][0] <= end:
            self.now, _, what = heapq.heappop(self._events)
            what()
        self.now = end
        after = self.running()
        return {name: after[name] - before[name] for name in after}

    def settle(self) -> None:
        """Have all that waits run, also what waits for nothing but the time."""
        for _ in range(50):
            self.run(20.0)
            for model in self.models:
                model.desk.dispatch(self.now)

    def running(self) -> Counter[str]:
        """What each has had, with what it has had by now of what runs."""
        had = self.had.copy()
        for seat in self.seats.values():
            total = sum(self.seconds[number] for number in seat.jobs[0]) if seat.jobs else 0.0
            for number in seat.jobs[0] if seat.jobs else ():
                share = self.seconds[number] / total
                had[self.asked[number].tenant.name] += (self.now - seat.since) * share  # type: ignore[assignment]
        return had

    def conserves(self) -> bool:
        """Whether no slot idles while something waits that it could run, and is not long."""
        return all(
            seat.jobs or not any(not each.isolation and each not in line.long for each in line)
            for seat in self.seats.values()
            for line in [seat.model.desk._scheduler.queue]
        )


def error(had: Mapping[str, float], expected: Mapping[str, float]) -> float:
    """How far the worst is from its share, as a part of that."""
    total, parts = sum(had.values()), sum(expected.values())
    return max(abs(had[name] / total - part / parts) / (part / parts) for name, part in expected.items())


def counted(models: Iterable[Model]) -> bool:
    """Whether each line tells of each tenant how many of its requests wait."""
    lines = [model.desk._scheduler.queue for model in models]
    return all(Counter(line.counts_by_tenant) == Counter(request.tenant for request in line) for line in lines)


def always(seconds: float) -> Callable[[], float]:
    return lambda: seconds


# --- shares ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "of_a", "of_b", "seats"),
    [(1.0, 0.01, 0.01, 1), (3.0, 0.005, 0.05, 3), (10.0, 0.05, 0.005, 3), (10.0, 0.005, 0.05, 1)],
)
def test_two_that_ask_without_end_have_seconds_by_their_weights(
    weight: float, of_a: float, of_b: float, seats: int
) -> None:
    world, a, b = World(), tenant("a"), tenant("b", weight)
    model = world.model(*["cpu"] * seats)
    world.load(model, a, always(of_a), 64)
    world.load(model, b, always(of_b), 64)
    assert error(world.run(SHARES_FOR_S), {"a": 1.0, "b": weight}) < ERROR


def test_the_share_of_who_asks_nothing_goes_to_the_others() -> None:
    world = World()
    model = world.model("cpu", "cpu")
    idle = tenant("idle", 5.0)
    world.ask(model, idle, 0.01)
    for each, weight in (("a", 1.0), ("b", 2.0)):
        world.load(model, tenant(each, weight), always(0.02), 20)
    had = world.run(SHARES_FOR_S)
    assert error({"a": had["a"], "b": had["b"]}, {"a": 1.0, "b": 2.0}) < ERROR
    assert had["a"] + had["b"] == pytest.approx(2 * SHARES_FOR_S, rel=0.01)


def test_who_was_idle_has_no_credit() -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    model = world.model("cpu")
    world.load(model, b, always(0.01), 1)
    world.load(model, a, always(0.01), 64)
    world.run(1.0)
    world.again.clear()
    world.load(model, a, always(0.01), 64)
    world.run(5.0)
    world.load(model, b, always(0.01), 64)
    assert error(world.run(1.0), {"a": 1.0, "b": 1.0}) < ERROR


def test_who_had_more_than_its_share_while_nobody_else_asked_owes_nothing() -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    model = world.model("cpu")
    world.ask(model, b, 0.01)
    world.load(model, a, always(0.01), 64)
    world.run(5.0)
    world.load(model, b, always(0.01), 64)
    assert error(world.run(1.0), {"a": 1.0, "b": 1.0}) < ERROR


def test_who_comes_waits_for_one_job_however_many_wait_of_another() -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    model = world.model("cpu")
    for _ in range(10_000):
        world.ask(model, a, 0.05)
    world.run(3.01)
    # The first of its requests finds one running, and one ready, which is taken back.
    first = world.ask(model, b, 0.05)
    world.run(1.0)
    assert world.waited[first.number] <= 0.05
    waits: list[float] = []
    for _ in range(20):
        each = world.ask(model, b, 0.05)
        world.run(0.13)
        waits.append(world.waited[each.number])
    assert max(waits) <= 0.05
    assert not world.again


def test_one_at_a_time_beside_a_thousand_takes_about_twice_as_long_as_alone() -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    model = world.model("cpu", "cpu")
    world.load(model, a, always(0.01), 1000)
    latencies: list[float] = []

    def ask() -> None:
        request = world.ask(model, b, 0.01)
        world.again[request.number] = lambda: answered(request)

    def answered(request: Request) -> None:
        latencies.append(world.now - request.arrived_at)
        world.at(world.now + 0.0003, ask)

    ask()
    world.run(5.0)
    assert sorted(latencies)[len(latencies) // 2] <= 2.0 * 0.01 + 1e-9
    assert max(latencies[1:]) <= 2.0 * 0.01 + 1e-9


def test_a_guess_that_is_wrong_by_a_hundred_times_is_corrected() -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    model = world.model("cpu", "cpu")
    some = random.Random(1)
    world.load(model, a, lambda: some.choice([0.002, 0.2]), 64)
    world.load(model, b, always(0.002), 64)
    assert error(world.run(SHARES_FOR_S), {"a": 1.0, "b": 1.0}) < ERROR


def test_a_second_model_on_the_same_device_gives_no_second_share() -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    one, other = world.model("cpu", "cpu", "cpu"), world.model("cpu")
    for model in (one, other):
        world.load(model, a, always(0.01), 20)
    world.load(one, b, always(0.01), 20)
    assert error(world.run(SHARES_FOR_S), {"a": 1.0, "b": 1.0}) < ERROR


def test_devices_have_shares_of_their_own() -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    one, other = world.model("ascend:0"), world.model("ascend:1")
    world.load(one, a, always(0.01), 20)
    for model in (one, other):
        world.load(model, b, always(0.01), 20)
    assert error(world.run(SHARES_FOR_S), {"a": 1.0, "b": 3.0}) < ERROR


def test_sets_of_cores_are_one_device() -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    one, other = world.model("cpu:0"), world.model("cpu:1")
    world.load(one, a, always(0.01), 20)
    for model in (one, other):
        world.load(model, b, always(0.01), 20)
    # One has the one, the other the other.
    assert error(world.run(SHARES_FOR_S), {"a": 1.0, "b": 1.0}) < ERROR


def test_who_could_use_one_slow_seat_alone_is_not_owed_all_others_for_as_long() -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    wide, narrow = world.model(*["cpu"] * 8), world.model("cpu")
    world.load(wide, a, always(0.04), 100)
    world.load(narrow, b, always(0.04), 10)
    world.run(10.0)
    world.load(wide, b, always(0.04), 100)
    # All eight for half a second at most, in which it has what it is owed.
    had = world.run(2.0)
    assert had["a"] > 0.5 * had["b"]


def test_what_a_seat_ran_until_it_died_is_charged() -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    model = world.model("cpu")
    world.load(model, b, always(0.01), 20)
    world.ask(model, a, 1000.0)
    world.run(0.1)
    victim = next(name for name, seat in world.seats.items() if world.asked[seat.jobs[0][0]].tenant is a)
    world.run(1.0)
    world.die(victim)
    world.enlist(model, "cpu")
    # It is its turn again only when the other one has had as much.
    before = world.had["b"]
    world.run(0.9)
    assert world.had["b"] - before == pytest.approx(0.9, abs=0.011)
    world.run(0.5)
    assert world.had["b"] - before == pytest.approx(1.0, abs=0.1)


def test_a_weight_that_changes_counts_from_then_on() -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    model = world.model("cpu")
    for each in (a, b):
        world.load(model, each, always(0.01), 20)
    world.run(5.0)
    b.set_config(TenantConfig(weight=4.0))
    assert error(world.run(SHARES_FOR_S), {"a": 1.0, "b": 4.0}) < ERROR


@pytest.mark.parametrize("weight", [0.01, 1.0])
def test_who_is_given_more_does_not_wait_for_what_it_has_had_at_the_weight_before(weight: float) -> None:
    world, a, b = World(), tenant("a", 0.01), tenant("b")
    model = world.model("cpu")
    world.load(model, b, always(0.01), 8)
    job = world.ask(model, a, 1.0)
    world.run(1.2)
    assert job.number in world.answers
    a.set_config(TenantConfig(weight=weight))
    first = world.ask(model, a, 1.0)
    world.run(2.0)
    assert (first.number in world.waited) == (weight == 1.0)


def test_what_ran_for_long_while_only_another_asked_waits_again_beside_that() -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    model = world.model("cpu")
    world.ask(model, b, 1000.0)
    world.load(model, a, always(0.01), 3)
    world.run(2 * MULTI_TENANT_HOLD_S)
    world.die(next(iter(world.seats)))
    world.again.clear()
    world.ask(model, b, 0.01)
    for _ in range(2):
        world.enlist(model, "cpu")
    world.run(2000.0)
    assert {*world.answers.values()} == {""}
    assert len(world.answers) == len(world.asked)
    assert len(world.clocks.clock_of("cpu")) == 0


def test_what_runs_is_charged_once_though_there_are_several_tenants_again() -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    model = world.model("cpu", "cpu")
    for _ in range(2):
        world.ask(model, a, 0.01)
        world.ask(model, b, 100.0)
        world.run(2 * MULTI_TENANT_HOLD_S)
        model.desk.dispatch(world.now)
        assert not model.desk._scheduler.queue.is_multi_tenant
    world.run(200.0)
    world.ask(model, a, 0.01)
    world.run(1.0)
    assert len(world.answers) == len(world.asked)
    assert len(world.clocks.clock_of("cpu")) == 0


# --- rows -----------------------------------------------------------------------------------------------------------


def test_a_job_of_several_tenants_is_charged_by_its_rows() -> None:
    world, a, b = World(), tenant("a"), tenant("b", 3.0)
    model = world.model("cpu", terms=ROWS)
    world.load(model, a, always(0.002), 64)
    world.load(model, b, always(0.002), 64)
    had = world.run(SHARES_FOR_S)
    assert error(had, {"a": 1.0, "b": 3.0}) < ERROR
    assert any(len({world.asked[number].tenant for number in job}) == 2 for job in world.jobs)


def test_rows_that_go_together_are_few_while_another_tenant_waits() -> None:
    world, a, b = World(max_batch_seconds=0.05), tenant("a"), tenant("b")
    model = world.model("cpu", terms=ROWS)
    world.load(model, a, always(0.02), 64)
    world.run(1.0)
    assert max(map(len, world.jobs)) == 8
    world.load(model, b, always(0.02), 1)
    world.run(1.0)
    world.jobs.clear()
    world.run(2.0)
    # Those, too, that begin while nothing of it waits: it has just been answered.
    assert len({world.asked[number].tenant for job in world.jobs for number in job}) == 2
    assert max(map(len, world.jobs)) <= 3


# --- requests that take long ------------------------------------------------------------------------------------------


class Sized(NamedTuple):
    """Requests of one size, which take as long as each other."""

    nbytes: int
    seconds: float


LONG, SHORT = Sized(8000, 3.0), Sized(16, 0.018)


def one_after_another(world: World, model: Model, who: Tenant, each: Sized) -> list[float]:
    """Have a tenant send one request at a time, and return the list to which its waiting times will be added."""
    waits: list[float] = []

    def ask() -> None:
        sent = world.now

        def answered() -> None:
            waits.append(world.now - sent - each.seconds)
            world.at(world.now + 0.001, ask)

        world.ask(model, who, each.seconds, answered, nbytes=each.nbytes)

    ask()
    return waits


def in_flight(world: World, model: Model, who: Tenant, sizes: Callable[[], Sized], depth: int, level: int = 0) -> None:
    """Have a tenant keep so many requests in flight."""

    def ask() -> None:
        size = sizes()
        again = lambda: world.at(world.now, ask)  # noqa: E731
        world.ask(model, who, size.seconds, again, nbytes=size.nbytes, level=level)

    for _ in range(depth):
        ask()


def beside_long(world: World, model: Model, long: Model | None = None, level: int = 0) -> list[float]:
    """Return the waiting times of B, which sends one request at a time while A has four long requests in flight."""
    a, b = tenant("a"), tenant("b")
    waits = one_after_another(world, model, b, SHORT)
    world.run(1.0)
    # That the requests of A take long is not known before one of them has run.
    in_flight(world, long or model, a, lambda: LONG, 4, level)
    world.run(2 * LONG.seconds)
    waits.clear()
    world.run(20.0)
    assert world.had["a"] > 15.0
    return waits


@pytest.mark.parametrize("level", [0, 1])
def test_long_requests_leave_one_worker_to_other_tenants(level: int) -> None:
    world = World()
    waits = beside_long(world, world.model("cpu", "cpu"), level=level)
    assert max(waits) < 1e-6
    assert len(waits) > 600


def test_long_requests_of_one_model_leave_one_process_to_the_other_models_in_it() -> None:
    world = World()
    model, other = world.household(2, 2)
    waits = beside_long(world, model, other)
    assert max(waits) < 1e-6
    assert len(waits) > 600


def test_of_the_only_worker_long_requests_have_no_more_than_their_share() -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    model = world.model("cpu")
    waits = one_after_another(world, model, b, SHORT)
    in_flight(world, model, a, lambda: LONG, 4)
    world.run(8.0)
    waits.clear()
    had = world.run(30.0)
    assert sorted(waits)[len(waits) * 99 // 100] < 1e-6
    assert had["a"] == pytest.approx(15.0, abs=LONG.seconds)


@pytest.mark.parametrize("seats", [1, 2])
def test_once_no_other_tenant_is_active_long_requests_have_all_workers(seats: int) -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    long_s = 9.0
    model = world.model(*["cpu"] * seats)
    world.ask(model, b, SHORT.seconds)
    world.ask(model, a, long_s, nbytes=LONG.nbytes)
    world.run(long_s + 0.1)
    world.ask(model, b, SHORT.seconds)
    for _ in range(20):
        world.ask(model, a, long_s, nbytes=LONG.nbytes)
    world.run(0.5)
    assert sum(bool(seat.jobs) for seat in world.seats.values()) == seats - 1
    # Nothing but the clock tells that the other one is not active any more.
    due = model.desk.next_event_at
    assert due <= world.now + ACTIVE_S
    world.run(due - world.now)
    model.desk.dispatch(world.now)
    assert sum(bool(seat.jobs) for seat in world.seats.values()) == seats
    world.settle()
    assert len(world.answers) == len(world.asked)


def test_a_tenant_that_asks_now_and_then_finds_a_worker_too() -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    model = world.model("cpu", "cpu")
    world.ask(model, b, SHORT.seconds)
    in_flight(world, model, a, lambda: LONG, 4)
    world.run(2 * LONG.seconds)
    for _ in range(5):
        rare = world.ask(model, b, SHORT.seconds)
        world.run(0.5 * ACTIVE_S)
        assert world.waited[rare.number] == 0.0
    world.run(2 * ACTIVE_S)
    model.desk.dispatch(world.now)
    assert not model.desk._scheduler.queue.is_multi_tenant
    assert all(seat.jobs for seat in world.seats.values())


def test_requests_that_take_as_long_as_those_of_others_have_all_workers() -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    model = world.model("cpu", "cpu")
    for each, seconds in ((a, 0.5), (b, 0.3)):
        world.load(model, each, always(seconds), 8)
    had = world.run(SHARES_FOR_S)
    assert sum(had.values()) == pytest.approx(2 * SHARES_FOR_S, rel=0.01)
    assert error(had, {"a": 1.0, "b": 1.0}) < ERROR


def test_the_expected_time_of_an_ordinary_request_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    model = world.model("cpu")
    for who in (a, b) * 2:
        world.ask(model, who, 0.5)
    world.run(10.0)
    asked: list[str] = []

    def expected(_: object, who: Tenant, nbytes: int) -> float:
        asked.append(who.name)
        return 0.0

    monkeypatch.setattr(Durations, "expected_s", expected)
    world.ask(model, a, 0.5)
    assert asked == ["a"]


def test_short_requests_pass_the_long_ones_of_their_own_tenant() -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    model = world.model("cpu", "cpu")
    one_after_another(world, model, b, SHORT)
    in_flight(world, model, a, lambda: LONG, 4)
    world.run(2 * LONG.seconds)
    short = world.ask(model, a, SHORT.seconds, nbytes=SHORT.nbytes)
    world.run(1.0)
    assert short.number in world.answers


def test_a_request_that_hung_is_long_for_the_next_time() -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    model = world.model("cpu", "cpu", predict_timeout=5.0)
    waits = one_after_another(world, model, b, SHORT)
    world.ask(model, a, 1000.0, nbytes=LONG.nbytes)
    world.run(5.0)
    for name, _ in list(model.desk.processes.overdue(world.now)):
        world.seats.pop(name)
    assert len(world.seats) == 1
    world.enlist(model, "cpu")
    waits.clear()
    for _ in range(4):
        world.ask(model, a, 1000.0, nbytes=LONG.nbytes)
    world.run(4.0)
    assert len(waits) > 100
    assert max(waits) < 1e-6


@settings(max_examples=examples(20), deadline=None)
@given(
    st.lists(st.builds(Sized, st.integers(1, 10_000), st.floats(0.01, 3.0)), min_size=1, max_size=5),
    st.integers(2, 4),
    st.integers(1, 12),
    st.integers(0, 2**32),
)
def test_whatever_sizes_another_tenant_sends_each_is_waited_for_twice_at_most(
    sizes: list[Sized], seats: int, depth: int, seed: int
) -> None:
    """That a size takes long is known once a request of that size has run; others of it may have begun meanwhile."""
    by_size = {each.nbytes.bit_length(): each for each in sizes}
    world, a, b, some = World(), tenant("a"), tenant("b"), random.Random(seed)
    model = world.model(*["cpu"] * seats)
    waits = one_after_another(world, model, b, SHORT)
    world.run(0.1)
    in_flight(world, model, a, lambda: some.choice([*by_size.values()]), depth)
    world.run(8.0)
    normal = max(world.clocks.max_batch_s, 2 * SHORT.seconds) + 1e-6
    assert sum(each > normal for each in waits) <= 2 * len(by_size)


def test_short_requests_hide_long_ones_of_their_size_for_a_hundredth_of_the_time() -> None:
    world, a, b, some = World(), tenant("a"), tenant("b"), random.Random(1)
    model = world.model("cpu", "cpu")
    waits = one_after_another(world, model, b, SHORT)
    in_flight(world, model, a, lambda: Sized(1000, 0.5 if some.random() < 0.05 else 0.01), 8)
    world.run(5.0)
    waits.clear()
    world.run(10.0)
    assert max(waits) <= 0.01


# --- the bound of what waits ------------------------------------------------------------------------------------------


def test_of_a_full_line_the_newest_of_the_tenant_that_has_most_gives_way() -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    model = world.model(max_queue=10)
    of_a = [world.ask(model, a, 1.0).number for _ in range(9)]
    of_b = [world.ask(model, b, 1.0).number for _ in range(4)]
    assert world.answers == dict.fromkeys(of_a[:5:-1], "RESOURCE_EXHAUSTED")
    # It is b's own that gives way when that has most.
    of_b += [world.ask(model, b, 1.0).number for _ in range(3)]
    assert world.answers == dict.fromkeys([*of_a[5:], *of_b[5:]], "RESOURCE_EXHAUSTED")


def test_weights_count_for_what_waits() -> None:
    world, a, b = World(), tenant("a", 4.0), tenant("b")
    model = world.model(max_queue=10)
    for each in (a, b):
        for _ in range(10):
            world.ask(model, each, 1.0)
    left = Counter(each.tenant.name for each in model.desk._scheduler.queue)
    assert left == {"a": 8, "b": 2}


def test_bytes_give_way_to_bytes_or_nothing_does() -> None:
    world, a, b = World(), tenant("a"), tenant("b")
    model = world.model(max_queue_bytes=20)
    of_a = [world.ask(model, a, 1.0, rows=8).number for _ in range(2)]
    small = world.ask(model, b, 1.0, rows=6).number
    assert world.answers == {of_a[1]: "RESOURCE_EXHAUSTED"}
    large = world.ask(model, b, 1.0, rows=8).number
    assert world.answers.keys() == {of_a[1], large}
    assert [each.number for each in model.desk._scheduler.queue] == [of_a[0], small]


# --- anything at all --------------------------------------------------------------------------------------------------


def of_quota(who: Tenant) -> tuple[int, int, int]:
    return who.quota.in_flight, who.quota.waiting, who.quota.waiting_bytes


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32), merges=st.booleans(), tenants=st.integers(1, 4), models=st.integers(1, 3))
def test_each_is_answered_once_no_seat_idles_in_vain_and_who_is_gone_is_forgotten(
    seed: int, merges: bool, tenants: int, models: int
) -> None:
    world, some = World(), random.Random(seed)
    who = [tenant(f"t{index}", some.choice([0.5, 1.0, 10.0])) for index in range(tenants)]
    terms = ROWS if merges else NO_BATCHING
    made = [
        world.model(*some.choices(["ascend:0", "ascend:1"], k=some.randrange(3)), terms=terms) for _ in range(models)
    ]
    for _ in range(150):
        model = some.choice(made)
        match some.randrange(12):
            case 0:
                world.enlist(model, some.choice(DEVICES), terms)
            case 1 if world.seats:
                world.die(some.choice([*world.seats]), ExitCause(-signal.SIGKILL))
            case 2 if world.asked:
                number = some.choice([*world.asked])
                if number not in world.answers:
                    each = world.asked[number]
                    world.whose[number].desk.cancel(each.client, each.id, world.now)
            case 3:
                world.run(some.choice([0.5, 5.0, 20.0]))
            case 4 | 5 | 6:
                world.run(some.choice([0.001, 0.01, 0.1]))
            case _:
                rows = some.randrange(1, 9)
                world.ask(model, some.choice(who), some.choice([0.001, 0.01, 0.3, 15.0]), rows=rows)
        assert world.conserves()
        assert counted(made)
        assert all(of_quota(each) == world.standing(each) for each in who)
    for model in made:
        world.enlist(model, DEVICES[0], terms)
    world.settle()
    assert world.answers.keys() == world.asked.keys()
    assert all(of_quota(each) == (0, 0, 0) for each in who)
    assert all(model.desk.is_idle for model in made)
    for model in made:
        model.desk.dispatch(world.now)
    assert [len(world.clocks.clock_of(device)) for device in DEVICES] == [0, 0]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.sampled_from(["ask", "ask", "run", "enlist"]), max_size=60), st.booleans())
def test_one_tenant_is_served_in_the_order_in_which_it_asks(events: Iterable[str], is_second: bool) -> None:
    """As if there were no tenants: each slot has one batch that runs, and one that is ready."""
    world, a = World(), tenant("a")
    model = world.model("cpu")
    if is_second:
        # Another one was there, long ago.
        world.ask(model, tenant("b"), 0.01)
        world.run(20.0)
        world.ordered.clear()
    asked: list[int] = []
    for event in events:
        match event:
            case "ask":
                asked.append(world.ask(model, a, 0.05).number)
            case "run":
                world.run(0.05)
            case _:
                world.enlist(model, "cpu")
    world.run(100.0)
    assert world.ordered == asked
    for _ in range(2):
        world.ask(model, a, 0.05)
        world.run(20.0)
    assert not model.desk._scheduler.queue.is_multi_tenant
