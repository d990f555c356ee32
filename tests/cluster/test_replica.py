"""A replica before a daemon of a few lines: what it says of its health, and of what it asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from testkit import fakedaemon, looks
from testkit.fakedaemon import FakeDaemon, directory
from weightd_protocol.codec import encode
from weightd_protocol.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from weightd_protocol.messages.control import ModelReady, ReadyResponse
from weightd_protocol.messages.inference import Infer
from weightd_protocol.messages.metrics import Metrics
from weightd_protocol.messages.types import ClientMessage
from weightd_ray.options import parse_arguments
from weightd_ray.replica import Replica

__all__ = ["directory"]

GOOD, OTHER = "ab" * 32, "cd" * 32


class World:
    """A daemon, of which a test says how it stands."""

    def __init__(self, directory: str) -> None:
        self.ready = True
        self.sha256 = GOOD
        self.meanwhile: Callable[[], Any] = lambda: None
        self.daemon = FakeDaemon(f"unix://{directory}/d.sock", self._answer)

    def _answer(self, message: ClientMessage, tensors: Sequence[bytes]) -> Sequence[list[Any]]:
        answer = self._answer_to(message, tensors)
        if isinstance(message, (Infer, Metrics)):
            self.meanwhile()
        return answer

    def _answer_to(self, message: ClientMessage, tensors: Sequence[bytes]) -> Sequence[list[Any]]:
        if isinstance(message, ModelReady):
            return [encode(ReadyResponse(message.id, self.ready, "" if self.ready else "m: attaching 0/2"))]
        if isinstance(message, Metrics):
            told = looks.metrics(1.0, looks.counted("m", sha256=self.sha256))
            return [encode(type(told)(**{**vars(told), "id": message.id}))]
        return fakedaemon.echo(message, tensors)

    def run(self, what: Callable[[Replica], Awaitable[Any]], **more: Any) -> Any:
        """Do something with a replica that serves."""

        async def within() -> Any:
            replica = Replica(parse_arguments({"address": self.daemon.address, "name": "m", **more}))
            await replica.start()
            try:
                return await what(replica)
            finally:
                await replica.stop()

        return asyncio.run(within())


@pytest.fixture
def world(directory: str) -> Iterator[World]:
    made = World(directory)
    yield made
    made.daemon.stop()


def test_arrays_are_asked_about_and_what_stands_for_one_is_awaited(world: World) -> None:
    x = np.ones(3, np.float32)

    async def ask(replica: Replica) -> None:
        later: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        later.set_result(x)
        for each in (x, later):
            assert np.array_equal((await replica.infer({"x": each}))["x"], x)
        with pytest.raises(InvalidArgument, match="timeout"):
            await replica.infer({"x": x}, timeout=-1)

    world.run(ask)


def test_what_stands_for_an_array_is_waited_for_as_long_as_the_request_has(world: World) -> None:
    x = np.ones(3, np.float32)

    async def ask(replica: Replica) -> None:
        never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with pytest.raises(DeadlineExceeded, match="input x: the referenced object did not arrive"):
            await replica.infer({"x": never}, timeout=0.01)
        lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        lost.set_exception(LookupError("x"))
        with pytest.raises(InvalidArgument, match="input x: cannot get the referenced object: LookupError"):
            await replica.infer({"x": lost})
        for timeout in (float("nan"), -1, 10**400):
            with pytest.raises(InvalidArgument, match="timeout"):
                await replica.infer({"x": lost}, timeout=timeout)
        assert np.array_equal((await replica.infer({"x": x}))["x"], x)

    world.run(ask)


def test_one_with_another_model_does_not_serve(world: World) -> None:
    async def nothing(_: Replica) -> None: ...

    world.run(nothing, sha256=GOOD)
    with pytest.raises(FailedPrecondition, match=f"sha256 {OTHER}, got {GOOD} of the service at unix:"):
        world.run(nothing, sha256=OTHER)


def test_health_is_that_of_the_model(world: World) -> None:
    async def ask(replica: Replica) -> None:
        await replica.check_health()
        world.ready = False
        with pytest.raises(Unavailable, match="attaching 0/2"):
            await replica.check_health()
        world.ready = True
        world.sha256 = OTHER
        with pytest.raises(FailedPrecondition, match=f"got {OTHER}"):
            await replica.check_health()
        # Whoever asks until Serve has another replica take its place is not answered by the other model.
        with pytest.raises(Unavailable, match=f"got {OTHER}"):
            await replica.infer({"x": np.ones(1, np.float32)})

    world.run(ask, sha256=GOOD)


def test_nothing_is_answered_of_a_daemon_that_has_started_again_until_that_is_known(world: World) -> None:
    async def ask(replica: Replica) -> None:
        loop = asyncio.get_running_loop()
        # The request waits for a connection, say, and that is one to the next daemon.
        world.meanwhile = lambda: loop.call_soon_threadsafe(replica.on_daemon_start)
        world.sha256 = OTHER
        with pytest.raises(Unavailable, match="is restarting"):
            await replica.infer({"x": np.ones(1, np.float32)})

    world.run(ask, sha256=GOOD)


def test_what_a_daemon_has_said_that_is_no_more_says_nothing_of_the_next(world: World) -> None:
    async def start() -> None:
        replica = Replica(parse_arguments({"address": world.daemon.address, "name": "m", "sha256": GOOD}))
        loop = asyncio.get_running_loop()
        world.sha256 = OTHER

        def starts_again() -> None:
            world.meanwhile = lambda: None
            world.sha256 = GOOD
            loop.call_soon_threadsafe(replica.on_daemon_start)

        world.meanwhile = starts_again
        await replica.start()
        await replica.infer({"x": np.ones(1, np.float32)})
        await replica.stop()

    asyncio.run(start())


def test_it_serves_when_a_worker_does_and_not_before(world: World) -> None:
    world.ready = False

    async def start() -> None:
        replica = Replica(parse_arguments({"address": world.daemon.address, "name": "m"}))
        starting = asyncio.create_task(replica.start())
        while world.daemon.seen.qsize() < 4:
            await asyncio.sleep(0.01)
        assert not starting.done()
        with pytest.raises(Unavailable, match="is restarting") as found:
            await replica.infer({"x": np.ones(1, np.float32)})
        assert found.value.retry_after is not None
        world.ready = True
        await starting
        await replica.stop()

    asyncio.run(start())
