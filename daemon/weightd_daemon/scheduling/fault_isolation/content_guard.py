"""Keeps contents that crashed or hung slots from the next slot.

The digest of a large content is computed in slices, one in each turn of the loop; what follows from it waits until
then.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from weightd_daemon.platform.client_log import ClientLog
from weightd_daemon.scheduling.fault_isolation.contents import FingerprintTask, Quarantine, compute_digest, is_small
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.scheduler import AT_ONCE, Scheduler
from weightd_protocol.errors import RequestError

_log = logging.getLogger("weightd")

FailRequest = Callable[[Request, RequestError], None]
DigestAction = Callable[[Request, float], None]


class _PendingAction(NamedTuple):
    """A request that something was learned of, what follows from that, and the error in which the request ends then."""

    request: Request
    action: DigestAction
    error: RequestError | None = None


class ContentGuard:
    """The contents of requests to one model that are in quarantine, or under suspicion.

    Args:
        scheduler: of the model.
        fail_request: called with each request that ends here, and the error in which it ends.
        schedule_by: called with the time when `continue_fingerprint` will have something to do.
        client_log: of what clients do; one object for all models.

    Attributes:
        quarantine: the contents.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        fail_request: FailRequest,
        schedule_by: Callable[[float], object],
        client_log: ClientLog,
    ) -> None:
        self.quarantine = Quarantine()
        self._scheduler = scheduler
        self._fail_request = fail_request
        self._schedule_by = schedule_by
        self._client_log = client_log
        # Requests that something was learned of, and what follows from that once their digests are known.
        self._pending_actions: deque[_PendingAction] = deque()
        self._fingerprint_task: FingerprintTask | None = None

    def check_request(self, request: Request, now: float) -> bool:
        """A request has come: return whether its content has to be read before it runs.

        Raises:
            Internal: its content is in quarantine.
        """
        # What is in memory of the client has to be read before it runs: the memory is the client's after the answer.
        may_be_suspected = request.is_mutable and self.quarantine.may_be_suspected(request, now)
        if not (may_be_suspected or self.quarantine.may_be_quarantined(request, now)):
            return False
        if is_small(request):
            compute_digest(request)
            self.quarantine.check_request(request, now)
            return False
        return True

    def on_answered(self, request: Request, now: float) -> None:
        """A slot has answered the request."""
        if (request.is_mutable and not request.digest) or not self.quarantine.may_be_suspected(request, now):
            return
        # One at a time: if that is another content, there will be further answers.
        if not any(each.action == self.quarantine.on_answered for each in self._pending_actions):
            self._act_on_digest(request, self.quarantine.on_answered, now)

    def on_crash(self, request: Request, now: float) -> None:
        """Put the content of a request that has ended into quarantine, unless the content may have changed since."""
        self._act_if_unchanged(request, self._quarantine_content, now)

    def on_hang(self, request: Request, now: float) -> None:
        """A slot hung in a request that has ended; unless its content may have changed since, suspect it."""
        self._act_if_unchanged(request, self._on_hang, now)

    def on_group_loss(self, request: Request, now: float) -> None:
        """A group of ranks was lost to a request that runs again."""
        self._act_on_digest(request, self._on_group_loss, now)

    def on_forgiven(self, request: Request, now: float) -> None:
        """A group of ranks was not lost to a request after all."""
        self._act_on_digest(request, self.quarantine.on_answered, now)

    def fail_crashed(self, request: Request, error: RequestError, now: float) -> None:
        """End a request in an error, and put its content into quarantine."""
        self._fail_and_act(request, error, self._quarantine_content, now)

    def fail_hung(self, request: Request, error: RequestError, now: float) -> None:
        """End a request in which a slot hung."""
        self._fail_and_act(request, error, self._on_hang, now)

    def fail_pending(self) -> None:
        """End each request that waits for its content to be read."""
        pending, self._pending_actions, self._fingerprint_task = self._pending_actions, deque(), None
        for request, _, error in pending:
            if error is not None:
                self._fail_request(request, error)

    @property
    def has_work(self) -> bool:
        """Whether `continue_fingerprint` has something to do."""
        return bool(self._pending_actions) or self._scheduler.queue.next_unchecked is not None

    def continue_fingerprint(self, now: float) -> None:
        """Read on in a request that may be one that has killed, for less than a millisecond."""
        request = self._pending_actions[0].request if self._pending_actions else self._scheduler.queue.next_unchecked
        if request is None:
            return
        if self._fingerprint_task is None or self._fingerprint_task.request is not request:
            self._fingerprint_task = FingerprintTask(request)
        if not self._fingerprint_task.step():
            return
        self._fingerprint_task = None
        if self._pending_actions:
            _, action, error = self._pending_actions.popleft()
            action(request, now)
            if error is not None:
                self._fail_request(request, error)
        else:
            self._admit_or_reject(request, now)

    def _fail_and_act(self, request: Request, error: RequestError, action: DigestAction, now: float) -> None:
        """End a request in an error, and learn something of it.

        Its memory is the client's once it has ended, so what is there has to be read before.
        """
        if request.is_mutable and not (request.digest or is_small(request)):
            # The client gets one response, so none of the other parts may end the request meanwhile.
            request.is_ended = True
            self._scheduler.end_split(request)
            self._pending_actions.append(_PendingAction(request, action, error))
            self._schedule_by(AT_ONCE)
        elif request.is_mutable:
            action(request, now)
            self._fail_request(request, error)
        else:
            self._fail_request(request, error)
            self._act_on_digest(request, action, now)

    def _act_if_unchanged(self, request: Request, action: DigestAction, now: float) -> None:
        """Learn something of a request that has ended before, unless its content may have changed since."""
        if request.digest or not request.is_mutable:
            self._act_on_digest(request, action, now)

    def _act_on_digest(self, request: Request, action: DigestAction, now: float) -> None:
        if is_small(request):
            action(request, now)
        else:
            self._pending_actions.append(_PendingAction(request, action))
            self._schedule_by(AT_ONCE)

    def _quarantine_content(self, request: Request, now: float) -> None:
        self._log_quarantine(request, "request %s is in quarantine: it crashed workers")
        self.quarantine.add(request, now)
        self._reject_quarantined(now)

    def _on_hang(self, request: Request, now: float) -> None:
        if self.quarantine.on_hang(request, now):
            self._log_quarantine(request, "request %s is in quarantine: it hung workers")
            self._reject_quarantined(now)

    def _on_group_loss(self, request: Request, now: float) -> None:
        if self.quarantine.on_hang(request, now):
            self._log_quarantine(request, "request %s is in quarantine: its content ended rank groups")
            self._reject_quarantined(now)

    def _log_quarantine(self, request: Request, text: str) -> None:
        self._client_log.log(_log, logging.WARNING, request.origin.principal, text, request.id)

    def _reject_quarantined(self, now: float) -> None:
        """Whoever waits with a content that is held would only kill, or stop, the next slot."""
        for request in self._scheduler.require_check(lambda each: self.quarantine.may_be_quarantined(each, now)):
            if is_small(request):
                self._admit_or_reject(request, now)

    def _admit_or_reject(self, request: Request, now: float) -> None:
        """A request that was put aside ends, or may run."""
        try:
            self.quarantine.check_request(request, now)
        except RequestError as error:
            self._scheduler.take_matching(lambda each: each is request)
            self._fail_request(request, error)
        else:
            self._scheduler.queue.admit(request)
