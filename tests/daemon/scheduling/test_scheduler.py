from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from testkit.examples import examples
from weightd_daemon.scheduling.request import Isolation, Request
from weightd_daemon.scheduling.scheduler import AT_ONCE, Scheduler
from weightd_daemon.scheduling.slots import MAX_QUICK_S, Slot
from weightd_protocol.errors import DeadlineExceeded, RequestError, ResourceExhausted
from weightd_protocol.messages.inference import RequestDescription

_numbers = itertools.count(1)

# Batches of a fast slot: one running, one queued.
CREDIT = 2


def request(deadline: float = 100.0, nbytes: int = 10) -> Request:
    number = next(_numbers)
    return Request(number, b"client", f"id{number}", RequestDescription("m", ()), (), 0.0, deadline, nbytes)


def scheduler(*workers: str, waiting: int = 0, max_queue: int = 100, max_bytes: int = 10_000) -> Scheduler:
    made = Scheduler(max_queue, max_bytes)
    for worker in workers:
        made.slots.add(Slot(worker, (worker,)))
    for _ in range(waiting):
        made.submit(request(), 0.0)
    return made


def assigned(made: Scheduler) -> list[tuple[str, int]]:
    return [(slot.name, batch.number) for slot, batch in made.assign(0.0)]


def requests_of(made: Scheduler, process: str) -> list[Request]:
    slot = made.slots.slot_of(process)
    return [request for batch in slot.batches.values() for request in batch.requests] if slot is not None else []


def numbers(requests: Iterable[Request]) -> list[int]:
    return [each.number for each in requests]


@pytest.mark.parametrize(
    ("made", "nbytes", "text"),
    [
        (scheduler(waiting=3, max_queue=3), 0, "the queue is full: it holds 3 of at most 3 requests"),
        (
            scheduler(waiting=3, max_bytes=30),
            1,
            "the queue is full: 30 bytes are queued, and 1 more exceed the limit of 30",
        ),
    ],
)
def test_full_queue_error_names_the_limit(made: Scheduler, nbytes: int, text: str) -> None:
    with pytest.raises(ResourceExhausted, match=f"^{text}$"):
        made.submit(request(nbytes=nbytes), 0.0)


def test_expiry_names_the_state_and_finds_the_next_deadline() -> None:
    made = scheduler("a")
    for deadline in (3.0, 5.0, 4.0):
        made.submit(request(deadline=deadline), 0.0)
    assert made.next_event_at == 3.0
    assigned(made)
    assert [str(error) for _, error in made.expire(3.0)] == ["was running at its deadline"]
    assert made.next_event_at == MAX_QUICK_S  # when the worker counts as slow
    assert made.take_overdue(MAX_QUICK_S) == []
    assert made.next_event_at == 4.0
    assert [str(error) for _, error in made.expire(4.0)] == ["was waiting in the queue at its deadline"]
    assert made.next_event_at == 5.0


def test_suspension_does_not_count_against_workers() -> None:
    """The daemon was suspended for 5 s. Results that arrived in that time must be read before workers count as hung."""
    due: list[float] = []
    made = Scheduler(100, 10_000, predict_timeout=2.0, schedule_by=due.append)
    made.slots.add(Slot("a", ("a",)))
    running, ready, waiting, patient, late = (request(deadline=each) for each in (4.0, 20.0, 4.0, 20.0, 0.9))
    for each in (running, ready, waiting, patient):
        made.submit(each, 0.0)
    list(made.assign(0.0))
    made.submit(late, 0.0)
    made.on_suspended(5.0, 1.0)
    assert [each.deadline for each in (running, ready, waiting, patient, late)] == [1.5, 15.0, -1.0, 15.0, -4.1]
    assert min(due) == -4.1
    assert made.take_overdue(1.9) == []
    assert {each.number for each, _ in made.expire(1.0)} == {late.number, waiting.number}
    assert made.running.finish("a", running.number, 1.4) is not None
    assert made.expire(1.6) == []


def test_idle_scheduler_has_no_next_event() -> None:
    made = scheduler("a", waiting=1)
    [(worker, number)] = assigned(made)
    made.running.finish(worker, number, 0.0)
    # The earliest deadline is a lower bound: one more look, then no event.
    assert made.expire(made.next_event_at) == []
    assert made.next_event_at == float("inf")


