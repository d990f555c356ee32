"""Load with a constant number of requests in flight: each answer starts the next request, in any order."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks.material import Arrays, Reference
from benchmarks.mosec_server import MosecClient, MosecServer
from weightd.aio import AsyncClient

# Uncounted seconds at the start of a round.
_WARM_UP_S = 0.3

# Sends requests until a time (time.perf_counter); returns for each answer its time, the index of its input, and itself.
Fly = Callable[[float], Sequence[tuple[float, int, Arrays]]]


def requests_per_second(fly: Fly, seconds: float, reference: Reference) -> float:
    """Keep requests in flight for `seconds`; check the answers afterwards.

    The measured time begins and ends with an answer, so that requests that ran only partly within it do not count.
    """
    begin = time.perf_counter() + _WARM_UP_S
    answers = fly(begin + seconds)
    for _, index, answer in answers:
        reference.check(index, answer)
    moments = [at for at, _, _ in answers if at >= begin]
    return (len(moments) - 1) / (moments[-1] - moments[0])


def weightd(address: str, model: str, inputs: Sequence[Arrays], in_flight: int) -> Fly:
    """Return a load on a model of weightd: one client with a task for each request in flight."""

    async def task(client: AsyncClient, own: int, end: float, answers: list[tuple[float, int, Arrays]]) -> None:
        index = own
        now = 0.0
        while now < end:
            answer = await client.infer(model, inputs[index % len(inputs)])
            now = time.perf_counter()
            answers.append((now, index, answer))
            index += in_flight

    async def fly(end: float) -> Sequence[tuple[float, int, Arrays]]:
        answers: list[tuple[float, int, Arrays]] = []
        async with AsyncClient(address) as client:
            await asyncio.gather(*[task(client, own, end, answers) for own in range(in_flight)])
        return answers

    return lambda end: asyncio.run(fly(end))


def mosec(server: MosecServer, inputs: Sequence[Arrays], in_flight: int) -> Fly:
    """Return a load on a mosec server: a persistent connection for each request in flight, all in one thread."""

    def fly(end: float) -> Sequence[tuple[float, int, Arrays]]:
        with contextlib.ExitStack() as stack, selectors.EpollSelector() as selector:
            for index in range(in_flight):
                client = stack.enter_context(server.client())
                client.send(inputs[index % len(inputs)])
                selector.register(client, selectors.EVENT_READ, index)
            return list(_answers(selector, inputs, in_flight, end))

    return fly


def _answers(
    selector: selectors.EpollSelector, inputs: Sequence[Arrays], in_flight: int, end: float
) -> Iterator[tuple[float, int, Arrays]]:
    under_way = in_flight
    while under_way:
        for key, _ in selector.select():
            client = key.fileobj
            assert isinstance(client, MosecClient)
            index: int = key.data
            answer = client.answer()
            now = time.perf_counter()
            if now < end:
                client.send(inputs[(index + in_flight) % len(inputs)])
                selector.modify(client, selectors.EVENT_READ, index + in_flight)
            else:
                under_way -= 1
            yield now, index, answer
