from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightd_common.peers import Peer
from weightd_gateway.connection_limiter import GatewayConnectionLimiter
from weightd_gateway.grpc import http2_filter as relay
from weightd_gateway.grpc import http2_frames
from weightd_gateway.grpc.http2_filter import CALLS_BURST, CALLS_PER_S, Http2Filter
from weightd_gateway.grpc.http2_frames import MAX_UNANSWERED_BYTES, PREFACE, SHORT_BYTES, FrameHeads
from weightd_gateway.tls_handshakes import Handshakes

END_HEADERS = 4


def frame(kind: int, content: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


RESET_CALL = frame(http2_frames.HEADERS, b"\x82", END_HEADERS) + frame(http2_frames.RST_STREAM, bytes(4))
# One read may exceed the limit by this amount before the filter checks again.
STEP = relay._STEP_BYTES // len(RESET_CALL) + 1


class FakeTransport(asyncio.Transport):
    """A transport that records the written bytes and whether reading is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_paused = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def abort(self) -> None:
        pass


class Connected:
    """A connection after its preface, with a clock that the test controls."""

    def __init__(self, relay: Http2Filter, peer: Peer) -> None:
        self.client = _Client(relay, peer)
        self.near, self.far = FakeTransport(), FakeTransport()
        self.client.connection_made(self.near)
        self.client._is_connecting = True
        self.client.data_received(PREFACE)
        self.client.on_library_connected(self.far)

    @property
    def calls(self) -> int:
        """Return the number of calls that the gRPC library has seen."""
        return sum(kind == http2_frames.HEADERS for kind, _, _, _ in FrameHeads().feed(self.far.written, len(PREFACE)))


_Client = relay._Client
NOW = [0.0]
PEER = Peer("uid 7", 7)


@pytest.fixture
def relayed(monkeypatch: pytest.MonkeyPatch) -> Http2Filter:
    NOW[0] = 100.0
    monkeypatch.setattr(relay, "time", SimpleNamespace(monotonic=lambda: NOW[0]))
    return Http2Filter(Path("/nowhere"), GatewayConnectionLimiter(100, 0.0), 5.0, Handshakes())


def run(scenario: Any) -> None:
    async def within() -> None:
        scenario()

    asyncio.run(within())


def test_limits_rate_of_empty_calls_per_peer(relayed: Http2Filter) -> None:
    def scenario() -> None:
        first, second = Connected(relayed, PEER), Connected(relayed, PEER)
        first.client.data_received(RESET_CALL * 3000)
        assert CALLS_BURST <= first.calls <= CALLS_BURST + STEP
        assert first.near.is_paused
        second.client.data_received(RESET_CALL * 10)
        assert second.calls == 0
        other = Connected(relayed, PEER._replace(key="uid 8"))
        other.client.data_received(RESET_CALL * 10)
        assert (other.calls, other.near.is_paused) == (10, False)
        NOW[0] += 1.0
        first.client._retry_held()
        assert CALLS_BURST + CALLS_PER_S - STEP <= first.calls <= CALLS_BURST + CALLS_PER_S + STEP

    run(scenario)


def test_does_not_limit_rate_of_calls_with_messages(relayed: Http2Filter) -> None:
    def scenario() -> None:
        connected = Connected(relayed, PEER)
        for _ in range(100):
            connected.client.data_received(frame(http2_frames.HEADERS, b"\x82", END_HEADERS) * 100)
            connected.client.on_library_data(frame(http2_frames.DATA, bytes(5)) * 100)
        assert connected.calls == 10_000

    run(scenario)


def test_passes_held_bytes_in_order(relayed: Http2Filter) -> None:
    def scenario() -> None:
        connected = Connected(relayed, PEER)
        sent = b"".join(frame(http2_frames.HEADERS, bytes([0x82, n & 127]), END_HEADERS) for n in range(4000))
        connected.client.data_received(sent)
        # The kernel may deliver bytes that it received before reading was paused.
        connected.client.data_received(RESET_CALL)
        for _ in range(10):
            NOW[0] += 1.0
            connected.client._retry_held()
        assert connected.far.written == PREFACE + sent + RESET_CALL
        assert not connected.near.is_paused

    run(scenario)


END_STREAM = 1


def calls(*streams: int) -> bytes:
    return b"".join(frame(http2_frames.HEADERS, b"\x82", END_HEADERS, each) for each in streams)


def data(stream: int, nbytes: int = 16 * 1024) -> bytes:
    return frame(http2_frames.DATA, bytes(nbytes), 0, stream)


def test_limits_unexpected_messages(relayed: Http2Filter) -> None:
    def scenario() -> None:
        connected = Connected(relayed, PEER)
        sent = calls(1, 3) + data(1) * 100 + data(3) * 100
        connected.client.data_received(sent)
        passed_on = len(connected.far.written)
        limit = MAX_UNANSWERED_BYTES + 2 * SHORT_BYTES
        assert limit < passed_on < limit + 100_000
        assert connected.near.is_paused
        assert connected.client.is_full
        for _ in range(20):
            connected.client._retry_held()
        assert len(connected.far.written) == passed_on
        # The call has a permit, so its message may be long.
        connected.client.expect(1)
        assert (connected.far.written, connected.near.is_paused) == (PREFACE + sent, False)
        connected.client.data_received(data(1) * 100)
        connected.client.expect(-1)
        assert connected.far.written == PREFACE + sent + data(1) * 100

    run(scenario)


@pytest.mark.parametrize(
    "end", [frame(http2_frames.HEADERS, b"\x88", END_HEADERS | END_STREAM, 1), frame(3, bytes(4), 0, 1)]
)
def test_ended_call_has_no_pending_bytes(relayed: Http2Filter, end: bytes) -> None:
    def scenario() -> None:
        connected = Connected(relayed, PEER)
        connected.client.data_received(calls(1, 3) + data(1) * 100)
        assert connected.near.is_paused
        # No timer retries; the end of the call resumes reading.
        assert connected.client._retry_timer is None
        connected.client.on_library_data(end)
        assert (connected.far.written, connected.near.is_paused) == (PREFACE + calls(1, 3) + data(1) * 100, False)

    run(scenario)


def test_never_limits_short_messages(relayed: Http2Filter) -> None:
    def scenario() -> None:
        connected = Connected(relayed, PEER)
        streams = [*range(1, 101, 2)]
        connected.client.data_received(calls(*streams) + b"".join(data(each, 60_000) for each in streams))
        # A call may have many messages, each with a response.
        for _ in range(50):
            connected.client.data_received(data(1, 60_000))
            connected.client.on_library_data(data(1, 5))
        assert not connected.near.is_paused

    run(scenario)


def test_stop_delivers_pending_answer(tmp_path: Path) -> None:
    answer = data(1, 60_000) * 100

    async def library(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(PREFACE))
        connected.set()
        await stopped.wait()
        writer.write(answer)
        writer.close()

    async def scenario() -> None:
        relay = _relay(tmp_path)
        near, far = socket.socketpair()
        near.setblocking(False)
        async with await asyncio.start_unix_server(library, tmp_path / "grpc"):
            relay.on_connection(near, PEER, None)
            reader, writer = await asyncio.open_unix_connection(sock=far)
            writer.write(PREFACE)
            await asyncio.wait_for(connected.wait(), 10.0)
            stop = asyncio.create_task(_stop(relay))
            await asyncio.sleep(0)
            stopped.set()
            assert await asyncio.wait_for(reader.read(), 10.0) == answer
            await asyncio.wait_for(stop, 10.0)
            writer.close()

    connected, stopped = asyncio.Event(), asyncio.Event()
    asyncio.run(scenario())


def test_delivers_answer_after_failed_write_to_library(tmp_path: Path) -> None:
    answer = data(1)

    async def scenario() -> None:
        relay = _relay(tmp_path)
        near, far = socket.socketpair()
        near.setblocking(False)
        far.settimeout(10.0)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "grpc"))
            listener.listen()
            listener.setblocking(False)
            relay.on_connection(near, PEER, None)
            far.sendall(PREFACE)
            library, _ = await asyncio.get_running_loop().sock_accept(listener)
            assert await asyncio.get_running_loop().sock_recv(library, 1024) == PREFACE
            # The loop sees all three together, the client's frame first.
            far.sendall(frame(http2_frames.PING, bytes(8)))
            library.sendall(answer)
            library.close()
            await asyncio.wait_for(relay.drain(10.0), 10.0)
            assert far.recv(len(answer), socket.MSG_WAITALL) == answer
            far.close()

    asyncio.run(scenario())


def _relay(directory: Path) -> Http2Filter:
    """Return a relay whose limiter has admitted one connection of `PEER`."""
    limiter = GatewayConnectionLimiter(100, 0.0)
    assert limiter.admit(PEER, 0.0) is None
    return Http2Filter(directory / "grpc", limiter, 5.0, Handshakes())


async def _stop(relay: Http2Filter) -> None:
    await relay.drain(10.0)
    relay.abort()
