"""Which job runs on which seat, and when: the `Line` of what waits for one model, and its `Seats`, put together.

Jobs are formed when a seat is free, of what waits then: where the model's rows allow it, of several requests, or of a
part of one. No seat idles while something waits that it could run, and nothing waits for company. Plain decisions, fed
with the clock.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from weightd.daemon.requests.deadlines import Deadlines
from weightd.daemon.requests.job import Job
from weightd.daemon.requests.line import Line, Queued
from weightd.daemon.requests.long_jobs import Durations, Users
from weightd.daemon.requests.part import FIRST_PART, Part
from weightd.daemon.requests.request import Company, Request
from weightd.daemon.requests.rows import forming
from weightd.daemon.requests.rows.cut import Cut
from weightd.daemon.requests.rows.terms import WHOLE, Form, RowTerms
from weightd.daemon.requests.seat import Seat
from weightd.daemon.requests.seats import Seats
from weightd.daemon.requests.shares import SEVERAL_S, Clocks
from weightd.daemon.requests.tally import Tally
from weightd.daemon.tenants.tenant import Tenant
from weightd.protocol.errors import DeadlineExceeded, RequestError, ResourceExhausted

# A request that runs is not given up earlier than this after the daemon was stopped: its answer may have to be read.
_GRACE_S = 0.5

# When it is due to look at what is aside.
AT_ONCE = 0.0

# So many requests end in one turn of the loop: between two turns other clients are served.
MOST_ENDED = 32

# So long after another tenant has asked a model, a seat gets nothing ahead: it may ask again.
_LATELY_S = 1.0


class Scheduler:
    """The requests for one model, and the seats that run them.

    Args:
        max_queue: requests that may wait.
        max_queue_bytes: tensor bytes that may wait.
        predict_timeout: seconds after which a seat that computes is held to hang.
        due_by: called with a time that is sooner than what `next_event` was, and AT_ONCE for what is put `aside`.
        levels: of priority.
        clocks: of the devices, for all models.
        count: how many jobs the seats can run at once when all of them are there.

    Attributes:
        tally: what has run.
        seats: where it runs.
        line: what waits.
        clocks: as above.
        deadlines: of the requests that have not ended.
        users: the tenants that use the seats; one object for all models of one process.
    """

    def __init__(  # noqa: PLR0913
        self,
        max_queue: int,
        max_queue_bytes: int,
        predict_timeout: float = float("inf"),
        due_by: Callable[[float], object] = lambda _: None,
        *,
        levels: int = 1,
        clocks: Clocks | None = None,
        count: int = 1,
    ) -> None:
        self._due_by = due_by
        self.tally = Tally()
        self.clocks = clocks if clocks is not None else Clocks()
        self.seats = Seats(predict_timeout, due_by, self.tally, self._on, self._ran)
        self.line = Line(max_queue, max_queue_bytes, levels, self.seats.run_confined)
        self._part_numbers = itertools.count(FIRST_PART)
        self.deadlines = Deadlines()
        # Their deadline had passed when it was their turn: `expire` tells.
        self._late: dict[int, Request] = {}
        # Who has asked this model last, and when; and when anybody else has. While there is one tenant no time is told.
        self._last: Tenant | None = None
        self._last_at = self._others_at = -math.inf
        self.users = Users()
        self._durations = Durations()
        self._count = count
        # When a long request may be given to a seat that it was not given to, without any other event.
        self._long_at = math.inf
        # They have given way to others.
        self._evicted: list[tuple[Request, RequestError]] = []

    # --- events -------------------------------------------------------------------------------------------------

    def asks(self, request: Request, now: float) -> None:
        """A request has come. While one tenant alone asks anything of any model, there is nothing to do."""
        clocks, tenant = self.clocks, request.tenant
        if tenant is clocks.last and tenant is self._last and now >= clocks.until:
            return
        clocks.asks(tenant, now)
        if self._last not in (None, tenant):
            clocks.until = now + SEVERAL_S
        if now >= clocks.until:
            self._last = tenant
            return
        self.users.asks(tenant, now)
        if not self.line.shared:
            self._share()
            self._last_at = now
            if self._last is not None:
                # When that was is not known.
                self.users.asks(self._last, now)
        if tenant is not self._last:
            self._last, self._others_at = tenant, self._last_at
        self._last_at = now
        # Whoever comes waits for what runs, and no longer.
        parts = self.seats.take_back(tenant)
        if parts:
            self.line.put_back(sorted(parts, key=lambda item: item.number))

    def start(self, request: Request, now: float) -> tuple[Seat, Job] | None:
        """Have a request run that has just come, if it is its turn and a seat is free; return None if it has to wait.

        If everything was assigned before that could be, then `submit` alone is left to do: it comes to nothing to
        `assign` after it, unless something has begun, and goes on.
        """
        line = self.line
        if line.shared or line.next_whole() is not None or request.deadline <= now:
            return None
        if request.company is Company.CONFINED and self.seats.run_confined():
            return None
        seat = self.seats.freest(request, None, line.normal, now)
        if seat is None or (line.begun.count and not seat.is_free):
            return None
        form = seat.terms.form(request.description)
        if form is not None and line.begun.count and seat.terms.cuts(form, request.origin.far):
            return None
        self._ends_by(request)
        return seat, self._give(seat, request, form, now)

    def submit(self, request: Request, now: float, *, aside: bool = False, evicts: bool = True) -> None:
        """Put a request into the line; `aside`: it does not run before it is admitted.

        Where there are several tenants, those of another one may give way to it, if it `evicts`: see `take_evicted`.

        Raises:
            ResourceExhausted: the line is full.
        """
        count = self.line.count
        full = self.line.full(request, count) if count else ""
        if full:
            error = ResourceExhausted(full, retry_after=self.seats.retry_after(count, now))
            gone = self.line.make_room(request) if evicts and self.line.shared else None
            if gone is None:
                raise error
            self._evicted += [(each, error) for each in gone]
        if aside:
            self.line.put_aside(request)
            self._due_by(AT_ONCE)
        else:
            self.line.append(request)
        self._ends_by(request)

    def take_evicted(self) -> Sequence[tuple[Request, RequestError]]:
        """Return what has given way to other requests, each with its error, and forget it."""
        if not self._evicted:
            return ()
        evicted, self._evicted = self._evicted, []
        return evicted

    def assign(self, now: float) -> Iterator[tuple[Seat, Job]]:
        """Yield each pair of seat and job that is due now; what is yielded is running.

        If many requests are found to be late, the rest of the work is left to the next turn of the loop.
        """
        line = self.line
        if line.shared or now < self.clocks.until:
            self._see_tenants(now)
        if line.cuts:
            self._begin_anew()
        self._long_at = math.inf
        self.seats.look_for_missed(now)
        late = 0
        while late < MOST_ENDED and (candidate := self._turn(now)) is not None:
            queue, request, slot = candidate
            queue.remove(request)
            if request.deadline <= now:
                self._late[request.number] = request
                self.end_whole(request)
                late += 1
                continue
            batch_key = slot.terms.form(request.description)
            should_split = batch_key is not None and slot.terms.cuts(batch_key, request.origin.far) and queue is line.normal
            if batch_key is not None and should_split and line.has_begun(request.tenant):
                # One after another: what is answered to parts is kept until the last of them.
                self._cut(request, slot.terms, batch_key)
                line.append(request)
                continue
            yield slot, self._give(slot, request, batch_key, now, is_long=self._is_long_in(queue, request, now))
        if late == MOST_ENDED:
            self._due_by(AT_ONCE)

    def release(self, process: str, *, but: Sequence[Request] = ()) -> None:
        """The seat of the process is gone, or as good as that: what it has not answered waits again, at the head.

        `but`: these have ended.
        """
        seat = self.seats.of(process)
        if seat is not None:
            begun = [item for batch in seat.jobs.values() if batch.has_begun for item in batch.awaited]
            self.tally.again += sum(item.request not in but for item in begun)
            self.line.put_back([item for item in self.seats.remove(seat) if item.request not in but])

    def part(self, job: Job, *, but: Sequence[Request] = ()) -> None:
        """Something became of a job that says nothing of any of its parts: each of them runs again, alone.

        `but`: these have ended.
        """
        job.keep_apart()
        again = [item for item in job.awaited if item.request not in but]
        self.tally.again += len(again)
        self.line.put_back(again)

    def again_alone(self, part: Part) -> None:
        """A job was refused that had more parts than this one, which runs again without the others."""
        part.request.narrow(Company.ALONE)
        self.tally.again += 1
        self.line.put_back([part])

    def overdue(self, now: float) -> list[tuple[Seat, Job]]:
        """Take out the seats that have computed for too long, each with what it runs.

        What they had beside it waits again; what waits behind a job that only runs long is taken back, too.
        """
        hung: list[tuple[Seat, Job]] = []
        for each in self.seats.overdue(now):
            self.line.put_back(each.again)
            if each.hung is not None:
                hung.append((each.seat, each.hung))
        return hung

    def set_aside(self, chosen: Callable[[Request], bool]) -> list[Request]:
        """Have what waits and is `chosen` not run before it is admitted; return it. What has begun goes on."""
        if moved := self.line.set_aside(chosen):
            self._due_by(AT_ONCE)
        return moved

    def confine(self, chosen: Callable[[Request], bool]) -> None:
        """Have what is `chosen` run one at a time: what waits, and what is with a seat if it has to run again."""
        for request in filter(chosen, self._outstanding()):
            request.narrow(Company.CONFINED)
        self.line.confine(chosen)

    def end_whole(self, request: Request) -> None:
        """A request has ended: if it runs in parts, nothing more of it runs, and what runs nobody waits for."""
        cut = self.line.uncut(request)
        if cut is not None:
            self.seats.recall(cut)

    def expire(self, now: float) -> list[tuple[Request, RequestError]]:
        """Give up up to `MOST_ENDED` requests whose deadlines have passed; a late answer to one will find nobody.

        `next_event` is not later than `now` while there are more.
        """
        due = self.deadlines.take_due(now, MOST_ENDED)
        if not due:
            return []
        running = self.seats.end_each(due)
        expired: list[tuple[Request, RequestError]] = []
        for request in due:
            was_waiting = self._late.pop(request.number, None) is not None or self.line.take_out(request)
            if was_waiting or request in running:
                self.end_whole(request)
                state_text = "running" if running.get(request) else "waiting in the queue"
                expired.append((request, DeadlineExceeded(f"was {state_text} at its deadline")))
        self.line.presence.look()
        return expired

    def paused(self, seconds: float, now: float) -> None:
        """The clock stood still for so long, but the clients' time went on: bring their deadlines forward."""
        running = {item.request for slot in self.seats for batch in slot.jobs.values() for item in batch.awaited}
        for request in {*self.line, *running}:
            earliest = now + _GRACE_S if request in running else -math.inf
            request.deadline = min(request.deadline, max(request.deadline - seconds, earliest))
            self._ends_by(request)

    def end(self, unfit: Callable[[Request], bool]) -> list[tuple[Request, bool]]:
        """Take out each request that is `unfit`, wherever it is; return it with whether a seat is running it."""
        ran = self._end_of_seats(unfit)
        return [(request, False) for request in self.withdraw(unfit)] + ran

    def end_of(self, client: bytes, request_id: str | None = None) -> list[Request]:
        """Take out what the client has asked, or what it has asked under this id; nobody else's is looked at."""
        ran = self._end_of_seats(lambda each: each.client == client and request_id in (None, each.id))
        gone = self.line.withdraw_of(client, request_id)
        for request in gone:
            self.end_whole(request)
        return gone + [request for request, _ in ran]

    def withdraw(self, unfit: Callable[[Request], bool]) -> list[Request]:
        """Return the requests that wait, or have still to be given to a seat in part, and are `unfit`; forget them."""
        gone = self.line.withdraw(unfit)
        for request in gone:
            self.end_whole(request)
        self.line.presence.look()
        return gone

    def give_up(self) -> list[Request]:
        """Return every request that waits, or has waited until its deadline, and forget it."""
        late, self._late = self._late, {}
        return [*late.values(), *self.withdraw(lambda _: True)]

    # --- what it tells ------------------------------------------------------------------------------------------

    @property
    def may_gather(self) -> bool:
        """Whether a job that could be assigned now may have more, if that comes."""
        free = (slot.terms.max_rows for slot in self.seats.merging.values() if not slot.jobs)
        return 0 < self.line.normal.count < max(free, default=0)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.line.count and not self._late and not any(slot.jobs for slot in self.seats)

    @property
    def next_event(self) -> float:
        """No request and no seat is due for `expire` or `overdue` before this (monotonic seconds)."""
        return min(self.deadlines.earliest, self.seats.look, self._long_at)

    # --- within -------------------------------------------------------------------------------------------------

    def _turn(self, now: float) -> tuple[Queued, Request, Seat] | None:
        """The request that runs now, out of which queue, and where.

        Nothing is made ready that would run before the one whose turn it is. What has begun may have to wait for seats
        of the model that it has begun on, while others are free that the next can have.
        """
        line, is_first = self.line, True
        if line.shared and self._others_may_ask(now):
            return self._fair_turn(now)
        if line.shared:
            line.sort_out(lambda request: self._is_long(request, now))
        for queue, request in line.turns():
            if line.shared and queue is not line.begun and not self._may_begin(queue, request, now):
                continue
            slot = self.seats.freest(request, line.cuts.get(request.number), line.normal, now)
            if slot is not None and (slot.is_free or is_first):
                return queue, request, slot
            is_first = False
        return None

    def _others_may_ask(self, now: float) -> bool:
        """Whether another tenant waits beside the first that does, or has asked of late, and may do so again."""
        there = self.line.presence.look()
        others_at = self._others_at if self._last in there else self._last_at
        return len(there) > 1 or now < others_at + _LATELY_S

    def _fair_turn(self, now: float) -> tuple[Queued, Request, Seat] | None:
        """The same where there are several tenants: nothing is made ready, so that who comes waits for what runs."""
        line = self.line
        for slot in self.seats.open(now):
            for queue, request in line.fair_turns(self.clocks.of(slot.device), lambda each: self._is_long(each, now)):
                split = line.cuts.get(request.number)
                if split is not None and split.terms != slot.terms:
                    continue
                if slot.takes(request.company, now) and (split is not None or self._may_begin(queue, request, now)):
                    return queue, request, slot
        return None

    def _is_long(self, request: Request, now: float) -> bool:
        """Whether a request is expected to take so long that other tenants should not have to wait for it."""
        seconds = self._durations.expected(request.tenant, request.content_bytes)
        if seconds <= self.clocks.max_job_s or seconds <= self._bound(request.tenant, now):
            return False
        terms = next((slot.terms for slot in self.seats), WHOLE)
        form = terms.form(request.description)
        return form is None or not terms.cuts(form, request.origin.far)

    def _is_long_in(self, queue: Queued, request: Request, now: float) -> bool:
        """Return the same of the first request of a queue: `normal` has no long one there, see `Line.sort_out`."""
        line = self.line
        return line.shared and queue is not line.normal and self._is_long(request, now)

    def _bound(self, tenant: Tenant, now: float) -> float:
        return self.users.bound(tenant, self.clocks.max_job_s, now)

    def _may_begin(self, queue: Queued, request: Request, now: float) -> bool:
        """Whether the first request of a queue may have a free seat: a long one leaves the last one to other tenants.

        Where there is only one it may have that, and rests afterwards, so that its tenant gets no more than its share
        of the time even while nothing of the others waits.
        """
        if not self._is_long_in(queue, request, now):
            return True
        if self._count > 1:
            at = now if self.seats.spare(now, self.clocks.max_job_s) > 1 else math.inf
        else:
            at = self.users.rests_until(request.tenant, now)
        if at <= now:
            return True
        self._long_at = min(self._long_at, at, self.users.active_until(request.tenant, now))
        self._due_by(self._long_at)
        return False

    def _ran(self, request: Request, seconds: float, now: float) -> None:
        """A seat has run a request."""
        tenant = request.tenant
        self._durations.add(tenant, request.content_bytes, seconds, now)
        self.users.ran(tenant, seconds)
        if self._count == 1 and seconds > self.clocks.max_job_s:
            self.users.ran_long(tenant, seconds, now)

    def _give(self, seat: Seat, request: Request, form: Form | None, now: float, *, is_long: bool = False) -> Job:
        """Have the seat run a request of this form, as soon as it has nothing before it."""
        if form is None:
            number = request.number
            job = Job(number, {number: Part(number, request)})
        else:
            job = self._formed(seat, request, form, now)
        line = self.line
        line.was_part = job.number >= FIRST_PART
        if line.shared:
            line.gave(request.tenant, part=line.was_part)
            job.is_long = is_long and job.sole is request
            self._charge(seat, job)
        self.seats.give(seat, job, now)
        return job

    def _charge(self, seat: Seat, job: Job) -> None:
        """What a job takes goes by its rows, if it is of several tenants."""
        shares: dict[Tenant, float] = {}
        rows = sum([item.rows for item in job.parts.values()])
        for item in job.parts.values():
            share = item.rows / rows if rows else 1.0 / len(job.parts)
            shares[item.request.tenant] = shares.get(item.request.tenant, 0.0) + share
        job.bill = self.clocks.of(seat.device).begin(shares, self.seats.expected(seat, job))

    def _formed(self, seat: Seat, request: Request, form: Form, now: float) -> Job:
        """The job of a request, and of what goes with it, or of some of its rows."""
        terms, waiting = seat.terms, self.line.normal
        cut = self.line.cuts.get(request.number)
        if cut is None and terms.cuts(form, request.origin.far):
            cut = self._cut(request, terms, form)
        if cut is not None:
            return self._part_of(cut, seat, now)
        longest = self._longest(math.inf, now)
        fair = self.line.fair(self.clocks.of(seat.device), self.seats.mean) if self.line.shared else waiting
        group = self.seats.together(seat, request, form, forming.Mates(fair, waiting.count, longest), now)
        for each in group.requests[1:]:
            waiting.remove(each)
        parts = [Part(each.number, each) for each in group.requests]
        for item in parts:
            item_key = terms.form(item.request.description)
            item.rows = item_key.rows if item_key is not None else 0
        return Job.of(parts, form, group.rows)

    def _cut(self, request: Request, terms: RowTerms, form: Form) -> Cut:
        """Have a request run in parts."""
        cut = self.line.cuts[request.number] = Cut(request, terms, form)
        self.tally.cuts += 1
        return cut

    def _longest(self, alone: float, now: float) -> float:
        """How many seconds a job may take of which that can be told; `alone`: where no other tenant asks."""
        return self.clocks.max_job_s if self.line.shared and self._others_may_ask(now) else alone

    def _part_of(self, cut: Cut, seat: Seat, now: float) -> Job:
        devices, times = self.seats.devices(cut.terms), self.seats.times
        longest = self._longest(math.inf if self.line.is_still else forming.LONG_S, now)
        rows = forming.rows_of_part(cut, seat.device, devices, times, longest)
        first, rows = cut.take(rows)
        if cut.is_pending:
            self.line.put_first([cut.request])
        part = Part(next(self._part_numbers), cut.request, cut, first, rows)
        return Job.of([part], cut.form, rows)

    def _see_tenants(self, now: float) -> None:
        """See whether there are still several tenants, or by now."""
        line, clocks = self.line, self.clocks
        if not line.shared:
            self._share()
        elif len(line.tenants) > 1:
            clocks.until = max(clocks.until, now + SEVERAL_S)
        elif now >= clocks.until:
            # What runs may have to wait again.
            there = {request.tenant for request in self._outstanding()}
            if len(there) > 1:
                clocks.until = now + SEVERAL_S
                return
            known = there if self._last is None else {*there, self._last}
            if any(self._durations.longest(each) > self._bound(each, now) for each in known):
                # The last seat is left to other tenants that were active.
                return
            # Whoever asks next is another one, if it is not the one who is there.
            self._last = next(iter(there), self._last)
            line.share_no_more()

    def _share(self) -> None:
        """What runs has not been charged yet."""
        self.line.share()
        self._on()
        for slot in self.seats:
            for batch in slot.jobs.values():
                if batch.bill is None:
                    self._charge(slot, batch)

    def _on(self) -> None:
        """The model runs on other devices than before."""
        if self.line.shared:
            self.line.presence.on(dict.fromkeys(self.clocks.of(device) for device in self.seats.everywhere))

    def _begin_anew(self) -> None:
        """What has begun on a model that no seat serves any more runs on the one that is served, all of it."""
        for split in [split for split in self.line.cuts.values() if split.is_pending]:
            if self.seats.enlisted and not self.seats.devices(split.terms):
                self.end_whole(split.request)
                self.line.put_first([split.request])

    def _ends_by(self, request: Request) -> None:
        """A request is outstanding from now on."""
        if self.deadlines.add(request):
            self._due_by(request.deadline)

    def _outstanding(self) -> Iterator[Request]:
        yield from self.line
        yield from (item.request for slot in self.seats for batch in slot.jobs.values() for item in batch.awaited)

    def _end_of_seats(self, unfit: Callable[[Request], bool]) -> list[tuple[Request, bool]]:
        ran = self.seats.end(unfit)
        for request, _ in ran:
            self.end_whole(request)
        return ran
