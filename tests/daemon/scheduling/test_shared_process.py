"""Several dispatchers and the processes that they share.

One batch at a time in each, in turn, and none idles in vain.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from testkit import desks
from testkit.desks import IgnoringSink
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
TERMS = BatchingPolicy(1, frozenset("x"), frozenset("y"), max_rows=4)


@dataclass
class Process:
    """What it has been given and has not answered, and who has asked that: all of one batch."""

    turns: SharedProcessScheduler = field(default_factory=SharedProcessScheduler)
    jobs: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    missing: int = 0


class Member(IgnoringSink):
    """One model: its dispatcher, and who has been answered."""

    def __init__(self, index: int, house: House, terms: BatchingPolicy) -> None:
        config = ModelConfig(path="/m.onnx", engine="onnxruntime", predict_timeout=TIMEOUT_S, max_queue=1000)
        self.desk = Dispatcher("m", config, self, self.send_order, lambda _: None)
        self.index = index
        self.house = house
        self.terms = terms
        self.answers: dict[int, str] = {}
        self.asked: dict[int, Request] = {}

    def reply_result(self, request: Request, result: PredictResult, frames: Sequence[Any]) -> None:
        assert request.number not in self.answers
        self.answers[request.number] = "answer"

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        assert request.number not in self.answers
        self.answers[request.number] = error.code

    def send_order(self, process: str, order: ChildOrder, frames: Sequence[Any], _: object) -> None:
        there = self.house.processes[process]
        match order:
            case BeginBatch(parts):
                assert not there.jobs
                there.missing = parts
            case Predict(number):
                assert order.model_index == self.index
                assert there.missing or not there.jobs, "one job at a time"
                there.missing = max(0, there.missing - 1)
                there.jobs.append((self.index, number))
                self.house.ran.append(self.index)
            case Ping(canary):
                assert not canary
                self.house.pinged.append((self.index, process))
            case _:
                raise AssertionError(order)

    def ask(self, deadline: float = 1e9) -> int:
        number = next(self.house.numbers)
        origin = ClientOrigin(f"client {self.index}", f"user {self.index}")
        request = Request(number, b"c", f"id{number}", ASKED, [b"x"], self.house.now, deadline, 1, origin)
        request.digest = b"%d" % number
        self.asked[number] = request
        self.desk.infer(request, self.house.now)
        self.look()
        return number

    def look(self) -> None:
        desks.run_turns(self.desk, self.house.now)


class House:
    """Members, and the processes that they share."""

    def __init__(self, *terms: BatchingPolicy) -> None:
        self.now = 1.0
        self.numbers = itertools.count(1)
        self.names = (f"p{number}" for number in itertools.count())
        self.processes: dict[str, Process] = {}
        self.ran: list[int] = []
        self.pinged: list[tuple[int, str]] = []
        self.members = [Member(index, self, each) for index, each in enumerate(terms)]

    def load(self) -> str:
        name = next(self.names)
        there = self.processes[name] = Process()
        for each in self.members:
            each.desk.processes.add_shared(name, there.turns, each.index, self.now, policy=each.terms)
        for each in self.members:
            each.desk.dispatch(self.now)
        return name

    def serve(self, name: str) -> None:
        """The process answers all of its batch."""
        there = self.processes[name]
        jobs = [*there.jobs]
        there.jobs.clear()
        for at, (index, number) in enumerate(jobs):
            # What comes next it gets behind the last of these.
            assert there.jobs == [] or at == len(jobs)
            self.members[index].desk.results.on_result(name, PredictResult(number, ANSWERED), [b"y"], self.now)
        for each in self.members:
            each.look()

    def end(self, name: str, end: ExitCause) -> None:
        """The process has ended: all dispatchers are told before any of them goes on."""
        del self.processes[name]
        for each in self.members:
            each.desk.results.on_exit(name, end, self.now)
        for each in self.members:
            each.desk.dispatch(self.now)


def house(count: int = 3) -> House:
    return House(*[BatchingPolicy()] * count)


def test_a_death_blames_the_one_whose_job_ran_alone() -> None:
    made = house(2)
    one, other = made.members
    for _ in range(2):
        name = made.load()
        if not one.asked:
            one.ask()
            other.ask()
        made.end(name, CRASH)
    [killer], [innocent] = one.asked.values(), other.asked.values()
    assert (killer.deaths, innocent.deaths, one.answers) == (2, 0, {killer.number: "INTERNAL"})
    assert (innocent.lost_slots, other.answers) == (0, {})
    assert not any(each.offenders for each in other.desk._isolator._offenses.tables)
    made.serve(made.load())
    assert other.answers == {innocent.number: "answer"}


def test_a_hang_is_seen_by_the_one_whose_job_runs_and_nobody_gets_anything_behind_it() -> None:
    made = house(2)
    one, other = made.members
    name = made.load()
    one.ask()
    number = other.ask()
    made.now += TIMEOUT_S
    assert [process for process, _ in other.desk.processes.overdue(made.now)] == []
    assert [process for process, _ in one.desk.processes.overdue(made.now)] == [name]
    other.ask()
    assert made.ran == [0]
    made.end(name, OURS)
    assert made.processes[made.load()].jobs == [(1, number)]


def test_what_leaves_is_given_nothing_more() -> None:
    made = house(2)
    one, other = made.members
    name = made.load()
    number = one.ask()
    other.ask()
    one.desk.results.on_batch_failed(name, PredictFailed(number, "INTERNAL", "spoilt", is_exiting=True), made.now)
    assert (one.answers, made.ran) == ({number: "INTERNAL"}, [0])
    made.end(name, CRASH)
    assert other.asked[number + 1].deaths == 0


def test_who_joins_while_another_one_runs_waits_for_its_turn() -> None:
    made = house(1)
    name = made.load()
    made.members[0].ask()
    late = Member(1, made, BatchingPolicy())
    made.members.append(late)
    late.desk.processes.add_shared(name, made.processes[name].turns, 1, made.now)
    late.ask()
    assert made.ran == [0]
    made.serve(name)
    assert made.ran == [0, 1]


def test_while_it_computes_for_one_the_others_do_not_ping_it_and_never_with_the_canary() -> None:
    made = house(2)
    name = made.load()
    number = made.members[0].ask()
    made.now += 1000.0
    assert [list(each.desk.processes.ping_idle(made.now)) for each in made.members] == [[], []]
    assert made.pinged == []
    made.serve(name)
    assert made.members[0].answers == {number: "answer"}
    made.now += 1000.0
    for each in made.members:
        assert list(each.desk.processes.ping_idle(made.now)) == []
    assert made.pinged == [(0, name), (1, name)]


def test_one_that_is_dismissed_has_no_turn() -> None:
    made = house(2)
    one, other = made.members
    name = made.load()
    one.ask()
    other.desk.processes.remove(name)
    other.ask()
    made.serve(name)
    assert made.ran == [0]


def test_how_soon_to_try_again_is_told_while_another_has_its_turn() -> None:
    made = house(2)
    one, other = made.members
    name = made.load()
    other.ask()
    made.serve(name)
    one.ask()
    slots = other.desk._scheduler.slots
    assert other.desk._scheduler._times.retry_after_s(3, len(slots.active), 0.0) is not None


class World(RuleBasedStateMachine):
    """Dispatchers, processes that are fast, slow, or die, and clients that give up."""

    def __init__(self) -> None:
        super().__init__()
        self.house = House()

    @initialize(merging=st.lists(st.booleans(), min_size=1, max_size=3), processes=st.integers(1, 2))
    def begin(self, merging: list[bool], processes: int) -> None:
        self.house = House(*[TERMS if each else BatchingPolicy() for each in merging])
        for _ in range(processes):
            self.house.load()

    @rule(data=st.data(), count=st.integers(1, 5), wait=st.sampled_from([1e9, 1e9, 30.0]))
    def ask(self, data: st.DataObject, count: int, wait: float) -> None:
        member = data.draw(st.sampled_from(self.house.members))
        for _ in range(count):
            try:
                member.ask(self.house.now + wait)
            except RequestError:
                member.asked.popitem()  # as one that has killed, or whose client's others have

    @rule(data=st.data(), count=st.integers(1, 6))
    def serve(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            busy = [name for name, each in self.house.processes.items() if each.jobs]
            if busy:
                self.house.now += 0.01
                self.house.serve(data.draw(st.sampled_from(busy)))

    @rule(data=st.data(), end=st.sampled_from([CRASH, OURS]))
    def die(self, data: st.DataObject, end: ExitCause) -> None:
        if self.house.processes:
            self.house.end(data.draw(st.sampled_from([*self.house.processes])), end)

    @rule()
    def load(self) -> None:
        if len(self.house.processes) < 3:
            self.house.load()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(self.house.members))
        for number, request in member.asked.items():
            if number % 3 == 0 and number not in member.answers:
                member.desk.cancel(request.client, request.id, self.house.now)

    @rule(seconds=st.sampled_from([1.0, 40.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.house.now += seconds
        self.tick()

    def tick(self) -> None:
        for member in self.house.members:
            desks.expire(member.desk, self.house.now)
            for name, _ in list(member.desk.processes.overdue(self.house.now)):
                self.house.end(name, OURS)
            member.look()

    @invariant()
    def no_process_idles_while_something_waits(self) -> None:
        idle = [each for each in self.house.processes.values() if not each.jobs]
        for member in self.house.members:
            line = member.desk._scheduler.queue
            assert line.next_unchecked is not None or not idle or all(each.isolation for each in line)

    @invariant()
    def whose_turn_it_is_has_it(self) -> None:
        for each in self.house.processes.values():
            running = {index for index, _ in each.jobs}
            assert len(running) == (each.turns.active_slot is not None)

    def teardown(self) -> None:
        if not self.house.members:
            return
        self.house.now += 1000.0
        self.tick()
        self.house.load()
        while any(each.jobs for each in self.house.processes.values()):
            for name in [*self.house.processes]:
                self.house.serve(name)
        for member in self.house.members:
            assert member.answers.keys() == member.asked.keys()
            assert member.desk.is_idle


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
