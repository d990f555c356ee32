"""Runs the coroutine of an HTTP request without passes of the event loop that do nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class RequestRun:
    """Runs a coroutine: at once until its first wait, and later as soon as its wait has ended.

    A task of asyncio does the same, but begins in the next pass of the event loop. `asyncio.current_task` returns None
    within the coroutine, so it must not use `asyncio.timeout` or `asyncio.wait_for`.

    Attributes:
        is_done: whether the coroutine has ended.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.is_done = False
        self._coroutine = coroutine
        # The future for which the coroutine waits.
        self._awaited: asyncio.Future[Any] | None = None
        self._is_cancelled = False
        self._end_waiters: list[asyncio.Future[None]] = []

    def go_on(self, ended: object = None) -> None:
        """Run the coroutine until its next wait. `ended` is the future that has ended."""
        self._awaited = None
        is_cancelled, self._is_cancelled = self._is_cancelled, False
        awaited: asyncio.Future[Any] | None
        try:
            awaited = self._coroutine.throw(asyncio.CancelledError()) if is_cancelled else self._coroutine.send(None)
        except (StopIteration, asyncio.CancelledError):
            self._end()
        except BaseException:
            self._end()
            raise
        else:
            if awaited is None:
                # The coroutine awaits `asyncio.sleep(0)`.
                asyncio.get_running_loop().call_soon(self.go_on)
                return
            self._awaited = awaited
            awaited.add_done_callback(self.go_on)
            if self._is_cancelled and awaited.cancel():
                self._is_cancelled = False

    def cancel(self) -> None:
        """Raise `CancelledError` in the coroutine where it waits, as `asyncio.Task.cancel` does."""
        if not self.is_done and (self._awaited is None or not self._awaited.cancel()):
            self._is_cancelled = True

    def end_waiter(self) -> asyncio.Future[None]:
        """Return a future that ends when the coroutine ends."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end_waiters.append(waiter)
        return waiter

    def _end(self) -> None:
        self.is_done = True
        for waiter in self._end_waiters:
            if not waiter.done():
                waiter.set_result(None)
