"""Which job runs on which seat, and when: the queue of one model.

First come, first served, among the seats that have credit. A seat that is quick has credit for two jobs: one runs and
one is ready, so it never waits for the daemon between two. One that computes for long has nothing ready, and what
waits behind it is taken back: no request waits for one seat while another is free. Requests of clients under suspicion
(`suspects`) are confined: one of them is with a seat at a time, and nothing waits behind it there. Jobs are formed of
requests when it is their turn: today of one request each. Plain decisions, fed with the clock.

A seat is spoken of by its name, or by that of any of its processes where it is these that answer or die.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from weightd.daemon.requests.job import Job
from weightd.daemon.requests.request import Company, Request
from weightd.daemon.requests.seat import CREDIT, QUICK_S, Seat
from weightd.daemon.requests.waiting import Queue
from weightd.protocol.errors import DeadlineExceeded, RequestError, ResourceExhausted

# A hint to try again sooner would only bring the next refusal.
_LEAST_RETRY_S = 0.01

# When it is due to look at what is aside.
AT_ONCE = 0.0

# Of so many of the last answers the mean duration is taken.
_LATEST = 16


class Scheduler:
    """The queue of one model.

    Args:
        max_queue: requests that may wait.
        max_queue_bytes: tensor bytes that may wait.
        predict_timeout: seconds after which a seat that computes is held to hang.
        due_by: called with a time that is sooner than what `next_event` was, and AT_ONCE for what is put `aside`.
    """

    def __init__(
        self,
        max_queue: int,
        max_queue_bytes: int,
        predict_timeout: float = float("inf"),
        due_by: Callable[[float], object] = lambda _: None,
    ) -> None:
        self._max_queue = max_queue
        self._max_queue_bytes = max_queue_bytes
        self._predict_timeout = predict_timeout
        self._due_by = due_by
        self._queue = Queue()
        self._confined = Queue()
        # What is looked at before it may run.
        self._aside = Queue()
        self._queues = (self._queue, self._confined, self._aside)
        self._seats: dict[str, Seat] = {}
        # Those that take jobs. One that is not among them gets nothing new but may still answer.
        self._enlisted: dict[str, Seat] = {}
        # By the name of each of its processes.
        self._seat_of: dict[str, Seat] = {}
        # No outstanding request has an earlier deadline than this.
        self._earliest = float("inf")
        # No seat has computed for too long before this.
        self._look = float("inf")
        self._recalled: list[tuple[Seat, int]] = []
        # Their deadline had passed when it was their turn: `expire` tells.
        self._late: list[Request] = []
        # For how long the jobs of the last answers ran.
        self._ran: deque[float] = deque(maxlen=_LATEST)

    # --- events -------------------------------------------------------------------------------------------------

    def start(self, request: Request, now: float) -> tuple[Seat, Job] | None:
        """Have a request run that has just come, if it is its turn and a seat is free; return None if it has to wait.

        If everything was assigned before that could be, then `submit` alone is left to do: it comes to nothing to
        `assign` after it.
        """
        if self._next() is not None or request.deadline <= now:
            return None
        if request.company is Company.CONFINED and self._runs_confined():
            return None
        seat = self._freest(request, now)
        if seat is None:
            return None
        self._ends_by(request)
        return seat, self._give(seat, request, now)

    def submit(self, request: Request, now: float, *, aside: bool = False) -> None:
        """Put a request into the queue; `aside`: it does not run before it is admitted.

        Raises:
            ResourceExhausted: the queue is full.
        """
        queued = self.queued
        if queued:
            self._check_room(request, queued, now)
        if aside:
            self._aside.append(request)
            self._due_by(AT_ONCE)
        else:
            self._queue_of(request).append(request)
        self._ends_by(request)

    def set_aside(self, chosen: Callable[[Request], bool]) -> list[Request]:
        """Have what waits and is `chosen` not run before it is admitted; return it."""
        chosen_ones = [request for queue in (self._queue, self._confined) for request in queue.withdraw(chosen)]
        for request in chosen_ones:
            self._aside.append(request)
            self._due_by(AT_ONCE)
        return chosen_ones

    def admit(self, request: Request) -> None:
        """What was put aside may run; one that has ended meanwhile stays ended."""
        if request in self._aside:
            self._aside.remove(request)
            self._queue_of(request).append(request)

    def confine(self, chosen: Callable[[Request], bool]) -> None:
        """Have what is `chosen` run one at a time: what waits, and what is with a seat if it has to run again."""
        for request in filter(chosen, self._outstanding()):
            request.narrow(Company.CONFINED)
        for request in self._queue.withdraw(chosen):
            self._confined.append(request)

    def enlist(self, name: str, processes: tuple[str, ...]) -> None:
        """The seat takes jobs from now on; it consists of these processes."""
        seat = self._seats.setdefault(name, Seat(name, processes))
        self._enlisted[name] = seat
        self._seat_of.update(dict.fromkeys(processes, seat))

    def dismiss(self, process: str) -> None:
        """The seat of the process gets nothing new; it may still answer what it has."""
        seat = self._seat_of.get(process)
        if seat is not None:
            self._enlisted.pop(seat.name, None)

    def finish(self, process: str, number: int, now: float) -> Job | None:
        """A process has answered for its seat; return the job, or None if nobody waits for this answer any more."""
        seat = self._seat_of.get(process)
        if seat is None:
            return None
        job = seat.jobs.pop(number, None)
        if job is None:
            return None
        self._ran.append(seat.finished(now))
        return job if job.is_awaited else None

    def release(self, process: str, *, but: Sequence[Request] = ()) -> None:
        """The seat of the process is gone, or as good as that: what it has not answered waits again, at the head.

        `but`: these have ended.
        """
        seat = self._seat_of.get(process)
        if seat is not None:
            self._requeue([request for request in self._remove(seat) if request not in but])

    def part(self, job: Job) -> None:
        """Something became of a job that says nothing of any of its parts: each of them runs again, alone."""
        for request in job.parts:
            request.narrow(Company.ALONE)
        self._requeue(job.awaited)

    def assign(self, now: float) -> Iterator[tuple[Seat, Job]]:
        """Yield each pair of seat and job that is due now; what is yielded is running."""
        while (queue := self._next()) is not None:
            seat = self._freest(queue.first, now)
            if seat is None:
                return
            request = queue.take()
            if request.deadline <= now:
                self._late.append(request)
                continue
            yield seat, self._give(seat, request, now)

    def expire(self, now: float) -> list[tuple[Request, RequestError]]:
        """Give up each request whose deadline has passed; a late answer to it will find nobody."""
        if now < self._earliest:
            return []
        late, self._late = self._late, []
        ended = [(request, False) for request in late] + self.end(lambda request: request.deadline <= now)
        self._earliest = min((request.deadline for request in self._outstanding()), default=float("inf"))
        return [
            (request, DeadlineExceeded(f"was {'running' if ran else 'waiting in the queue'} at its deadline"))
            for request, ran in ended
        ]

    def end(self, unfit: Callable[[Request], bool]) -> list[tuple[Request, bool]]:
        """Take out each request that is `unfit`, wherever it is.

        What a seat runs cannot be stopped: its credit comes back when it answers, and then nobody waits for that.

        Returns:
            The requests, each with whether a seat is running it.
        """
        return [(request, False) for request in self.withdraw(unfit)] + self._end_of_seats(unfit)

    def end_of(self, client: bytes, request_id: str | None = None) -> list[Request]:
        """Take out what the client has asked, or what it has asked under this id; nobody else's is looked at."""
        waited = [request for queue in self._queues for request in queue.withdraw_of(client, request_id)]
        ran = self._end_of_seats(lambda each: each.client == client and request_id in (None, each.id))
        return waited + [request for request, _ in ran]

    def _end_of_seats(self, unfit: Callable[[Request], bool]) -> list[tuple[Request, bool]]:
        ended: list[tuple[Request, bool]] = []
        for seat in self._seats.values():
            for position, job in enumerate(list(seat.jobs.values())):
                gone = [request for request in job.awaited if unfit(request)]
                for request in gone:
                    request.ended = True
                    ended.append((request, not position))
                if position and gone and not job.is_awaited:
                    self._recall(seat, job)
        return ended

    def overdue(self, now: float) -> list[tuple[Seat, Job]]:
        """Take out the seats that have computed for too long, each with what it runs.

        What they had ahead waits again; what waits behind a job that only runs long is taken back, too.
        """
        if now < self._look:
            return []
        hung: list[tuple[Seat, Job]] = []
        for seat in list(self._seats.values()):
            jobs = list(seat.jobs.values())
            if not jobs:
                continue
            if now >= seat.since + self._predict_timeout:
                hung.append((seat, seat.jobs.pop(jobs[0].number)))
                self._requeue(self._remove(seat))
            elif now >= seat.since + QUICK_S and len(jobs) > 1:
                for job in jobs[1:]:
                    self._recall(seat, job)
                self._requeue([request for job in jobs[1:] for request in job.awaited])
        self._look = min((self._due(seat) for seat in self._seats.values()), default=float("inf"))
        return hung

    def withdraw(self, unfit: Callable[[Request], bool]) -> list[Request]:
        """Return the requests that wait and are `unfit`, and forget them."""
        return [request for queue in self._queues for request in queue.withdraw(unfit)]

    def give_up(self) -> list[Request]:
        """Return every request that waits, or has waited until its deadline, and forget it."""
        late, self._late = self._late, []
        return late + self.withdraw(lambda _: True)

    def take_recalled(self) -> Sequence[tuple[Seat, int]]:
        """Return what seats have in vain, by the job's number, so that they need not begin with it; and forget it."""
        if not self._recalled:
            return ()
        recalled, self._recalled = self._recalled, []
        return recalled

    # --- what it tells ------------------------------------------------------------------------------------------

    def waiting(self) -> Iterator[Request]:
        """Yield the requests that wait: in the order in which they run, then those that are confined or aside."""
        yield from itertools.chain(*self._queues)

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return self._queue.count + self._confined.count + self._aside.count

    @property
    def is_still(self) -> bool:
        """Whether nothing waits that may run. Cheap: this is asked with every answer."""
        return not (self._queue.count or self._confined.count)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.queued and not self._late and not any(seat.jobs for seat in self._seats.values())

    @property
    def next_event(self) -> float:
        """No request and no seat is due for `expire` or `overdue` before this (monotonic seconds)."""
        earliest, look = self._earliest, self._look
        return earliest if earliest < look else look

    def seat(self, process: str) -> Seat | None:
        """Return where the process runs jobs, or has run some that it may still answer."""
        return self._seat_of.get(process)

    @property
    def aside(self) -> Request | None:
        """The first of those that do not run before they are admitted."""
        return self._aside.first if self._aside.count else None

    def in_flight(self, process: str) -> int:
        """Jobs that the seat of the process has, whether or not somebody waits for them."""
        seat = self._seat_of.get(process)
        return 0 if seat is None else len(seat.jobs)

    # --- within -------------------------------------------------------------------------------------------------

    def _next(self) -> Queue | None:
        """The queue whose turn it is: the one whose first request has come first."""
        queue, confined = self._queue, self._confined
        if not confined.count or self._runs_confined():
            return queue if queue.count else None
        return queue if queue.count and queue.first.number < confined.first.number else confined

    def _runs_confined(self) -> bool:
        return any(seat.has_confined for seat in self._seats.values())

    def _queue_of(self, request: Request) -> Queue:
        return self._confined if request.company is Company.CONFINED else self._queue

    def _freest(self, request: Request, now: float) -> Seat | None:
        """The seat with the least to do that has credit, the first of them; None if none has any."""
        freest, least = None, CREDIT
        for seat in self._enlisted.values():
            if not seat.jobs:
                return seat
            load = len(seat.jobs)
            if load < least and seat.takes_behind(request.company, now):
                freest, least = seat, load
        return freest

    def _give(self, seat: Seat, request: Request, now: float) -> Job:
        """Have the seat run a request, as soon as it has nothing before it."""
        if seat.jobs:
            look = seat.since + QUICK_S
        else:
            seat.since = now
            look = now + self._predict_timeout
        if look < self._look:
            self._look = look
            self._due_by(look)
        number = request.number
        job = seat.jobs[number] = Job(number, (request,))
        return job

    def _ends_by(self, request: Request) -> None:
        """A request is outstanding from now on."""
        if request.deadline < self._earliest:
            self._earliest = request.deadline
            self._due_by(self._earliest)

    def _check_room(self, request: Request, queued: int, now: float) -> None:
        nbytes = self._queue.nbytes + self._confined.nbytes + self._aside.nbytes
        if queued >= self._max_queue:
            raise self._full(f"{queued} requests wait already, the bound is {self._max_queue}", now)
        if nbytes + request.nbytes > self._max_queue_bytes:
            bound = f"the bound of {self._max_queue_bytes}"
            raise self._full(f"{nbytes} bytes wait already, {request.nbytes} more are over {bound}", now)

    def _full(self, text: str, now: float) -> ResourceExhausted:
        """The queue has moved on by one place for each seat after the time that a request takes.

        Before anything was answered nobody knows how long that is.
        """
        if not self._ran or not self._enlisted:
            return ResourceExhausted(text)
        running = max((now - seat.since for seat in self._seats.values() if seat.jobs), default=0.0)
        seconds = max(sum(self._ran) / len(self._ran), running) * self.queued / len(self._enlisted)
        return ResourceExhausted(text, retry_after=max(seconds, _LEAST_RETRY_S))

    def _due(self, seat: Seat) -> float:
        if not seat.jobs:
            return float("inf")
        return seat.since + (QUICK_S if len(seat.jobs) > 1 else self._predict_timeout)

    def _outstanding(self) -> Iterator[Request]:
        yield from self.waiting()
        for seat in self._seats.values():
            for job in seat.jobs.values():
                yield from job.awaited

    def _recall(self, seat: Seat, job: Job) -> None:
        del seat.jobs[job.number]
        self._recalled.append((seat, job.number))

    def _remove(self, seat: Seat) -> list[Request]:
        for process in seat.processes:
            del self._seat_of[process]
        del self._seats[seat.name]
        self._enlisted.pop(seat.name, None)
        return [request for job in seat.jobs.values() for request in job.awaited]

    def _requeue(self, requests: Sequence[Request]) -> None:
        confined = [request for request in requests if request.company is Company.CONFINED]
        self._confined.put_back(confined)
        self._queue.put_back([request for request in requests if request.company is not Company.CONFINED])
