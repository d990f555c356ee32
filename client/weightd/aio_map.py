"""Many inputs through a model, a bounded number of them at a time, in order: for asyncio."""

from __future__ import annotations

import asyncio
from collections import abc
from typing import (
    TYPE_CHECKING,
    Any,
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    List,
    Optional,
    Union,
)

if TYPE_CHECKING:
    from weightd.inputs import Inputs

    InputSeries = Union[Iterable[Inputs], AsyncIterable[Inputs]]
    InferCall = Callable[[Inputs], Coroutine[Any, Any, Any]]
    # Requests under way in order and, when there will be no more, None.
    StartedRequests = asyncio.Queue[Optional[asyncio.Future[Any]]]


async def map_ordered(infer: InferCall, inputs: InputSeries, in_flight: int) -> AsyncGenerator[Any, None]:
    """Begin a request for each of `inputs`, and give their answers in this order, as soon as they are there.

    Inputs are waited for beside the answers: one may depend on an answer to an earlier one. However it ends, what is
    under way then is taken back.
    """
    permits = asyncio.Semaphore(in_flight)
    started: StartedRequests = asyncio.Queue()
    tasks: List[asyncio.Future[Any]] = [asyncio.ensure_future(_start_requests(infer, inputs, permits, started))]
    try:
        while True:
            request = await started.get()
            if request is None:
                break
            tasks.append(request)
            answer = await request
            tasks.remove(request)
            permits.release()
            yield answer
        await tasks[0]
    finally:
        await _cancel_all(tasks, started)


async def _start_requests(
    infer: InferCall, inputs: InputSeries, permits: asyncio.Semaphore, started: StartedRequests
) -> None:
    """Take inputs as there is room: all of them in one task, as who makes them may rely on."""
    try:
        await permits.acquire()
        async for each in _iterate(inputs):
            started.put_nowait(asyncio.ensure_future(infer(each)))
            await permits.acquire()
    finally:
        started.put_nowait(None)


async def _iterate(inputs: InputSeries) -> AsyncIterator[Inputs]:
    if isinstance(inputs, abc.AsyncIterable):
        async for each in inputs:
            yield each
    else:
        for each in inputs:
            yield each


async def _cancel_all(tasks: List[asyncio.Future[Any]], started: StartedRequests) -> None:
    """End what feeds, and then what it has begun; wait until all of it has ended, whatever in."""
    while tasks:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks.clear()
        while not started.empty():
            request = started.get_nowait()
            if request is not None:
                tasks.append(request)
