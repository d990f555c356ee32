"""A proxy in a thread, between clients that are hostile and a daemon that reads when it is told to."""

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
    """A client; its handshake is done."""

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
            assert part, "the gate has hung up"
            data += part
        return data

    def rest(self) -> bytes:
        """What comes before the proxy ends the connection."""
        data = b""
        try:
            while part := self.connection.recv(1 << 16):
                data += part
        except ConnectionError:
            pass
        return data


class Daemon:
    """The other end of a proxy's link."""

    def __init__(self, connection: socket.socket) -> None:
        self.link = Stream(connection, accepts_descriptors=True)
        connection.settimeout(LIMIT_S)
        self.lines: list[str] = []
        self.lanes: list[Stream] = []
        self.peers = 0

    def meet(self) -> Stream:
        """Wait for somebody new."""
        count = len(self.lanes)
        while len(self.lanes) == count:
            self.hear()
        return self.lanes[-1]

    def told(self, text: str) -> bool:
        """Hear the proxy until it has logged this."""
        while not any(text in line for line in self.lines):
            self.hear()
        return True

    def hear(self) -> None:
        for each in self.link.receive():
            said = control.parse_proxy_message(each.frames[0])
            if isinstance(said, PeerConnected):
                self.lanes.append(Stream(socket.socket(fileno=self.link.descriptors.popleft())))
                self.lanes[-1].connection.settimeout(LIMIT_S)
                self.peers = said.peer_count
            elif isinstance(said, ProxyLogLine):
                self.lines.append(said.text)
            else:
                self.peers = said


class Scene:
    """A proxy, its daemon, and clients."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.peers: list[Any] = []
        self.daemon: Daemon
        self.gate: ZmqProxy

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

    def met(self) -> tuple[Peer, Stream]:
        """A client that has spoken, and the daemon's end."""
        peer = self.connect()
        peer.send(message([b"hello"]))
        lane = self.daemon.meet()
        assert received(lane) == [[b"hello"]]
        return peer, lane


def received(lane: Stream) -> list[list[bytes]]:
    return [[bytes(part) for part in each.frames] for each in lane.receive()]


Start = Callable[..., Scene]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    scenes: list[tuple[Scene, ZmqProxy, threading.Thread, socket.socket]] = []
    # The tests' own user is limited like any other.
    monkeypatch.setattr(clients, "is_operator", lambda _: False)

    def started(
        max_memory_bytes: int = 64 * MIB,
        most: int = 0,
        rate: float = 0.0,
        max_connections: int = 0,
        tenants: Sequence[TenantCredentials] | None = None,
    ) -> Scene:
        ours, its = socket.socketpair()
        listener = stack.enter_context(listen_on(f"ipc://{tmp_path}/s"))
        terms = ProxyConfig(
            "default",
            "",
            max_memory_bytes,
            max_memory_bytes,
            max_connections,
            most,
            rate,
            "",
            None,
            tenants,
            control.error_prefix(bytes(NO_TEXT)),
        )
        gate = ZmqProxy(listener, Stream(its), terms)
        thread = threading.Thread(target=gate.run)
        thread.start()
        scene = Scene(tmp_path / "s")
        scene.daemon, scene.gate = Daemon(ours), gate
        scenes.append((scene, gate, thread, its))
        return scene

    with contextlib.ExitStack() as stack:
        yield started
        for scene, gate, thread, its in scenes:
            for each in (*scene.peers, *scene.daemon.lanes, scene.daemon.link):
                each.close()
            thread.join()
            gate.close()
            its.close()


# --- limits of connections --------------------------------------------------------------------------------------------