def retry_after(made: Scheduler, now: float) -> float | None:
    with pytest.raises(ResourceExhausted) as refused:
        made.submit(request(), now)
    return refused.value.retry_after


def test_refusal_estimates_the_waiting_time() -> None:
    made = scheduler(max_queue=6, waiting=6)
    assert retry_after(made, 0.0) is None  # no durations are known
    made.slots.add(Slot("a", ("a",)))
    made.slots.add(Slot("b", ("b",)))
    assert retry_after(made, 0.0) is None
    [(worker, number), *_] = assigned(made)
    made.running.finish(worker, number, 5.0)
    while made.queue.count < 6:
        made.submit(request(), 5.0)
    # 5 s per request, six in the queue, two workers.
    assert retry_after(made, 5.0) == pytest.approx(5.0 * 6 / 2)
    # The other worker has been running for longer than that.
    assert retry_after(made, 8.0) == pytest.approx(8.0 * 6 / 2)


def test_retry_after_is_never_zero() -> None:
    made = scheduler("a", max_queue=1, waiting=1)
    [(worker, number)] = assigned(made)
    made.running.finish(worker, number, 0.0)
    made.submit(request(), 0.0)
    assert retry_after(made, 0.0) == 0.01


class UncomparedClient(bytes):
    """A client id that fails when it is compared."""

    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        if other is not self:
            raise AssertionError("compared with another client")
        return True


def test_end_of_client_does_not_scan_other_clients() -> None:
    made = scheduler()
    for count in range(5):
        for client in (UncomparedClient(b"other %d" % count), b"me"):
            each = request()
            each.client, each.id = client, "x" if count < 2 else "y"
            made.submit(each, 0.0)
    assert [(each.client, each.id) for each in made.end_of_client(b"me", "x")] == [(b"me", "x")] * 2
    assert (made.end_of_client(b"me", "x"), len(made.end_of_client(b"me")), made.queue.count) == ([], 3, 5)


# --- model-based test -----------------------------------------------------------------------------------------------

MAX_QUEUE = 6
MAX_BYTES = 50
TIMEOUT_S = 4.0
WORKERS = ["a", "b", "c"]
CLIENTS = [b"c", b"d"]


class RequestSpec(NamedTuple):
    """Properties of a request to be submitted."""

    nbytes: int
    wait: float
    client: bytes
    name: str
    where: str
    starts: bool


REQUEST_SPECS = st.lists(
    st.builds(
        RequestSpec,
        nbytes=st.sampled_from([0, 0, 10, 25, 60]),
        wait=st.sampled_from([1e9, 1e9, 5.0, 1.0, 0.0]),
        client=st.sampled_from(CLIENTS),
        name=st.sampled_from(["x", "y"]),
        where=st.sampled_from(["", "", "", "", "", "alone", "confined", "aside"]),
        starts=st.booleans(),
    ),
    min_size=2,
    max_size=MAX_QUEUE,
)
"""In groups, so that requests meet each other."""


