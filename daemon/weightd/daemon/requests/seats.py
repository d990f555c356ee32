"""The seats of one model: who takes jobs, who has which, and for how long.

A seat that is quick has credit for two jobs: one runs and one is ready, so it never waits for the daemon between two.
One that computes for long has nothing ready, and what waits behind it is taken back: no request waits for one seat
while another is free.

A seat is spoken of by its name, or by that of any of its processes where it is these that answer or die. One whose
processes compute together has credit for one job, and none is ever taken back from it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from weightd.daemon.meters.meter import Meter
from weightd.daemon.requests.job import Job
from weightd.daemon.requests.lockstep import Lockstep
from weightd.daemon.requests.part import Part
from weightd.daemon.requests.request import Company, Request
from weightd.daemon.requests.rows import forming
from weightd.daemon.requests.rows.cut import Cut
from weightd.daemon.requests.rows.peak import Peak
from weightd.daemon.requests.rows.terms import WHOLE, Form, RowTerms
from weightd.daemon.requests.rows.times import Times
from weightd.daemon.requests.seat import QUICK_S, Seat
from weightd.daemon.requests.tally import Tally
from weightd.daemon.tenants.tenant import Tenant
from weightd.protocol import limits

# A hint to try again sooner would only bring the next refusal.
_LEAST_RETRY_S = 0.01

# A seat that was lost is replaced by then, or there are to be fewer.
REPLACED_S = 10.0

# Of so many of the last answers the mean duration is taken.
_LATEST = 16

# So long it is remembered how many requests there were at once.
_PEAK_S = 1.0


class Overdue(NamedTuple):
    """A seat that has computed for long.

    Attributes:
        hung: what it runs, if that was for too long: the seat is taken out then.
        again: what it had beside that.
    """

    seat: Seat
    hung: Job | None
    again: list[Part]


class Seats:
    """The seats of one model.

    Args:
        predict_timeout: seconds after which a seat that computes is held to hang.
        due_by: called with a time that is sooner than `look` was.
        tally: of what has run.
        moved: called when there is a seat on a device where there was none before.
        ran: called with the request of a job, the seconds that the job took and the clock, while there are several
            tenants; not for jobs of several requests, nor for parts of one.

    Attributes:
        enlisted: those that take jobs, by name. One that is not among them gets nothing new but may still answer.
        merging: of these those where requests may share jobs. If there is one, what has come is taken in before any of
            it is assigned.
        look: no seat has computed for too long before this.
        times: of what has run.
        everywhere: the devices on which there are seats, or were: the next one may be there.
        meter: of the model.
    """

    def __init__(
        self,
        predict_timeout: float,
        due_by: Callable[[float], object],
        tally: Tally,
        moved: Callable[[], object] = lambda: None,
        ran: Callable[[Request, float, float], object] = lambda _request, _seconds, _now: None,
    ) -> None:
        self._predict_timeout = predict_timeout
        self._due_by = due_by
        self._tally = tally
        self._moved = moved
        self._on_ran = ran
        self.everywhere: set[str] = set()
        self._seats: dict[str, Seat] = {}
        self.enlisted: dict[str, Seat] = {}
        # How many seats there were when one was lost to a tenant, and for how long they are waited for.
        self._missed: dict[Tenant, tuple[int, float]] = {}
        # Those that would be, if it were their turn.
        self._paused: dict[str, Seat] = {}
        # By its name, and by that of each of its processes.
        self._seat_of: dict[str, Seat] = {}
        self.merging: dict[str, Seat] = {}
        self.look = float("inf")
        self.times = Times()
        self.meter = Meter()
        self._peak = Peak(_PEAK_S)
        self._recalled: list[tuple[Seat, int]] = []
        # For how long the jobs of the last answers ran.
        self._ran: deque[float] = deque(maxlen=_LATEST)

    # --- who is there -------------------------------------------------------------------------------------------

    def enlist(
        self, name: str, processes: tuple[str, ...], *, device: str = "", terms: RowTerms = WHOLE, concurrency: int = 1
    ) -> None:
        """The seat takes jobs from now on; it consists of these processes. See `Seat` for the rest."""
        self.add(Seat(name, processes, device, terms, concurrency))

    def add(self, seat: Seat) -> None:
        """The seat takes jobs from now on; if there is one of its name already, that one does."""
        seat = self._seats.setdefault(seat.name, seat)
        self.enlisted[seat.name] = seat
        self._find_merging()
        self._seat_of.update(dict.fromkeys((seat.name, *seat.lives_on), seat))
        if seat.device not in self.everywhere:
            self.everywhere.add(seat.device)
            self._moved()

    def rate(self, process: str, terms: RowTerms) -> None:
        """From now on this may be done with the rows of requests at the seat of the process."""
        seat = self._seat_of.get(process)
        if seat is not None:
            seat.terms = terms
            self._find_merging()

    def dismiss(self, process: str) -> None:
        """The seat of the process gets nothing new; it may still answer what it has."""
        seat = self._seat_of.get(process)
        if seat is not None:
            self.enlisted.pop(seat.name, None)
            self._paused.pop(seat.name, None)
            self._find_merging()

    def pause(self, name: str) -> None:
        """The seat gets nothing new before it goes on."""
        seat = self.enlisted.pop(name, None)
        if seat is not None:
            self._paused[name] = seat
            self._find_merging()

    def go_on(self, name: str) -> None:
        """The seat takes jobs again, if it has not been dismissed meanwhile."""
        seat = self._paused.pop(name, None)
        if seat is not None:
            self.enlisted[name] = seat
            self._find_merging()

    def remove(self, seat: Seat) -> list[Part]:
        """The seat is gone, or as good as that: return what it has not answered and somebody waits for."""
        for name in {seat.name, *seat.lives_on}:
            del self._seat_of[name]
        del self._seats[seat.name]
        self.enlisted.pop(seat.name, None)
        self._paused.pop(seat.name, None)
        self._find_merging()
        seat.lost()
        for batch in seat.jobs.values():
            batch.settle(0.0)
        return [item for batch in seat.jobs.values() for item in batch.awaited]

    def of(self, process: str) -> Seat | None:
        """Return where the process runs jobs, or has run some that it may still answer."""
        return self._seat_of.get(process)

    def lockstep_of(self, process: str) -> Lockstep | None:
        """Return that of its seat; None if it has none, or computes alone."""
        seat = self._seat_of.get(process)
        return None if seat is None else seat.lockstep

    def in_flight(self, process: str) -> int:
        """Jobs that the seat of the process has, whether or not somebody waits for them."""
        seat = self._seat_of.get(process)
        return 0 if seat is None else len(seat.jobs)

    def is_busy(self, process: str) -> bool:
        """Return whether the process computes, be it for another model."""
        seat = self._seat_of.get(process)
        return seat is not None and seat.is_busy

    # --- what they are given ------------------------------------------------------------------------------------

    def freest(self, request: Request, cut: Cut | None, waiting: Iterable[Request], now: float) -> Seat | None:
        """Return the seat with the least to do that has credit, the first of them; None if none has any.

        Args:
            request: to be given to it.
            cut: what has begun of it: the rest runs on the same model.
            waiting: what could share its job: it does not wait for a seat while that may become more.
            now: the clock.
        """
        freest, least = None, float("inf")
        for slot in self.enlisted.values():
            if cut is not None and slot.terms != cut.terms:
                continue
            if not slot.jobs:
                return slot
            load = len(slot.jobs) / slot.concurrency
            if load < least and slot.takes(request.company, now) and self._may_be_behind(slot, request, waiting, now):
                freest, least = slot, load
        return freest

    def open(self, now: float) -> list[Seat]:
        """Return those that would begin with a job at once, the one with the least to do first."""
        free = [slot for slot in self.enlisted.values() if slot.is_free and slot.takes(Company.ANY, now)]
        return sorted(free, key=lambda slot: len(slot.jobs) / slot.concurrency)

    def together(self, seat: Seat, request: Request, form: Form, waiting: forming.Mates, now: float) -> forming.Group:
        """Return what shares a job of a seat that is free with a request of this form, of all that waits."""
        where = self._where(seat, self._share(seat, form, 1 + waiting.number, now), waiting.longest)
        return forming.together(request, form, waiting.requests, where, now)

    def expected(self, seat: Seat, job: Job) -> float:
        """Return how many seconds a job will take at a seat, about; 0.0 where nobody knows."""
        known = self.times.expected(seat.device, job.form.kind, job.rows) if job.form is not None else 0.0
        return known or job.count * self.mean

    @property
    def mean(self) -> float:
        """The seconds that a part took of late; 0.0 before anything was answered."""
        return sum(self._ran) / len(self._ran) if self._ran else 0.0

    def give(self, seat: Seat, job: Job, now: float) -> None:
        """Have the seat run a job, as soon as it has nothing before it."""
        for item in job.parts.values():
            request = item.request
            if not request.begun:
                request.begun = True
                waited = now - request.arrived
                request.account.waited(waited)
                self.meter.queue.add(waited)
                request.tenant.quota.begins(request.nbytes)
        look = now + self._predict_timeout if seat.give(job, now) else seat.since + QUICK_S
        if look < self.look:
            self.look = look
            self._due_by(look)

    def finish(self, process: str, number: int, now: float) -> Part | None:
        """A process has answered a part for its seat; return it, or None if nobody waits for this answer any more."""
        seat = self._seat_of.get(process)
        job = None if seat is None else seat.job_of(number)
        if seat is None or job is None:
            return None
        part = job.parts.pop(number)
        if job.parts:
            job.answered += (part,)
        else:
            took = seat.finished(job, now)
            job.settle(took, part)
            self._tell_ran(job, part, took, now)
            self._ran.append(took / job.count)
            self._tally.executions += 1
            self.meter.compute.add(took)
            if job.form is not None:
                self._tally.ran_rows(job.rows, seat.terms.padded(job.rows))
                self.meter.rows.add(job.rows)
                self.times.add(seat.device, job.form.kind, job.rows, took)
        return part if part.is_awaited else None

    # --- what is taken from them --------------------------------------------------------------------------------

    def end(self, unfit: Callable[[Request], bool]) -> list[tuple[Request, bool]]:
        """End what seats have that is `unfit`; return each request once, with whether a seat is running any of it.

        What a seat runs cannot be stopped: its credit comes back when it answers, and then nobody waits for that.
        """
        return list(self._end(lambda batch: [item for item in batch.awaited if unfit(item.request)]).items())

    def end_each(self, requests: Sequence[Request]) -> dict[Request, bool]:
        """End what seats have of these requests, without a look at others; return them as `end` does."""

        def gone(batch: Job) -> list[Part]:
            return [item for each in requests if (item := batch.part_of(each)) is not None and item.is_awaited]

        return self._end(gone)

    def recall(self, cut: Cut) -> None:
        """Take the parts of a request back from the seats that have not begun with them."""
        for slot in self._seats.values():
            for batch in slot.ready:
                mine = [item.number for item in batch.parts.values() if item.cut is cut]
                if mine:
                    self._recall(slot, batch, mine)

    def overdue(self, now: float) -> Iterator[Overdue]:
        """Take out the seats that have computed for too long, and take back what waits behind one that runs long."""
        if now < self.look:
            return
        for slot in list(self._seats.values()):
            if not slot.jobs:
                continue
            if now >= slot.since + self._predict_timeout:
                longest = min(slot.jobs.values(), key=lambda batch: batch.began)
                del slot.jobs[longest.number]
                longest.settle(now - longest.began)
                for item in longest.parts.values():
                    self._tell_ran(longest, item, now - longest.began, now)
                yield Overdue(slot, longest, self.remove(slot))
            elif now >= slot.since + QUICK_S:
                requeued = [item for batch in slot.ready for item in self._recall(slot, batch, list(batch.parts))]
                yield Overdue(slot, None, requeued)
        self.look = min((self._due(slot) for slot in self._seats.values()), default=float("inf"))

    def take_back(self, but: Tenant) -> list[Part]:
        """Take back what seats have not begun with and is another tenant's; return what is awaited of that."""
        again: list[Part] = []
        for slot in self._seats.values():
            for batch in slot.ready:
                if any(request.tenant is not but for request in batch.requests):
                    again += self._recall(slot, batch, list(batch.parts))
        return again

    def take_recalled(self) -> Sequence[tuple[Seat, int]]:
        """Return what seats have in vain, by the part's number, so that they need not begin with it; and forget it."""
        if not self._recalled:
            return ()
        recalled, self._recalled = self._recalled, []
        return recalled

    # --- what they tell -----------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Seat]:
        return iter(self._seats.values())

    @property
    def running(self) -> int:
        """Requests of which they have something that somebody waits for."""
        return len(
            {item.request for slot in self._seats.values() for batch in slot.jobs.values() for item in batch.awaited}
        )

    def devices(self, terms: RowTerms) -> list[str]:
        """Return where those are that take jobs on these terms."""
        return [slot.device for slot in self.enlisted.values() if slot.terms == terms]

    def run_confined(self, tenant: Tenant | None = None) -> bool:
        """Return whether a seat has a job that is confined, or was lost to one; of this tenant where one is given."""
        if self._missed and (tenant is None or tenant in self._missed):
            return True
        return any(slot.has_confined and (tenant is None or tenant in slot.tenants) for slot in self._seats.values())

    def lost_to(self, tenant: Tenant, now: float) -> None:
        """A seat is about to be lost to what a tenant has asked: that was its seat until another one is there."""
        until = now + REPLACED_S
        self._missed[tenant] = len(self.enlisted) + len(self._paused), until
        self._due_by(until)

    def look_for_missed(self, now: float) -> None:
        """See which seats that were lost to tenants have been replaced."""
        if not self._missed:
            return
        there = len(self.enlisted) + len(self._paused)
        self._missed = {
            tenant: (count, deadline) for tenant, (count, deadline) in self._missed.items() if there < count and now < deadline
        }

    def retry_after(self, queued: int, now: float) -> float | None:
        """Return in how many seconds there may be room in a queue that is full.

        It has moved on by one place for each seat after the time that a request takes. Before anything was answered
        nobody knows how long that is.
        """
        taking = len(self.enlisted) + len(self._paused)
        if not self._ran or not taking:
            return None
        running = max((now - slot.since for slot in self._seats.values() if slot.jobs), default=0.0)
        seconds = max(self.mean, running) * queued / taking
        return max(seconds, _LEAST_RETRY_S)

    def spare(self, now: float, long_s: float) -> int:
        """Return how many jobs the seats could run beside those that are long, or have run for `long_s` seconds."""
        seats = (*self.enlisted.values(), *self._paused.values())
        return sum(max(0, slot.concurrency - slot.long_jobs(now, long_s)) for slot in seats)

    # --- within -------------------------------------------------------------------------------------------------

    def _tell_ran(self, job: Job, part: Part, seconds: float, now: float) -> None:
        if job.bill is not None and job.count == 1 and part.cut is None:
            self._on_ran(part.request, seconds, now)

    def _may_be_behind(self, seat: Seat, request: Request, waiting: Iterable[Request], now: float) -> bool:
        """Whether nothing that may still come could share the request's job, so that it need not wait for the seat."""
        form = seat.terms.form(request.description) if seat.terms.merges and not seat.is_free else None
        return form is None or forming.together(request, form, waiting, self._where(seat), now).is_full

    def _where(self, seat: Seat, most: int = limits.MAX_BATCH_ITEMS, longest: float = math.inf) -> forming.Where:
        return forming.Where(seat.terms, partial(self.times.expected, seat.device), most, longest)

    def _share(self, seat: Seat, form: Form, waiting: int, now: float) -> int:
        """How many of the requests that wait may share a job: those of the seats that are free share all there are.

        A seat counts that will be free before this one had run what waits. And what there was a moment ago is counted:
        who has just been answered asks again.
        """
        seats = self.merging.values()
        running = sum(batch.count for each in seats for batch in each.jobs.values())
        peak = self._peak.add(waiting + running, now)
        end = now + self.times.expected(seat.device, form.kind, min(waiting * form.rows, seat.terms.max_rows))
        return math.ceil(peak / (1 + sum(self._free_at(each) <= end for each in seats if each is not seat)))

    def _free_at(self, seat: Seat) -> float:
        """When a seat will have run what it has, as far as is known."""
        at = seat.since if seat.jobs else -math.inf
        for batch in seat.jobs.values():
            if batch.form is None:
                return math.inf
            at += self.times.expected(seat.device, batch.form.kind, batch.rows)
        return at

    def _end(self, chosen: Callable[[Job], list[Part]]) -> dict[Request, bool]:
        """End the requests of the parts that are chosen of each job; return whether a seat is running any of each."""
        ended: dict[Request, bool] = {}
        for slot in self._seats.values():
            for batch in list(slot.jobs.values()):
                chosen_items = chosen(batch)
                for item in chosen_items:
                    ended[item.request] = ended.get(item.request, False) or batch.has_begun
                if chosen_items and not batch.has_begun:
                    self._recall(slot, batch, [item.number for item in chosen_items])
        for request in ended:
            request.ended = True
        return ended

    def _recall(self, seat: Seat, job: Job, numbers: Sequence[int]) -> list[Part]:
        """Take these parts of a job back from a seat that has not begun with it; return those that are awaited."""
        parts = [job.parts.pop(number) for number in numbers]
        self._recalled += [(seat, number) for number in numbers]
        if not job.parts:
            job.settle(0.0)
            del seat.jobs[job.number]
        return [item for item in parts if item.is_awaited]

    def _due(self, seat: Seat) -> float:
        if not seat.jobs:
            return float("inf")
        return seat.since + (QUICK_S if seat.ready else self._predict_timeout)

    def _find_merging(self) -> None:
        self.merging = {name: slot for name, slot in self.enlisted.items() if slot.terms.merges}
