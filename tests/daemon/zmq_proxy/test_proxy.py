"""A proxy in a thread, between hostile clients and a daemon that reads when the test does."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from testkit.waiting import until
from weightd_common.peer_credentials import Credentials
from weightd_common.stream import Stream
from weightd_daemon.platform.connection_limiter import NO_TENANT
from weightd_daemon.platform.listen import listen_on
from weightd_daemon.platform.tenant_lookup import TenantCredentials
from weightd_daemon.zmq_proxy import client as clients
from weightd_daemon.zmq_proxy import client_table as module
from weightd_daemon.zmq_proxy import control
from weightd_daemon.zmq_proxy.client import ProxyClient
from weightd_daemon.zmq_proxy.control import PeerConnected, ProxyConfig, ProxyLogLine
from weightd_daemon.zmq_proxy.proxy import ZmqProxy
from weightd_protocol.codec import decode, encode
from weightd_protocol.framing import MAX_FRAMES
from weightd_protocol.messages.inference import Error
from weightd_protocol.messages.types import TO_CLIENT

from .peer import COMMAND, GREETING, MORE, PING, READY, frame, message

LIMIT_S = 20.0
MIB = 2**20

[NO_TEXT] = encode(Error("", "INVALID_ARGUMENT", ""))

SERVER_GREETING = GREETING
SERVER_READY = frame(COMMAND, b"\5READY\x0bSocket-Type\0\0\0\6ROUTER\x08Identity\0\0\0\0")


class Peer:
    """A client with a complete handshake."""

    def __init__(self, path: str) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(LIMIT_S)
        self.connection.connect(path)
        self.connection.sendall(GREETING + READY)
        self.fileno, self.send = self.connection.fileno, self.connection.sendall
        self.read(len(SERVER_GREETING + SERVER_READY))

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.connection.recv(count - len(data))
            assert part, "the proxy has disconnected"
            data += part
        return data

    def rest(self) -> bytes:
        """Return what the proxy sends before it closes the connection."""
        data = b""
        try:
            while part := self.connection.recv(1 << 16):
                data += part
        except ConnectionError:
            pass
        return data


class Daemon:
    """The daemon's end of a proxy's link."""

    def __init__(self, connection: socket.socket) -> None:
        self.link = Stream(connection, accepts_descriptors=True)
        connection.settimeout(LIMIT_S)
        self.lines: list[str] = []
        self.streams: list[Stream] = []
        self.peers = 0

    def accept_client(self) -> Stream:
        """Wait for the next client and return its stream."""
        count = len(self.streams)
        while len(self.streams) == count:
            self.receive()
        return self.streams[-1]

    def has_logged(self, text: str) -> bool:
        """Read from the link until the proxy has logged this text."""
        while not any(text in line for line in self.lines):
            self.receive()
        return True

    def receive(self) -> None:
        for each in self.link.receive():
            event = control.parse_proxy_message(each.frames[0])
            if isinstance(event, PeerConnected):
                self.streams.append(Stream(socket.socket(fileno=self.link.descriptors.popleft())))
                self.streams[-1].connection.settimeout(LIMIT_S)
                self.peers = event.peer_count
            elif isinstance(event, ProxyLogLine):
                self.lines.append(event.text)
            else:
                self.peers = event


class ProxyHarness:
    """A proxy with its daemon and clients."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.peers: list[Any] = []
        self.daemon: Daemon
        self.proxy: ZmqProxy

    def connect(self) -> Peer:
        self.peers.append(Peer(self.path).connection)
        made = Peer.__new__(Peer)
        made.connection = self.peers[-1]
        made.fileno, made.send = made.connection.fileno, made.connection.sendall
        return made

    def raw(self, data: bytes = b"") -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        self.peers.append(made)
        made.settimeout(LIMIT_S)
        made.connect(self.path)
        with contextlib.suppress(ConnectionError):
            made.sendall(data)
        return made

    def connect_active(self) -> tuple[Peer, Stream]:
        """Return a client that has sent a message, and the daemon's stream of it."""
        peer = self.connect()
        peer.send(message([b"hello"]))
        stream = self.daemon.accept_client()
        assert received(stream) == [[b"hello"]]
        return peer, stream