def is_hung_up(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def is_let_in(connection: socket.socket) -> bool:
    """Whether the proxy greets it."""
    try:
        return connection.recv(1) != b""
    except ConnectionError:
        return False


def test_a_user_has_so_many_connections_and_no_more(start: Start) -> None:
    scene = start(most=2)
    first, _ = scene.connect(), scene.connect()
    refused = scene.raw()
    assert not is_let_in(refused)
    assert scene.daemon.told("refused: this user has 2 connections already (max_user_connections)")
    first.connection.close()
    until(lambda: is_let_in(scene.raw()), "there is room again")


def test_a_user_connects_so_often_and_no_more_often(start: Start) -> None:
    scene = start(rate=1.0)
    assert is_let_in(scene.raw(GREETING))
    assert not is_let_in(scene.raw(GREETING))
    assert scene.daemon.told("opens more than 1 connections a second (max_user_connection_rate)")


def test_the_operators_have_no_such_limit(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = start(most=1)
    monkeypatch.setattr(clients, "is_operator", lambda uid: uid == os.getuid())
    for _ in range(3):
        scene.connect()


def test_a_listener_may_have_a_limit_of_its_own(start: Start) -> None:
    scene = start(max_connections=2)
    silent, (speaks, _) = scene.connect(), scene.met()
    _, lane = scene.met()
    assert silent.rest() == b""
    assert scene.daemon.told("expected at most 2 connections (max_connections), got 3, of which uid")
    speaks.send(message([b"again"]))
    assert received(scene.daemon.lanes[0]) == [[b"again"]]
    assert lane is scene.daemon.lanes[1]


def passes(peer: Peer, lane: Stream) -> bool:
    """Whether the proxy still passes on what a client sends."""
    peer.send(message([b"again"]))
    return received(lane) == [[b"again"]]


@pytest.fixture
def uid(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The user id that the kernel names for the next connections, in a list."""
    current = [1]
    monkeypatch.setattr(clients, "peer_credentials", lambda _: Credentials(1, current[0], current[0]))
    monkeypatch.setattr(clients, "peer_groups", lambda _: ())
    return current


# In the last case, 5 belongs to a tenant for which the listener is not.
@pytest.mark.parametrize("first", [100_000, 5])
def test_users_without_a_tenant_push_out_no_tenant_however_many_they_are(
    start: Start, uid: list[int], first: int
) -> None:
    tables = [TenantCredentials("b", [2]), TenantCredentials(NO_TENANT, [5])]
    scene = start(max_connections=8, most=3, tenants=tables)
    uid[0] = 2
    own = [scene.met() for _ in range(2)]
    for number in range(20):
        uid[0] = first + number * (first != 5)
        # The proxy greets each before it looks for those that are too many.
        assert is_let_in(scene.raw(GREETING))
    assert scene.daemon.told("expected at most 2 of users without a tenant, a part of 8 (max_connections), got 3")
    # They are one user.
    until(lambda: {*scene.gate._clients.users} == {"uid 2", NO_TENANT}, "they are one user")
    until(lambda: len(scene.gate._clients.users[NO_TENANT].clients) == 2, "they have a quarter")
    uid[0] = 2
    own.append(scene.met())
    assert all(passes(*each) for each in own)


def test_tenants_that_a_reload_adds_count_from_then_on(start: Start, uid: list[int]) -> None:
    scene = start(max_connections=4, tenants=[TenantCredentials("a", [1])])
    uid[0] = 2
    early = scene.met()
    scene.daemon.link.send(
        [control.encode_allowed_peers(None, [TenantCredentials("a", [1]), TenantCredentials("b", [2])])]
    )
    until(lambda: [*scene.gate._clients._limiter._accounts] == ["b"], "the gate knows the tenant")
    uid[0] = 1
    for _ in range(5):
        scene.connect()
    assert passes(*early)


def test_many_users_with_one_connection_each_push_out_nobody_who_is_connected(start: Start, uid: list[int]) -> None:
    scene = start(max_connections=8)
    uid[0] = 2
    own = [scene.met()]
    for number in range(20):
        uid[0] = 100_000 + number
        scene.connect()
    assert passes(*own[0])
    # Where all have spoken, the new connection is refused.
    uid[0] = 200_000
    for _ in range(7):
        uid[0] += 1
        own.append(scene.met())
    uid[0] += 1
    assert is_hung_up(scene.raw(GREETING))
    assert all(passes(*each) for each in own)


def test_of_a_users_connections_that_without_a_request_under_way_ends(start: Start, uid: list[int]) -> None:
    scene = start(max_connections=2)
    idle, asks = (scene.met() for _ in range(2))
    idle[1].send([b"answer"])
    asks[1].send([b"answer"])
    for peer, _ in (idle, asks):
        peer.read(len(message([b"answer"])))
    asks[0].send(message([b"again"]))
    assert received(asks[1]) == [[b"again"]]
    until(
        lambda: [each.is_busy for user in scene.gate._clients.users.values() for each in user.clients].count(True) == 1,
        "it asks",
    )
    uid[0] = 2
    scene.met()
    assert idle[0].rest() == b""
    assert passes(*asks)


def test_lines_of_the_log_about_one_user_are_few(start: Start) -> None:
    scene = start()
    for _ in range(50):
        assert is_hung_up(scene.raw(b"GET / HTTP/1.1\r\n\r\n"))
    _, _ = scene.met()
    assert len(scene.daemon.lines) == 1
    assert "expected a greeting of ZMTP" in scene.daemon.lines[0]


# --- handshakes -------------------------------------------------------------------------------------------------------


def test_a_handshake_has_to_be_complete_in_time_however_slow_it_comes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 0.3)
    scene = start()
    peer = scene.raw()
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
    assert scene.daemon.told("its handshake is not complete after 0.3 s")


def test_a_user_has_so_many_handshakes_under_way_and_the_oldest_goes_first(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_USER_HANDSHAKES", 2)
    monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 600.0)
    scene = start()
    done = scene.connect()
    first, second, third = (scene.raw(GREETING[:20]) for _ in range(3))
    assert is_hung_up(first)
    for each in (second, third):
        each.sendall(GREETING[20:] + READY)
        assert each.recv(1)
    done.send(message([b"x"]))
    assert received(scene.daemon.meet()) == [[b"x"]]


def test_a_socket_of_another_type_is_told(start: Start) -> None:
    scene = start()
    peer = scene.raw(GREETING + READY.replace(b"\6DEALER", b"\6SOCKET"))
    data = b""
    while part := peer.recv(1000):
        data += part
    assert data[64:] == frame(COMMAND, b"\5ERROR\x2eexpected a socket of type DEALER, got 'SOCKET'")


# --- what breaks a bound ----------------------------------------------------------------------------------------------


def error_in(data: bytes) -> Error:
    """The last message of what a client was sent."""
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
def test_what_breaks_a_bound_ends_its_connection_with_an_error_and_concerns_nobody_else(
    start: Start, data: bytes, text: str
) -> None:
    scene = start(max_memory_bytes=MIB)
    other, lane = scene.met()
    guilty, its_lane = scene.met()
    with contextlib.suppress(ConnectionError):
        guilty.send(data)
    error = error_in(guilty.rest())
    assert (error.id, error.code) == ("", "INVALID_ARGUMENT")
    assert text in error.error
    assert error.error.endswith("; closing this connection")
    assert its_lane.connection.recv(1) == b""
    other.send(message([b"x"] * MAX_FRAMES))
    assert received(lane) == [[b"x"] * MAX_FRAMES]


def test_the_user_of_whom_most_is_kept_makes_room_for_others(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["small", "large", "large"])
    monkeypatch.setattr(clients, "identify_user", lambda *_: (next(names), False))
    scene = start(max_memory_bytes=4 * MIB)
    small, first, second = (scene.connect() for _ in range(3))
    small.send(frame(MORE, bytes(MIB)))
    first.send(frame(MORE, bytes(MIB + 1)))
    second.send(frame(MORE, bytes(MIB // 2)))
    second.send(frame(MORE, bytes(MIB)))
    with contextlib.suppress(ConnectionError):
        for _ in range(24):
            second.send(frame(MORE, bytes(1 << 16)))
    assert scene.daemon.told("bytes (max_memory_bytes) are kept for clients, and ")
    small.send(frame(0, b"end"))
    assert [len(each) for [each, *_] in received_all(scene.daemon.meet())] == [MIB]
    first.send(frame(0, b"end"))
    assert [len(each) for [each, *_] in received_all(scene.daemon.meet())] == [MIB + 1]
    # What was kept for those that are gone counts no more.
    until(lambda: [each.buffered_bytes for each in scene.gate._clients.users.values()] == [0, 0], "nothing is kept")


def received_all(lane: Stream) -> list[list[Any]]:
    """As `received`, of large frames."""
    lane.frame_reader = link_incoming()
    messages: list[list[Any]] = []
    while not messages:
        messages = received(lane)
    return messages


def link_incoming() -> Any:
    from weightd_protocol.framing import FrameReader

    return FrameReader(max_header_bytes=2**30)


def test_a_ping_flood_is_answered_now_and_then(start: Start) -> None:
    scene = start()
    peer, _ = scene.met()
    peer.send(PING * 10_000 + message([b"x"]))
    assert received(scene.daemon.lanes[0]) == [[b"x"]]
    pong = frame(COMMAND, b"\4PONGcontext")
    assert peer.read(len(pong)) == pong
    peer.connection.setblocking(False)
    rest = peer.connection.recv(1 << 20)
    assert len(rest) < 200 * len(pong)


# --- who does not read ------------------------------------------------------------------------------------------------


def test_a_client_whose_messages_the_daemon_does_not_read_waits_alone(start: Start) -> None:
    scene = start()
    stuck, _ = scene.met()
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
    # What the proxy keeps is one message that it has read, and a part of the next one at most.
    assert sent < 6 * MIB
    client, lane = scene.met()
    client.send(message([b"x"]))
    assert received(lane) == [[b"x"]]
    # It is read on when the daemon reads.
    count = sent // len(part)
    lane = scene.daemon.lanes[0]
    found: list[list[Any]] = []
    while len(found) < count:
        found += received_all(lane)
    assert [len(each[1]) for each in found] == [MIB - 100] * count


def test_a_client_that_does_not_read_waits_alone_and_gets_all_when_it_does(start: Start) -> None:
    scene = start()
    slow, lane = scene.met()
    lane.connection.setblocking(False)
    answers = [[b"%d" % number, bytes(MIB)] for number in range(8)]
    for each in answers:
        lane.send(each)
    while select.select([], [lane], [], 0.3)[1]:
        lane.flush()
    # One message is on its way in the proxy; the rest waits in the daemon, which counts it.
    assert lane.unsent > 5 * MIB
    client, its_lane = scene.met()
    its_lane.send([b"x"])
    assert client.read(3) == b"\0\1x"
    expected = b"".join(map(message, answers))
    data = b""
    while len(data) < len(expected):
        readable, writable, _ = select.select([slow], [lane] if lane.unsent else [], [], LIMIT_S)
        assert readable or writable
        if writable:
            lane.flush()
        if readable:
            data += slow.connection.recv(1 << 20)
    assert data == expected


def test_the_last_answers_arrive_before_the_daemons_end_is_passed_on(start: Start) -> None:
    scene = start()
    peer, lane = scene.met()

    def end() -> None:
        lane.connection.setblocking(True)
        lane.send([bytes(3 * MIB)])
        lane.close()

    thread = threading.Thread(target=end)
    thread.start()
    data = peer.rest()
    thread.join()
    assert data == message([bytes(3 * MIB)])
    scene.daemon.lanes.remove(lane)


def test_a_client_that_leaves_is_gone_for_the_daemon(start: Start) -> None:
    scene = start()
    _, (peer, lane) = scene.met(), scene.met()
    peer.connection.close()
    assert lane.connection.recv(1) == b""
    while scene.daemon.peers != 1:
        scene.daemon.hear()


# --- the link to the daemon -------------------------------------------------------------------------------------------


class Refusing:
    """The proxy's end of its link, to which the kernel passes no descriptor while it refuses."""

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
def refusing(start: Start) -> tuple[Scene, Refusing]:
    scene = start()
    connection: Any = Refusing(scene.gate._link.stream.connection)
    scene.gate._link.stream.connection = connection
    return scene, connection


def test_clients_wait_while_more_descriptors_are_in_flight_than_the_kernel_allows(
    refusing: tuple[Scene, Refusing],
) -> None:
    scene, connection = refusing
    early = scene.met()
    connection.error = errno.ETOOMANYREFS
    late = [scene.connect() for _ in range(3)]
    for number, each in enumerate(late):
        each.send(message([b"%d" % number]))
        assert passes(*early)
    # The first one, the one that is behind it, and the timer.
    until(lambda: connection.refused >= 3, "the gate tries again")
    connection.error = 0
    assert {bytes(received(scene.daemon.meet())[0][0]) for _ in late} == {b"0", b"1", b"2"}


def test_a_client_for_whom_the_link_has_no_descriptor_is_hung_up_alone(refusing: tuple[Scene, Refusing]) -> None:
    scene, connection = refusing
    early = scene.met()
    connection.error = errno.EMFILE
    late = scene.connect()
    late.send(message([b"x"]))
    assert late.rest() == b""
    connection.error = 0
    assert scene.daemon.told(
        f"disconnecting a client of uid {os.getuid()}: no stream to the daemon: Too many open files"
    )
    assert passes(*early)
    scene.met()


def test_last_answers_arrive_whatever_the_daemon_had_yet_to_read_of_the_link(start: Start) -> None:
    scene = start()
    peer, lane = scene.met()
    scene.gate._link.stream.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    others = [scene.connect() for _ in range(20)]
    for each in others:
        each.send(message([b"x"]))
    until(lambda: scene.gate._relay._peer_count == 21 and scene.gate._link.stream.unsent > 0, "the link is full")
    answer = bytes(2 * MIB)
    lane.send([answer])
    while not lane.flush():
        pass
    # The proxy has read the answer, and holds it until its client reads.
    until(lambda: scene.gate._clients.buffered_bytes >= MIB, "the gate has the answer")
    scene.daemon.link.close()
    # The ends of those that the daemon has not read are closed with the link.
    until(lambda: scene.gate._relay._peer_count < 21, "some of the others have left")
    assert peer.read(9 + len(answer))[9:] == answer


# --- turns ------------------------------------------------------------------------------------------------------------


def test_one_user_who_floods_does_not_hold_up_another(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter([*["many"] * 20, "one"])
    monkeypatch.setattr(clients, "identify_user", lambda *_: (next(names), False))
    scene = start()
    # Many tiny messages of many connections are there before the one of another user.
    order: list[str] = []
    flood = frame(0, b"x") * 20_000
    crowd = [scene.met() for _ in range(20)]
    one, its_lane = scene.met()
    for peer, _ in crowd:
        peer.connection.setblocking(False)
        peer.connection.send(flood)
    one.send(message([b"y"]))
    lanes: Sequence[Any] = [its_lane, *(lane for _, lane in crowd)]
    handled = 0
    while "one" not in order:
        for lane in select.select(lanes, [], [], LIMIT_S)[0]:
            found = len(received(lane))
            handled += found
            order.append("one" if lane is its_lane else "many")
    assert handled < 20 * 20_000 / 10


# --- whatever clients do, in whatever order ---------------------------------------------------------------------------


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
def test_a_client_that_has_left_when_something_is_sent_to_it_concerns_nobody_else(
    start: Start, begin: bytes, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(["other", "leaves"])
    monkeypatch.setattr(clients, "identify_user", lambda *_: (next(names), False))
    scene = start()
    other, lane = scene.met()
    send = ProxyClient.send

    def broken(client: ProxyClient, pieces: Sequence[Any]) -> bool:
        if b"".join(pieces).startswith(begin):
            raise BrokenPipeError
        return send(client, pieces)

    with monkeypatch.context() as patched:
        patched.setattr(ProxyClient, "send", broken)
        assert is_hung_up(scene.raw(GREETING + READY + data))
    other.send(message([b"y"]))
    assert received(lane) == [[b"y"]]
