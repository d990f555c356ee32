"""Limits the number of long-lived gRPC calls, and ends these calls when the gateway stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Generator
from typing import TypeVar, cast

from weightd_gateway.auth import Caller
from weightd_gateway.fairness import FairLimit
from weightd_protocol.errors import ResourceExhausted, Unavailable

T = TypeVar("T")

MAX_STREAMS = 256
"""Maximum number of `ModelStreamInfer` calls of all callers. A stream is idle most of the time, and costs a few
kilobytes."""

MAX_WATCH_STREAMS = 256
"""Maximum number of health watches, which need no token. A separate limit keeps them from displacing authenticated
streams."""

MAX_REFLECTION_STREAMS = 8
"""Maximum number of reflection streams, which need no token either. Each may hold an incomplete message of the maximum
size."""


class WaitingCalls:
    """Counts long-lived calls of one kind, and interrupts them when the gateway stops.

    Args:
        max_streams: maximum number of calls.
    """

    def __init__(self, max_streams: int = MAX_STREAMS) -> None:
        self._max_streams = max_streams
        self._limit = FairLimit(max_streams)
        self._waiting: set[asyncio.Task[object]] = set()
        self._is_stopping = False

    @contextlib.contextmanager
    def admit(self, caller: Caller | None) -> Generator[None, None, None]:
        """Count a call within the block. For the caller None, only the total of all callers is limited.

        Raises:
            ResourceExhausted: the limit, or the caller's share of it, is reached.
        """
        if not self._limit.take(caller):
            raise ResourceExhausted(
                f"the caller has reached its share of {self._max_streams} open streams of this kind at this gateway"
            )
        try:
            yield
        finally:
            self._limit.release(caller)

    async def wait(self, start_wait: Callable[[], Awaitable[T]]) -> T:
        """Await `start_wait()` and return its result; `stop` interrupts the wait.

        Raises:
            Unavailable: the gateway is stopping.
        """
        task = cast("asyncio.Task[object]", asyncio.current_task())
        self._waiting.add(task)
        try:
            if self._is_stopping:
                raise asyncio.CancelledError
            return await start_wait()
        except asyncio.CancelledError:
            if self._is_stopping:
                raise Unavailable("the gateway is stopping") from None
            raise
        finally:
            self._waiting.discard(task)

    def stop(self) -> None:
        """Interrupt calls that are in `wait` or enter it later. A call that is working can finish this work first."""
        self._is_stopping = True
        for task in [*self._waiting]:
            task.cancel()
