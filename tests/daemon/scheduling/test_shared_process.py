"""Several dispatchers that share processes: one batch at a time in each process, in turn, and no needless idling."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from testkit import dispatching
from testkit.dispatching import IgnoringSink
from testkit.examples import examples
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.platform.exit_cause import ExitCause, ExitInitiator
from weightd_daemon.scheduling.batching.policy import BatchingPolicy
from weightd_daemon.scheduling.dispatcher import Dispatcher
from weightd_daemon.scheduling.request import ClientOrigin, Request
from weightd_daemon.scheduling.shared_process import SharedProcessScheduler
from weightd_protocol.errors import RequestError
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSpec
from weightd_protocol.messages.worker import BeginBatch, ChildOrder, Ping, Predict, PredictFailed, PredictResult

TIMEOUT_S = 60.0
CRASH, OURS = ExitCause(-signal.SIGSEGV), ExitCause(-signal.SIGKILL, initiator=ExitInitiator.DAEMON)
ASKED = RequestDescription("m", (TensorSpec("x", "UINT8", (1, 1)),))
ANSWERED = ResponseDescription("m", (TensorSpec("y", "UINT8", (1, 1)),))
MERGING = BatchingPolicy(1, frozenset("x"), frozenset("y"), max_rows=4)


@dataclass
class Process:
    """A process with the unanswered requests of one batch, as pairs of dispatcher and request number."""

    scheduler: SharedProcessScheduler = field(default_factory=SharedProcessScheduler)
    pending: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    missing: int = 0


class DispatcherHarness(IgnoringSink):
    """One model's dispatcher and its replies."""

    def __init__(self, index: int, harness: SharedProcessHarness, policy: BatchingPolicy) -> None:
        config = ModelConfig(path="/m.onnx", engine="onnxruntime", predict_timeout=TIMEOUT_S, max_queue=1000)
        self.dispatcher = Dispatcher("m", config, self, self.send_order, lambda _: None)
        self.index = index
        self.harness = harness
        self.policy = policy
        self.answers: dict[int, str] = {}
        self.requests: dict[int, Request] = {}

    def reply_result(self, request: Request, result: PredictResult, frames: Sequence[Any]) -> None:
        assert request.number not in self.answers
        self.answers[request.number] = "answer"

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        assert request.number not in self.answers
        self.answers[request.number] = error.code

    def send_order(self, process: str, order: ChildOrder, frames: Sequence[Any], _: object) -> None:
        target = self.harness.processes[process]
        match order:
            case BeginBatch(items):
                assert not target.pending
                target.missing = items
            case Predict(number):
                assert order.model_index == self.index
                assert target.missing or not target.pending, "two batches at a time"
                target.missing = max(0, target.missing - 1)
                target.pending.append((self.index, number))
                self.harness.ran.append(self.index)
            case Ping(run_selftest):
                assert not run_selftest
                self.harness.pinged.append((self.index, process))
            case _:
                raise AssertionError(order)

    def ask(self, deadline: float = 1e9) -> int:
        number = next(self.harness.numbers)
        origin = ClientOrigin(f"client {self.index}", f"user {self.index}")
        request = Request(number, b"c", f"id{number}", ASKED, [b"x"], self.harness.now, deadline, 1, origin)
        request.digest = b"%d" % number
        self.requests[number] = request
        self.dispatcher.infer(request, self.harness.now)
        self.run_turns()
        return number

    def run_turns(self) -> None:
        dispatching.run_turns(self.dispatcher, self.harness.now)


