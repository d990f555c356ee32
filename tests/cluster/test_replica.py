"""Tests of a replica with a fake daemon: its health, and its requests."""

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


class FakeService:
    """A fake daemon whose state a test sets."""

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
            metrics = looks.metrics(1.0, looks.counted("m", sha256=self.sha256))
            return [encode(type(metrics)(**{**vars(metrics), "id": message.id}))]
        return fakedaemon.echo(message, tensors)

    def run(self, what: Callable[[Replica], Awaitable[Any]], **more: Any) -> Any:
        """Run a coroutine with a replica that serves."""

        async def within() -> Any:
            replica = Replica(parse_arguments({"address": self.daemon.address, "name": "m", **more}))
            await replica.start()
            try:
                return await what(replica)
            finally:
                await replica.stop()

        return asyncio.run(within())


@pytest.fixture
def service(directory: str) -> Iterator[FakeService]:
    made = FakeService(directory)
    yield made
    made.daemon.stop()


def test_awaits_references_to_arrays(service: FakeService) -> None:
    x = np.ones(3, np.float32)

    async def ask(replica: Replica) -> None:
        later: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        later.set_result(x)
        for each in (x, later):
            assert np.array_equal((await replica.infer({"x": each}))["x"], x)
        with pytest.raises(InvalidArgument, match="timeout"):
            await replica.infer({"x": x}, timeout=-1)

    service.run(ask)


def test_wait_for_reference_has_the_request_timeout(service: FakeService) -> None:
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

    service.run(ask)


def test_replica_with_another_model_does_not_serve(service: FakeService) -> None:
    async def nothing(_: Replica) -> None: ...

    service.run(nothing, sha256=GOOD)
    with pytest.raises(FailedPrecondition, match=f"sha256 {OTHER}, got {GOOD} of the service at unix:"):
        service.run(nothing, sha256=OTHER)


def test_health_depends_on_model(service: FakeService) -> None:
    async def ask(replica: Replica) -> None:
        await replica.check_health()
        service.ready = False
        with pytest.raises(Unavailable, match="attaching 0/2"):
            await replica.check_health()
        service.ready = True
        service.sha256 = OTHER
        with pytest.raises(FailedPrecondition, match=f"got {OTHER}"):
            await replica.check_health()
        # Until Serve has replaced the replica, its callers get no answer from the other model.
        with pytest.raises(Unavailable, match=f"got {OTHER}"):
            await replica.infer({"x": np.ones(1, np.float32)})

    service.run(ask, sha256=GOOD)


def test_drops_answer_of_unverified_daemon(service: FakeService) -> None:
    async def ask(replica: Replica) -> None:
        loop = asyncio.get_running_loop()
        # The request may wait for a connection and get one to the next daemon.
        service.meanwhile = lambda: loop.call_soon_threadsafe(replica.on_daemon_start)
        service.sha256 = OTHER
        with pytest.raises(Unavailable, match="is restarting"):
            await replica.infer({"x": np.ones(1, np.float32)})

    service.run(ask, sha256=GOOD)


def test_ignores_answers_of_earlier_daemon(service: FakeService) -> None:
    async def start() -> None:
        replica = Replica(parse_arguments({"address": service.daemon.address, "name": "m", "sha256": GOOD}))
        loop = asyncio.get_running_loop()
        service.sha256 = OTHER

        def starts_again() -> None:
            service.meanwhile = lambda: None
            service.sha256 = GOOD
            loop.call_soon_threadsafe(replica.on_daemon_start)

        service.meanwhile = starts_again
        await replica.start()
        await replica.infer({"x": np.ones(1, np.float32)})
        await replica.stop()

    asyncio.run(start())


def test_serves_once_a_worker_serves(service: FakeService) -> None:
    service.ready = False

    async def start() -> None:
        replica = Replica(parse_arguments({"address": service.daemon.address, "name": "m"}))
        starting = asyncio.create_task(replica.start())
        while service.daemon.seen.qsize() < 4:
            await asyncio.sleep(0.01)
        assert not starting.done()
        with pytest.raises(Unavailable, match="is restarting") as found:
            await replica.infer({"x": np.ones(1, np.float32)})
        assert found.value.retry_after is not None
        service.ready = True
        await starting
        await replica.stop()

    asyncio.run(start())
