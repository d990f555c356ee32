"""Keeps the contents of requests that crashed or hung a slot away from other slots.

The digest of a large content is computed in slices, one in each turn of the event loop. Actions that depend on the
digest are queued until the computation has ended.
"""

from __future__ import annotations

import logging
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
    """An action that is performed when the digest of a request's content has been computed.

    If `error` is not None, the request ends in that error after the action.
    """

    request: Request
    action: DigestAction
    error: RequestError | None = None


class ContentGuard:
    """The quarantine of contents for one model.

    Args:
        scheduler: the scheduler of the model.
        fail_request: called with each request that this object ends, and the request's error.
        schedule_by: called with the time when `continue_fingerprint` has something to do.
        client_log: the rate-limited log of client events; one object for all models.

    Attributes:
        quarantine: the quarantined and suspected contents.
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
        # Actions that wait for the digests of their requests.
        self._pending_actions: list[_PendingAction] = []
        self._fingerprint_task: FingerprintTask | None = None

    def check_request(self, request: Request, now: float) -> bool:
        """Check a new request; return whether its content must be read before the request runs.

        Raises:
            Internal: the content is in quarantine.
        """
        # The client may change a content in its own memory after the answer, and then `on_answered` could not clear the
        # content that the worker has read. So a suspected content must be read before the request runs.
        may_be_suspected = request.is_mutable and self.quarantine.may_be_suspected(request, now)
        if not (may_be_suspected or self.quarantine.may_be_quarantined(request, now)):
            return False
        if is_small(request):
            compute_digest(request)
            self.quarantine.check_request(request, now)
            return False
        return True

    def on_answered(self, request: Request, now: float) -> None:
        """Clear the content of an answered request from suspicion."""
        if (request.is_mutable and not request.digest) or not self.quarantine.may_be_suspected(request, now):
            return
        # Queue at most one action of this kind. If the queued action clears another content, the answer to a later
        # request with the same content as this request will clear that content.
        if not any(each.action == self.quarantine.on_answered for each in self._pending_actions):
            self._act_on_digest(request, self.quarantine.on_answered, now)

    def on_crash(self, request: Request, now: float) -> None:
        """Quarantine the content of an ended request, unless the client may have changed the content since."""
        self._act_if_unchanged(request, self._quarantine_content, now)

    def on_hang(self, request: Request, now: float) -> None:
        """Record a hang against an ended request's content, unless the client may have changed the content since."""
        self._act_if_unchanged(request, self._on_hang, now)

    def on_group_loss(self, request: Request, now: float) -> None:
        """Record, against a request's content, that a rank group was lost. The request will run again."""
        self._act_on_digest(request, self._on_group_loss, now)

    def on_forgiven(self, request: Request, now: float) -> None:
        """Clear a request's content from suspicion, because the loss of the rank group had another cause."""
        self._act_on_digest(request, self.quarantine.on_answered, now)

    def fail_crashed(self, request: Request, error: RequestError, now: float) -> None:
        """End a request in an error, and quarantine its content."""
        self._fail_and_act(request, error, self._quarantine_content, now)

    def fail_hung(self, request: Request, error: RequestError, now: float) -> None:
        """End a request that hung a slot, and record the hang against the request's content."""
        self._fail_and_act(request, error, self._on_hang, now)

    def fail_pending(self) -> None:
        """Drop all pending actions, and end the requests that would have ended after them."""
        pending, self._pending_actions, self._fingerprint_task = self._pending_actions, [], None
        for request, _, error in pending:
            if error is not None:
                self._fail_request(request, error)

    @property
    def has_work(self) -> bool:
        """Whether `continue_fingerprint` has something to do."""
        return bool(self._pending_actions) or self._scheduler.queue.next_unchecked is not None

    def continue_fingerprint(self, now: float) -> None:
        """Compute the next slice of a digest, for less than a millisecond; act on the digest once it is complete."""
        request = self._pending_actions[0].request if self._pending_actions else self._scheduler.queue.next_unchecked
        if request is None:
            return
        if self._fingerprint_task is None or self._fingerprint_task.request is not request:
            self._fingerprint_task = FingerprintTask(request)
        if not self._fingerprint_task.step():
            return
        self._fingerprint_task = None
        if self._pending_actions:
            _, action, error = self._pending_actions.pop(0)
            action(request, now)
            if error is not None:
                self._fail_request(request, error)
        else:
            self._admit_or_reject(request, now)

    def _fail_and_act(self, request: Request, error: RequestError, action: DigestAction, now: float) -> None:
        """End a request in an error and perform an action that needs its digest.

        The client may change the content in its shared memory as soon as the request has ended, so such a content is
        read before the request ends.
        """
        if request.is_mutable and not (request.digest or is_small(request)):
            # The request is marked as ended here, so that its other parts cannot end the request before the pending
            # action ends it.
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
        """Perform an action for an ended request, unless the client may have changed the content since."""
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
            self._log_quarantine(request, "request %s is in quarantine: its content crashed or hung rank groups")
            self._reject_quarantined(now)

    def _log_quarantine(self, request: Request, text: str) -> None:
        self._client_log.log(_log, logging.WARNING, request.origin.principal, text, request.id)

    def _reject_quarantined(self, now: float) -> None:
        """Check the queued requests again, and reject those whose contents are in quarantine."""
        for request in self._scheduler.require_check(lambda each: self.quarantine.may_be_quarantined(each, now)):
            if is_small(request):
                self._admit_or_reject(request, now)

    def _admit_or_reject(self, request: Request, now: float) -> None:
        """Reject a request whose content is in quarantine, or admit it to the queue."""
        try:
            self.quarantine.check_request(request, now)
        except RequestError as error:
            self._scheduler.take_matching(lambda each: each is request)
            self._fail_request(request, error)
        else:
            self._scheduler.queue.admit(request)
