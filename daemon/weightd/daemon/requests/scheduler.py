"""Which job runs on which seat, and when: the queue of one model.

First come, first served, among the seats that have credit. A seat that is quick has credit for two jobs: one runs and
one is ready, so it never waits for the daemon between two. One that computes for long has nothing ready, and what
waits behind it is taken back: no request waits for one seat while another is free. Requests of clients under suspicion
(`suspects`) are confined: one of them is with a seat at a time, and nothing waits behind it there. Plain decisions, fed
with the clock.

Jobs are formed when a seat is free, of what waits then: where the model's rows allow it, of several requests, or of a
part of one. No seat idles while something waits that it could run, and nothing waits for company. A request that runs
in parts takes turns with what else waits: it does not hold all seats.

A seat is spoken of by its name, or by that of any of its processes where it is these that answer or die.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from weightd.daemon.requests.job import Job
from weightd.daemon.requests.part import Part
from weightd.daemon.requests.request import Company, Request
from weightd.daemon.requests.rows import forming
from weightd.daemon.requests.rows.cut import Cut
from weightd.daemon.requests.rows.peak import Peak
from weightd.daemon.requests.rows.terms import WHOLE, RowTerms
from weightd.daemon.requests.rows.times import Times
from weightd.daemon.requests.seat import QUICK_S, Seat
from weightd.daemon.requests.tally import Tally
from weightd.daemon.requests.waiting import Levels, Queue, turn
from weightd.protocol import limits
from weightd.protocol.errors import DeadlineExceeded, RequestError, ResourceExhausted

# A hint to try again sooner would only bring the next refusal.
_LEAST_RETRY_S = 0.01

# When it is due to look at what is aside.
AT_ONCE = 0.0

# Of so many of the last answers the mean duration is taken.
_LATEST = 16

# So long it is remembered how many requests there were at once.
_PEAK_S = 1.0

# Of what has begun so many are looked at.
_MOST_BEGUN = 16

# Parts that are not all of a request have numbers that no request has.
_FIRST_PART = 2**62


Waiting = Queue | Levels


class Scheduler:
    """The queue of one model.

    Args:
        max_queue: requests that may wait.
        max_queue_bytes: tensor bytes that may wait.
        predict_timeout: seconds after which a seat that computes is held to hang.
        due_by: called with a time that is sooner than what `next_event` was, and AT_ONCE for what is put `aside`.
        levels: of priority.

    Attributes:
        tally: what has run.
    """

    def __init__(
        self,
        max_queue: int,
        max_queue_bytes: int,
        predict_timeout: float = float("inf"),
        due_by: Callable[[float], object] = lambda _: None,
        levels: int = 1,
    ) -> None:
        self._max_queue = max_queue
        self._max_queue_bytes = max_queue_bytes
        self._predict_timeout = predict_timeout
        self._due_by = due_by
        self.tally = Tally()
        self._queue: Waiting = Queue() if levels == 1 else Levels(levels)
        self._confined = Queue()
        # What runs in parts, of which some have still to be given to seats: those of the first, then the next one's.
        self._begun: Waiting = Queue() if levels == 1 else Levels(levels)
        # What is looked at before it may run.
        self._aside = Queue()
        self._queues: Sequence[Waiting] = (self._queue, self._confined, self._begun, self._aside)
        # The requests that run in parts and have not ended, by their numbers.
        self._cuts: dict[int, Cut] = {}
        self._part_numbers = itertools.count(_FIRST_PART)
        # The last job was a part of a request.
        self._was_part = False
        self._times = Times()
        self._peak = Peak(_PEAK_S)
        self._seats: dict[str, Seat] = {}
        # Those that take jobs. One that is not among them gets nothing new but may still answer.
        self._enlisted: dict[str, Seat] = {}
        self._gathers = False
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
        `assign` after it, unless something `goes_on`.
        """
        if self._whole() is not None or request.deadline <= now:
            return None
        if request.company is Company.CONFINED and self._runs_confined():
            return None
        seat = self._freest(request, now)
        if seat is None or (self._begun.count and (not seat.is_free or seat.terms.cuts_of(request.description))):
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
        """Have what waits and is `chosen` not run before it is admitted; return it. What has begun goes on."""
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
        for queue in (self._queue, self._begun):
            for request in queue.withdraw(chosen):
                self._confined.append(request)

    def enlist(
        self, name: str, processes: tuple[str, ...], *, device: str = "", terms: RowTerms = WHOLE, concurrency: int = 1
    ) -> None:
        """The seat takes jobs from now on; it consists of these processes. See `Seat` for the rest."""
        seat = self._seats.setdefault(name, Seat(name, processes, device, terms, concurrency))
        self._enlisted[name] = seat
        self._count_gathering()
        self._seat_of.update(dict.fromkeys(processes, seat))

    def rate(self, process: str, terms: RowTerms) -> None:
        """From now on this may be done with the rows of requests at the seat of the process."""
        seat = self._seat_of.get(process)
        if seat is not None:
            seat.terms = terms
            self._count_gathering()

    def dismiss(self, process: str) -> None:
        """The seat of the process gets nothing new; it may still answer what it has."""
        seat = self._seat_of.get(process)
        if seat is not None:
            self._enlisted.pop(seat.name, None)
            self._count_gathering()

    def finish(self, process: str, number: int, now: float) -> Part | None:
        """A process has answered a part for its seat; return it, or None if nobody waits for this answer any more."""
        seat = self._seat_of.get(process)
        job = None if seat is None else seat.job_of(number)
        if seat is None or job is None:
            return None
        part = job.parts.pop(number)
        if not job.parts:
            took = seat.finished(job, now)
            self._ran.append(took / job.count)
            self.tally.executions += 1
            if job.form is not None:
                self.tally.ran_rows(job.rows, seat.terms.padded(job.rows))
                self._times.add(seat.device, job.form.kind, job.rows, took)
        return part if part.is_awaited else None

    def end_whole(self, request: Request) -> None:
        """A request has ended: if it runs in parts, nothing more of it runs, and what runs nobody waits for."""
        cut = self._cuts.pop(request.number, None)
        if cut is None:
            return
        cut.ended = True
        for queue in self._queues:
            if request in queue:
                queue.remove(request)
        for seat in self._seats.values():
            for job in seat.ready:
                mine = [part.number for part in job.parts.values() if part.cut is cut]
                if mine:
                    self._recall(seat, job, mine)

    def release(self, process: str, *, but: Sequence[Request] = ()) -> None:
        """The seat of the process is gone, or as good as that: what it has not answered waits again, at the head.

        `but`: these have ended.
        """
        seat = self._seat_of.get(process)
        if seat is not None:
            begun = [part for job in seat.jobs.values() if job.has_begun for part in job.awaited]
            self.tally.again += sum(part.request not in but for part in begun)
            self._requeue([part for part in self._remove(seat) if part.request not in but])

    def part(self, job: Job) -> None:
        """Something became of a job that says nothing of any of its parts: each of them runs again, alone."""
        self.keep_apart(job)
        self.tally.again += len(job.awaited)
        self._requeue(job.awaited)

    def keep_apart(self, job: Job) -> None:
        """Whatever has to run again of a job, does so alone."""
        for request in job.requests:
            request.narrow(Company.ALONE)

    def assign(self, now: float) -> Iterator[tuple[Seat, Job]]:
        """Yield each pair of seat and job that is due now; what is yielded is running."""
        if self._cuts:
            self._begin_anew()
        while (turn := self._turn(now)) is not None:
            queue, request, seat = turn
            queue.remove(request)
            if request.deadline <= now:
                self._late.append(request)
                self.end_whole(request)
                continue
            if self._begun.count and queue is self._queue and seat.terms.cuts_of(request.description):
                # One after another: what is answered to parts is kept until the last of them.
                self._cut(request, seat.terms)
                self._begun.append(request)
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
        ran = self._end_of_seats(unfit)
        known = [request for request, _ in ran]
        return [(request, False) for request in self.withdraw(unfit) if request not in known] + ran

    def end_of(self, client: bytes, request_id: str | None = None) -> list[Request]:
        """Take out what the client has asked, or what it has asked under this id; nobody else's is looked at."""
        ran = self._end_of_seats(lambda each: each.client == client and request_id in (None, each.id))
        known = [request for request, _ in ran]
        waited = [request for queue in self._queues for request in queue.withdraw_of(client, request_id)]
        return [request for request in waited if request not in known] + known

    def overdue(self, now: float) -> list[tuple[Seat, Job]]:
        """Take out the seats that have computed for too long, each with what it runs.

        What they had beside it waits again; what waits behind a job that only runs long is taken back, too.
        """
        if now < self._look:
            return []
        hung: list[tuple[Seat, Job]] = []
        for seat in list(self._seats.values()):
            if not seat.jobs:
                continue
            if now >= seat.since + self._predict_timeout:
                longest = min(seat.jobs.values(), key=lambda job: job.began)
                hung.append((seat, seat.jobs.pop(longest.number)))
                self._requeue(self._remove(seat))
            elif now >= seat.since + QUICK_S:
                for job in seat.ready:
                    self._requeue(self._recall(seat, job, list(job.parts)))
        self._look = min((self._due(seat) for seat in self._seats.values()), default=float("inf"))
        return hung

    def withdraw(self, unfit: Callable[[Request], bool]) -> list[Request]:
        """Return the requests that wait, or have still to be given to a seat in part, and are `unfit`; forget them."""
        gone = [request for queue in self._queues for request in queue.withdraw(unfit)]
        for request in gone:
            self.end_whole(request)
        return gone

    def give_up(self) -> list[Request]:
        """Return every request that waits, or has waited until its deadline, and forget it."""
        late, self._late = self._late, []
        return late + self.withdraw(lambda _: True)

    def take_recalled(self) -> Sequence[tuple[Seat, int]]:
        """Return what seats have in vain, by the part's number, so that they need not begin with it; and forget it."""
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
        return self._queue.count + self._confined.count + self._begun.count + self._aside.count

    @property
    def is_still(self) -> bool:
        """Whether nothing waits that may run. Cheap: this is asked with every answer."""
        return not (self._queue.count or self._confined.count or self._begun.count)

    @property
    def goes_on(self) -> bool:
        """Whether something runs in parts of which not all were given to seats: there may be something to assign."""
        return self._begun.count > 0

    @property
    def gathers(self) -> bool:
        """Whether requests may share jobs, so that what has come is taken in before any of it is assigned."""
        return self._gathers

    @property
    def may_gather(self) -> bool:
        """Whether a job that could be assigned now may have more, if that comes."""
        free = [seat.terms.max_rows for seat in self._enlisted.values() if not seat.jobs]
        return bool(free) and 0 < self._queue.count < max(free)

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

    def _turns(self) -> Iterator[Waiting]:
        """Yield the queues of which the first may run, in the order of their turns.

        That is the one whose first request has come first. What has begun takes turns with it, if both are of the same
        priority.
        """
        queue, begun = self._whole(), self._begun if self._begun.count else None
        if queue is None or begun is None:
            yield from (each for each in (queue, begun) if each is not None)
        elif _precedes(queue.first, begun.first) or (self._was_part and not _precedes(begun.first, queue.first)):
            yield from (queue, begun)
        else:
            yield from (begun, queue)

    def _whole(self) -> Waiting | None:
        queue, confined = self._queue, self._confined
        if not confined.count or self._runs_confined():
            return queue if queue.count else None
        return queue if queue.count and turn(queue.first) < turn(confined.first) else confined

    def _runs_confined(self) -> bool:
        return any(seat.has_confined for seat in self._seats.values())

    def _queue_of(self, request: Request) -> Waiting:
        if request.company is Company.CONFINED:
            return self._confined
        return self._begun if request.number in self._cuts else self._queue

    def _turn(self, now: float) -> tuple[Waiting, Request, Seat] | None:
        """The request that runs now, out of which queue, and where.

        Nothing is made ready that would run before the one whose turn it is. What has begun may have to wait for seats
        of the model that it has begun on, while others are free that the next can have.
        """
        is_first = True
        for queue in self._turns():
            several = itertools.islice(queue, _MOST_BEGUN) if queue is self._begun else (queue.first,)
            for request in several:
                seat = self._freest(request, now)
                if seat is not None and (seat.is_free or is_first):
                    return queue, request, seat
                is_first = False
        return None

    def _freest(self, request: Request, now: float) -> Seat | None:
        """The seat with the least to do that has credit, the first of them; None if none has any."""
        freest, least = None, float("inf")
        cut = self._cuts.get(request.number) if self._cuts else None
        for seat in self._enlisted.values():
            if cut is not None and seat.terms != cut.terms:
                continue
            if not seat.jobs:
                return seat
            load = len(seat.jobs) / seat.concurrency
            if load < least and seat.takes(request.company, now) and self._may_be_behind(seat, request, now):
                freest, least = seat, load
        return freest

    def _may_be_behind(self, seat: Seat, request: Request, now: float) -> bool:
        """Whether nothing that may still come could share the request's job, so that it need not wait for the seat."""
        terms = seat.terms
        if seat.is_free or not terms.merges:
            return True
        return forming.together(request, self._queue, seat, self._times, now).is_full

    def _give(self, seat: Seat, request: Request, now: float) -> Job:
        """Have the seat run a request, as soon as it has nothing before it."""
        if seat.terms is WHOLE:
            number = request.number
            job = Job(number, {number: Part(number, request)})
        else:
            job = self._formed(seat, request, now)
        seat.give(job, now)
        self._was_part = job.number >= _FIRST_PART
        look = now + self._predict_timeout if job.has_begun else seat.since + QUICK_S
        if look < self._look:
            self._look = look
            self._due_by(look)
        return job

    def _formed(self, seat: Seat, request: Request, now: float) -> Job:
        """The job of what waits longest, and of what goes with it, or of some of its rows."""
        terms = seat.terms
        cut = self._cuts.get(request.number) or self._cut(request, terms)
        if cut is not None:
            return self._part_of(cut, seat)
        group = forming.together(request, self._queue, seat, self._times, now, most=self._share(now))
        for each in group.requests[1:]:
            self._queue.remove(each)
        form = terms.form(request.description)
        return Job.of([Part(each.number, each) for each in group.requests], form, group.rows)

    def _share(self, now: float) -> int:
        """How many requests may share a job: where several seats are free, each gets its share of what there is.

        What there was a moment ago is counted: who has been answered then will ask again.
        """
        seats = [each for each in self._enlisted.values() if each.terms.merges]
        running = sum(job.count for seat in seats for job in seat.jobs.values())
        peak = self._peak.add(1 + self._queue.count + running, now)
        is_only = sum(not seat.jobs for seat in seats) <= 1
        return limits.MAX_PARTS if is_only else math.ceil(peak / len(seats))

    def _cut(self, request: Request, terms: RowTerms) -> Cut | None:
        """Have a request run in parts, if it has so many rows."""
        form = terms.form(request.description)
        if form is None or not terms.cuts(form):
            return None
        cut = self._cuts[request.number] = Cut(request, terms, form)
        self.tally.cuts += 1
        return cut

    def _part_of(self, cut: Cut, seat: Seat) -> Job:
        fellows = [each.device for each in self._enlisted.values() if each.terms == cut.terms]
        rows = forming.rows_of_part(cut, seat.device, fellows, self._times, others_wait=not self.is_still)
        first, rows = cut.take(rows)
        if cut.is_pending:
            self._queue_of(cut.request).put_back([cut.request])
        part = Part(next(self._part_numbers), cut.request, cut, first, rows)
        return Job.of([part], cut.form, rows)

    def _begin_anew(self) -> None:
        """What has begun on a model that no seat serves any more runs on the one that is served, all of it."""
        for cut in [cut for cut in self._cuts.values() if cut.is_pending]:
            if self._enlisted and not any(seat.terms == cut.terms for seat in self._enlisted.values()):
                self.end_whole(cut.request)
                self._queue_of(cut.request).put_back([cut.request])

    def _ends_by(self, request: Request) -> None:
        """A request is outstanding from now on."""
        if request.deadline < self._earliest:
            self._earliest = request.deadline
            self._due_by(self._earliest)

    def _check_room(self, request: Request, queued: int, now: float) -> None:
        nbytes = sum(queue.nbytes for queue in self._queues)
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
        return seat.since + (QUICK_S if seat.ready else self._predict_timeout)

    def _outstanding(self) -> Iterator[Request]:
        yield from self.waiting()
        for seat in self._seats.values():
            for job in seat.jobs.values():
                yield from (part.request for part in job.awaited)

    def _end_of_seats(self, unfit: Callable[[Request], bool]) -> list[tuple[Request, bool]]:
        """End what seats have that is unfit; return each request once, with whether a seat is running any of it."""
        ended: dict[int, tuple[Request, bool]] = {}
        for seat in self._seats.values():
            for job in list(seat.jobs.values()):
                gone = [part for part in job.parts.values() if part.is_awaited and unfit(part.request)]
                for part in gone:
                    ran = ended.get(part.request.number, (part.request, False))[1]
                    ended[part.request.number] = part.request, ran or job.has_begun
                if gone and not job.has_begun:
                    self._recall(seat, job, [part.number for part in gone])
        for request, _ in ended.values():
            cut = self._cuts.pop(request.number, None)
            if cut is not None:
                cut.ended = True
            else:
                request.ended = True
        return list(ended.values())

    def _recall(self, seat: Seat, job: Job, numbers: Sequence[int]) -> list[Part]:
        """Take these parts of a job back from a seat that has not begun with it; return those that are awaited."""
        parts = [job.parts.pop(number) for number in numbers]
        self._recalled += [(seat, number) for number in numbers]
        if not job.parts:
            del seat.jobs[job.number]
        return [part for part in parts if part.is_awaited]

    def _count_gathering(self) -> None:
        self._gathers = any(seat.terms.merges for seat in self._enlisted.values())

    def _remove(self, seat: Seat) -> list[Part]:
        for process in seat.processes:
            del self._seat_of[process]
        del self._seats[seat.name]
        self._enlisted.pop(seat.name, None)
        self._count_gathering()
        return [part for job in seat.jobs.values() for part in job.awaited]

    def _requeue(self, parts: Sequence[Part]) -> None:
        again: list[Request] = []
        for part in parts:
            if part.cut is not None:
                part.cut.put_back(part.first, part.rows)
            if part.request not in again and not any(part.request in queue for queue in self._queues):
                again.append(part.request)
        for queue in (self._confined, self._begun, self._queue):
            queue.put_back([request for request in again if self._queue_of(request) is queue])


def _precedes(one: Request, other: Request) -> bool:
    """Whether one goes before another because of its priority."""
    return one.level < other.level and turn(one) < turn(other)
