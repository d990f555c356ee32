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
    from weightd.client.inputs import Inputs

    Several = Union[Iterable[Inputs], AsyncIterable[Inputs]]
    Ask = Callable[[Inputs], Coroutine[Any, Any, Any]]
    # Requests under way in order and, when there will be no more, None.
    Begun = asyncio.Queue[Optional[asyncio.Future[Any]]]


async def answers(ask: Ask, inputs: Several, in_flight: int) -> AsyncGenerator[Any, None]:
    """Begin a request for each of `inputs`, and give their answers in this order, as soon as they are there.

    Inputs are waited for beside the answers: one may depend on an answer to an earlier one. However it ends, what is
    under way then is taken back.
    """
    room = asyncio.Semaphore(in_flight)
    begun: Begun = asyncio.Queue()
    under_way: List[asyncio.Future[Any]] = [asyncio.ensure_future(_feed(ask, inputs, room, begun))]
    try:
        while True:
            request = await begun.get()
            if request is None:
                break
            under_way.append(request)
            answer = await request
            under_way.remove(request)
            room.release()
            yield answer
        await under_way[0]
    finally:
        await _take_back(under_way, begun)


async def _feed(ask: Ask, inputs: Several, room: asyncio.Semaphore, begun: Begun) -> None:
    """Take inputs as there is room: all of them in one task, as who makes them may rely on."""
    try:
        await room.acquire()
        async for each in _each(inputs):
            begun.put_nowait(asyncio.ensure_future(ask(each)))
            await room.acquire()
    finally:
        begun.put_nowait(None)


async def _each(inputs: Several) -> AsyncIterator[Inputs]:
    if isinstance(inputs, abc.AsyncIterable):
        async for each in inputs:
            yield each
    else:
        for each in inputs:
            yield each


async def _take_back(under_way: List[asyncio.Future[Any]], begun: Begun) -> None:
    """End what feeds, and then what it has begun; wait until all of it has ended, whatever in."""
    while under_way:
        for each in under_way:
            each.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        under_way.clear()
        while not begun.empty():
            request = begun.get_nowait()
            if request is not None:
                under_way.append(request)