class SharedProcessHarness:
    """Dispatchers and the processes that they share."""

    def __init__(self, *policy: BatchingPolicy) -> None:
        self.now = 1.0
        self.numbers = itertools.count(1)
        self.names = (f"p{number}" for number in itertools.count())
        self.processes: dict[str, Process] = {}
        self.ran: list[int] = []
        self.pinged: list[tuple[int, str]] = []
        self.models = [DispatcherHarness(index, self, each) for index, each in enumerate(policy)]

    def add_process(self) -> str:
        name = next(self.names)
        target = self.processes[name] = Process()
        for each in self.models:
            each.dispatcher.processes.add_shared(name, target.scheduler, each.index, self.now, policy=each.policy)
        for each in self.models:
            each.dispatcher.dispatch(self.now)
        return name

    def serve(self, name: str) -> None:
        """Answer all requests of the process's batch."""
        target = self.processes[name]
        pending = [*target.pending]
        target.pending.clear()
        for at, (index, number) in enumerate(pending):
            # The next batch must not start before the last answer of this one.
            assert target.pending == [] or at == len(pending)
            self.models[index].dispatcher.results.on_result(name, PredictResult(number, ANSWERED), [b"y"], self.now)
        for each in self.models:
            each.run_turns()

    def end(self, name: str, end: ExitCause) -> None:
        """Report the exit of a process to all dispatchers before any of them dispatches."""
        del self.processes[name]
        for each in self.models:
            each.dispatcher.results.on_exit(name, end, self.now)
        for each in self.models:
            each.dispatcher.dispatch(self.now)


def harness(count: int = 3) -> SharedProcessHarness:
    return SharedProcessHarness(*[BatchingPolicy()] * count)


def test_crash_blames_only_the_running_batch() -> None:
    made = harness(2)
    one, other = made.models
    for _ in range(2):
        name = made.add_process()
        if not one.requests:
            one.ask()
            other.ask()
        made.end(name, CRASH)
    [killer], [innocent] = one.requests.values(), other.requests.values()
    assert (killer.deaths, innocent.deaths, one.answers) == (2, 0, {killer.number: "INTERNAL"})
    assert (innocent.lost_slots, other.answers) == (0, {})
    assert not any(each.offenders for each in other.dispatcher.isolator._offenses.tables)
    made.serve(made.add_process())
    assert other.answers == {innocent.number: "answer"}


def test_hang_is_reported_by_the_running_dispatcher_only() -> None:
    made = harness(2)
    one, other = made.models
    name = made.add_process()
    one.ask()
    number = other.ask()
    made.now += TIMEOUT_S
    assert [process for process, _ in other.dispatcher.processes.overdue(made.now)] == []
    assert [process for process, _ in one.dispatcher.processes.overdue(made.now)] == [name]
    other.ask()
    assert made.ran == [0]
    made.end(name, OURS)
    assert made.processes[made.add_process()].pending == [(1, number)]


def test_exiting_process_gets_no_further_batch() -> None:
    made = harness(2)
    one, other = made.models
    name = made.add_process()
    number = one.ask()
    other.ask()
    one.dispatcher.results.on_batch_failed(name, PredictFailed(number, "INTERNAL", "spoilt", is_exiting=True), made.now)
    assert (one.answers, made.ran) == ({number: "INTERNAL"}, [0])
    made.end(name, CRASH)
    assert other.requests[number + 1].deaths == 0


def test_new_dispatcher_waits_for_its_turn() -> None:
    made = harness(1)
    name = made.add_process()
    made.models[0].ask()
    new = DispatcherHarness(1, made, BatchingPolicy())
    made.models.append(new)
    new.dispatcher.processes.add_shared(name, made.processes[name].scheduler, 1, made.now)
    new.ask()
    assert made.ran == [0]
    made.serve(name)
    assert made.ran == [0, 1]


def test_busy_process_is_not_pinged_by_other_dispatchers() -> None:
    made = harness(2)
    name = made.add_process()
    number = made.models[0].ask()
    made.now += 1000.0
    assert [list(each.dispatcher.processes.ping_idle(made.now)) for each in made.models] == [[], []]
    assert made.pinged == []
    made.serve(name)
    assert made.models[0].answers == {number: "answer"}
    made.now += 1000.0
    for each in made.models:
        assert list(each.dispatcher.processes.ping_idle(made.now)) == []
    assert made.pinged == [(0, name), (1, name)]


