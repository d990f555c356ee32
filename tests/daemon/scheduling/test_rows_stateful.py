"""Random requests whose rows are merged or split, on slots that are fast, slow or crash, on devices of any speed.

Each row of a request has its own number and the model returns its input, so a wrong result shows. Some requests offer
shared memory for the outputs: two processes never write to the same area, and none after the request was released.
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

from testkit import dispatching
from testkit.dispatching import IgnoringSink
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
"""Each with the seconds that one row takes."""

AREA_BYTES = 4096
"""Bytes of a client's memory between any two outputs."""


@dataclass
class Worker:
    """A process with its orders; it runs the first of its batches."""

    device: str
    policy: BatchingPolicy
    batches: deque[list[Predict]] = field(default_factory=deque[list[Predict]])
    contents: dict[int, Sequence[Any]] = field(default_factory=dict[int, Sequence[Any]])
    missing_items: int = 0
    padded: int = 0

    def output_areas(self) -> list[MappedOutput]:
        """Return the areas of shared memory that it may write."""
        return [area for batch in self.batches for each in batch for area in output_areas(each)]


def output_areas(order: Predict) -> tuple[MappedOutput, ...]:
    return () if order.regions is None else order.regions.outputs


def description(rows: int, width: int) -> RequestDescription:
    return RequestDescription("m", (TensorSpec("x", "INT64", (rows, width)), TensorSpec("t", "INT64", (1,))))


