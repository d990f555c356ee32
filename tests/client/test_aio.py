"""Tests of how the asyncio client waits. Its requests and responses are covered by the tests of `Client`."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Coroutine, List, Optional, Sequence, TypeVar

import numpy as np
import pytest

from testkit.fakedaemon import LIMIT_S, FakeDaemon, echo, silent
from weightd import (
    AsyncClient,
    Cancelled,
    Client,
    ClientClosed,
    DeadlineExceeded,
    PermissionDenied,
    Unavailable,
    WrongLoop,
)
from weightd.address import parse_address
from weightd.session import ClientSession
from weightd_protocol.codec import encode
from weightd_protocol.messages.control import ReadyResponse
from weightd_protocol.messages.inference import Cancel, Error, Infer
from weightd_protocol.messages.types import ClientMessage

X = np.arange(6, dtype=np.float32)

T = TypeVar("T")


def run(test: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(test, LIMIT_S))


async def seen(daemon: FakeDaemon) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, daemon.next)


def test_has_the_methods_of_client() -> None:
    def methods(cls: type) -> Any:
        return {
            name: (inspect.signature(each).parameters if callable(each) else None)
            for name in dir(cls)
            if not name.startswith("_") and name not in ("submit", "map")
            for each in [getattr(cls, name)]
        }

    assert methods(AsyncClient) == methods(Client)
    # map() also takes asynchronous iterables.
    assert list(inspect.signature(AsyncClient.map).parameters) == list(inspect.signature(Client.map).parameters)


def test_many_concurrent_tasks(daemon: FakeDaemon) -> None:
    async def ask(client: AsyncClient, number: int) -> None:
        # Some arrays exceed one read or write; all together exceed the socket's buffers.
        x = np.random.default_rng(number).standard_normal((1, 100, 100_000, 300_000)[number % 4])
        assert np.array_equal((await client.infer("echo", {"x": x}))["x"], x)

    async def test() -> None:
        async with AsyncClient(daemon.address) as client:
            assert client.address == daemon.address
            assert client.transport == ("unix" if daemon.address.startswith("unix") else "zmq")
            await ask(client, 3)
            await asyncio.gather(*(ask(client, number) for number in range(100)))
            assert (await client.server()).version == "9.9"
            assert (await client.status()).state == (await client.metrics()).state == "running"
            assert (await client.metadata("m")).platform == "echo"

    run(test())


@pytest.mark.parametrize("ready", [True, False])
def test_ready_is_a_boolean(daemon: FakeDaemon, *, ready: bool) -> None:
    async def test() -> None:
        daemon.handle = lambda message, _: [encode(ReadyResponse(message.id, ready))]
        async with AsyncClient(daemon.address) as client:
            assert bool(await client.ready("m")) is bool(await client.ready()) is ready

    run(test())


def test_raises_errors_of_daemon(daemon: FakeDaemon) -> None:
    async def test() -> None:
        daemon.handle = lambda message, _: [encode(Error(message.id, "PERMISSION_DENIED", "may not"))]
        async with AsyncClient(daemon.address) as client:
            for refused in (client.ready("m"), client.reload(), client.update("m", rollback=True)):
                with pytest.raises(PermissionDenied, match=r"^may not$"):
                    await refused

    run(test())


def test_silent_daemon_ends_in_deadline(daemon: FakeDaemon) -> None:
    async def test() -> None:
        daemon.handle = silent
        async with AsyncClient(daemon.address) as client:
            with pytest.raises(DeadlineExceeded, match="does not respond"):
                await client.infer("m", {"x": X}, timeout=0.1)
            message, tensors = await seen(daemon)
            daemon.send(*echo(message, tensors)[0])
            daemon.handle = echo
            assert await client.infer("m", {"x": X})

    run(test())


def test_each_request_has_its_own_deadline(daemon: FakeDaemon) -> None:
    async def test() -> None:
        ended: List[float] = []

        async def infer(seconds: float) -> None:
            with pytest.raises(DeadlineExceeded):
                await client.infer("m", {"x": X}, timeout=seconds)
            ended.append(seconds)

        daemon.handle = silent
        async with AsyncClient(daemon.address) as client:
            await asyncio.gather(*map(infer, (0.6, 0.1, 0.3)))
            await infer(0.2)
        assert ended == [0.1, 0.3, 0.6, 0.2]

    run(test())


@pytest.mark.parametrize("gives_up", [True, False])
def test_cancellation_cancels_request(daemon: FakeDaemon, *, gives_up: bool) -> None:
    async def test() -> None:
        daemon.handle = silent
        async with AsyncClient(daemon.address) as client:
            other = asyncio.ensure_future(client.infer("m", {"x": X}))
            await seen(daemon)
            if gives_up:
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(client.infer("m", {"x": X}), 0.05)
            else:
                task = asyncio.ensure_future(client.infer("m", {"x": X}))
                await asyncio.sleep(0.05)
                task.cancel()
            infer, _ = await seen(daemon)
            cancel, _ = await seen(daemon)
            assert isinstance(infer, Infer)
            assert cancel == Cancel(infer.id)
            # The client drops the answer to the cancelled request and delivers the other one.
            daemon.send(*encode(Error(infer.id, "CANCELLED", "")))
            daemon.send(*encode(Error(f"{infer.id[:-1]}1", "CANCELLED", "other")))
            with pytest.raises(Cancelled, match="other"):
                await other
            # A cancelled query is dropped without a message to the daemon.
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.server(), 0.05)
            await seen(daemon)
            assert daemon.seen.empty()

    run(test())


def test_connection_loss_ends_all_calls(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    made: List[None] = []
    connecting = ClientSession.connect_steps

    def counted(session: ClientSession) -> Any:
        made.append(None)
        return connecting(session)

    monkeypatch.setattr(ClientSession, "connect_steps", counted)

    async def test() -> None:
        daemon.handle = silent
        async with AsyncClient(daemon.address) as client:
            tasks = [asyncio.ensure_future(client.infer("m", {"x": X})) for _ in range(4)]
            for _ in tasks:
                await seen(daemon)
            daemon.stop()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(each, Unavailable) for each in ended)
            with pytest.raises(Unavailable, match="no daemon at"):
                await client.server()
            again = FakeDaemon(daemon.address)
            made.clear()
            await asyncio.gather(*(client.infer("m", {"x": X}) for _ in range(4)))
            assert len(made) == 1
            # The client notices the loss even if no call waits.
            again.stop()
            again = FakeDaemon(daemon.address)
            answer = None
            while answer is None:
                # libzmq reports the loss a moment later, so a request in between fails, too.
                with contextlib.suppress(Unavailable):
                    answer = await client.infer("m", {"x": X})
            again.stop()

    run(test())


def test_daemon_that_does_not_read(directory: Path) -> None:
    async def test() -> None:
        address = f"unix://{directory}/d.sock"
        with socket.socket(socket.AF_UNIX) as unread:
            unread.bind(parse_address(address).unix_path)
            unread.listen(1)
            async with AsyncClient(address) as client:
                large = np.zeros(4 * 1024 * 1024, np.uint8)
                for _ in range(3):
                    with pytest.raises(DeadlineExceeded, match="does not read"):
                        await client.infer("m", {"x": large}, timeout=0.05)
                waiting = asyncio.ensure_future(client.infer("m", {"x": large}, timeout=LIMIT_S))
                await asyncio.sleep(0.05)
                unread.close()
                with pytest.raises(Unavailable):
                    await waiting

    run(test())


def test_waits_for_full_backlog(daemon: FakeDaemon, directory: Path) -> None:
    async def test() -> None:
        address = f"{'unix' if daemon.address.startswith('unix') else 'ipc'}://{directory}/other"
        ways = parse_address(address)
        with socket.socket(socket.AF_UNIX) as mute, socket.socket(socket.AF_UNIX) as first:
            mute.bind(ways.unix_path or ways.zmq_address[len("ipc://") :])
            mute.listen(0)
            first.connect(mute.getsockname())
            client = AsyncClient(address, timeout=0.1)
            with pytest.raises(DeadlineExceeded, match=r"handshake with .* timed out"):
                await client.server()
            waiting = asyncio.ensure_future(client.server(timeout=LIMIT_S))
            await asyncio.sleep(0.05)
            await client.close()
            with pytest.raises(ClientClosed):
                await waiting

    run(test())


def test_close_ends_pending_calls(daemon: FakeDaemon) -> None:
    async def test() -> None:
        daemon.handle = silent
        async with AsyncClient(daemon.address) as client:
            tasks = [asyncio.ensure_future(client.infer("m", {"x": X})) for _ in range(3)]
            await seen(daemon)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, ClientClosed) for each in ended)
        with pytest.raises(ClientClosed):
            await client.server()
        await client.close()

    run(test())


def test_rejects_another_event_loop(daemon: FakeDaemon) -> None:
    client = AsyncClient(daemon.address)

    async def test() -> None:
        await client.server()
        refused = asyncio.get_running_loop().run_in_executor(None, run, client.server(timeout=0.5))
        with pytest.raises(WrongLoop):
            await refused
        await client.close()

    run(test())


def test_imports_asyncio_on_demand() -> None:
    script = "import sys, weightd; assert 'asyncio' not in sys.modules; weightd.AsyncClient"
    subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": ":".join(sys.path)}, check=True)


@pytest.mark.parametrize("answers", [True, False])
def test_answer_that_arrives_while_stopped_is_in_time(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """The loop's poll returns nothing after a stop beyond its time-out, and timers run before the next poll."""
    is_stopped = threading.Event()

    def answer(message: ClientMessage, tensors: Sequence[bytes]) -> Sequence[List[Any]]:
        assert is_stopped.wait(LIMIT_S)
        return echo(message, tensors)

    async def test() -> None:
        async with AsyncClient(daemon.address) as client:
            assert np.array_equal((await client.infer("m", {"x": X}))["x"], X)
            selector = vars(asyncio.get_running_loop())["_selector"]
            select = selector.select

            def stopped(timeout: Optional[float]) -> Any:
                if timeout and not is_stopped.is_set():
                    is_stopped.set()
                    time.sleep(timeout + 0.2)
                    return []
                return select(timeout)

            daemon.handle = answer if answers else silent
            monkeypatch.setattr(selector, "select", stopped)
            call = client.infer("m", {"x": X}, timeout=0.3)
            if answers:
                assert np.array_equal((await call)["x"], X)
            else:
                with pytest.raises(DeadlineExceeded):
                    await call

    run(test())
