"""Generates load with a constant number of requests in flight: each task sends a request, awaits it, and repeats."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from typing import Any, Callable, Mapping, NamedTuple, Sequence

from weightctl.bench.windows import MAX_WINDOWS, Level, Windows, summarize
from weightctl.target import per_execution, read_counters
from weightd.aio import AsyncClient
from weightd_protocol.errors import RequestError

# Pause after an error; without it, a full queue would be flooded with requests that it rejects immediately.
_BACKOFF_S = 0.01
_MAX_BACKOFF_S = 1.0


class BenchPlan(NamedTuple):
    """The plan of a measurement.

    Attributes:
        model: the model to measure.
        inputs: the inputs of the requests, used in turn.
        levels: the numbers of requests in flight, measured one after another.
        max_seconds: maximum duration of each level.
        on_window: called with the requests in flight and the windows of a level, at its begin and after each window.
    """

    model: str
    inputs: Sequence[Mapping[str, Any]]
    levels: Sequence[int]
    max_seconds: float
    on_window: Callable[[int, Windows], None]


def measure(address: str, timeout: float, plan: BenchPlan, on_level: Callable[[Level], None]) -> bool:
    """Measure each level and call `on_level` with the result. Return whether Ctrl-C ended the measurement early.

    Args:
        address: the daemon's address.
        timeout: timeout of each request in seconds.
        plan: the plan of the measurement.
        on_level: receives the result of each level.
    """
    return asyncio.run(_run(AsyncClient(address, timeout=timeout), plan, on_level))


async def _run(client: AsyncClient, plan: BenchPlan, on_level: Callable[[Level], None]) -> bool:
    async with client:
        interrupt = _Interrupt()
        with interrupt:
            for in_flight in plan.levels:
                on_level(await _measure_level(client, plan, in_flight, interrupt.interrupted))
                if interrupt.interrupted.done():
                    return True
    return False


async def _measure_level(
    client: AsyncClient, plan: BenchPlan, in_flight: int, interrupted: asyncio.Future[None]
) -> Level:
    before = read_counters(await client.status(), plan.model)
    windows = Windows(time.monotonic(), plan.max_seconds / MAX_WINDOWS)
    plan.on_window(in_flight, windows)
    tasks = [
        asyncio.ensure_future(_send_requests(client, plan, windows, first, in_flight)) for first in range(in_flight)
    ]
    try:
        await asyncio.wait({*tasks, interrupted}, timeout=plan.max_seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        windows.finish(time.monotonic())
        for task in tasks:
            task.cancel()
        # Each cancelled task cancels its request.
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception) and not isinstance(end, asyncio.CancelledError):
            raise end
    after = read_counters(await client.status(), plan.model)
    return summarize(in_flight, windows, per_execution(before, after))


async def _send_requests(client: AsyncClient, plan: BenchPlan, windows: Windows, first: int, in_flight: int) -> None:
    """Send requests until the windows are complete; each task begins with another input."""
    for inputs in itertools.islice(itertools.cycle(plan.inputs), first % len(plan.inputs), None):
        sent = time.monotonic()
        try:
            await client.infer(plan.model, inputs)
        except RequestError as error:
            windows.on_error(error.code)
            await asyncio.sleep(min(_MAX_BACKOFF_S, error.retry_after or _BACKOFF_S))
            continue
        now = time.monotonic()
        if windows.on_response(now, now - sent):
            plan.on_window(in_flight, windows)
            if windows.is_over:
                return


class _Interrupt:
    """Handles Ctrl-C within the block: it completes a future instead of raising `KeyboardInterrupt`.

    Attributes:
        interrupted: done after Ctrl-C.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.interrupted: asyncio.Future[None] = self._loop.create_future()

    def __enter__(self) -> None:
        self._loop.add_signal_handler(signal.SIGINT, self._on_sigint)

    def __exit__(self, *_: object) -> None:
        self._loop.remove_signal_handler(signal.SIGINT)

    def _on_sigint(self) -> None:
        if not self.interrupted.done():
            self.interrupted.set_result(None)
