from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weightd.daemon.request import Request
from weightd.daemon.scheduler import CREDIT, MAX_DEATHS, QUICK_S, Scheduler
from weightd.protocol.errors import DeadlineExceeded, Internal, RequestError, ResourceExhausted

_numbers = itertools.count(1)


def request(deadline: float = 100.0, nbytes: int = 10) -> Request:
    number = next(_numbers)
    return Request(number, b"client", f"id{number}", "m", (), (), 0.0, deadline, nbytes)


def scheduler(*workers: str, waiting: int = 0, max_queue: int = 100, max_bytes: int = 10_000) -> Scheduler:
    made = Scheduler(max_queue, max_bytes)
    for worker in workers:
        made.enlist(worker)
    for _ in range(waiting):
        made.submit(request())
    return made


def assigned(made: Scheduler) -> list[tuple[str, int]]:
    return [(worker, each.number) for worker, each in made.assign(0.0)]


def numbers(requests: Iterator[Request] | list[Request]) -> list[int]:
    return [each.number for each in requests]


# --- the queue and its bounds ---------------------------------------------------------------------------------------


def test_requests_run_in_the_order_in_which_they_came() -> None:
    made = scheduler(waiting=5)
    waiting = numbers(made.waiting())
    assert waiting == sorted(waiting)
    made.enlist("a")
    assert assigned(made) == [("a", waiting[0]), ("a", waiting[1])]
    assert numbers(made.waiting()) == waiting[2:]


def test_the_least_busy_worker_is_next_and_none_gets_more_than_its_credit() -> None:
    made = scheduler("a", "b", waiting=6)
    assert [worker for worker, _ in assigned(made)] == ["a", "b", "a", "b"]
    assert (made.in_flight("a"), made.in_flight("b"), made.queued) == (CREDIT, CREDIT, 2)


def test_an_answer_gives_the_credit_back() -> None:
    made = scheduler("a", waiting=3)
    first = assigned(made)[0][1]
    assert assigned(made) == []
    finished = made.finish("a", first, 0.0)
    assert finished is not None
    assert finished.number == first
    assert len(assigned(made)) == 1


def test_too_many_requests_are_refused() -> None:
    made = scheduler(waiting=3, max_queue=3)
    with pytest.raises(ResourceExhausted, match=r"^3 requests wait already, the bound is 3$"):
        made.submit(request())
    assert made.queued == 3


def test_too_many_bytes_are_refused() -> None:
    made = scheduler(max_bytes=100)
    made.submit(request(nbytes=60))
    made.submit(request(nbytes=40))
    with pytest.raises(ResourceExhausted, match=r"^100 bytes wait already, 1 more are over the bound of 100$"):
        made.submit(request(nbytes=1))
    made.enlist("a")
    assert len(assigned(made)) == 2
    made.submit(request(nbytes=100))


def test_one_request_may_be_larger_than_the_bound_if_it_is_alone() -> None:
    made = scheduler(max_bytes=100)
    made.submit(request(nbytes=1000))
    with pytest.raises(ResourceExhausted):
        made.submit(request(nbytes=0))


# --- workers that go ------------------------------------------------------------------------------------------------


def test_what_a_dead_worker_had_waits_again_at_the_head() -> None:
    made = scheduler("a", waiting=4)
    waiting = numbers(made.waiting())
    assigned(made)
    assert made.lost("a") == []
    assert numbers(made.waiting()) == waiting
    assert assigned(made) == []


def test_a_request_that_two_workers_died_of_never_runs_again() -> None:
    made = scheduler("a", "b", waiting=1)
    [killer] = made.waiting()
    assigned(made)
    assert made.lost("a") == []
    assigned(made)
    [(refused, error)] = made.lost("b")
    assert refused is killer
    assert isinstance(error, Internal)
    assert str(error) == f"request {killer.id} was on 2 workers when they died"
    assert made.idle
    made.enlist("c")
    assert assigned(made) == []