def received(stream: Stream) -> list[list[bytes]]:
    return [[bytes(part) for part in each.frames] for each in stream.receive()]


Start = Callable[..., ProxyHarness]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    harnesses: list[tuple[ProxyHarness, ZmqProxy, threading.Thread, socket.socket]] = []
    # Limits apply to the tests' user, even if that is an operator.
    monkeypatch.setattr(clients, "is_operator", lambda _: False)

    def started(
        max_memory_bytes: int = 64 * MIB,
        max_user_connections: int = 0,
        rate: float = 0.0,
        max_connections: int = 0,
        tenants: Sequence[TenantCredentials] | None = None,
    ) -> ProxyHarness:
        ours, proxy_end = socket.socketpair()
        listener = stack.enter_context(listen_on(f"ipc://{tmp_path}/s"))
        config = ProxyConfig(
            "default",
            "",
            max_memory_bytes,
            max_memory_bytes,
            max_connections,
            max_user_connections,
            rate,
            "",
            None,
            tenants,
            control.error_prefix(bytes(NO_TEXT)),
        )
        proxy = ZmqProxy(listener, Stream(proxy_end), config)
        thread = threading.Thread(target=proxy.run)
        thread.start()
        harness = ProxyHarness(tmp_path / "s")
        harness.daemon, harness.proxy = Daemon(ours), proxy
        harnesses.append((harness, proxy, thread, proxy_end))
        return harness

    with contextlib.ExitStack() as stack:
        yield started
        for harness, proxy, thread, proxy_end in harnesses:
            for each in (*harness.peers, *harness.daemon.streams, harness.daemon.link):
                each.close()
            thread.join()
            proxy.close()
            proxy_end.close()


# --- limits of connections --------------------------------------------------------------------------------------------


def is_closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def is_greeted(connection: socket.socket) -> bool:
    """Return whether the proxy sends a greeting."""
    try:
        return connection.recv(1) != b""
    except ConnectionError:
        return False


def test_limits_connections_of_a_user(start: Start) -> None:
    harness = start(max_user_connections=2)
    first, _ = harness.connect(), harness.connect()
    refused = harness.raw()
    assert not is_greeted(refused)
    assert harness.daemon.has_logged("refused: this user has 2 connections already (max_user_connections)")
    first.connection.close()
    until(lambda: is_greeted(harness.raw()), "a connection is free")


def test_limits_the_connection_rate_of_a_user(start: Start) -> None:
    harness = start(rate=1.0)
    assert is_greeted(harness.raw(GREETING))
    assert not is_greeted(harness.raw(GREETING))
    assert harness.daemon.has_logged("opens more than 1 connections a second (max_user_connection_rate)")