def test_removed_process_gets_no_turn() -> None:
    made = harness(2)
    one, other = made.models
    name = made.add_process()
    one.ask()
    other.dispatcher.processes.remove(name)
    other.ask()
    made.serve(name)
    assert made.ran == [0]


def test_retry_after_is_known_while_another_has_its_turn() -> None:
    made = harness(2)
    one, other = made.models
    name = made.add_process()
    other.ask()
    made.serve(name)
    one.ask()
    slots = other.dispatcher._scheduler.slots
    assert other.dispatcher._scheduler._times.retry_after_s(3, len(slots.active), 0.0) is not None


class SharedProcessMachine(RuleBasedStateMachine):
    """Dispatchers, processes that are fast, slow or crash, and clients that cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.harness = SharedProcessHarness()

    @initialize(merging=st.lists(st.booleans(), min_size=1, max_size=3), processes=st.integers(1, 2))
    def begin(self, merging: list[bool], processes: int) -> None:
        self.harness = SharedProcessHarness(*[MERGING if each else BatchingPolicy() for each in merging])
        for _ in range(processes):
            self.harness.add_process()

    @rule(data=st.data(), count=st.integers(1, 5), wait=st.sampled_from([1e9, 1e9, 30.0]))
    def ask(self, data: st.DataObject, count: int, wait: float) -> None:
        model = data.draw(st.sampled_from(self.harness.models))
        for _ in range(count):
            try:
                model.ask(self.harness.now + wait)
            except RequestError:
                model.requests.popitem()  # rejected because of earlier crashes of the client

    @rule(data=st.data(), count=st.integers(1, 6))
    def serve(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            busy = [name for name, each in self.harness.processes.items() if each.pending]
            if busy:
                self.harness.now += 0.01
                self.harness.serve(data.draw(st.sampled_from(busy)))

    @rule(data=st.data(), end=st.sampled_from([CRASH, OURS]))
    def die(self, data: st.DataObject, end: ExitCause) -> None:
        if self.harness.processes:
            self.harness.end(data.draw(st.sampled_from([*self.harness.processes])), end)

    @rule()
    def add_process(self) -> None:
        if len(self.harness.processes) < 3:
            self.harness.add_process()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.harness.models))
        for number, request in model.requests.items():
            if number % 3 == 0 and number not in model.answers:
                model.dispatcher.cancel(request.client, request.id, self.harness.now)

    @rule(seconds=st.sampled_from([1.0, 40.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.harness.now += seconds
        self.tick()

    def tick(self) -> None:
        for model in self.harness.models:
            dispatching.expire(model.dispatcher, self.harness.now)
            for name, _ in list(model.dispatcher.processes.overdue(self.harness.now)):
                self.harness.end(name, OURS)
            model.run_turns()

    @invariant()
    def no_process_idles_with_runnable_requests(self) -> None:
        idle = [each for each in self.harness.processes.values() if not each.pending]
        for model in self.harness.models:
            queue = model.dispatcher._scheduler.queue
            assert queue.next_unchecked is not None or not idle or all(each.isolation for each in queue)

    @invariant()
    def active_dispatcher_has_the_turn(self) -> None:
        for each in self.harness.processes.values():
            running = {index for index, _ in each.pending}
            assert len(running) == (each.scheduler.active_slot is not None)

    def teardown(self) -> None:
        if not self.harness.models:
            return
        self.harness.now += 1000.0
        self.tick()
        self.harness.add_process()
        while any(each.pending for each in self.harness.processes.values()):
            for name in [*self.harness.processes]:
                self.harness.serve(name)
        for model in self.harness.models:
            assert model.answers.keys() == model.requests.keys()
            assert model.dispatcher.is_idle


TestSharedProcessMachine = SharedProcessMachine.TestCase
TestSharedProcessMachine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