def test_who_only_waited_behind_a_killer_is_not_blamed() -> None:
    made = scheduler("a", waiting=2)
    killer, innocent = numbers(made.waiting())
    for worker in ("a", "b"):
        made.enlist(worker)
        assert numbers([each for _, each in made.assign(0.0)]) == [killer, innocent]
        refused = made.lost(worker)
    assert numbers([each for each, _ in refused]) == [killer]
    assert numbers(made.waiting()) == [innocent]
    assert [each.deaths for each in made.waiting()] == [0]


def test_a_killer_whose_deadline_has_passed_leaves_the_blame_on_nobody_else() -> None:
    made = scheduler("a")
    made.submit(request(deadline=1.0))
    made.submit(request(deadline=100.0))
    assigned(made)
    made.expire(2.0)
    made.lost("a")
    assert [each.deaths for each in made.waiting()] == [0]


def test_a_worker_that_leaves_of_itself_has_killed_nobody() -> None:
    made = scheduler("a", waiting=2)
    for _ in range(5 * MAX_DEATHS):
        made.enlist("a")
        assert len(assigned(made)) == 2
        made.release("a")
    assert [each.deaths for each in made.waiting()] == [0, 0]
    assert assigned(made) == []


def test_a_dismissed_worker_gets_nothing_but_may_still_answer() -> None:
    made = scheduler("a", waiting=3)
    first, second, _ = numbers(made.waiting())
    assigned(made)
    made.dismiss("a")
    assert made.finish("a", first, 0.0) is not None
    assert assigned(made) == []
    assert made.finish("a", second, 0.0) is not None
    made.dismiss("a")
    assert made.queued == 1


def test_a_worker_that_was_never_enlisted_has_nothing() -> None:
    made = scheduler(waiting=1)
    assert made.finish("x", 1, 0.0) is None
    assert made.lost("x") == []
    made.release("x")
    made.dismiss("x")
    assert (made.in_flight("x"), made.queued) == (0, 1)


def test_an_answer_counts_once_and_from_the_worker_that_was_asked() -> None:
    made = scheduler("a", "b", waiting=1)
    [(worker, number)] = assigned(made)
    assert worker == "a"
    assert made.finish("b", number, 0.0) is None
    assert made.finish("a", number + 1, 0.0) is None
    assert made.finish("a", number, 0.0) is not None
    assert made.finish("a", number, 0.0) is None
    assert made.idle


# --- deadlines ------------------------------------------------------------------------------------------------------


def test_a_request_expires_in_the_queue() -> None:
    made = scheduler()
    made.submit(request(deadline=5.0))
    made.submit(request(deadline=3.0))
    assert made.next_event == 3.0
    assert made.expire(2.999) == []
    [(expired, error)] = made.expire(3.0)
    assert (expired.deadline, type(error), str(error)) == (
        3.0,
        DeadlineExceeded,
        "was waiting in the queue at its deadline",
    )
    assert (made.queued, made.next_event) == (1, 5.0)


def test_a_request_expires_while_it_runs_and_its_late_answer_finds_nobody() -> None:
    made = scheduler("a")
    late = request(deadline=3.0)
    made.submit(late)
    made.submit(request(deadline=9.0))
    made.submit(request(deadline=9.0))
    assigned(made)
    [(expired, error)] = made.expire(3.0)
    assert expired is late
    assert (type(error), str(error)) == (DeadlineExceeded, "was running at its deadline")
    assert made.expire(3.0) == []
    # The worker is busy with it all the same.
    assert (made.in_flight("a"), assigned(made)) == (2, [])
    assert made.finish("a", late.number, 0.0) is None
    assert len(assigned(made)) == 1


def test_an_expired_request_is_not_run_again_when_its_worker_dies() -> None:
    made = scheduler("a")
    made.submit(request(deadline=3.0))
    assigned(made)
    made.expire(3.0)
    assert made.lost("a") == []
    assert made.idle


def test_what_runs_is_due_too_when_another_has_expired() -> None:
    made = scheduler("a")
    made.submit(request(deadline=3.0))
    made.submit(request(deadline=5.0))
    assigned(made)
    assert len(made.expire(3.0)) == 1
    assert made.next_event == QUICK_S  # to see whether the worker computes for long
    assert made.overdue(QUICK_S) == []
    assert made.next_event == 5.0
    assert len(made.expire(5.0)) == 1


