"""Requests whose rows share batches, or are cut into parts, on slots that are fast, slow, or die, of devices of any
speed.

Each row of a request is a number of its own, and the model's answer is its input: whatever happens on the way, what a
client gets is what it has sent. Some offer room for it in their memory: nobody writes there where another one does, or
when that is theirs again.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from testkit import desks
from testkit.desks import IgnoringSink
from testkit.examples import examples
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_daemon.scheduling.batching.policy import BatchingPolicy
from weightd_daemon.scheduling.dispatcher import Dispatcher
from weightd_daemon.scheduling.request import ClientOrigin, Request
from weightd_daemon.scheduling.slots import Slot
from weightd_daemon.scheduling.tensor_location import NO_LOCATIONS, SharedRegion, TensorLocation, TensorLocations
from weightd_protocol.errors import RequestError, ResourceExhausted
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSpec
from weightd_protocol.messages.regions import MappedOutput
from weightd_protocol.messages.worker import (
    BeginBatch,
    CancelPredict,
    ChildOrder,
    Predict,
    PredictFailed,
    PredictResult,
)

MAX_ROWS, PART_ROWS, TIMEOUT_S = 8, 4, 50.0
DEVICES = {"cpu:0": 0.001, "cpu:1": 0.01, "cpu:2": 0.08}
"""Each with the seconds that a row takes there."""

ROOM = 4096
"""Bytes of a client's memory between any two outputs."""


@dataclass
class Worker:
    """A process that has been given orders; the first of its batches runs."""

    device: str
    terms: BatchingPolicy
    jobs: deque[list[Predict]] = field(default_factory=deque[list[Predict]])
    contents: dict[int, Sequence[Any]] = field(default_factory=dict[int, Sequence[Any]])
    missing: int = 0
    padded: int = 0

    def rooms(self) -> list[MappedOutput]:
        """Where it may write."""
        return [room for job in self.jobs for each in job for room in rooms(each)]


def rooms(order: Predict) -> tuple[MappedOutput, ...]:
    return () if order.regions is None else order.regions.outputs


def description(rows: int, width: int) -> RequestDescription:
    return RequestDescription("m", (TensorSpec("x", "INT64", (rows, width)), TensorSpec("t", "INT64", (1,))))


