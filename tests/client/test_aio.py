"""The client for asyncio: that it waits as it should; what it sends and makes of answers is `Client`'s."""

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


def test_it_has_the_methods_of_the_other_one() -> None:
    def methods(cls: type) -> Any:
        return {
            name: (inspect.signature(each).parameters if callable(each) else None)
            for name, each in vars(cls).items()
            if not name.startswith("_") and name not in ("submit", "map")
        }

    assert methods(AsyncClient) == methods(Client)
    # It takes inputs that are waited for, too.
    assert list(inspect.signature(AsyncClient.map).parameters) == list(inspect.signature(Client.map).parameters)


def test_many_tasks_ask_at_once(daemon: FakeDaemon) -> None:
    async def ask(client: AsyncClient, number: int) -> None:
        # Some are larger than what is sent or received at once, and all together are than what fits in between.
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
def test_what_ready_returns_is_a_condition(daemon: FakeDaemon, *, ready: bool) -> None:
    async def test() -> None:
        daemon.handle = lambda message, _: [encode(ReadyResponse(message.id, ready))]
        async with AsyncClient(daemon.address) as client:
            assert bool(await client.ready("m")) is bool(await client.ready()) is ready

    run(test())


def test_errors_come_as_they_are(daemon: FakeDaemon) -> None:
    async def test() -> None:
        daemon.handle = lambda message, _: [encode(Error(message.id, "PERMISSION_DENIED", "may not"))]
        async with AsyncClient(daemon.address) as client:
            for refused in (client.ready("m"), client.reload(), client.update("m", rollback=True)):
                with pytest.raises(PermissionDenied, match=r"^may not$"):
                    await refused

    run(test())


def test_a_silent_daemon_is_waited_for_until_the_deadline(daemon: FakeDaemon) -> None:
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


@pytest.mark.parametrize("gives_up", [True, False])
def test_who_is_cancelled_takes_the_request_back(daemon: FakeDaemon, *, gives_up: bool) -> None:
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
            # Its answer is dropped; that of another one is not.
            daemon.send(*encode(Error(infer.id, "CANCELLED", "")))
            daemon.send(*encode(Error(f"{infer.id[:-1]}1", "CANCELLED", "other")))
            with pytest.raises(Cancelled, match="other"):
                await other
            # What only looks is forgotten, and nothing else.
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.server(), 0.05)
            await seen(daemon)
            assert daemon.seen.empty()

    run(test())


def test_a_loss_ends_all_calls_and_one_task_connects_again(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
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
            # Nobody waits, and it is noticed all the same.
            again.stop()
            again = FakeDaemon(daemon.address)
            answer = None
            while answer is None:
                # libzmq tells of a loss a moment later: what is asked in between is lost, too.
                with contextlib.suppress(Unavailable):
                    answer = await client.infer("m", {"x": X})
            again.stop()

    run(test())


def test_a_daemon_that_reads_nothing_ends_in_the_deadline_and_its_death_the_wait(directory: Path) -> None:
    async def test() -> None:
        address = f"unix://{directory}/d.sock"
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.bind(parse_address(address).unix_path)
            deaf.listen(1)
            async with AsyncClient(address) as client:
                large = np.zeros(4 * 1024 * 1024, np.uint8)
                for _ in range(3):
                    with pytest.raises(DeadlineExceeded, match="does not read"):
                        await client.infer("m", {"x": large}, timeout=0.05)
                waiting = asyncio.ensure_future(client.infer("m", {"x": large}, timeout=LIMIT_S))
                await asyncio.sleep(0.05)
                deaf.close()
                with pytest.raises(Unavailable):
                    await waiting

    run(test())


def test_a_full_backlog_is_waited_for(daemon: FakeDaemon, directory: Path) -> None:
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


def test_close_ends_the_calls_of_others(daemon: FakeDaemon) -> None:
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


def test_another_loop_is_refused_while_it_is_connected(daemon: FakeDaemon) -> None:
    client = AsyncClient(daemon.address)

    async def test() -> None:
        await client.server()
        refused = asyncio.get_running_loop().run_in_executor(None, run, client.server(timeout=0.5))
        with pytest.raises(WrongLoop):
            await refused
        await client.close()

    run(test())


def test_asyncio_is_for_those_who_use_it() -> None:
    script = "import sys, weightd; assert 'asyncio' not in sys.modules; weightd.AsyncClient"
    subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": ":".join(sys.path)}, check=True)


@pytest.mark.parametrize("answers", [True, False])
def test_an_answer_that_has_come_while_the_process_was_stopped_is_not_too_late(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """The loop's poll returns nothing after a stop beyond its time-out, and timers run before it is called again."""
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
