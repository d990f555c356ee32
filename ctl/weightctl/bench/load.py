"""Generates load with a constant number of requests in flight.

Each of several tasks sends one request after another.
"""

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

# Seconds that a task pauses after a failed request. Without the pause, tasks would flood a full queue, which rejects
# requests at once. `_MAX_BACKOFF_S` limits the pause that the daemon proposes.
_BACKOFF_S = 0.01
_MAX_BACKOFF_S = 1.0


class BenchPlan(NamedTuple):
    """Plan of a measurement: the requests to send and the duration.

    Attributes:
        model: the name of the model to measure.
        inputs: the inputs of the requests. Each task uses them in turn.
        levels: the numbers of requests in flight. They are measured one after another.
        max_seconds: the maximum duration of the measurement of one level in seconds.
        on_window: a function that is called with the number of requests in flight and the windows, at the beginning of
            each level and after each window.
    """

    model: str
    inputs: Sequence[Mapping[str, Any]]
    levels: Sequence[int]
    max_seconds: float
    on_window: Callable[[int, Windows], None]


def measure(address: str, timeout: float, plan: BenchPlan, on_level: Callable[[Level], None]) -> bool:
    """Measure each level and call `on_level` with its result. Return whether Ctrl-C ended the measurement early.

    Args:
        address: the daemon's address.
        timeout: the timeout of each request in seconds.
        plan: the requests to send.
        on_level: a function that is called with the result of each level.
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
        # Each task that is cancelled here cancels its request in progress.
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception) and not isinstance(end, asyncio.CancelledError):
            raise end
    after = read_counters(await client.status(), plan.model)
    return summarize(in_flight, windows, per_execution(before, after))


async def _send_requests(client: AsyncClient, plan: BenchPlan, windows: Windows, first: int, in_flight: int) -> None:
    """Send one request after another until the windows are complete. The tasks begin with different inputs."""
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
    """Context manager that handles Ctrl-C: completes a future instead of raising `KeyboardInterrupt`.

    Attributes:
        interrupted: a future that is done after Ctrl-C.
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