class World(RuleBasedStateMachine, IgnoringSink):
    """A dispatcher, its clients, and its workers."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1.0
        self.numbers = itertools.count(1)
        self.rows = itertools.count(1)
        self.sent: dict[int, tuple[Request, bytes]] = {}
        self.answers: dict[int, bytes | str] = {}
        self.workers: dict[str, Worker] = {}
        self.names = (f"w{number}" for number in itertools.count())
        self.last_begun: list[int] = []
        self.memory = SharedRegion(1, os.memfd_create("world"), 2**40, os.close)
        os.truncate(self.memory.fileno(), self.memory.nbytes)
        # Who will end soon.
        self.dying: dict[str, Worker] = {}
        # What has ended while somebody might still write for it, and who has given up what it had not begun with.
        self.written: set[int] = set()
        self.given_up: list[tuple[str, int]] = []
        # Answers to parts until there is no room for one.
        self.room_left = 9
        self.descriptions = {(rows, width): description(rows, width) for rows in range(1, 40) for width in (1, 2)}

    @initialize(exact=st.booleans(), sizes=st.sampled_from([(), (), (2, 8)]), workers=st.integers(1, 3))
    def begin(self, exact: bool, sizes: tuple[int, ...], workers: int) -> None:
        config = ModelConfig(path="/m.onnx", engine="onnxruntime", predict_timeout=TIMEOUT_S, max_queue=1000)
        self.desk = Dispatcher("m", config, self, self.send_order, lambda _: None)
        self.terms = BatchingPolicy(1, frozenset("x"), frozenset("y"), MAX_ROWS, PART_ROWS, sizes, exact)
        for device in itertools.islice(itertools.cycle(DEVICES), workers):
            self.enlist(device)

    # --- what the dispatcher tells ------------------------------------------------------------------------------------

    def reply_result(self, request: Request, result: PredictResult, frames: Sequence[Any]) -> None:
        """An answer: to whom it was promised, and as large as it says."""
        assert request.number not in self.answers
        y, t = result.description.outputs
        assert (y.shape, t.shape) == (request.description.inputs[0].shape, (1,))
        # As the client reads it: the first bytes of where there was room, if it is said to be there.
        placed = 0 in (result.shared_outputs or ())
        self.answers[request.number] = request.locations.outputs[0][: y.nbytes] if placed else bytes(frames[0])
        self.written |= {request.number} if request.pending_writes else set()

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        """An error."""
        assert request.number not in self.answers
        assert "part" not in str(error), "the parts are not of one model"
        self.answers[request.number] = error.code
        self.written |= {request.number} if request.pending_writes else set()

    def reserve_partial_result(self, request: Request, nbytes: int) -> None:
        """More is kept of a request, now and then too much."""
        assert request.number not in self.answers
        if nbytes and self.room_left == 0:
            raise ResourceExhausted("there is no room")
        self.room_left -= 1

    def notify_released(self, request: Request) -> None:
        """Nobody writes any more."""
        self.written.remove(request.number)

    def send_order(self, process: str, order: ChildOrder, frames: Sequence[Any], _: object) -> None:
        """A worker is given something: what goes together agrees in everything but its rows."""
        if isinstance(order, CancelPredict) and process not in self.workers:
            return  # it is dead, and hears nothing
        worker = self.workers[process]
        match order:
            case BeginBatch(parts, rows):
                assert not worker.missing
                worker.missing, worker.padded = parts, rows
                worker.jobs.append([])
            case Predict(number):
                worker.contents[number] = frames
                theirs = [room for each in [*self.workers.values(), *self.dying.values()] for room in each.rooms()]
                for room in rooms(order):
                    assert all(
                        room.offset + room.nbytes <= it.offset or it.offset + it.nbytes <= room.offset for it in theirs
                    )
                if worker.missing:
                    worker.missing -= 1
                    worker.jobs[-1].append(order)
                else:
                    worker.jobs.append([order])
                if not worker.missing:
                    self.check_job(worker, worker.jobs[-1])
            case CancelPredict(number):
                if any(each.request == number for job in [*worker.jobs][1:] for each in job):
                    self.given_up.append((process, number))
                for job in [*worker.jobs][1:]:
                    job[:] = [each for each in job if each.request != number]
                worker.jobs = deque(job for job in worker.jobs if job)
            case _:
                raise AssertionError(order)

    def check_job(self, worker: Worker, job: list[Predict]) -> None:
        shapes = [each.description.inputs[0].shape for each in job]
        total = sum(rows for rows, _ in shapes)
        requests = [self.sent[each.request][0] for each in job if each.request in self.sent]
        assert len(worker.jobs) <= 2
        assert len({width for _, width in shapes}) == 1
        assert len(job) == 1 or total <= worker.terms.max_rows
        assert all(rows <= PART_ROWS for rows, _ in shapes) or not worker.terms.max_split_rows
        if worker.terms.sizes:
            assert total <= worker.padded or total > max(worker.terms.sizes)
            worker.padded = 0
        if len(job) > 1:
            assert len({*requests}) == len(job)
            assert all(request.deadline > self.now for request in requests)
            assert worker.terms.is_exact or len({request.origin.principal for request in requests}) == 1
            # With an input that has no rows, requests cannot share a predict.
            assert not worker.terms.max_split_rows or all(each.description.inputs[1:] == () for each in job)

    @property
    def enlisted(self) -> dict[str, Slot]:
        return self.desk._scheduler.slots.accepting

    # --- what happens -------------------------------------------------------------------------------------------

    @rule(
        several=st.lists(
            st.tuples(
                st.sampled_from([1, 1, 2, 3, 4, 5, 9, 30]), st.sampled_from([1, 2]), st.booleans(), st.integers(0, 2)
            ),
            max_size=6,
        ),
        wait=st.sampled_from([1e9, 1e9, 1e9, 20.0, 0.05]),
        far=st.sampled_from(["ann", "bob"]),
    )
    def ask(self, several: list[tuple[int, int, bool, int]], wait: float, far: str) -> None:
        for rows, width, has_more, room in several:
            number = next(self.numbers)
            x = np.arange(rows * width, dtype=np.int64) + 1000 * number
            asked = self.descriptions[rows, width]
            frames: list[bytes] = [x.tobytes(), b"t" * 8]
            if not has_more:
                asked = RequestDescription("m", asked.inputs[:1])
                frames = frames[:1]
            deadline, origin = self.now + wait, ClientOrigin(far, far)
            name = f"id{number}"
            # None, just as much as is needed, or more: then the rows of one part are not behind those of another.
            begin = 2 * number * ROOM
            y, t = (
                TensorLocation(self.memory, begin, room * x.nbytes),
                TensorLocation(self.memory, begin + ROOM, 8 * rows),
            )
            places = TensorLocations({}, {0: y, 1: t}) if room else NO_LOCATIONS
            request = Request(number, far.encode(), name, asked, frames, self.now, deadline, x.nbytes, origin, places)
            self.sent[number] = request, x.tobytes()
            try:
                self.desk.infer(request, self.now)
            except RequestError as error:
                self.reply_request_error(request, error)
        self.turn()

    @rule(device=st.sampled_from([*DEVICES]))
    def enlist(self, device: str) -> None:
        if len(self.enlisted) < 4:
            name = next(self.names)
            self.workers[name] = Worker(device, self.terms)
            self.desk.processes.add(name, device=device, policy=self.terms)
            self.desk.dispatch(self.now)

    @rule(data=st.data(), count=st.integers(1, 5))
    def run(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            busy = [name for name, worker in self.workers.items() if worker.jobs]
            if busy:
                self.finish(data.draw(st.sampled_from(busy)), data.draw(st.sampled_from(["", "", "", "fail"])))

    def finish(self, name: str, how: str = "") -> None:
        worker = self.workers[name]
        job, source = worker.jobs.popleft(), b"%08d" % worker.terms.source_number
        self.now += DEVICES[worker.device] * sum(each.description.inputs[0].shape[0] for each in job)
        for index, each in enumerate(job):
            if how == "fail" and index == len(job) // 2:
                self.desk.results.on_batch_failed(
                    name, PredictFailed(each.request, "INVALID_ARGUMENT", "no", is_exiting=False), self.now
                )
                continue
            x = each.description.inputs[0]
            outputs = (TensorSpec("y", "INT64", x.shape), TensorSpec("t", "INT64", (1,)))
            contents = [worker.contents.pop(each.request)[0], source]
            placed = [room.tensor_index for room in rooms(each) if self.write(room, contents[room.tensor_index])]
            result = PredictResult(each.request, ResponseDescription("m", outputs), tuple(placed) or None)
            rest = [content for index, content in enumerate(contents) if index not in placed]
            self.desk.results.on_result(name, result, rest, self.now)
        self.turn()

    def write(self, room: MappedOutput, content: Any) -> bool:
        """A worker writes an output, if there is room, which is still its to write to."""
        number = room.offset // (2 * ROOM)
        assert number not in self.answers or number in self.written
        fits = len(content) <= room.nbytes
        if fits:
            os.pwrite(self.memory.fileno(), content, room.offset)
        return fits

    @rule(data=st.data(), sign=st.sampled_from([signal.SIGSEGV, signal.SIGKILL]), spoilt=st.booleans())
    def die(self, data: st.DataObject, sign: int, spoilt: bool) -> None:
        if self.workers:
            name = data.draw(st.sampled_from([*self.workers]))
            if spoilt and self.workers[name].jobs:
                first = self.workers[name].jobs[0].pop(0)
                self.desk.results.on_batch_failed(
                    name, PredictFailed(first.request, "INTERNAL", "spoilt", is_exiting=True), self.now
                )
                self.desk.dispatch(self.now)
                self.dying[name] = self.workers.pop(name)
            else:
                self.end(name, self.workers.pop(name), sign)

    @rule()
    def bury(self) -> None:
        """Who was told to leave, or is killed, has ended."""
        while self.dying:
            self.end(*self.dying.popitem())

    def end(self, name: str, worker: Worker, sign: int = signal.SIGKILL) -> None:
        """A worker ends while it writes."""
        for room in worker.rooms():
            self.write(room, b"?" * room.nbytes)
        self.desk.results.on_exit(name, ExitCause(-sign), self.now)
        self.desk.dispatch(self.now)

    @rule(rest=st.integers(0, 4))
    def cancel(self, rest: int) -> None:
        for number, (request, _) in list(self.sent.items()):
            if number % 5 == rest and number not in self.answers:
                self.desk.cancel(request.client, request.id, self.now)
                # What was late when it was its turn is told that.
                assert number in self.answers or request.deadline <= self.now

    @rule(seconds=st.sampled_from([0.01, 0.3, 5.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tick()

    def tick(self) -> None:
        desks.expire(self.desk, self.now)
        for name, _ in self.desk.processes.overdue(self.now):
            self.dying[name] = self.workers.pop(name)
        self.turn()
        self.desk.dispatch(self.now)

    def turn(self) -> None:
        """The daemon has read all that had come."""
        desks.run_turns(self.desk, self.now)
        while self.given_up:
            self.desk.results.on_cancelled(*self.given_up.pop(), self.now)

    @rule(
        source=st.integers(1, 2),
        max_rows=st.sampled_from([1, MAX_ROWS]),
        part_rows=st.sampled_from([0, PART_ROWS, PART_ROWS]),
        everywhere=st.booleans(),
    )
    def replace(self, source: int, max_rows: int, part_rows: int, everywhere: bool = True) -> None:
        """Another model is served from now on, here or everywhere; who serves the one before answers what it has."""
        self.terms = BatchingPolicy(
            source, frozenset("x"), frozenset("y"), max_rows, part_rows, self.terms.sizes, self.terms.is_exact
        )
        for name in [*self.workers][: None if everywhere else 1]:
            self.desk.processes.remove(name)
        self.enlist("cpu:0")

    # --- what holds ---------------------------------------------------------------------------------------------

    @invariant()
    def who_gets_an_answer_gets_its_own(self) -> None:
        for number, answer in self.answers.items():
            assert isinstance(answer, str) or answer == self.sent[number][1]

    @invariant()
    def no_seat_idles_while_something_waits_that_it_could_run(self) -> None:
        if not hasattr(self, "desk") or self.desk._scheduler.queue.next_unchecked is not None:
            return
        idle = [seat.policy for seat in self.enlisted.values() if not seat.batches]
        cuts = self.desk._scheduler.queue.splits
        for each in self.desk._scheduler.queue:
            cut = cuts.get(each.number)
            assert each.isolation or not idle or (cut is not None and cut.policy not in idle)

    def teardown(self) -> None:
        """Whatever was asked ends."""
        if not hasattr(self, "desk"):
            return
        self.now += 1000.0
        self.tick()
        if not self.enlisted:
            self.replace(1, MAX_ROWS, PART_ROWS)
        for _ in range(1000):
            busy = [name for name, worker in self.workers.items() if worker.jobs]
            # Parts of one request are answered in any order.
            for name in reversed(busy):
                self.finish(name)
            if not busy:
                break
        self.bury()
        assert (self.written, self.desk._sender.output_leases.leases) == (set(), {})
        self.who_gets_an_answer_gets_its_own()
        assert self.answers.keys() == self.sent.keys()
        assert self.desk.is_idle


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
