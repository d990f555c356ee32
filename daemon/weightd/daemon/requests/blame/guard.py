"""What keeps requests from killing seat after seat, and a seat that hangs from keeping requests.

What a seat dies of, hangs in or is spoilt by is a job. That says something of a request only if the job had no other
part: where it had several, each of them runs again alone, and what happens then tells.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from weightd.daemon.config.model import ModelConfig
from weightd.daemon.host.clientlog import ClientLog
from weightd.daemon.host.ends import By, End
from weightd.daemon.requests.blame.contents import Reading, content, is_small
from weightd.daemon.requests.blame.groups import MAX_GROUPS, Groups, Loss
from weightd.daemon.requests.blame.quarantine import Quarantine
from weightd.daemon.requests.blame.suspects import Suspects
from weightd.daemon.requests.blame.watchdog import Watchdog
from weightd.daemon.requests.job import Job, blame
from weightd.daemon.requests.request import Company, Origin, Request
from weightd.daemon.requests.scheduler import AT_ONCE, Scheduler
from weightd.daemon.requests.seat import Seat
from weightd.protocol.errors import DeadlineExceeded, Internal, RequestError, ResourceExhausted, Unavailable
from weightd.protocol.messages.children import Ping

_log = logging.getLogger("weightd")

# A request that two seats died of is held to be the cause.
MAX_DEATHS = 2

# Whatever ends the seats that run a request, and be it for want of the memory that it takes: this is the last one.
MAX_LOSSES = 5

# What a process may have to finish before it comes to the canary: two predicts. The canary is the third.
_CANARY_PATIENCE = 3

Refuse = Callable[[Request, RequestError], None]
Then = Callable[[Request, float], None]


class _Evidence(NamedTuple):
    """A request that something was learned of, what follows from that, and the error in which the request ends then."""

    request: Request
    then: Then
    error: RequestError | None = None


class Guard:
    """Watches the seats and requests of one model.

    Args:
        config: of the model.
        scheduler: of the model.
        refuse: called with each request that ends here, and the error in which it ends.
        due_by: called with the time when `look` or `pings` will have something to do.

    Attributes:
        log: of what clients do; one object for all models.
    """

    def __init__(
        self,
        config: ModelConfig,
        scheduler: Scheduler,
        refuse: Refuse,
        due_by: Callable[[float], object] = lambda _: None,
    ) -> None:
        self.quarantine = Quarantine()
        self.suspects = Suspects()
        self.log = ClientLog()
        self.watchdog = Watchdog(
            config.watchdog, config.canary_interval, _CANARY_PATIENCE * config.predict_timeout, due_by
        )
        self._predict_timeout = config.predict_timeout
        self._scheduler = scheduler
        self._groups = Groups(MAX_LOSSES)
        self._refuse = refuse
        self._due_by = due_by
        # Requests that something was learned of, and what follows from that once their digests are known.
        # Tenants that this model has answered: until then one has one seat at a time, so that the first of its requests
        # cannot take several seats along at once.
        self._trusted: set[str] = set()
        self._evidence: deque[_Evidence] = deque()
        self._reading: Reading | None = None

    # --- requests -----------------------------------------------------------------------------------------------

    def has_to(self, request: Request) -> bool:
        """Whether a request that has come has to be checked: cheap, where nobody is a suspect."""
        known = self.quarantine.held or (request.is_mutable and self.quarantine.suspects)
        return self.suspects.are_known or bool(known) or self._is_new(request)

    def check(self, request: Request, now: float) -> bool:
        """A request has come: return whether it may be one that has killed, so that it is put `aside` for a look.

        While nobody `has_to` be checked, there is nothing to check.

        Raises:
            RequestError: it is refused.
        """
        self.suspects.check(request.origin, now)
        if self.suspects.confines(request.origin, now) or self._is_new(request):
            request.narrow(Company.CONFINED)
        # What is in memory of the client has to be read before it runs: the memory is the client's after the answer.
        may_clear = request.is_mutable and self.quarantine.may_suspect(request, now)
        if not (may_clear or self.quarantine.may_hold(request, now)):
            return False
        if is_small(request):
            content(request)
            self.quarantine.check(request, now)
            return False
        return True

    def answered(self, request: Request, now: float) -> None:
        """A seat has answered the request."""
        if request.origin.is_tenant:
            self._trusted.add(request.tenant.name)
        if (request.is_mutable and not request.digest) or not self.quarantine.may_suspect(request, now):
            return
        # One at a time: if that is another content, there will be further answers.
        if not any(each.then == self.quarantine.answered for each in self._evidence):
            self._learn(request, self.quarantine.answered, now)

    def give_up(self) -> None:
        """End each request that waits for its content to be read."""
        evidence, self._evidence, self._reading = self._evidence, deque(), None
        for request, _, error in evidence:
            if error is not None:
                self._refuse(request, error)

    def clear(self) -> None:
        """Another model is served: what killed the last one says nothing."""
        self.give_up()
        self._trusted.clear()
        self.quarantine.clear()
        self.suspects.clear()

    @property
    def looks(self) -> bool:
        """Whether `look` has something to do."""
        return bool(self._evidence) or self._scheduler.line.aside is not None

    def look(self, now: float) -> None:
        """Read on in a request that may be one that has killed, for less than a millisecond."""
        request = self._evidence[0].request if self._evidence else self._scheduler.line.aside
        if request is None:
            return
        if self._reading is None or self._reading.request is not request:
            self._reading = Reading(request)
        if not self._reading.step():
            return
        self._reading = None
        if self._evidence:
            _, then, error = self._evidence.popleft()
            then(request, now)
            if error is not None:
                self._refuse(request, error)
        else:
            self._decide(request, now)

    # --- seats --------------------------------------------------------------------------------------------------

    def died(self, process: str, end: End, now: float) -> None:
        """A process has ended, and may have died of what its seat had."""
        forgiven = self._groups.exited(process, end)
        if forgiven is not None:
            self._learn(forgiven, self.quarantine.answered, now)
        seat = self._scheduler.seats.of(process)
        if seat is None or not seat.jobs:
            self._scheduler.release(process)
            return
        if seat.lockstep is not None:
            self._lose(seat, Loss(f"{process} was {end.description}", Internal if end.may_be_own_fault else None), now)
            return
        jobs = list(seat.jobs.values())
        _charge(jobs, now)
        # The answer to the first may be lost with it, if it died of the next: all that it had runs alone from now on.
        accused = jobs if end.may_be_own_fault else []
        origins = self._accuse(accused)
        blame(accused)
        self._suspect(origins, now - seat.since, now)
        self._missed(accused, now)
        proven = accused[0].sole if len(accused) == 1 else None
        awaited = {item.request for batch in jobs for item in batch.awaited}
        errors = self._verdicts([batch for batch in jobs if batch.has_begun], end, now, proven=proven is not None)
        self._scheduler.release(process, but=[request for request, _ in errors])
        held = proven if proven is not None and proven.deaths >= MAX_DEATHS else None
        for request, error in errors:
            if request in awaited:
                self._end(request, error, self._hold if request is held else None, now)
        if held is not None and held not in awaited:
            self._learn_of_ended(held, self._hold, now)
        for origin in origins:
            self._contain(origin, now)

    def broke(self, process: str, why: str, now: float) -> None:
        """A process can go on no more, for this reason, and its seat is lost with it; what that ran waits again."""
        seat = self._scheduler.seats.of(process)
        if seat is not None and seat.lockstep is not None:
            self._lose(seat, Loss(why, Internal), now)
        else:
            _charge([] if seat is None else list(seat.jobs.values()), now)
            self._scheduler.release(process)

    def leaves(self, process: str, number: int, now: float) -> None:
        """A seat ends, because its model may be spoilt by a job that failed: it is as lost as one that died."""
        seat = self._scheduler.seats.of(process)
        job = seat.job_of(number) if seat is not None else None
        if job is not None:
            _charge([job], now)
            self._lost_to(job, now - job.began, now)

    def overdue(self, now: float) -> Iterator[tuple[Seat, str]]:
        """Yield the seats that compute for too long, each with the reason to end it.

        Nobody waits for what such a seat may still give.
        """
        for slot, batch in self._scheduler.overdue(now):
            reason = f"a predict took longer than predict_timeout, {self._predict_timeout:g} s"
            if slot.lockstep is not None:
                self._lost(slot, batch, Loss(reason, DeadlineExceeded), now)
                yield slot, f"{reason} (request {', '.join(each.id for each in batch.requests)})"
                continue
            request = batch.sole
            if request is None:
                self._scheduler.part(batch)
            self._lost_to(batch, self._predict_timeout, now)
            if request is not None and batch.awaited:
                self._end(request, DeadlineExceeded(f"request {request.id}: {reason}"), self._hung, now)
            elif request is not None:
                self._learn_of_ended(request, self._hung, now)
            yield slot, f"{reason} (request {', '.join(each.id for each in batch.requests)})"

    def pings(self, now: float) -> Iterator[tuple[str, Ping | None]]:
        """Yield the processes that have to be pinged, and those that have to be ended (None) as they did not answer."""
        due = self.watchdog.due(now, self._scheduler.seats.is_busy)
        yield from ((process, Ping(canary=False)) for process in due.plain)
        yield from ((process, Ping(canary=True)) for process in due.canary)
        yield from ((process, None) for process in due.silent)

    # --- within -------------------------------------------------------------------------------------------------

    def _lose(self, seat: Seat, loss: Loss, now: float) -> None:
        """A group of ranks is lost, with the job that it may have."""
        jobs = list(seat.jobs.values())
        _charge(jobs, now)
        seat.jobs.clear()
        self._scheduler.release(seat.name)
        for batch in jobs:
            self._lost(seat, batch, loss, now)

    def _lost(self, seat: Seat, job: Job, loss: Loss, now: float) -> None:
        """A group of ranks is lost, of which this job was taken: it waits again, but for what ends."""
        ended = self._groups.lost(seat, job, loss, now)
        self._scheduler.part(job, but=[request for request, _ in ended])
        accused = job.sole if loss.error is not None else None
        held = accused if accused is not None and accused.deaths >= MAX_GROUPS else None
        for request, error in ended:
            self._end(request, error, self._hold if request is held else None, now)
        if held is not None:
            if held not in [request for request, _ in ended]:
                self._learn_of_ended(held, self._hold, now)
            self._lost_to(job, now - job.began, now)
        elif accused is not None:
            blame([job])
            self._learn(accused, self._costs, now)

    def _is_new(self, request: Request) -> bool:
        return request.origin.is_tenant and request.tenant.name not in self._trusted

    def _accuse(self, jobs: Sequence[Job]) -> set[Origin]:
        """A seat has died of one of these jobs: what they are of runs alone; return who has asked."""
        for batch in jobs:
            batch.keep_apart()
            if batch.sole is not None:
                batch.sole.deaths += 1
        return {origin for batch in jobs for origin in batch.origins}

    def _lost_to(self, job: Job, ran: float, now: float) -> None:
        """A seat is lost to a job that it has run for `ran` seconds."""
        blame([job])
        self._suspect(job.origins, ran, now)
        self._missed([job], now)
        for origin in job.origins:
            self._contain(origin, now)

    def _suspect(self, origins: set[Origin], ran: float, now: float) -> None:
        """A seat was lost to what these have asked: that counts against who has asked all of it."""
        if len(origins) == 1:
            [origin] = origins
            self.suspects.died(origin, ran, now)

    def _missed(self, jobs: Sequence[Job], now: float) -> None:
        """A seat is about to be lost to these jobs: to a tenant, if all of it is one's."""
        tenants = {request.tenant for batch in jobs for request in batch.requests if request.origin.is_tenant}
        if len(tenants) == 1:
            [tenant] = tenants
            self._scheduler.seats.lost_to(tenant, now)

    def _verdicts(
        self, ran: Sequence[Job], end: End, now: float, *, proven: bool
    ) -> list[tuple[Request, RequestError]]:
        """Return those requests of what ran that end with their seat, each with the error; the others run again."""
        # Several jobs may be parts of one.
        began = {request: batch.began for batch in ran for request in batch.requests}
        verdicts = [(each, self._verdict(each, at, end, now, proven=proven)) for each, at in began.items()]
        return [(request, error) for request, error in verdicts if error is not None]

    def _verdict(self, request: Request, began: float, end: End, now: float, *, proven: bool) -> RequestError | None:
        # Those that have run parts of it at the same time may have ended of the same thing.
        if began >= request.lost_at:
            request.losses += 1
            request.lost_at = now
        if proven and request.deaths >= MAX_DEATHS:
            words = f"was on {request.deaths} workers when they died, the last one {end.description}"
            return Internal(f"request {request.id} {words}")
        if proven and self.suspects.condemns(request.origin, now):
            return Internal(f"request {request.id} was on a worker that was {end.description}, as others of its client were")
        if request.losses >= MAX_LOSSES:
            text = f"request {request.id} was on {request.losses} workers when they ended, the last one {end.description}"
            return ResourceExhausted(text) if end.by is By.KERNEL else Unavailable(text)
        return None

    def _contain(self, origin: Origin, now: float) -> None:
        """A seat was lost to what this client asked: see that not all are."""
        if not self.suspects.confines(origin, now):
            return
        self._scheduler.confine(lambda each: self.suspects.confines(each.origin, now))
        refusals: list[tuple[Request, RequestError]] = []

        def is_refused(request: Request) -> bool:
            try:
                self.suspects.check(request.origin, now)
            except RequestError as error:
                refusals.append((request, error))
                return True
            return False

        self._scheduler.withdraw(is_refused)
        for request, error in refusals:
            self._refuse(request, error)
        who = origin.far if origin.is_tenant else origin.near
        text = "workers were lost to requests of %s: they run one at a time, or are refused"
        self.log.log(_log, logging.WARNING, origin.far, text, who)

    def _end(self, request: Request, error: RequestError, then: Then | None, now: float) -> None:
        """End a request in an error, and learn something of it.

        Its memory is the client's once it has ended, so what is there has to be read before.
        """
        if then is None:
            self._refuse(request, error)
        elif request.is_mutable and not (request.digest or is_small(request)):
            # The client gets one response, so none of the other parts may end the request meanwhile.
            request.ended = True
            self._scheduler.end_whole(request)
            self._evidence.append(_Evidence(request, then, error))
            self._due_by(AT_ONCE)
        elif request.is_mutable:
            then(request, now)
            self._refuse(request, error)
        else:
            self._refuse(request, error)
            self._learn(request, then, now)

    def _learn_of_ended(self, request: Request, then: Then, now: float) -> None:
        """Learn something of a request that has ended before, unless its content may have changed since."""
        if request.digest or not request.is_mutable:
            self._learn(request, then, now)

    def _learn(self, request: Request, then: Then, now: float) -> None:
        if is_small(request):
            then(request, now)
        else:
            self._evidence.append(_Evidence(request, then))
            self._due_by(AT_ONCE)

    def _hold(self, request: Request, now: float) -> None:
        self._log_quarantine(request, "request %s is in quarantine: workers died of it")
        self.quarantine.hold(request, now)
        self._refuse_equals(now)

    def _hung(self, request: Request, now: float) -> None:
        if self.quarantine.hung(request, now):
            self._log_quarantine(request, "request %s is in quarantine: workers hang in it")
            self._refuse_equals(now)

    def _costs(self, request: Request, now: float) -> None:
        if self.quarantine.hung(request, now):
            self._log_quarantine(request, "request %s is in quarantine: groups of ranks are lost to its content")
            self._refuse_equals(now)

    def _log_quarantine(self, request: Request, text: str) -> None:
        self.log.log(_log, logging.WARNING, request.origin.far, text, request.id)

    def _refuse_equals(self, now: float) -> None:
        """Whoever waits with a content that is held would only kill, or stop, the next seat."""
        for request in self._scheduler.set_aside(lambda each: self.quarantine.may_hold(each, now)):
            if is_small(request):
                self._decide(request, now)

    def _decide(self, request: Request, now: float) -> None:
        """A request that was put aside ends, or may run."""
        try:
            self.quarantine.check(request, now)
        except RequestError as error:
            self._scheduler.withdraw(lambda each: each is request)
            self._refuse(request, error)
        else:
            self._scheduler.line.admit(request)


def _charge(jobs: Sequence[Job], now: float) -> None:
    """A seat is lost: what ran there has had it, whoever is to blame."""
    for batch in jobs:
        if batch.has_begun:
            batch.settle(now - batch.began)
