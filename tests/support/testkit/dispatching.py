"""Stand-ins for the daemon's main loop in tests of the dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weightd_daemon.scheduling.dispatcher import Dispatcher
from weightd_daemon.scheduling.request import Request
from weightd_daemon.scheduling.scheduler import AT_ONCE
from weightd_protocol.errors import RequestError
from weightd_protocol.messages.control import ModelMetadataResponse
from weightd_protocol.messages.worker import PredictResult


class IgnoringSink:
    """A response sink that ignores all replies. Tests override the methods whose replies they check."""

    def reply_result(self, request: Request, result: PredictResult, frames: Sequence[Any]) -> None:
        """Called with the result of a request."""

    def reply_request_error(self, request: Request, error: RequestError) -> None:
        """Called with the error of a request."""

    def reserve_partial_result(self, request: Request, nbytes: int) -> None:
        """Called before a partial result of a request is kept."""

    def notify_released(self, request: Request) -> None:
        """Called when no worker writes to the memory of a request any more."""

    def reply(self, client: bytes, message: ModelMetadataResponse) -> None:
        """Called with the reply to a request for metadata."""

    def reply_error(self, client: bytes, request_id: str, error: RequestError) -> None:
        """Called with the error of a request for metadata."""


def expire(dispatcher: Dispatcher, now: float) -> None:
    """Fail every request whose deadline has passed. The dispatcher fails a limited number per turn of the loop."""
    dispatcher.expire(now, lambda error: error)
    while dispatcher.has_pending_failures or dispatcher._scheduler.deadlines.next_deadline <= now:
        dispatcher.expire(now, lambda error: error)


def run_turns(dispatcher: Dispatcher, now: float) -> None:
    """Run the turns of the loop that the dispatcher needs at once, as if no other message arrived."""
    while dispatcher.next_event_at == AT_ONCE:
        dispatcher.expire(now, lambda error: error)
        dispatcher.isolator.contents.continue_fingerprint(now)
        dispatcher.dispatch_gathered(now)
