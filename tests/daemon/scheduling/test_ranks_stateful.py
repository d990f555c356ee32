"""Rank groups that compute as real ones do: they mix whatever inputs have arrived, without noticing a mismatch.

The result is the sum of all ranks' outputs, so it is wrong if a rank is at another request or
has skipped one. Ranks crash, hang, fail, reject, and report late, twice or wrongly; clients cancel, reach deadlines and
offer shared memory; the daemon is restarted at any moment. In all cases each request ends once, and a result comes
from all ranks of one group and is correct.
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
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from testkit import dispatching
from testkit.dispatching import IgnoringSink
from testkit.examples import examples
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.platform.exit_cause import ExitCause, ExitInitiator
from weightd_daemon.scheduling.batching.policy import NO_BATCHING, BatchingPolicy
from weightd_daemon.scheduling.dispatcher import Dispatcher
from weightd_daemon.scheduling.lockstep import LockstepTracker
from weightd_daemon.scheduling.request import ClientOrigin, Request
from weightd_daemon.scheduling.tensor_location import NO_LOCATIONS, SharedRegion, TensorLocation, TensorLocations
from weightd_protocol.errors import RequestError
from weightd_protocol.messages.inference import RequestDescription, ResponseDescription, TensorSpec
from weightd_protocol.messages.ranks import PredictDone
from weightd_protocol.messages.worker import BeginBatch, ChildOrder, Predict, PredictFailed, PredictResult

TIMEOUT_S, WIDTH = 50.0, 2

AREA_BYTES = 4096
"""Bytes of a client's memory between any two requests."""

DESCRIPTIONS = {rows: RequestDescription("m", (TensorSpec("x", "INT64", (rows, WIDTH)),)) for rows in range(1, 40)}
PARTS = BatchingPolicy(1, frozenset("x"), frozenset("y"), max_rows=8, max_split_rows=4)
ALONE = BatchingPolicy(1, frozenset("x"), frozenset("y"), max_split_rows=4)

FACTORS, FACTOR = {1: (9,), 2: (2, 7), 3: (2, 3, 4)}, 9
"""The factor of each rank by the size of the group, and their sum."""

Report = tuple[PredictResult | PredictFailed | PredictDone, list[bytes]]


@dataclass
class Rank:
    """A process: orders not run yet, reports not delivered yet, and the last step."""

    name: str
    step: int
    orders: deque[tuple[Predict, Sequence[Any]]] = field(default_factory=deque[tuple[Predict, Sequence[Any]]])
    reports: deque[Report] = field(default_factory=deque[Report])
    given: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    missing: int = 0


@dataclass
class Group:
    """Ranks and their broker; without `reply`, each rank replies with its slice."""

    name: str
    ranks: list[Rank]
    reply: int | None
    policy: BatchingPolicy
    is_dying: bool = False

    @property
    def broker(self) -> str:
        return f"{self.name}.broker"


def output_areas(order: Predict) -> list[tuple[int, int]]:
    return [] if order.regions is None else [(each.offset, each.nbytes) for each in order.regions.outputs]