def test_nothing_is_due_when_nothing_is_there() -> None:
    made = scheduler("a", waiting=1)
    [(worker, number)] = assigned(made)
    made.finish(worker, number, 0.0)
    # The earliest deadline is a bound, not a promise: it is looked at once, and then there is none.
    assert made.expire(made.next_event) == []
    assert made.next_event == float("inf")


# --- taking back ----------------------------------------------------------------------------------------------------


def test_requests_that_do_not_fit_are_withdrawn_and_the_others_stay_in_order() -> None:
    made = scheduler(waiting=5)
    waiting = numbers(made.waiting())
    assert numbers(made.withdraw(lambda each: each.number in waiting[1::2])) == waiting[1::2]
    assert numbers(made.waiting()) == waiting[::2]
    assert made.withdraw(lambda _: False) == []


def test_giving_up_takes_all_that_wait_and_none_that_run() -> None:
    made = scheduler("a", waiting=4)
    waiting = numbers(made.waiting())
    assigned(made)
    assert numbers(made.give_up()) == waiting[CREDIT:]
    assert (made.queued, made.in_flight("a"), made.idle) == (0, CREDIT, False)


# --- who is slow, and how long a queue takes ------------------------------------------------------------------------


def test_who_was_slow_gets_nothing_ahead_until_it_is_quick_again() -> None:
    made = scheduler("a", waiting=4)
    first, second, third, fourth = numbers(made.waiting())
    assert assigned(made) == [("a", first), ("a", second)]
    made.overdue(QUICK_S)
    made.finish("a", first, 1.0)
    assert [each.number for _, each in made.assign(1.0)] == [second]
    made.finish("a", second, 1.1)
    assert [each.number for _, each in made.assign(1.1)] == [third, fourth]


def test_time_counts_from_the_answer_before() -> None:
    made = scheduler("a", waiting=4)
    first, second, third, fourth = numbers(made.waiting())
    assigned(made)
    made.finish("a", first, 0.2)
    # It has had the second one from 0.0 on, and has run it since 0.2.
    made.finish("a", second, 0.4)
    assert [each.number for _, each in made.assign(0.4)] == [third, fourth]


def test_who_has_computed_for_long_gets_nothing_ahead() -> None:
    made = scheduler("a", waiting=1)
    assigned(made)
    made.submit(request())
    assert list(made.assign(QUICK_S)) == []
    assert made.queued == 1


def test_a_refusal_says_when_there_may_be_room() -> None:
    made = scheduler("a", "b", max_queue=6)

    def retry_after() -> float | None:
        with pytest.raises(ResourceExhausted) as refused:
            made.submit(request())
        return refused.value.retry_after

    for _ in range(6):
        made.submit(request())
    assert retry_after() == 0.01  # nothing is known
    [(worker, each), *_] = list(made.assign(0.0))
    made.finish(worker, each.number, 20.0)
    while made.queued < 6:
        made.submit(request())
    # A tenth of the latest duration, six in the queue, two workers.
    assert retry_after() == pytest.approx(0.1 * 20.0 * 6 / 2)


# --- against a model ------------------------------------------------------------------------------------------------

MAX_QUEUE = 6
MAX_BYTES = 50
TIMEOUT_S = 4.0
WORKERS = ["a", "b", "c"]


