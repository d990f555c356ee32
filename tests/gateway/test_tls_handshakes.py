from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.certificates import AUTHORITY, SERVER
from weightd_common.peers import Peer
from weightd_gateway.tls_handshakes import LOOP_SHARE, FairThrottle, HandshakeLimiter, Handshakes

A, B = Peer("uid 1"), Peer("host 10.0.0.2")


class HandshakeSim:
    """A clock that advances with work and with scheduled calls."""

    def __init__(self, share: float = LOOP_SHARE) -> None:
        self.now = 0.0
        self.busy = 0.0
        self.due: list[tuple[float, Callable[[], None]]] = []
        self.done: list[str] = []
        self.pace = FairThrottle(
            share, lambda seconds, call: self.due.append((self.now + seconds, call)), lambda: self.now
        )

    def want(self, key: str, seconds: float) -> None:
        def work() -> None:
            self.now += seconds
            self.busy += seconds
            self.done.append(key)

        self.pace.run(key, work)

    def step(self) -> None:
        self.now, call = self.due.pop(0)
        call()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 0.01)), min_size=1, max_size=50))
def test_runs_all_work_within_its_share_of_time(wanted: list[tuple[str, float]]) -> None:
    sim = HandshakeSim()
    for key, seconds in wanted:
        sim.want(key, seconds)
    while sim.due:
        sim.step()
        assert sim.busy <= LOOP_SHARE * sim.now + 0.01
    assert sorted(sim.done) == sorted(key for key, _ in wanted)


def test_busy_peer_delays_others_by_one_handshake() -> None:
    sim = HandshakeSim()
    for _ in range(100):
        sim.want("a", 0.001)
    sim.step()
    sim.want("b", 0.001)
    sim.step()
    assert sim.done == ["a", "a", "b"]


def test_failed_work_keeps_the_rest() -> None:
    sim = HandshakeSim()
    sim.want("a", 0.001)

    def fail() -> None:
        raise KeyError

    sim.pace.run("a", fail)
    sim.want("a", 0.001)
    with pytest.raises(KeyError):
        sim.step()
    sim.step()
    assert sim.done == ["a", "a"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_limiter_is_fair_and_loses_no_place(steps: list[tuple[str, bool]]) -> None:
    places, has, waits = (
        HandshakeLimiter(8),
        list[tuple[str, Callable[[], None]]](),
        list[tuple[str, Callable[[], None]]](),
    )

    def beginning(key: str) -> Callable[[], None]:
        def begin() -> None:
            waits.remove((key, begin))
            has.append((key, begin))

        return begin

    for key, comes in steps:
        if comes:
            begin = beginning(key)
            waits.append((key, begin))
            places.take(key, begin)
        elif mine := [each for each in has + waits if each[0] == key]:
            (waits if mine[-1] in waits else has).remove(mine[-1])
            places.release(*mine[-1])
        assert len(has) <= 8
        assert all(any(key == each for each, _ in has) for key, _ in waits), (
            "the first handshake of a peer waits for no other peer"
        )
    for each in [*has]:
        has.remove(each)
        places.release(*each)
    while has:
        places.release(*has.pop())
    assert not waits


class Echo(asyncio.Protocol):
    """A protocol that echoes and closes the connection at the end of the input."""

    transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS contexts of a server and a client."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*SERVER.write(tmp_path_factory.mktemp("tls"), "server"))
    return server, ssl.create_default_context(cadata=AUTHORITY)


def connected(handshakes: Handshakes, peer: Peer, context: ssl.SSLContext) -> tuple[socket.socket, asyncio.Task[None]]:
    """Return a client's socket, and the task of its handshake."""
    near, far = socket.socketpair()
    for each in (near, far):
        each.setblocking(False)
    return far, asyncio.create_task(handshakes.complete(near, peer, context, 30.0, Echo))


class Client:
    """The client side of TLS."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self._outgoing, server_hostname="localhost")

    def handshake_bytes(self) -> bytes:
        """Return the next bytes of the handshake."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()
        return self._outgoing.read()

    def encrypt(self, data: bytes) -> bytes:
        """Return the data, encrypted."""
        self.tls.write(data)
        return self._outgoing.read()


@pytest.mark.parametrize("size", [1, 100_000])
def test_data_behind_handshake_reaches_protocol(contexts: tuple[ssl.SSLContext, ssl.SSLContext], size: int) -> None:
    async def scenario() -> None:
        loop, client, handshakes = asyncio.get_running_loop(), Client(contexts[1]), Handshakes()
        far, task = connected(handshakes, A, contexts[0])
        with far:
            hello = client.handshake_bytes()
            for begin in range(0, len(hello), size):
                await loop.sock_sendall(far, hello[begin : begin + size])
                await asyncio.sleep(0)
            flight = b""
            while not flight:
                client.incoming.write(await loop.sock_recv(far, 65536))
                flight = client.handshake_bytes()
            assert handshakes.in_progress == 1
            await loop.sock_sendall(far, flight + client.encrypt(b"ping"))
            await task
            assert handshakes.in_progress == 0
            answer = b""
            while not answer:
                client.incoming.write(await loop.sock_recv(far, 65536))
                with contextlib.suppress(ssl.SSLWantReadError):
                    answer = client.tls.read()
            assert answer == b"ping"

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_limits_running_handshakes_of_a_peer(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async def scenario() -> None:
        handshakes = Handshakes(8)
        many = [connected(handshakes, A, contexts[0]) for _ in range(10)]
        await asyncio.sleep(0)
        other, task = connected(handshakes, B, contexts[0])
        await asyncio.wait([each for _, each in many], return_when=asyncio.FIRST_COMPLETED)
        refused = [each for _, each in many if each.done()]
        assert len(refused) == 4
        for each in refused:
            with pytest.raises(ConnectionAbortedError, match="uid 1 has reached its share of 8 TLS handshakes"):
                await each
        assert not task.done()
        for far in (other, *(far for far, _ in many)):
            far.close()
        await asyncio.gather(task, *(each for _, each in many), return_exceptions=True)
        assert handshakes.in_progress == 0

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_unfinished_handshake_does_not_delay_other_peers(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    async def scenario() -> None:
        loop, handshakes, client = asyncio.get_running_loop(), Handshakes(100, 8), Client(contexts[1])
        hello = client.handshake_bytes()
        many = [connected(handshakes, A, contexts[0]) for _ in range(50)]
        for far, _ in many:
            far.send(hello)
        await asyncio.gather(*(loop.sock_recv(far, 65536) for far, _ in many[:6]))
        other, task = connected(handshakes, B, contexts[0])
        await loop.sock_sendall(other, hello)
        client.incoming.write(await loop.sock_recv(other, 65536))
        await loop.sock_sendall(other, client.handshake_bytes())
        await task
        assert not any(each.done() for _, each in many)
        for far, _ in many:
            far.close()
        await asyncio.gather(*(each for _, each in many), return_exceptions=True)
        other.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_skips_handshake_of_disconnected_client(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async def scenario() -> None:
        far, task = connected(Handshakes(), A, contexts[0])
        with far:
            far.send(Client(contexts[1]).handshake_bytes())
            far.shutdown(socket.SHUT_WR)
            with pytest.raises(OSError):  # noqa: PT011 - asyncio decides on the kind
                await task
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.get_running_loop().sock_recv(far, 1) == b""

    asyncio.run(asyncio.wait_for(scenario(), 30))