class RanksMachine(RuleBasedStateMachine, IgnoringSink):
    """A dispatcher, its clients and its rank groups."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1.0
        self.numbers = itertools.count(1)
        self.names = (f"g{number}" for number in itertools.count())
        self.sent: dict[int, tuple[Request, bytes]] = {}
        self.answers: dict[int, bytes | str] = {}
        self.groups: dict[str, Group] = {}
        # Processes whose exit has not been reported, with their groups.
        self.dying: dict[str, Group] = {}
        self.reported: dict[tuple[str, int], set[str]] = {}
        self.delivering: tuple[Group, int] | None = None
        self.written: set[int] = set()
        self.memory = SharedRegion(1, os.memfd_create("test"), 2**40, os.close)
        os.truncate(self.memory.fileno(), self.memory.nbytes)

    @initialize(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=2), policy=st.sampled_from([NO_BATCHING, PARTS]))
    def begin(self, sizes: list[int], policy: BatchingPolicy) -> None:
        self.policy = policy
        self.dispatcher = self.new_dispatcher()
        for size in sizes:
            self.add_group(size, joins=False)

    def new_dispatcher(self) -> Dispatcher:
        config = ModelConfig(path="/m.onnx", engine="onnxruntime", predict_timeout=TIMEOUT_S, max_queue=1000)
        return Dispatcher("m", config, self, self.send_order, lambda _: None)

    # --- calls of the dispatcher --------------------------------------------------------------------------------------

    def reply_result(self, request: Request, result: PredictResult, frames: Sequence[Any]) -> None:
        """Check that all ranks of one group have reported the last item."""
        assert request.number not in self.answers
        self.check_all_ranks_reported()
        [y] = result.description.outputs
        assert y.shape == request.description.inputs[0].shape
        placed = request.locations.outputs[0][: y.nbytes] if result.shared_outputs else None
        self.answers[request.number] = bytes(frames[0]) if placed is None else placed
        self.written |= {request.number} if request.pending_writes else set()

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        assert request.number not in self.answers
        if "rank groups failed" in str(error):
            assert max(request.deaths, request.lost_slots) >= 2
        self.answers[request.number] = error.code
        self.written |= {request.number} if request.pending_writes else set()

    def reserve_partial_result(self, request: Request, nbytes: int) -> None:
        assert request.number not in self.answers
        self.check_all_ranks_reported()

    def check_all_ranks_reported(self) -> None:
        assert self.delivering is not None
        group, number = self.delivering
        assert not group.is_dying
        assert self.reported[group.name, number] == {rank.name for rank in group.ranks}

    def notify_released(self, request: Request) -> None:
        self.written.remove(request.number)

    def send_order(self, process: str, order: ChildOrder, frames: Sequence[Any], _: object) -> None:
        """Give an order to a rank: one batch at a time, and no recall."""
        group = self.groups[process.partition(".")[0]]
        [rank] = [each for each in group.ranks if each.name == process]
        if isinstance(order, BeginBatch):
            assert not rank.orders
            assert group.reply is not None
            rank.missing = order.items
            return
        assert isinstance(order, Predict)
        assert rank.missing or not rank.orders
        rank.missing = max(0, rank.missing - 1)
        for begin, nbytes in output_areas(order):
            assert group.reply == group.ranks.index(rank)
            assert not any(begin < at + size and at < begin + nbytes for at, size in self.writable_areas())
        rank.orders.append((order, frames))
        rank.given.append((order.request, order.step))

    def writable_areas(self) -> list[tuple[int, int]]:
        """Return the areas of shared memory that ranks may still write."""
        groups = [*self.groups.values(), *self.dying.values()]
        ranks = {id(rank): rank for group in groups for rank in group.ranks}
        return [area for rank in ranks.values() for order, _ in rank.orders for area in output_areas(order)]

    # --- clients ------------------------------------------------------------------------------------------------

    @rule(
        several=st.lists(st.tuples(st.sampled_from([1, 1, 2, 3, 5, 9]), st.integers(0, 3)), max_size=4),
        wait=st.sampled_from([1e9, 1e9, 1e9, 70.0, 20.0]),
        client=st.sampled_from(["ann", "bob"]),
    )
    def ask(self, several: list[tuple[int, int]], wait: float, client: str) -> None:
        for rows, area in several:
            number = next(self.numbers)
            x = np.arange(rows * WIDTH, dtype=np.int64) + 1000 * number
            # No output memory, output memory apart from the inputs, or in the place of the inputs.
            begin = number * AREA_BYTES
            x_there, y_there = (
                TensorLocation(self.memory, begin, x.nbytes),
                TensorLocation(self.memory, begin + AREA_BYTES // 2, x.nbytes),
            )
            locations = [
                NO_LOCATIONS,
                NO_LOCATIONS,
                TensorLocations({}, {0: y_there}),
                TensorLocations({0: x_there}, {0: x_there}),
            ][area]
            os.pwrite(self.memory.fileno(), x.tobytes(), begin)
            frames = [] if locations.inputs else [x.tobytes()]
            deadline, origin = self.now + wait, ClientOrigin(client, client)
            request = Request(
                *(number, client.encode(), f"id{number}", DESCRIPTIONS[rows], frames),
                *(self.now, deadline, x.nbytes, origin, locations),
            )
            self.sent[number] = request, x.tobytes()
            try:
                self.dispatcher.infer(request, self.now)
            except RequestError as error:
                self.reply_request_error(request, error)
        self.turn()

    @rule(rest=st.integers(0, 4))
    def cancel(self, rest: int) -> None:
        for number, (request, _) in list(self.sent.items()):
            if number % 5 == rest and number not in self.answers:
                self.dispatcher.cancel(request.client, request.id, self.now)
                assert number in self.answers or request.deadline <= self.now

    @rule(client=st.sampled_from([b"ann", b"bob"]))
    def disconnect(self, client: bytes) -> None:
        self.dispatcher.on_disconnect(client, self.now)
        for number, (request, _) in self.sent.items():
            assert number in self.answers or request.client != client or request.deadline <= self.now

    @rule(seconds=st.sampled_from([0.3, 5.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tick()

    def tick(self) -> None:
        dispatching.expire(self.dispatcher, self.now)
        for process, _ in list(self.dispatcher.processes.overdue(self.now)):
            self.drop(process)
        self.turn()
        self.dispatcher.dispatch(self.now)

    def turn(self) -> None:
        dispatching.run_turns(self.dispatcher, self.now)

    # --- rank groups --------------------------------------------------------------------------------------------

    @rule(size=st.integers(1, 3), joins=st.booleans())
    def add_group(self, size: int, joins: bool) -> None:
        if len(self.groups) < 3:
            name = next(self.names)
            ranks = [Rank(f"{name}.rank{number}", 0) for number in range(size)]
            policy = self.policy if not (joins and self.policy.can_merge) else ALONE
            self.groups[name] = Group(name, ranks, None if joins else size - 1, policy)
            self.register_group(self.groups[name])
            self.dispatcher.dispatch(self.now)

    def register_group(self, group: Group) -> None:
        names = tuple(rank.name for rank in group.ranks)
        reply = None if group.reply is None else names[group.reply]
        lockstep = LockstepTracker(names, reply, group.ranks[0].step)
        self.dispatcher.processes.add_ranks(
            group.name, lockstep, self.now, support_processes=[group.broker], policy=group.policy
        )

    @rule(data=st.data(), count=st.integers(1, 8))
    def compute(self, data: st.DataObject, count: int) -> None:
        """Let groups run their next steps, and deliver some reports."""
        for _ in range(count):
            for group in list(self.groups.values()):
                self.run_step(group)
            reporting = [rank.name for group in self.groups.values() for rank in group.ranks if rank.reports]
            if reporting:
                self.deliver(data.draw(st.sampled_from(reporting)))

    def run_step(self, group: Group) -> None:
        """Run the first order of all ranks; each rank's input contributes to the result."""
        if group.is_dying or not all(rank.orders for rank in group.ranks):
            return
        for rank in group.ranks:
            if rank.orders[0][0].step != rank.step + 1:
                self.dispatcher.results.on_process_failed(rank.name, "it has missed a step", self.now)
                self.drop(rank.name)
                return
        self.now += 0.01
        inputs = [self.read(rank) for rank in group.ranks]
        rows = len(inputs[0])
        y = np.zeros_like(inputs[0])
        for x, factor in zip(inputs, FACTORS[len(inputs)], strict=True):
            y += factor * np.resize(x, (rows, WIDTH))
        shares = np.array_split(y, len(group.ranks))
        for index, rank in enumerate(group.ranks):
            order, _ = rank.orders.popleft()
            rank.step = order.step
            if group.reply not in (None, index):
                rank.reports.append((PredictDone(order.request), []))
                continue
            mine = shares[index] if group.reply is None else y
            spec = TensorSpec("y", "INT64", mine.shape)
            placed = output_areas(order)
            for begin, _ in placed:
                self.write(begin, mine.tobytes())
            result = PredictResult(order.request, ResponseDescription("m", (spec,)), (0,) if placed else None)
            rank.reports.append((result, [] if placed else [mine.tobytes()]))

    def read(self, rank: Rank) -> np.ndarray[Any, np.dtype[np.int64]]:
        order, frames = rank.orders[0]
        [x] = order.description.inputs
        if order.regions is not None and order.regions.inputs:
            content = os.pread(self.memory.fileno(), x.nbytes, order.regions.inputs[0].offset)
        else:
            content = bytes(frames[0])
        return np.frombuffer(content, np.int64).reshape(x.shape)

    def write(self, begin: int, content: bytes) -> None:
        """Write outputs; the request must not have been released."""
        number = begin // AREA_BYTES
        assert number not in self.answers or number in self.written
        os.pwrite(self.memory.fileno(), content, begin)

    def deliver(self, name: str, report: Report | None = None) -> None:
        group = self.groups[name.partition(".")[0]]
        [rank] = [each for each in group.ranks if each.name == name]
        message, frames = rank.reports.popleft() if report is None else report
        self.delivering = group, message.request
        reporters = self.reported.setdefault((group.name, message.request), set())
        reporters.add(name)
        # The receive buffer is reused after the call.
        views = [memoryview(bytearray(each)) for each in frames]
        problem = self.handle_report(name, message, views)
        for view in views:
            view[:] = b"?" * len(view)
        self.delivering = None
        if problem:
            self.drop(name)
        elif len(reporters) == len(group.ranks):
            reporters.clear()
        self.turn()

    def handle_report(
        self, name: str, message: PredictResult | PredictFailed | PredictDone, frames: list[memoryview]
    ) -> str:
        match message:
            case PredictResult():
                return self.dispatcher.results.on_result(name, message, frames, self.now)
            case PredictFailed():
                return self.dispatcher.results.on_batch_failed(name, message, self.now)
            case PredictDone(number):
                return self.dispatcher.results.on_done(name, number, self.now)

    # --- faults -------------------------------------------------------------------------------------------------

    def victim(self, data: st.DataObject) -> tuple[Group, Rank] | None:
        if not self.groups:
            return None
        group = self.groups[data.draw(st.sampled_from([*self.groups]))]
        return group, data.draw(st.sampled_from(group.ranks))

    @rule(data=st.data(), sign=st.sampled_from([signal.SIGSEGV, signal.SIGKILL]), broker=st.booleans())
    def die(self, data: st.DataObject, sign: int, broker: bool) -> None:
        found = self.victim(data)
        if found is not None:
            group, rank = found
            name = group.broker if broker else rank.name
            self.kill(group)
            self.on_exit(name, ExitCause(-sign))

    @rule(data=st.data(), leaving=st.booleans())
    def fail(self, data: st.DataObject, leaving: bool) -> None:
        """Let a rank fail during the step, or reject what others run: both end the group."""
        found = self.victim(data)
        if found is not None and found[1].orders:
            _, rank = found
            order, _ = rank.orders.popleft()
            self.deliver(rank.name, (PredictFailed(order.request, "INTERNAL", "no", leaving), []))

    @rule(data=st.data())
    def reject_on_all_ranks(self, data: st.DataObject) -> None:
        """Let all ranks reject an order before they begin."""
        found = self.victim(data)
        if found is None or not all(rank.orders for rank in found[0].ranks):
            return
        for rank in found[0].ranks:
            order, _ = rank.orders.popleft()
            rank.step = order.step
            rank.reports.append((PredictFailed(order.request, "INVALID_ARGUMENT", "no", is_exiting=False), []))

    @rule(data=st.data())
    def drop_order(self, data: st.DataObject) -> None:
        """Let a rank drop an order; the other ranks hang in that step."""
        found = self.victim(data)
        if found is not None and found[1].orders:
            group, rank = found
            rank.orders.popleft()
            if len(group.ranks) == 1 and not rank.orders and not rank.reports:
                self.wait(TIMEOUT_S)

    @rule(data=st.data(), number=st.integers(0, 20))
    def report_unknown_batch(self, data: st.DataObject, number: int) -> None:
        """Let a rank report an order that it was not given, or whose outputs it should have sent."""
        found = self.victim(data)
        if found is not None:
            group, rank = found
            is_asked = any(given == number for given, _ in rank.given)
            if not is_asked or group.reply in (None, group.ranks.index(rank)):
                self.deliver(rank.name, (PredictDone(number), []))
                assert group.is_dying

    @rule(data=st.data())
    def report_twice(self, data: st.DataObject) -> None:
        found = self.victim(data)
        if found is not None and found[1].reports:
            rank = found[1]
            rank.reports.insert(1, rank.reports[0])

    @rule(data=st.data())
    def skip(self, data: st.DataObject) -> None:
        found = self.victim(data)
        if found is not None and found[1].orders:
            assert self.dispatcher.results.on_cancelled(found[1].name, found[1].orders[0][0].request, self.now)
            self.drop(found[1].name)

    def drop(self, process: str) -> None:
        """Release the slot and kill the group, as the process event handler does."""
        self.dispatcher.processes.release(process)
        group = self.groups.get(process.partition(".")[0])
        if group is not None:
            self.kill(group)
        self.dispatcher.dispatch(self.now)

    def kill(self, group: Group) -> None:
        group.is_dying = True
        del self.groups[group.name]
        self.dying.update(dict.fromkeys([group.broker, *(rank.name for rank in group.ranks)], group))

    @precondition(lambda self: self.dying)
    @rule(data=st.data(), count=st.integers(1, 4))
    def report_exits(self, data: st.DataObject, count: int) -> None:
        """Report exits of killed processes, each after the reports that the process had sent."""
        for _ in range(min(count, len(self.dying))):
            self.report_exit(data.draw(st.sampled_from(sorted(self.dying))), data.draw(st.sampled_from(ExitInitiator)))

    def report_exit(self, name: str, by: ExitInitiator) -> None:
        for rank in self.dying[name].ranks:
            while rank.name == name and rank.reports:
                message, frames = rank.reports.popleft()
                assert self.handle_report(name, message, [memoryview(each) for each in frames]) == ""
        self.on_exit(name, ExitCause(-signal.SIGKILL, initiator=by))

    def on_exit(self, name: str, end: ExitCause) -> None:
        group = self.dying.pop(name)
        for rank in group.ranks:
            if rank.name == name:
                for order, _ in rank.orders:
                    for begin, _ in output_areas(order):
                        self.write(begin, b"?")
                rank.orders.clear()
        self.dispatcher.results.on_exit(name, end, self.now)
        self.dispatcher.dispatch(self.now)
        self.turn()

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """Start another daemon with the groups whose ranks all report the same step."""
        while self.dying:
            self.report_exit(min(self.dying), ExitInitiator.DAEMON)
        self.dispatcher.hand_over()
        assert self.answers.keys() == self.sent.keys()
        # Clients of the previous daemon have disconnected, so nothing reports the end of writes.
        for group in list(self.groups.values()):
            if data.draw(st.booleans()):
                self.run_step(group)
            for rank in group.ranks:
                rank.reports.clear()
                rank.given.clear()
                # The group may have failed because of such a report, whose exits nothing reports
                # now.
                self.dying.pop(rank.name, None)
            if any(rank.orders for rank in group.ranks) or len({rank.step for rank in group.ranks}) > 1:
                self.groups.pop(group.name, None)
        self.written.clear()
        self.reported.clear()
        self.dispatcher = self.new_dispatcher()
        for group in self.groups.values():
            self.register_group(group)

    # --- invariants ---------------------------------------------------------------------------------------------

    @invariant()
    def results_are_correct(self) -> None:
        for number, answer in self.answers.items():
            if not isinstance(answer, str):
                x = np.frombuffer(self.sent[number][1], np.int64)
                got = np.frombuffer(answer, np.int64)
                assert (got == FACTOR * x).all()

    @invariant()
    def ranks_get_the_same_orders(self) -> None:
        for group in self.groups.values():
            assert all(rank.given == group.ranks[0].given for rank in group.ranks)
            steps = [step for _, step in group.ranks[0].given]
            assert all(later == step + 1 for step, later in itertools.pairwise(steps))

    @invariant()
    def no_slot_idles_with_runnable_requests(self) -> None:
        if not hasattr(self, "dispatcher") or self.dispatcher._scheduler.queue.next_unchecked is not None:
            return
        idle = [slot.policy for slot in self.dispatcher._scheduler.slots.accepting.values() if not slot.batches]
        splits = self.dispatcher._scheduler.queue.splits
        for each in self.dispatcher._scheduler.queue:
            split = splits.get(each.number)
            assert each.isolation or not idle or (split is not None and split.policy not in idle)

    def teardown(self) -> None:
        """Check that every request ends."""
        if not hasattr(self, "dispatcher"):
            return
        for _ in range(5):
            # Hung groups time out, and a new group takes over.
            self.now += 1000.0
            self.tick()
            self.add_group(2, joins=False)
            self.run_all()
        while self.dying:
            self.report_exit(min(self.dying), ExitInitiator.DAEMON)
        self.run_all()
        assert self.answers.keys() == self.sent.keys()
        assert (self.written, self.dispatcher._sender.output_leases.leases) == (set(), {})
        assert self.dispatcher.is_idle

    def run_all(self) -> None:
        for _ in range(1000):
            for group in list(self.groups.values()):
                self.run_step(group)
            reporting = [rank.name for group in self.groups.values() for rank in group.ranks if rank.reports]
            if not reporting:
                break
            self.deliver(reporting[-1])


TestRanksMachine = RanksMachine.TestCase
TestRanksMachine.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