class SchedulerMachine(RuleBasedStateMachine):
    """A Scheduler compared with a model of lists: each request ends exactly once, or still waits or runs."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.due = float("inf")
        self.count = 0
        self.queue: list[Request] = []
        self.confined: list[Request] = []
        self.aside: list[Request] = []
        self.accepting: set[str] = set()
        self.running: dict[str, list[Request]] = {}
        self.since: dict[str, float] = {}
        self.slow: set[str] = set()
        self.late: list[Request] = []
        self.expired: set[int] = set()
        self.submitted: set[int] = set()
        self.ended: list[int] = []

    @initialize(workers=st.integers(1, 2), several=REQUEST_SPECS)
    def begin(self, workers: int, several: list[RequestSpec]) -> None:
        self.real = Scheduler(MAX_QUEUE, MAX_BYTES, TIMEOUT_S, self.due_by)
        for worker in WORKERS[:workers]:
            self.add_worker(worker)
        self.submit(several)

    def due_by(self, latest: float) -> None:
        self.due = min(self.due, latest)

    @rule(several=REQUEST_SPECS)
    def submit(self, several: list[RequestSpec]) -> None:
        for each in several:
            self._submit(each)

    @rule(seconds=st.sampled_from([0.0, 0.1, MAX_QUICK_S, TIMEOUT_S]), several=REQUEST_SPECS, data=st.data())
    def wait(self, seconds: float, several: list[RequestSpec], data: st.DataObject) -> None:
        """Submit and assign, then let a worker answer or exit.

        This is one rule since hypothesis often disables most rules.
        """
        self.submit(several)
        self.assign()
        self.now += seconds
        if any(self.running.values()):
            data.draw(st.sampled_from([self.answer, self.die]))(data)

    def _submit(self, spec: RequestSpec) -> None:
        self.count += 1
        deadline = self.now + spec.wait
        new = Request(
            self.count, spec.client, spec.name, RequestDescription("m", ()), (), self.now, deadline, spec.nbytes
        )
        new.isolation, aside = Isolation.__members__.get(spec.where.upper(), Isolation.BATCHABLE), spec.where == "aside"
        if spec.starts:
            self.assign()
            if not aside and self._try_start(new):
                return
        over = bool(self.waiting) and sum(each.nbytes for each in self.waiting) + spec.nbytes > MAX_BYTES
        if len(self.waiting) >= MAX_QUEUE or over:
            with pytest.raises(ResourceExhausted):
                self.real.submit(new, self.now, needs_check=aside)
        else:
            self.real.submit(new, self.now, needs_check=aside)
            (self.aside if aside else self._queue_of(new)).append(new)
            self.submitted.add(new.number)
        if spec.starts:
            running = [*map(numbers, self.running.values())]
            self.assign()
            assert [*map(numbers, self.running.values())] == running

    def _try_start(self, new: Request) -> bool:
        """Start a request at once if it would be assigned next; then nothing else can be assigned."""
        queue = self._queue_of(new)
        queue.append(new)
        turn = self._next_queue()
        is_next = bool(turn) and turn[0] is new
        queue.remove(new)
        started = self.real.try_start(new, self.now)
        assert (started is not None) == (is_next and new.deadline > self.now and bool(self._free(new)))
        if started is None:
            return False
        slot, batch = started
        assert batch.single_request is new
        self._start(slot.name, new)
        self.submitted.add(new.number)
        return True

    @rule(rest=st.integers(0, 3))
    def require_check(self, rest: int) -> None:
        chosen = [each for each in self.queue + self.confined if each.number % 4 == rest]
        assert self.real.require_check(lambda each: each.number % 4 == rest) == chosen
        self._forget(chosen)
        self.aside += chosen

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        stranger = Request(10_000, b"c", "x", RequestDescription("m", ()), (), self.now, 1e9, 0)
        each = data.draw(st.sampled_from([*self.aside, stranger]))
        self.real.queue.admit(each)
        if each is not stranger:
            self.aside.remove(each)
            self._queue_of(each).append(each)

    @rule(client=st.sampled_from(CLIENTS))
    def confine(self, client: bytes) -> None:
        self.real.confine(lambda each: each.client == client)
        moved = [each for each in self.queue if each.client == client]
        self._forget(moved)
        self.confined += moved
        running = [each for had in self.running.values() for each in self._unanswered(had)]
        for each in self.waiting + running:
            each.isolation = Isolation.CONFINED if each.client == client else each.isolation

    @rule(worker=st.sampled_from(WORKERS))
    def add_worker(self, worker: str) -> None:
        self.real.slots.add(Slot(worker, (worker,)))
        self.accepting.add(worker)
        self.running.setdefault(worker, [])

    @rule(worker=st.sampled_from(WORKERS))
    def retire_worker(self, worker: str) -> None:
        self.real.slots.retire(worker)
        self.accepting.discard(worker)

    @rule()
    def assign(self) -> None:
        for slot, batch in self.real.assign(self.now):
            worker, [each] = slot.name, batch.requests
            while (queue := self._next_queue())[0].deadline <= self.now:
                self.late.append(queue.pop(0))
            assert each is queue.pop(0)
            self._start(worker, each)
        while (queue := self._next_queue()) and self._free(queue[0]) and queue[0].deadline <= self.now:
            self.late.append(queue.pop(0))
        assert not queue or not self._free(queue[0])

    def _start(self, worker: str, each: Request) -> None:
        free = self._free(each)
        assert worker in free
        assert len(self.running[worker]) == min(len(self.running[name]) for name in free)
        if not self.running[worker]:
            self.since[worker] = self.now
        self.running[worker].append(each)

    def _queue_of(self, each: Request) -> list[Request]:
        return self.confined if each.isolation is Isolation.CONFINED else self.queue

    def _free(self, each: Request) -> list[str]:
        """Return the workers that may get the request; an isolated request needs an idle worker."""
        credit = [name for name in self.accepting if self._has_credit(name)]
        return [name for name in credit if not self.running[name] or each.isolation is Isolation.BATCHABLE]

    def _next_queue(self) -> list[Request]:
        """Return the queue whose first request arrived earlier; only queues that may run now count."""
        runs = any(each.isolation is Isolation.CONFINED for had in self.running.values() for each in had)
        queues = [self.queue, [] if runs else self.confined]
        return min(queues, key=lambda queue: queue[0].number if queue else 10**9)

    @precondition(lambda self: any(self.running.values()))
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([name for name, had in self.running.items() if had]))
        each = data.draw(st.sampled_from(self.running[worker]))
        runs = each is self.running[worker][0]
        self.running[worker].remove(each)
        finished = self.real.running.finish(worker, each.number, self.now)
        (self.slow.add if runs and self.now - self.since[worker] >= MAX_QUICK_S else self.slow.discard)(worker)
        if runs:
            self.since[worker] = self.now
        if each.number in self.expired:
            assert finished is None
        else:
            assert finished is not None
            assert finished.request is each
            self.ended.append(each.number)

    @rule(worker=st.sampled_from(WORKERS), number=st.integers(0, 30))
    def answer_unknown_request(self, worker: str, number: int) -> None:
        if number not in [each.number for each in self.running.get(worker, [])]:
            assert self.real.running.finish(worker, number, self.now) is None

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([name for name, had in self.running.items() if had] or WORKERS))
        ends = data.draw(st.booleans())
        had = self._remove(worker)
        assert requests_of(self.real, worker) == had
        ended = had[0] if had and ends else None
        self.real.release_slot(worker, excluding=[] if ended is None else [ended])
        if ended is not None:
            self.ended += numbers(self._unanswered([ended]))
        self._put_back([each for each in self._unanswered(had) if each is not ended])

    @rule()
    def take_overdue(self) -> None:
        hung: list[tuple[str, Request]] = []
        for worker, had in list(self.running.items()):
            since = self.since.get(worker, self.now)
            if had and self.now >= since + TIMEOUT_S:
                hung.append((worker, had[0]))
                self._put_back(self._unanswered(self._remove(worker)[1:]))
            elif self.now >= since + MAX_QUICK_S and len(had) > 1:
                self._put_back(had[1:])
                self.running[worker] = had[:1]
        assert [(slot.name, batch.single_request) for slot, batch in self.real.take_overdue(self.now)] == hung
        self.ended += numbers(self._unanswered([each for _, each in hung]))
        self.expired |= {each.number for _, each in hung}
        self.due = self._next_event

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0, 10.0]))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        found: list[tuple[Request, RequestError]] = self.real.expire(self.now)
        assert all(isinstance(error, DeadlineExceeded) for _, error in found)
        self.ended += numbers(self.late)
        found = [each for each in found if each[0] not in self.late]
        self.late = []
        self._end([each for each, _ in found], lambda each: each.deadline <= self.now)
        self.due = self._next_event

    @rule(rest=st.integers(0, 3))
    def cancel(self, rest: int) -> None:
        found = self.real.end_matching(lambda each: each.number % 4 == rest)
        self._end([each for each, _ in found], lambda each: each.number % 4 == rest)

    @rule(client=st.sampled_from(CLIENTS), name=st.sampled_from([None, "x", "y"]))
    def cancel_of_client(self, client: bytes, name: str | None) -> None:
        found = self.real.end_of_client(client, name)
        self._end(found, lambda each: each.client == client and name in (None, each.id))

    @rule(rest=st.integers(0, 3))
    def take_matching(self, rest: int) -> None:
        taken = [each for each in self.waiting if each.number % 4 == rest]
        assert self.real.take_matching(lambda each: each.number % 4 == rest) == taken
        self._forget(taken)
        self.ended += numbers(taken)

    @precondition(lambda self: len(self.waiting) == MAX_QUEUE)
    @rule()
    def take_all_waiting(self) -> None:
        assert self.real.take_all_waiting() == self.late + self.waiting
        self.ended += numbers(self.late + self.waiting)
        self.late, self.queue, self.confined, self.aside = [], [], [], []

    @property
    def _next_event(self) -> float:
        return AT_ONCE if self.aside else self.real.next_event_at

    @property
    def waiting(self) -> list[Request]:
        return self.queue + self.confined + self.aside

    def _forget(self, gone: list[Request]) -> None:
        for queue in (self.queue, self.confined, self.aside):
            queue[:] = [each for each in queue if each not in gone]

    def _put_back(self, requests: list[Request]) -> None:
        self.queue = [each for each in requests if each.isolation is not Isolation.CONFINED] + self.queue
        self.confined = [each for each in requests if each.isolation is Isolation.CONFINED] + self.confined

    def _end(self, found: list[Request], matches: Callable[[Request], bool]) -> None:
        """Check that the requests that match have ended; the one that a worker runs keeps the worker busy."""
        running = [each for had in self.running.values() for each in self._unanswered(had)]
        due = [each for each in self.waiting + running if matches(each)]
        assert sorted(numbers(found)) == sorted(numbers(due))
        self._forget(due)
        for worker, had in self.running.items():
            self.expired |= {each.number for each in had[:1] if each in due}
            self.running[worker] = had[:1] + [each for each in had[1:] if each not in due]
        self.ended += numbers(due)

    def _remove(self, worker: str) -> list[Request]:
        self.accepting.discard(worker)
        self.slow.discard(worker)
        return self.running.pop(worker, [])

    def _has_credit(self, worker: str) -> bool:
        load = len(self.running[worker])
        quick = worker not in self.slow and self.now < self.since.get(worker, 0.0) + MAX_QUICK_S
        exclusive = any(each.isolation is not Isolation.BATCHABLE for each in self.running[worker])
        return not load or (load < CREDIT and quick and not exclusive)

    def _unanswered(self, had: list[Request]) -> list[Request]:
        return [each for each in had if each.number not in self.expired]

    @invariant()
    def queues_are_equal(self) -> None:
        assert list(self.real.queue) == self.waiting
        assert self.real.queue.count == len(self.waiting)
        assert self.real.queue.next_unchecked is (self.aside[0] if self.aside else None)
        assert self.real.is_idle == (not self.waiting and not self.late and not any(self.running.values()))

    @invariant()
    def in_flight_is_within_the_credit(self) -> None:
        for worker in WORKERS:
            assert self.real.slots.in_flight(worker) == len(self.running.get(worker, [])) <= CREDIT

    @invariant()
    def recalled_requests_have_left_their_worker(self) -> None:
        for slot, number in self.real.running.take_recalled():
            assert number not in numbers(self.running.get(slot.name, []))

    @invariant()
    def next_event_is_early_enough(self) -> None:
        assert self.due <= self._next_event
        running = [each for had in self.running.values() for each in self._unanswered(had)]
        for each in self.waiting + running + self.late:
            assert self.real.next_event_at <= each.deadline
        for worker, had in self.running.items():
            if had:
                assert self.real.next_event_at <= self.since[worker] + (MAX_QUICK_S if len(had) > 1 else TIMEOUT_S)

    @invariant()
    def each_request_is_in_one_state(self) -> None:
        assert len(self.ended) == len(set(self.ended))
        running = [number for had in self.running.values() for number in numbers(self._unanswered(had))]
        assert sorted([*numbers(self.waiting + self.late), *running, *self.ended]) == sorted(self.submitted)

    def teardown(self) -> None:
        """Check that the queue's bytes were counted exactly: an empty queue accepts the maximum again."""
        self.take_all_waiting()
        for nbytes in (MAX_BYTES, 0):
            self.real.submit(Request(nbytes, b"", "", RequestDescription("m", ()), (), 0.0, 1e9, nbytes), self.now)
        with pytest.raises(ResourceExhausted):
            self.real.submit(Request(1, b"", "", RequestDescription("m", ()), (), 0.0, 1e9, 1), self.now)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
