"""Calls that last: how many there are, and that they end when the gateway does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Generator
from typing import TypeVar, cast

from weightd.gateway.callers import Caller
from weightd.gateway.shares import Shares
from weightd.protocol.errors import ResourceExhausted, Unavailable

T = TypeVar("T")

MOST_STREAMS = 256
"""Of all callers. Each is idle most of the time, and costs some kilobytes."""

MOST_WATCHING = 256
"""Of those who watch the health of the gateway, without a token: they leave those alone who have one."""

MOST_REFLECTING = 8
"""Of those who ask which methods there are, likewise: a message that each has begun may be as long as any."""


class Streams:
    """Calls that wait for their caller, or for something to happen, as often as not.

    Args:
        most: of them.
    """

    def __init__(self, most: int = MOST_STREAMS) -> None:
        self._most = most
        self._shares = Shares(most)
        self._waiting: set[asyncio.Task[object]] = set()
        self._is_ending = False

    @contextlib.contextmanager
    def one(self, caller: Caller | None) -> Generator[None, None, None]:
        """Have one within the block; None: of whoever asks.

        Raises:
            ResourceExhausted: there are as many as there may be.
        """
        if not self._shares.take(caller):
            raise ResourceExhausted(f"the caller has its share of {self._most} such streams open at this gateway")
        try:
            yield
        finally:
            self._shares.give(caller)

    async def wait(self, for_what: Callable[[], Awaitable[T]]) -> T:
        """Wait for what need not happen, and return what comes of it.

        Raises:
            Unavailable: the gateway stops before it does.
        """
        task = cast("asyncio.Task[object]", asyncio.current_task())
        self._waiting.add(task)
        try:
            if self._is_ending:
                raise asyncio.CancelledError
            return await for_what()
        except asyncio.CancelledError:
            if self._is_ending:
                raise Unavailable("the gateway stops") from None
            raise
        finally:
            self._waiting.discard(task)

    def end(self) -> None:
        """End what waits; what does something first finishes that."""
        self._is_ending = True
        for task in [*self._waiting]:
            task.cancel()
