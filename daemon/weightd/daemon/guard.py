"""What keeps a request from killing worker after worker, and a worker that hangs from keeping requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from weightd.daemon.config import ModelConfig
from weightd.daemon.quarantine import Quarantine
from weightd.daemon.request import Request, content
from weightd.daemon.scheduler import Scheduler
from weightd.daemon.watchdog import Watchdog
from weightd.protocol.errors import DeadlineExceeded, Internal, RequestError
from weightd.protocol.worker_messages import Ping

_log = logging.getLogger("weightd")

# What a worker may have to finish before it comes to the canary: two predicts. The canary is the third.
_CANARY_PATIENCE = 3

Refuse = Callable[[Request, RequestError], None]


class Guard:
    """Watches the workers and requests of one model.

    Args:
        config: of the model.
        scheduler: of the model.
        refuse: called with each request that ends here, and the error in which it ends.
    """

    def __init__(self, config: ModelConfig, scheduler: Scheduler, refuse: Refuse) -> None:
        self.quarantine = Quarantine()
        self.watchdog = Watchdog(
            config.watchdog, config.canary_interval, canary_patience=_CANARY_PATIENCE * config.predict_timeout
        )
        self._predict_timeout = config.predict_timeout
        self._scheduler = scheduler
        self._refuse = refuse

    def died(self, worker: str, how: str, now: float) -> None:
        """A worker has died, and may have died of what it had."""
        for request, error in self._scheduler.lost(worker, how):
            _log.warning("request %s is in quarantine: workers died of it", request.id)
            self.quarantine.hold(request, now)
            self._refuse(request, error)
            self._refuse_equals(request)

    def overdue(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield the workers that compute for too long, each with the reason to end it.

        Nobody waits for what such a worker may still give.
        """
        for worker, request in self._scheduler.overdue(now):
            why = f"a predict took longer than predict_timeout, {self._predict_timeout:g} s"
            if not request.answered:
                self._refuse(request, DeadlineExceeded(f"request {request.id}: {why}"))
            if self.quarantine.hung(request, now):
                _log.warning("request %s is in quarantine: workers hang in it", request.id)
                self._refuse_equals(request)
            yield worker, f"{why} (request {request.id})"

    def pings(self, now: float) -> Iterator[tuple[str, Ping | None]]:
        """Yield the workers that have to be pinged, and those that have to be ended (None) as they did not answer."""
        due = self.watchdog.due(now, lambda worker: self._scheduler.in_flight(worker) > 0)
        yield from ((worker, Ping(canary=False)) for worker in due.plain)
        yield from ((worker, Ping(canary=True)) for worker in due.canary)
        yield from ((worker, None) for worker in due.silent)

    def _refuse_equals(self, held: Request) -> None:
        """Whoever waits with the same content would only kill, or stop, the next worker."""
        digest = content(held)
        for request in self._scheduler.withdraw(lambda each: each.nbytes == held.nbytes and content(each) == digest):
            self._refuse(request, Internal(f"request {request.id} has the content of {held.id}, in quarantine"))
