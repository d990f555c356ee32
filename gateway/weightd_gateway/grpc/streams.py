"""Calls that last: how many there are, and that they end when the gateway does."""

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
"""Of all callers. Each is idle most of the time, and costs some kilobytes."""

MAX_WATCH_STREAMS = 256
"""Of those who watch the health of the gateway, without a token: they leave those alone who have one."""

MAX_REFLECTION_STREAMS = 8
"""Of those who ask which methods there are, likewise: a message that each has begun may be as long as any."""


class WaitingCalls:
    """Calls that wait for their caller, or for something to happen, as often as not.

    Args:
        max_streams: of them.
    """

    def __init__(self, max_streams: int = MAX_STREAMS) -> None:
        self._max_streams = max_streams
        self._limit = FairLimit(max_streams)
        self._waiting: set[asyncio.Task[object]] = set()
        self._is_stopping = False

    @contextlib.contextmanager
    def admit(self, caller: Caller | None) -> Generator[None, None, None]:
        """Have one within the block; None: of whoever asks.

        Raises:
            ResourceExhausted: there are as many as there may be.
        """
        if not self._limit.take(caller):
            raise ResourceExhausted(
                f"the caller has its share of {self._max_streams} such streams open at this gateway"
            )
        try:
            yield
        finally:
            self._limit.release(caller)

    async def wait(self, start_wait: Callable[[], Awaitable[T]]) -> T:
        """Wait for what need not happen, and return what comes of it.

        Raises:
            Unavailable: the gateway stops before it does.
        """
        task = cast("asyncio.Task[object]", asyncio.current_task())
        self._waiting.add(task)
        try:
            if self._is_stopping:
                raise asyncio.CancelledError
            return await start_wait()
        except asyncio.CancelledError:
            if self._is_stopping:
                raise Unavailable("the gateway stops") from None
            raise
        finally:
            self._waiting.discard(task)

    def stop(self) -> None:
        """End what waits; what does something first finishes that."""
        self._is_stopping = True
        for task in [*self._waiting]:
            task.cancel()