def test_operators_are_not_limited(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = start(max_user_connections=1)
    monkeypatch.setattr(clients, "is_operator", lambda uid: uid == os.getuid())
    for _ in range(3):
        harness.connect()


def test_listener_limit_evicts_silent_connections(start: Start) -> None:
    harness = start(max_connections=2)
    silent, (speaks, _) = harness.connect(), harness.connect_active()
    _, stream = harness.connect_active()
    assert silent.rest() == b""
    assert harness.daemon.has_logged("expected at most 2 connections (max_connections), got 3, of which uid")
    speaks.send(message([b"again"]))
    assert received(harness.daemon.streams[0]) == [[b"again"]]
    assert stream is harness.daemon.streams[1]


def passes(peer: Peer, stream: Stream) -> bool:
    """Return whether the proxy passes the client's messages on."""
    peer.send(message([b"again"]))
    return received(stream) == [[b"again"]]


@pytest.fixture
def uid(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list with the user id that the kernel reports for the next connections."""
    current = [1]
    monkeypatch.setattr(clients, "peer_credentials", lambda _: Credentials(1, current[0], current[0]))
    monkeypatch.setattr(clients, "peer_groups", lambda _: ())
    return current


# In the second case, user 5 belongs to a tenant that may not use this listener.
@pytest.mark.parametrize("first", [100_000, 5])
def test_users_without_tenant_do_not_evict_tenants(start: Start, uid: list[int], first: int) -> None:
    tables = [TenantCredentials("b", [2]), TenantCredentials(NO_TENANT, [5])]
    harness = start(max_connections=8, max_user_connections=3, tenants=tables)
    uid[0] = 2
    own = [harness.connect_active() for _ in range(2)]
    for number in range(20):
        uid[0] = first + number * (first != 5)
        # The proxy sends its greeting before it evicts the excess connections.
        assert is_greeted(harness.raw(GREETING))
    assert harness.daemon.has_logged(
        "expected at most 2 of users without a tenant, a part of 8 (max_connections), got 3"
    )
    until(lambda: {*harness.proxy._clients.users} == {"uid 2", NO_TENANT}, "they count as one user")
    until(lambda: len(harness.proxy._clients.users[NO_TENANT].clients) == 2, "they have a quarter of the connections")
    uid[0] = 2
    own.append(harness.connect_active())
    assert all(passes(*each) for each in own)


def test_reloaded_tenants_apply_to_open_connections(start: Start, uid: list[int]) -> None:
    harness = start(max_connections=4, tenants=[TenantCredentials("a", [1])])
    uid[0] = 2
    early = harness.connect_active()
    harness.daemon.link.send(
        [control.encode_allowed_peers(None, [TenantCredentials("a", [1]), TenantCredentials("b", [2])])]
    )
    until(lambda: [*harness.proxy._clients._limiter._accounts] == ["b"], "the proxy knows the tenant")
    uid[0] = 1
    for _ in range(5):
        harness.connect()
    assert passes(*early)


def test_many_users_do_not_evict_active_clients(start: Start, uid: list[int]) -> None:
    harness = start(max_connections=8)
    uid[0] = 2
    own = [harness.connect_active()]
    for number in range(20):
        uid[0] = 100_000 + number
        harness.connect()
    assert passes(*own[0])
    # If every client has sent a message, the new connection is refused.
    uid[0] = 200_000
    for _ in range(7):
        uid[0] += 1
        own.append(harness.connect_active())
    uid[0] += 1
    assert is_closed(harness.raw(GREETING))
    assert all(passes(*each) for each in own)


def test_evicts_a_users_idle_connection_first(start: Start, uid: list[int]) -> None:
    harness = start(max_connections=2)
    idle, busy = (harness.connect_active() for _ in range(2))
    idle[1].send([b"answer"])
    busy[1].send([b"answer"])
    for peer, _ in (idle, busy):
        peer.read(len(message([b"answer"])))
    busy[0].send(message([b"again"]))
    assert received(busy[1]) == [[b"again"]]
    until(
        lambda: (
            [each.is_busy for user in harness.proxy._clients.users.values() for each in user.clients].count(True) == 1
        ),
        "one request is in progress",
    )
    uid[0] = 2
    harness.connect_active()
    assert idle[0].rest() == b""
    assert passes(*busy)


def test_limits_log_lines_about_one_user(start: Start) -> None:
    harness = start()
    for _ in range(50):
        assert is_closed(harness.raw(b"GET / HTTP/1.1\r\n\r\n"))
    _, _ = harness.connect_active()
    assert len(harness.daemon.lines) == 1
    assert "expected a greeting of ZMTP" in harness.daemon.lines[0]


# --- handshakes -------------------------------------------------------------------------------------------------------


def test_slow_handshake_times_out(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 0.3)
    harness = start()
    peer = harness.raw()
    begin = time.monotonic()
    trickle = GREETING + READY + bytes(1000)

    def is_open() -> bool:
        nonlocal trickle
        peer.sendall(trickle[:1])
        trickle = trickle[1:]
        return not select.select([peer], [], [], 0.05)[0] or bool(peer.recv(100))

    with contextlib.suppress(ConnectionError):
        while is_open():
            pass
    assert time.monotonic() - begin < 3.0
    assert harness.daemon.has_logged("its handshake is not complete after 0.3 s")


def test_limits_handshakes_of_a_user_and_drops_the_oldest(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_USER_HANDSHAKES", 2)
    monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 600.0)
    harness = start()
    done = harness.connect()
    first, second, third = (harness.raw(GREETING[:20]) for _ in range(3))
    assert is_closed(first)
    for each in (second, third):
        each.sendall(GREETING[20:] + READY)
        assert each.recv(1)
    done.send(message([b"x"]))
    assert received(harness.daemon.accept_client()) == [[b"x"]]


def test_other_socket_type_gets_an_error(start: Start) -> None:
    harness = start()
    peer = harness.raw(GREETING + READY.replace(b"\6DEALER", b"\6SOCKET"))
    data = b""
    while part := peer.recv(1000):
        data += part
    assert data[64:] == frame(COMMAND, b"\5ERROR\x2eexpected a socket of type DEALER, got 'SOCKET'")


# --- limits of messages -----------------------------------------------------------------------------------------------


def error_in(data: bytes) -> Error:
    """Return the last message sent to a client."""
    assert data[0] & 6 == 0
    assert data[1] == len(data) - 2
    [error] = [decode([data[2:]], TO_CLIENT)]
    assert isinstance(error, Error)
    return error


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\1\0" * 10_000, "frames: expected a message of at most 66 frames, got more"),
        (b"\2" + bytes(3) + b"\xff" * 5, "frames: expected at most 1048576 bytes in a frame, got 1099511627775"),
        (frame(MORE, bytes(MIB)) * 2, "expected a message of at most 1048576 bytes (max_memory_bytes), got 2097152"),
    ],
)
def test_invalid_message_gets_an_error_and_affects_no_other(start: Start, data: bytes, text: str) -> None:
    harness = start(max_memory_bytes=MIB)
    other, stream = harness.connect_active()
    bad, its_stream = harness.connect_active()
    with contextlib.suppress(ConnectionError):
        bad.send(data)
    error = error_in(bad.rest())
    assert (error.id, error.code) == ("", "INVALID_ARGUMENT")
    assert text in error.error
    assert error.error.endswith("; closing this connection")
    assert its_stream.connection.recv(1) == b""
    other.send(message([b"x"] * MAX_FRAMES))
    assert received(stream) == [[b"x"] * MAX_FRAMES]


def test_memory_limit_disconnects_the_largest_user(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["small", "large", "large"])
    monkeypatch.setattr(clients, "identify_user", lambda *_: (next(names), False))
    harness = start(max_memory_bytes=4 * MIB)
    small, first, second = (harness.connect() for _ in range(3))
    small.send(frame(MORE, bytes(MIB)))
    first.send(frame(MORE, bytes(MIB + 1)))
    second.send(frame(MORE, bytes(MIB // 2)))
    second.send(frame(MORE, bytes(MIB)))
    with contextlib.suppress(ConnectionError):
        for _ in range(24):
            second.send(frame(MORE, bytes(1 << 16)))
    assert harness.daemon.has_logged("bytes (max_memory_bytes) are kept for clients, and ")
    small.send(frame(0, b"end"))
    assert [len(each) for [each, *_] in received_all(harness.daemon.accept_client())] == [MIB]
    first.send(frame(0, b"end"))
    assert [len(each) for [each, *_] in received_all(harness.daemon.accept_client())] == [MIB + 1]
    # The memory of the disconnected client is released.
    until(
        lambda: [each.buffered_bytes for each in harness.proxy._clients.users.values()] == [0, 0], "buffers are empty"
    )


def received_all(stream: Stream) -> list[list[Any]]:
    """Return the next messages, whose frames may be large."""
    stream.frame_reader = link_incoming()
    messages: list[list[Any]] = []
    while not messages:
        messages = received(stream)
    return messages


def link_incoming() -> Any:
    from weightd_protocol.framing import FrameReader

    return FrameReader(max_header_bytes=2**30)


def test_ping_flood_gets_few_pongs(start: Start) -> None:
    harness = start()
    peer, _ = harness.connect_active()
    peer.send(PING * 10_000 + message([b"x"]))
    assert received(harness.daemon.streams[0]) == [[b"x"]]
    pong = frame(COMMAND, b"\4PONGcontext")
    assert peer.read(len(pong)) == pong
    peer.connection.setblocking(False)
    rest = peer.connection.recv(1 << 20)
    assert len(rest) < 200 * len(pong)


# --- slow readers -----------------------------------------------------------------------------------------------------


def test_slow_daemon_stream_does_not_block_others(start: Start) -> None:
    harness = start()
    stuck, _ = harness.connect_active()
    stuck.connection.setblocking(False)
    part = message([b"", bytes(MIB - 100)])
    sent = 0
    idle = 0
    while idle < 3:
        try:
            sent += stuck.connection.send(part[sent % len(part) :])
            idle = 0
        except BlockingIOError:
            idle += not select.select([], [stuck], [], 0.1)[1]
    # The proxy buffers one complete message and at most a part of the next one.
    assert sent < 6 * MIB
    client, stream = harness.connect_active()
    client.send(message([b"x"]))
    assert received(stream) == [[b"x"]]
    # The proxy continues when the daemon reads.
    count = sent // len(part)
    stream = harness.daemon.streams[0]
    found: list[list[Any]] = []
    while len(found) < count:
        found += received_all(stream)
    assert [len(each[1]) for each in found] == [MIB - 100] * count


def test_slow_client_does_not_block_others(start: Start) -> None:
    harness = start()
    slow, stream = harness.connect_active()
    stream.connection.setblocking(False)
    answers = [[b"%d" % number, bytes(MIB)] for number in range(8)]
    for each in answers:
        stream.send(each)
    while select.select([], [stream], [], 0.3)[1]:
        stream.flush()
    # The proxy buffers one message; the others wait in the daemon, which counts them.
    assert stream.unsent > 5 * MIB
    client, its_stream = harness.connect_active()
    its_stream.send([b"x"])
    assert client.read(3) == b"\0\1x"
    expected = b"".join(map(message, answers))
    data = b""
    while len(data) < len(expected):
        readable, writable, _ = select.select([slow], [stream] if stream.unsent else [], [], LIMIT_S)
        assert readable or writable
        if writable:
            stream.flush()
        if readable:
            data += slow.connection.recv(1 << 20)
    assert data == expected


def test_last_responses_arrive_before_the_disconnect(start: Start) -> None:
    harness = start()
    peer, stream = harness.connect_active()

    def end() -> None:
        stream.connection.setblocking(True)
        stream.send([bytes(3 * MIB)])
        stream.close()

    thread = threading.Thread(target=end)
    thread.start()
    data = peer.rest()
    thread.join()
    assert data == message([bytes(3 * MIB)])
    harness.daemon.streams.remove(stream)


def test_disconnect_of_a_client_reaches_the_daemon(start: Start) -> None:
    harness = start()
    _, (peer, stream) = harness.connect_active(), harness.connect_active()
    peer.connection.close()
    assert stream.connection.recv(1) == b""
    while harness.daemon.peers != 1:
        harness.daemon.receive()


# --- the link to the daemon -------------------------------------------------------------------------------------------


class FailingLink:
    """The proxy's end of its link, which can fail to pass descriptors."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.error = 0
        self.refused = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def sendmsg(self, pieces: Any, ancillary: Any = ()) -> int:
        if self.error and ancillary:
            self.refused += 1
            raise OSError(self.error, os.strerror(self.error))
        return self._connection.sendmsg(pieces, ancillary)


@pytest.fixture
def failing_link(start: Start) -> tuple[ProxyHarness, FailingLink]:
    harness = start()
    connection: Any = FailingLink(harness.proxy._link.stream.connection)
    harness.proxy._link.stream.connection = connection
    return harness, connection


def test_clients_wait_while_too_many_descriptors_are_in_flight(
    failing_link: tuple[ProxyHarness, FailingLink],
) -> None:
    harness, connection = failing_link
    early = harness.connect_active()
    connection.error = errno.ETOOMANYREFS
    late = [harness.connect() for _ in range(3)]
    for number, each in enumerate(late):
        each.send(message([b"%d" % number]))
        assert passes(*early)
    # At least three attempts: for two of the new clients, and by the timer.
    until(lambda: connection.refused >= 3, "the proxy tries again")
    connection.error = 0
    assert {bytes(received(harness.daemon.accept_client())[0][0]) for _ in late} == {b"0", b"1", b"2"}


def test_descriptor_exhaustion_disconnects_one_client_only(failing_link: tuple[ProxyHarness, FailingLink]) -> None:
    harness, connection = failing_link
    early = harness.connect_active()
    connection.error = errno.EMFILE
    late = harness.connect()
    late.send(message([b"x"]))
    assert late.rest() == b""
    connection.error = 0
    assert harness.daemon.has_logged(
        f"disconnecting a client of uid {os.getuid()}: no stream to the daemon: Too many open files"
    )
    assert passes(*early)
    harness.connect_active()


def test_last_responses_arrive_with_a_full_link(start: Start) -> None:
    harness = start()
    peer, stream = harness.connect_active()
    harness.proxy._link.stream.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    others = [harness.connect() for _ in range(20)]
    for each in others:
        each.send(message([b"x"]))
    until(lambda: harness.proxy._relay._peer_count == 21 and harness.proxy._link.stream.unsent > 0, "the link is full")
    answer = bytes(2 * MIB)
    stream.send([answer])
    while not stream.flush():
        pass
    # The proxy buffers the response until its client reads.
    until(lambda: harness.proxy._clients.buffered_bytes >= MIB, "the proxy has the response")
    harness.daemon.link.close()
    # Streams that the daemon has not received are closed with the link.
    until(lambda: harness.proxy._relay._peer_count < 21, "some clients have disconnected")
    assert peer.read(9 + len(answer))[9:] == answer


# --- fairness ---------------------------------------------------------------------------------------------------------


def test_flood_of_one_user_does_not_block_another(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter([*["many"] * 20, "one"])
    monkeypatch.setattr(clients, "identify_user", lambda *_: (next(names), False))
    harness = start()
    # Many connections of one user have many tiny messages before another user sends one.
    order: list[str] = []
    flood = frame(0, b"x") * 20_000
    flooders = [harness.connect_active() for _ in range(20)]
    one, its_stream = harness.connect_active()
    for peer, _ in flooders:
        peer.connection.setblocking(False)
        peer.connection.send(flood)
    one.send(message([b"y"]))
    streams: Sequence[Any] = [its_stream, *(stream for _, stream in flooders)]
    handled = 0
    while "one" not in order:
        for stream in select.select(streams, [], [], LIMIT_S)[0]:
            found = len(received(stream))
            handled += found
            order.append("one" if stream is its_stream else "many")
    assert handled < 20 * 20_000 / 10


# --- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begin", "data"),
    [
        (b"\xff", b""),
        (b"\4", message([b"x"])),
        (b"\4\x0c", PING + message([b"x"])),
        (b"\0", b"\1\0" * (MAX_FRAMES + 1)),
    ],
    ids=["greeting", "ready", "pong", "error"],
)
def test_send_to_a_closed_client_affects_no_other(
    start: Start, begin: bytes, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(["other", "leaves"])
    monkeypatch.setattr(clients, "identify_user", lambda *_: (next(names), False))
    harness = start()
    other, stream = harness.connect_active()
    send = ProxyClient.send

    def broken(client: ProxyClient, pieces: Sequence[Any]) -> bool:
        if b"".join(pieces).startswith(begin):
            raise BrokenPipeError
        return send(client, pieces)

    with monkeypatch.context() as patched:
        patched.setattr(ProxyClient, "send", broken)
        assert is_closed(harness.raw(GREETING + READY + data))
    other.send(message([b"y"]))
    assert received(stream) == [[b"y"]]
