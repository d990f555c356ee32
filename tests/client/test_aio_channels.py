"""Requests of the asyncio client over direct channels. `test_channels` tests what both clients have in common."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any, Callable, Coroutine, Iterator, TypeVar

import numpy as np
import pytest

from testkit.fakechannels import FakeChannel, FakeChannels, TakenRequest
from testkit.fakedaemon import LIMIT_S, FakeDaemon
from weightd import AsyncClient, ClientClosed, DeadlineExceeded, Unavailable
from weightd_protocol.messages.inference import Infer

X = {"x": np.arange(6, dtype=np.float32)}

T = TypeVar("T")


@pytest.fixture
def address(directory: Path) -> str:
    return f"unix://{directory}/d.sock"


@pytest.fixture
def channels(daemon: FakeDaemon) -> Iterator[FakeChannels]:
    channels = FakeChannels(daemon)
    yield channels
    channels.close()


def run(test: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(test, LIMIT_S))


async def in_thread(function: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, function)


async def open_channel(client: AsyncClient, channels: FakeChannels) -> FakeChannel:
    for _ in range(5):
        await client.infer("m", X)
    channels.relayed.clear()
    return channels.granted[-1]


def ask(client: AsyncClient, value: float = 0.0, **options: Any) -> asyncio.Future[Any]:
    return asyncio.ensure_future(client.infer("m", {"x": np.full(6, value, np.float32)}, **options))


async def taken(channel: FakeChannel) -> TakenRequest:
    return await in_thread(channel.take)


async def value_of(future: asyncio.Future[Any]) -> float:
    return float((await future)["x"][0])


def test_requests_take_the_channel(daemon: FakeDaemon, channels: FakeChannels) -> None:
    async def test() -> None:
        async with AsyncClient(daemon.address) as client:
            channel = await open_channel(client, channels)
            calls = [ask(client, float(number)) for number in range(3)]
            requests = [await taken(channel) for _ in calls]
            for request in reversed(requests):
                channel.answer(request)
            assert [await value_of(each) for each in calls] == [0.0, 1.0, 2.0]
            assert channels.relayed == []

    run(test())


def test_many_tasks_share_a_channel(daemon: FakeDaemon, channels: FakeChannels) -> None:
    async def test() -> None:
        async with AsyncClient(daemon.address) as client:
            channel = await open_channel(client, channels)
            channel.serve()
            values = await asyncio.gather(*[value_of(ask(client, float(number))) for number in range(500)])
            assert values == [*range(500)]

    run(test())


def test_notices_apply_after_the_answers(daemon: FakeDaemon, channels: FakeChannels) -> None:
    async def test() -> None:
        async with AsyncClient(daemon.address) as client:
            channel = await open_channel(client, channels)
            calls = [ask(client, float(number)) for number in range(4)]
            answered, lost, adopted, queued = [await taken(channel) for _ in calls]
            channel.lose(lost)
            assert await value_of(calls[1]) == 1.0
            channel.adopt(adopted)
            await client.server()
            daemon.send(*adopted.answer)
            assert await value_of(calls[2]) == 2.0
            channel.answer(answered)
            channel.finish()
            assert [await value_of(calls[0]), await value_of(calls[3])] == [0.0, 3.0]
            assert [each.id for each in channels.relayed] == [lost.message.id, queued.message.id]

    run(test())


def test_calls_outlive_the_daemon(daemon: FakeDaemon, channels: FakeChannels) -> None:
    async def test() -> None:
        async with AsyncClient(daemon.address) as client:
            channel = await open_channel(client, channels)
            calls = [ask(client, float(number)) for number in range(2)]
            request = await taken(channel)
            await in_thread(daemon.stop)
            again = FakeDaemon(daemon.address)
            others = FakeChannels(again)
            while True:
                with contextlib.suppress(Unavailable):
                    await client.server()
                    break
            assert len((await client.infer("m", X))["x"]) == 6
            assert len(others.relayed) == 1
            channel.answer(request)
            assert await value_of(calls[0]) == 0.0
            await taken(channel)
            channel.close()
            with pytest.raises(Unavailable, match="may have run the request"):
                await calls[1]
            again.stop()

    run(test())


def test_a_cancelled_task_drops_its_answer(daemon: FakeDaemon, channels: FakeChannels) -> None:
    async def test() -> None:
        async with AsyncClient(daemon.address) as client:
            channel = await open_channel(client, channels)
            call = ask(client)
            request = await taken(channel)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            other = ask(client, 1.0)
            channel.answer(request)
            channel.answer(await taken(channel))
            assert await value_of(other) == 1.0
            with pytest.raises(DeadlineExceeded, match="the workers of the model do not respond"):
                await client.infer("m", X, timeout=0.05)
            await client.server()
            messages = [daemon.next()[0] for _ in range(daemon.seen.qsize())]
            assert not [each for each in messages if type(each).__name__ == "Cancel"]
            assert len([each for each in messages if isinstance(each, Infer)]) == 5

    run(test())


def test_closing_ends_the_channel(daemon: FakeDaemon, channels: FakeChannels) -> None:
    async def test() -> FakeChannel:
        client = AsyncClient(daemon.address)
        channel = await open_channel(client, channels)
        call = ask(client)
        await taken(channel)
        await client.close()
        with pytest.raises(ClientClosed):
            await call
        return channel

    channel = run(test())
    channel.end.settimeout(LIMIT_S)
    assert channel.end.recv(1) == b""


def test_a_client_may_move_to_another_loop_after_a_loss(daemon: FakeDaemon, channels: FakeChannels) -> None:
    client = AsyncClient(daemon.address)

    async def first() -> FakeChannel:
        channel = await open_channel(client, channels)
        await in_thread(daemon.stop)
        with pytest.raises(Unavailable):
            await client.server()
        return channel

    async def second() -> None:
        again = FakeDaemon(daemon.address)
        others = FakeChannels(again)
        channel = await open_channel(client, others)
        channel.serve()
        assert await value_of(ask(client, 1.0)) == 1.0
        await client.close()
        others.close()
        again.stop()

    channel = run(first())
    run(second())
    channel.end.settimeout(LIMIT_S)
    assert channel.end.recv(1) == b""