class Against(RuleBasedStateMachine):
    """A scheduler beside a model of lists: each request ends exactly once, or still waits or runs."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.count = 0
        self.queue: list[Request] = []
        self.enlisted: set[str] = set()
        self.running: dict[str, list[Request]] = {}
        self.since: dict[str, float] = {}
        self.slow: set[str] = set()
        self.late: list[Request] = []
        self.expired: set[int] = set()
        self.deaths: dict[int, int] = {}
        self.submitted: set[int] = set()
        self.ended: list[int] = []

    @initialize()
    def begin(self) -> None:
        self.real = Scheduler(MAX_QUEUE, MAX_BYTES, TIMEOUT_S)

    @rule(seconds=st.sampled_from([0.1, QUICK_S, 1.0, TIMEOUT_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(nbytes=st.sampled_from([0, 10, 25, 60]), wait=st.sampled_from([0.0, 1.0, 5.0, 1e9]))
    def submit(self, nbytes: int, wait: float) -> None:
        self.count += 1
        new = Request(self.count, b"c", "id", "m", (), (), self.now, self.now + wait, nbytes)
        over = bool(self.queue) and sum(each.nbytes for each in self.queue) + nbytes > MAX_BYTES
        if len(self.queue) >= MAX_QUEUE or over:
            with pytest.raises(ResourceExhausted):
                self.real.submit(new)
        else:
            self.real.submit(new)
            self.queue.append(new)
            self.submitted.add(new.number)

    @rule(worker=st.sampled_from(WORKERS))
    def enlist(self, worker: str) -> None:
        self.real.enlist(worker)
        self.enlisted.add(worker)
        self.running.setdefault(worker, [])

    @rule(worker=st.sampled_from(WORKERS))
    def dismiss(self, worker: str) -> None:
        self.real.dismiss(worker)
        self.enlisted.discard(worker)

    @rule()
    def assign(self) -> None:
        for worker, each in self.real.assign(self.now):
            while self.queue[0].deadline <= self.now:
                self.late.append(self.queue.pop(0))
            free = [name for name in self.enlisted if self._has_credit(name)]
            assert worker in free
            assert each is self.queue.pop(0)
            assert len(self.running[worker]) == min(len(self.running[name]) for name in free)
            if not self.running[worker]:
                self.since[worker] = self.now
            self.running[worker].append(each)
        while self.queue and self.queue[0].deadline <= self.now and any(map(self._has_credit, self.enlisted)):
            self.late.append(self.queue.pop(0))
        assert not self.queue or not any(self._has_credit(name) for name in self.enlisted)

    @precondition(lambda self: any(self.running.values()))
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([name for name, had in self.running.items() if had]))
        each = data.draw(st.sampled_from(self.running[worker]))
        self.running[worker].remove(each)
        finished = self.real.finish(worker, each.number, self.now)
        (self.slow.discard if self.now - self.since[worker] < QUICK_S else self.slow.add)(worker)
        self.since[worker] = self.now
        if each.number in self.expired:
            assert finished is None
        else:
            assert finished is each
            self.ended.append(each.number)

    @rule(worker=st.sampled_from(WORKERS), number=st.integers(0, 30))
    def answer_nonsense(self, worker: str, number: int) -> None:
        if number not in [each.number for each in self.running.get(worker, [])]:
            assert self.real.finish(worker, number, self.now) is None

    @rule(worker=st.sampled_from(WORKERS))
    def die(self, worker: str) -> None:
        had = self._remove(worker)
        if had:
            self.deaths[had[0].number] = self.deaths.get(had[0].number, 0) + 1
        killers = [each for each in self._unanswered(had) if self.deaths.get(each.number, 0) >= MAX_DEATHS]
        refused = self.real.lost(worker)
        assert [each for each, _ in refused] == killers
        assert all(isinstance(error, Internal) for _, error in refused)
        self.ended += numbers(killers)
        self.queue = [each for each in self._unanswered(had) if each not in killers] + self.queue

    @rule(worker=st.sampled_from(WORKERS))
    def release(self, worker: str) -> None:
        self.real.release(worker)
        self.queue = self._unanswered(self._remove(worker)) + self.queue

    @rule()
    def look_for_the_overdue(self) -> None:
        hung: list[tuple[str, Request]] = []
        for worker, had in list(self.running.items()):
            since = self.since.get(worker, self.now)
            if had and self.now >= since + TIMEOUT_S:
                hung.append((worker, had[0]))
                self.queue = self._unanswered(self._remove(worker)[1:]) + self.queue
            elif self.now >= since + QUICK_S and len(had) > 1:
                self.queue = had[1:] + self.queue
                self.running[worker] = had[:1]
        assert self.real.overdue(self.now) == hung
        self.ended += numbers(self._unanswered([each for _, each in hung]))
        self.expired |= {each.number for _, each in hung}

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0, 10.0]))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        found: list[tuple[Request, RequestError]] = self.real.expire(self.now)
        assert all(isinstance(error, DeadlineExceeded) for _, error in found)
        self.ended += numbers(self.late)
        found = [each for each in found if each[0] not in self.late]
        self.late = []
        self._end([each for each, _ in found], lambda each: each.deadline <= self.now)

    @rule(odd=st.booleans())
    def cancel(self, odd: bool) -> None:
        found = self.real.end(lambda each: each.number % 2 == odd)
        self._end([each for each, _ in found], lambda each: each.number % 2 == odd)

    @rule(odd=st.booleans())
    def withdraw(self, odd: bool) -> None:
        taken = [each for each in self.queue if each.number % 2 == odd]
        assert self.real.withdraw(lambda each: each.number % 2 == odd) == taken
        self.queue = [each for each in self.queue if each not in taken]
        self.ended += numbers(taken)

    @rule()
    def give_up(self) -> None:
        assert self.real.give_up() == self.late + self.queue
        self.ended += numbers(self.late + self.queue)
        self.late, self.queue = [], []

    def _end(self, found: list[Request], unfit: Callable[[Request], bool]) -> None:
        """Whoever is unfit has ended, wherever it was; what a worker runs keeps the worker busy."""
        running = [each for had in self.running.values() for each in self._unanswered(had)]
        due = [each for each in self.queue + running if unfit(each)]
        assert sorted(numbers(found)) == sorted(numbers(due))
        self.queue = [each for each in self.queue if each not in due]
        for worker, had in self.running.items():
            self.expired |= {each.number for each in had[:1] if each in due}
            self.running[worker] = had[:1] + [each for each in had[1:] if each not in due]
        self.ended += numbers(due)

    def _remove(self, worker: str) -> list[Request]:
        self.enlisted.discard(worker)
        self.slow.discard(worker)
        return self.running.pop(worker, [])

    def _has_credit(self, worker: str) -> bool:
        load = len(self.running[worker])
        quick = worker not in self.slow and self.now < self.since.get(worker, 0.0) + QUICK_S
        return not load or (load < CREDIT and quick)

    def _unanswered(self, had: list[Request]) -> list[Request]:
        return [each for each in had if each.number not in self.expired]

    @invariant()
    def the_queues_are_equal(self) -> None:
        assert list(self.real.waiting()) == self.queue
        assert self.real.queued == len(self.queue)
        assert self.real.idle == (not self.queue and not self.late and not any(self.running.values()))

    @invariant()
    def credit_is_kept(self) -> None:
        for worker in WORKERS:
            assert self.real.in_flight(worker) == len(self.running.get(worker, [])) <= CREDIT

    @invariant()
    def what_is_recalled_is_not_the_workers_any_more(self) -> None:
        for worker, number in self.real.take_recalled():
            assert number not in numbers(self.running.get(worker, []))

    @invariant()
    def nothing_that_is_due_is_overlooked(self) -> None:
        running = [each for had in self.running.values() for each in self._unanswered(had)]
        for each in self.queue + running + self.late:
            assert self.real.next_event <= each.deadline
        for worker, had in self.running.items():
            if had:
                assert self.real.next_event <= self.since[worker] + (QUICK_S if len(had) > 1 else TIMEOUT_S)

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        assert len(self.ended) == len(set(self.ended))
        running = [number for had in self.running.values() for number in numbers(self._unanswered(had))]
        assert sorted([*numbers(self.queue + self.late), *running, *self.ended]) == sorted(self.submitted)

    def teardown(self) -> None:
        """The bytes that wait were counted exactly: once the queue is empty, the whole bound is there again."""
        self.give_up()
        for nbytes in (MAX_BYTES, 0):
            self.real.submit(Request(0, b"", "", "m", (), (), 0.0, 1e9, nbytes))
        with pytest.raises(ResourceExhausted):
            self.real.submit(Request(0, b"", "", "m", (), (), 0.0, 1e9, 1))


TestAgainst = Against.TestCase
TestAgainst.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
