"""What keeps requests from killing worker after worker, and a worker that hangs from keeping requests."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator

from weightd.daemon.config.load import ModelConfig
from weightd.daemon.host.ends import By, End
from weightd.daemon.requests.blame.contents import Reading, is_small
from weightd.daemon.requests.blame.quarantine import Quarantine
from weightd.daemon.requests.blame.suspects import Suspects
from weightd.daemon.requests.blame.watchdog import Watchdog
from weightd.daemon.requests.request import Origin, Request
from weightd.daemon.requests.scheduler import Scheduler
from weightd.protocol.errors import DeadlineExceeded, Internal, RequestError, ResourceExhausted, Unavailable
from weightd.protocol.messages.children import Ping

_log = logging.getLogger("weightd")

# A request that two workers died of is held to be the cause.
MAX_DEATHS = 2

# Whatever ends the workers that run a request, and be it for want of the memory that it takes: this is the last one.
MAX_LOSSES = 5

# What a worker may have to finish before it comes to the canary: two predicts. The canary is the third.
_CANARY_PATIENCE = 3

Refuse = Callable[[Request, RequestError], None]
Then = Callable[[Request, float], None]


class Guard:
    """Watches the workers and requests of one model.

    Args:
        config: of the model.
        scheduler: of the model.
        refuse: called with each request that ends here, and the error in which it ends.
    """

    def __init__(self, config: ModelConfig, scheduler: Scheduler, refuse: Refuse) -> None:
        self.quarantine = Quarantine()
        self.suspects = Suspects()
        self.watchdog = Watchdog(
            config.watchdog, config.canary_interval, canary_patience=_CANARY_PATIENCE * config.predict_timeout
        )
        self._predict_timeout = config.predict_timeout
        self._scheduler = scheduler
        self._refuse = refuse
        # Requests that something was learned of, and what follows from that once their digests are known.
        self._evidence: deque[tuple[Request, Then]] = deque()
        self._reading: Reading | None = None

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """Put a request into the queue.

        Raises:
            RequestError: it is refused.
        """
        self.suspects.check(request.origin, now)
        aside = self.quarantine.may_hold(request, now)
        if aside and is_small(request):
            self.quarantine.check(request, now)
            aside = False
        request.confined = self.suspects.confines(request.origin, now)
        self._scheduler.submit(request, now, aside=aside)

    def answered(self, request: Request, now: float) -> None:
        """A worker has answered the request."""
        if not self.quarantine.may_suspect(request, now):
            return
        # One at a time: if that is another content, there will be further answers.
        if not any(then == self.quarantine.answered for _, then in self._evidence):
            self._learn(request, self.quarantine.answered, now)

    def clear(self) -> None:
        """Another model is served: what killed the last one says nothing."""
        self.quarantine.clear()
        self.suspects.clear()

    @property
    def looks(self) -> bool:
        """Whether `look` has something to do."""
        return bool(self._evidence) or self._scheduler.aside is not None

    def look(self, now: float) -> None:
        """Read on in a request that may be one that has killed, for less than a millisecond."""
        request = self._evidence[0][0] if self._evidence else self._scheduler.aside
        if request is None:
            return
        if self._reading is None or self._reading.request is not request:
            self._reading = Reading(request)
        if not self._reading.step():
            return
        self._reading = None
        if self._evidence:
            self._evidence.popleft()[1](request, now)
        else:
            self._decide(request, now)

    # --- workers ------------------------------------------------------------------------------------------------

    def died(self, worker: str, end: End, now: float) -> None:
        """A worker has ended, and may have died of what it had."""
        had = self._scheduler.has(worker)
        if not had:
            self._scheduler.release(worker)
            return
        # The answer to the first may be lost with it, if it died of the next: all that it had runs alone from now on.
        accused = had if end.blames else []
        for each in accused:
            each.deaths += 1
            each.alone = True
        origins = {each.origin for each in accused}
        if len(origins) == 1:
            self.suspects.died(had[0].origin, self._scheduler.ran(worker, now), now)
        error = self._verdict(had[0], end, now, proven=len(accused) == 1)
        self._scheduler.release(worker, but=had[0] if error is not None else None)
        if error is not None and not had[0].answered:
            self._refuse(had[0], error)
        if len(accused) == 1 and had[0].deaths >= MAX_DEATHS:
            self._learn(had[0], self._hold, now)
        for origin in origins:
            self._contain(origin, now)

    def leaves(self, worker: str, number: int, now: float) -> None:
        """A worker leaves, because its model may be spoilt by a request that failed: it is as lost as one that died."""
        for request in [each for each in self._scheduler.has(worker) if each.number == number]:
            self.suspects.died(request.origin, self._scheduler.ran(worker, now), now)
            self._contain(request.origin, now)

    def overdue(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield the workers that compute for too long, each with the reason to end it.

        Nobody waits for what such a worker may still give.
        """
        for worker, request in self._scheduler.overdue(now):
            why = f"a predict took longer than predict_timeout, {self._predict_timeout:g} s"
            if not request.answered:
                self._refuse(request, DeadlineExceeded(f"request {request.id}: {why}"))
            self.suspects.died(request.origin, self._predict_timeout, now)
            self._contain(request.origin, now)
            self._learn(request, self._hung, now)
            yield worker, f"{why} (request {request.id})"

    def pings(self, now: float) -> Iterator[tuple[str, Ping | None]]:
        """Yield the workers that have to be pinged, and those that have to be ended (None) as they did not answer."""
        due = self.watchdog.due(now, lambda worker: self._scheduler.in_flight(worker) > 0)
        yield from ((worker, Ping(canary=False)) for worker in due.plain)
        yield from ((worker, Ping(canary=True)) for worker in due.canary)
        yield from ((worker, None) for worker in due.silent)

    # --- within -------------------------------------------------------------------------------------------------

    def _verdict(self, request: Request, end: End, now: float, *, proven: bool) -> RequestError | None:
        """Return the error in which a request ends whose worker has ended; None if it runs again."""
        request.losses += 1
        if proven and request.deaths >= MAX_DEATHS:
            words = f"was on {request.deaths} workers when they died, the last one {end.how}"
            return Internal(f"request {request.id} {words}")
        if proven and self.suspects.confines(request.origin, now):
            return Internal(f"request {request.id} was on a worker that was {end.how}, as others of its client were")
        if request.losses >= MAX_LOSSES:
            text = f"request {request.id} was on {request.losses} workers when they ended, the last one {end.how}"
            return ResourceExhausted(text) if end.by is By.KERNEL else Unavailable(text)
        return None

    def _contain(self, origin: Origin, now: float) -> None:
        """A worker has died of what this client asked: see that not all do."""
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
        _log.warning("workers were lost to requests of %s: they run one at a time, or are refused", origin.near)

    def _learn(self, request: Request, then: Then, now: float) -> None:
        if is_small(request):
            then(request, now)
        else:
            self._evidence.append((request, then))

    def _hold(self, request: Request, now: float) -> None:
        _log.warning("request %s is in quarantine: workers died of it", request.id)
        self.quarantine.hold(request, now)
        self._refuse_equals(now)

    def _hung(self, request: Request, now: float) -> None:
        if self.quarantine.hung(request, now):
            _log.warning("request %s is in quarantine: workers hang in it", request.id)
            self._refuse_equals(now)

    def _refuse_equals(self, now: float) -> None:
        """Whoever waits with a content that is held would only kill, or stop, the next worker."""
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
            self._scheduler.admit(request)
