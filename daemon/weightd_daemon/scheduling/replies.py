"""The ends of requests: each accepted request gets one reply, its result or an error."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from weightd_daemon.counters import ModelCounters
from weightd_daemon.scheduling.measurements import LatencyWindow
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.scheduler import AT_ONCE, MAX_ENDED_PER_TURN, Scheduler
from weightd_protocol.errors import RequestError
from weightd_protocol.messages.control import ModelMetadataResponse
from weightd_protocol.messages.worker import PredictResult


class ResponseSink(Protocol):
    """Sends replies to clients."""

    def reply_result(self, request: Request, result: PredictResult, frames: Sequence[Any]) -> None:
        """Send the model's answer to the client."""

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        """Send an error to the client."""

    def reserve_partial_result(self, request: Request, nbytes: int) -> None:
        """Keep so much more of a request until it has ended.

        Raises:
            ResourceExhausted: there is no room for it.
        """

    def notify_released(self, request: Request) -> None:
        """Tell the client of a request that was still running at its end that nobody writes for it any more."""

    def reply(self, client: bytes, message: ModelMetadataResponse) -> None:
        """Send a model's metadata to the client."""

    def reply_error(self, client: bytes, request_id: str, error: RequestError) -> None:
        """Send an error to the client."""


class Replies:
    """Ends the requests of one model, and measures how long they took.

    Args:
        scheduler: of the model.
        response_sink: sends the replies.
        counters: of the model.
        schedule_by: called with the time when `fail_some` has something to do.

    Attributes:
        latencies: from a request's arrival to its answer, in the daemon.
        failed_count: requests that ended in an error after they were accepted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        response_sink: ResponseSink,
        counters: ModelCounters,
        schedule_by: Callable[[float], object],
    ) -> None:
        self._scheduler = scheduler
        self._watched_requests = scheduler.deadlines.requests
        self._response_sink = response_sink
        self._counters = counters
        self._schedule_by = schedule_by
        self.latencies = LatencyWindow()
        self.failed_count = 0
        # Requests that have been taken from the queue and from the slots, and still have to be refused.
        self._pending_failures: deque[tuple[Request, RequestError]] = deque()

    def complete(self, request: Request, result: PredictResult, frames: Sequence[Any], now: float) -> float:
        """End a request with its answer; return its latency in seconds."""
        self._watched_requests.pop(request.number, None)
        request.may_still_write = bool(request.pending_writes)
        self._response_sink.reply_result(request, result, frames)
        latency = now - request.arrived_at
        self.latencies.add(latency)
        self._counters.requests.add(latency)
        return latency

    def fail(self, request: Request, error: RequestError) -> None:
        """End a request in an error."""
        self.failed_count += 1
        self._scheduler.end_split(request)
        self._watched_requests.pop(request.number, None)
        request.may_still_write = bool(request.pending_writes)
        self._response_sink.reply_request_error(request, error)

    def fail_all(self, requests: Iterable[tuple[Request, RequestError]]) -> None:
        """End requests that neither wait nor run any more: some at once, and the rest in the next turns."""
        was_pending = bool(self._pending_failures)
        self._pending_failures += requests
        if not was_pending:
            self.fail_some()

    def fail_some(self) -> None:
        """Go on with that."""
        for _ in range(min(MAX_ENDED_PER_TURN, len(self._pending_failures))):
            self.fail(*self._pending_failures.popleft())
        if self._pending_failures:
            self._schedule_by(AT_ONCE)

    def fail_pending(self, should_fail: Callable[[Request], bool] = lambda _: True) -> None:
        """End at once those of these requests that are `should_fail`."""
        pending, self._pending_failures = self._pending_failures, deque()
        for request, error in pending:
            if should_fail(request):
                self.fail(request, error)
            else:
                self._pending_failures.append((request, error))

    @property
    def is_pending(self) -> bool:
        """Whether clients have still to be told of requests that neither wait nor run any more."""
        return bool(self._pending_failures)

    def reserve_partial_result(self, request: Request, nbytes: int) -> None:
        """Keep so many bytes of an answer to a part of a request.

        Raises:
            ResourceExhausted: there is no room for it.
        """
        self._response_sink.reserve_partial_result(request, nbytes)

    def notify_released(self, requests: Iterable[Request]) -> None:
        """Tell the clients of requests that have ended that nobody writes to their memory any more."""
        for request in requests:
            self._response_sink.notify_released(request)