class RowsMachine(RuleBasedStateMachine, IgnoringSink):
    """A dispatcher, its clients and its workers."""

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
        self.memory = SharedRegion(1, os.memfd_create("test"), 2**40, os.close)
        os.truncate(self.memory.fileno(), self.memory.nbytes)
        # Workers that were ordered to exit or killed.
        self.dying: dict[str, Worker] = {}
        # Requests that ended while a worker may still write for them, and cancelled items that a worker had
        # not begun.
        self.written: set[int] = set()
        self.cancelled: list[tuple[str, int]] = []
        # The number of partial results that still fit into memory.
        self.partial_results_left = 9
        self.descriptions = {(rows, width): description(rows, width) for rows in range(1, 40) for width in (1, 2)}

    @initialize(exact=st.booleans(), sizes=st.sampled_from([(), (), (2, 8)]), workers=st.integers(1, 3))
    def begin(self, exact: bool, sizes: tuple[int, ...], workers: int) -> None:
        config = ModelConfig(path="/m.onnx", engine="onnxruntime", predict_timeout=TIMEOUT_S, max_queue=1000)
        self.dispatcher = Dispatcher("m", config, self, self.send_order, lambda _: None)
        self.policy = BatchingPolicy(1, frozenset("x"), frozenset("y"), MAX_ROWS, PART_ROWS, sizes, exact)
        for device in itertools.islice(itertools.cycle(DEVICES), workers):
            self.add_worker(device)

    # --- calls of the dispatcher --------------------------------------------------------------------------------------

    def reply_result(self, request: Request, result: PredictResult, frames: Sequence[Any]) -> None:
        assert request.number not in self.answers
        y, t = result.description.outputs
        assert (y.shape, t.shape) == (request.description.inputs[0].shape, (1,))
        # Read as the client does: the first bytes of the area, if the outputs are in shared memory.
        placed = 0 in (result.shared_outputs or ())
        self.answers[request.number] = request.locations.outputs[0][: y.nbytes] if placed else bytes(frames[0])
        self.written |= {request.number} if request.pending_writes else set()

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        assert request.number not in self.answers
        assert "part" not in str(error), "the partial results come from different models"
        self.answers[request.number] = error.code
        self.written |= {request.number} if request.pending_writes else set()

    def reserve_partial_result(self, request: Request, nbytes: int) -> None:
        """Reserve memory for a partial result, which fails now and then."""
        assert request.number not in self.answers
        if nbytes and self.partial_results_left == 0:
            raise ResourceExhausted("the memory budget is exhausted")
        self.partial_results_left -= 1

    def notify_released(self, request: Request) -> None:
        self.written.remove(request.number)

    def send_order(self, process: str, order: ChildOrder, frames: Sequence[Any], _: object) -> None:
        """Give an order to a worker: requests of one batch differ in their rows only."""
        if isinstance(order, CancelPredict) and process not in self.workers:
            return  # the worker has exited
        worker = self.workers[process]
        match order:
            case BeginBatch(items, rows):
                assert not worker.missing_items
                worker.missing_items, worker.padded = items, rows
                worker.batches.append([])
            case Predict(number):
                worker.contents[number] = frames
                others = [
                    area for each in [*self.workers.values(), *self.dying.values()] for area in each.output_areas()
                ]
                for area in output_areas(order):
                    assert all(
                        area.offset + area.nbytes <= it.offset or it.offset + it.nbytes <= area.offset for it in others
                    )
                if worker.missing_items:
                    worker.missing_items -= 1
                    worker.batches[-1].append(order)
                else:
                    worker.batches.append([order])
                if not worker.missing_items:
                    self.check_batch(worker, worker.batches[-1])
            case CancelPredict(number):
                if any(each.request == number for batch in [*worker.batches][1:] for each in batch):
                    self.cancelled.append((process, number))
                for batch in [*worker.batches][1:]:
                    batch[:] = [each for each in batch if each.request != number]
                worker.batches = deque(batch for batch in worker.batches if batch)
            case _:
                raise AssertionError(order)

    def check_batch(self, worker: Worker, batch: list[Predict]) -> None:
        shapes = [each.description.inputs[0].shape for each in batch]
        total = sum(rows for rows, _ in shapes)
        requests = [self.sent[each.request][0] for each in batch if each.request in self.sent]
        assert len(worker.batches) <= 2
        assert len({width for _, width in shapes}) == 1
        assert len(batch) == 1 or total <= worker.policy.max_rows
        assert all(rows <= PART_ROWS for rows, _ in shapes) or not worker.policy.max_split_rows
        if worker.policy.sizes:
            assert total <= worker.padded or total > max(worker.policy.sizes)
            worker.padded = 0
        if len(batch) > 1:
            assert len({*requests}) == len(batch)
            assert all(request.deadline > self.now for request in requests)
            assert worker.policy.is_exact or len({request.origin.principal for request in requests}) == 1
            # Requests with an input without rows cannot share a batch.
            assert not worker.policy.max_split_rows or all(each.description.inputs[1:] == () for each in batch)

    @property
    def slots(self) -> dict[str, Slot]:
        return self.dispatcher._scheduler.slots.accepting

    # --- events -------------------------------------------------------------------------------------------------

    @rule(
        several=st.lists(
            st.tuples(
                st.sampled_from([1, 1, 2, 3, 4, 5, 9, 30]), st.sampled_from([1, 2]), st.booleans(), st.integers(0, 2)
            ),
            max_size=6,
        ),
        wait=st.sampled_from([1e9, 1e9, 1e9, 20.0, 0.05]),
        principal=st.sampled_from(["ann", "bob"]),
    )
    def ask(self, several: list[tuple[int, int, bool, int]], wait: float, principal: str) -> None:
        for rows, width, has_more, area in several:
            number = next(self.numbers)
            x = np.arange(rows * width, dtype=np.int64) + 1000 * number
            asked = self.descriptions[rows, width]
            frames: list[bytes] = [x.tobytes(), b"t" * 8]
            if not has_more:
                asked = RequestDescription("m", asked.inputs[:1])
                frames = frames[:1]
            deadline, origin = self.now + wait, ClientOrigin(principal, principal)
            name = f"id{number}"
            # No output memory, exactly enough, or more: then the rows of the parts do not lie one
            # behind another.
            begin = 2 * number * AREA_BYTES
            y, t = (
                TensorLocation(self.memory, begin, area * x.nbytes),
                TensorLocation(self.memory, begin + AREA_BYTES, 8 * rows),
            )
            locations = TensorLocations({}, {0: y, 1: t}) if area else NO_LOCATIONS
            request = Request(
                number, principal.encode(), name, asked, frames, self.now, deadline, x.nbytes, origin, locations
            )
            self.sent[number] = request, x.tobytes()
            try:
                self.dispatcher.infer(request, self.now)
            except RequestError as error:
                self.reply_request_error(request, error)
        self.turn()

    @rule(device=st.sampled_from([*DEVICES]))
    def add_worker(self, device: str) -> None:
        if len(self.slots) < 4:
            name = next(self.names)
            self.workers[name] = Worker(device, self.policy)
            self.dispatcher.processes.add(name, device=device, policy=self.policy)
            self.dispatcher.dispatch(self.now)

    @rule(data=st.data(), count=st.integers(1, 5))
    def run(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            busy = [name for name, worker in self.workers.items() if worker.batches]
            if busy:
                self.finish(data.draw(st.sampled_from(busy)), data.draw(st.sampled_from(["", "", "", "fail"])))

    def finish(self, name: str, how: str = "") -> None:
        worker = self.workers[name]
        batch, source = worker.batches.popleft(), b"%08d" % worker.policy.source_number
        self.now += DEVICES[worker.device] * sum(each.description.inputs[0].shape[0] for each in batch)
        for index, each in enumerate(batch):
            if how == "fail" and index == len(batch) // 2:
                self.dispatcher.results.on_batch_failed(
                    name, PredictFailed(each.request, "INVALID_ARGUMENT", "no", is_exiting=False), self.now
                )
                continue
            x = each.description.inputs[0]
            outputs = (TensorSpec("y", "INT64", x.shape), TensorSpec("t", "INT64", (1,)))
            contents = [worker.contents.pop(each.request)[0], source]
            placed = [area.tensor_index for area in output_areas(each) if self.write(area, contents[area.tensor_index])]
            result = PredictResult(each.request, ResponseDescription("m", outputs), tuple(placed) or None)
            rest = [content for index, content in enumerate(contents) if index not in placed]
            self.dispatcher.results.on_result(name, result, rest, self.now)
        self.turn()

    def write(self, area: MappedOutput, content: Any) -> bool:
        """Write an output if it fits into its area; the request must not have been released."""
        number = area.offset // (2 * AREA_BYTES)
        assert number not in self.answers or number in self.written
        fits = len(content) <= area.nbytes
        if fits:
            os.pwrite(self.memory.fileno(), content, area.offset)
        return fits

    @rule(data=st.data(), sign=st.sampled_from([signal.SIGSEGV, signal.SIGKILL]), spoilt=st.booleans())
    def die(self, data: st.DataObject, sign: int, spoilt: bool) -> None:
        if self.workers:
            name = data.draw(st.sampled_from([*self.workers]))
            if spoilt and self.workers[name].batches:
                first = self.workers[name].batches[0].pop(0)
                self.dispatcher.results.on_batch_failed(
                    name, PredictFailed(first.request, "INTERNAL", "spoilt", is_exiting=True), self.now
                )
                self.dispatcher.dispatch(self.now)
                self.dying[name] = self.workers.pop(name)
            else:
                self.end(name, self.workers.pop(name), sign)

    @rule()
    def report_exits(self) -> None:
        """Report the exit of workers that were ordered to exit or killed."""
        while self.dying:
            self.end(*self.dying.popitem())

    def end(self, name: str, worker: Worker, sign: int = signal.SIGKILL) -> None:
        """Let a worker exit in the middle of a write."""
        for area in worker.output_areas():
            self.write(area, b"?" * area.nbytes)
        self.dispatcher.results.on_exit(name, ExitCause(-sign), self.now)
        self.dispatcher.dispatch(self.now)

    @rule(rest=st.integers(0, 4))
    def cancel(self, rest: int) -> None:
        for number, (request, _) in list(self.sent.items()):
            if number % 5 == rest and number not in self.answers:
                self.dispatcher.cancel(request.client, request.id, self.now)
                # A request whose deadline passed before its turn gets that error instead.
                assert number in self.answers or request.deadline <= self.now

    @rule(seconds=st.sampled_from([0.01, 0.3, 5.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tick()

    def tick(self) -> None:
        dispatching.expire(self.dispatcher, self.now)
        for name, _ in self.dispatcher.processes.overdue(self.now):
            self.dying[name] = self.workers.pop(name)
        self.turn()
        self.dispatcher.dispatch(self.now)

    def turn(self) -> None:
        """Let the daemon process everything received."""
        dispatching.run_turns(self.dispatcher, self.now)
        while self.cancelled:
            self.dispatcher.results.on_cancelled(*self.cancelled.pop(), self.now)

    @rule(
        source=st.integers(1, 2),
        max_rows=st.sampled_from([1, MAX_ROWS]),
        part_rows=st.sampled_from([0, PART_ROWS, PART_ROWS]),
        everywhere=st.booleans(),
    )
    def replace(self, source: int, max_rows: int, part_rows: int, everywhere: bool = True) -> None:
        """Deploy another model on one worker or on all; workers of the previous model finish their orders."""
        self.policy = BatchingPolicy(
            source, frozenset("x"), frozenset("y"), max_rows, part_rows, self.policy.sizes, self.policy.is_exact
        )
        for name in [*self.workers][: None if everywhere else 1]:
            self.dispatcher.processes.remove(name)
        self.add_worker("cpu:0")

    # --- invariants ---------------------------------------------------------------------------------------------

    @invariant()
    def results_are_correct(self) -> None:
        for number, answer in self.answers.items():
            assert isinstance(answer, str) or answer == self.sent[number][1]

    @invariant()
    def no_slot_idles_with_runnable_requests(self) -> None:
        if not hasattr(self, "dispatcher") or self.dispatcher._scheduler.queue.next_unchecked is not None:
            return
        idle = [slot.policy for slot in self.slots.values() if not slot.batches]
        splits = self.dispatcher._scheduler.queue.splits
        for each in self.dispatcher._scheduler.queue:
            split = splits.get(each.number)
            assert each.isolation or not idle or (split is not None and split.policy not in idle)

    def teardown(self) -> None:
        """Check that every request ends."""
        if not hasattr(self, "dispatcher"):
            return
        self.now += 1000.0
        self.tick()
        if not self.slots:
            self.replace(1, MAX_ROWS, PART_ROWS)
        for _ in range(1000):
            busy = [name for name, worker in self.workers.items() if worker.batches]
            # Parts of one request are answered in any order.
            for name in reversed(busy):
                self.finish(name)
            if not busy:
                break
        self.report_exits()
        assert (self.written, self.dispatcher._sender.output_leases.leases) == (set(), {})
        self.results_are_correct()
        assert self.answers.keys() == self.sent.keys()
        assert self.dispatcher.is_idle


TestRowsMachine = RowsMachine.TestCase
TestRowsMachine.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
