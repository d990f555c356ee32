"""Client connections over real sockets, with a loop driven by the test."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from weightd_common import memfd
from weightd_common.stream import Stream
from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.platform.connection_limiter import ConnectionAdmission, UserConnectionLimits
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.scheduling.request import ClientOrigin
from weightd_daemon.tenants.tenant import PeerCredential, Tenant
from weightd_daemon.transport import connections, reader
from weightd_daemon.transport import listener as listener_module
from weightd_daemon.transport.connection import (
    ClientConnection,
    ClientIdentity,
    proxied_identity,
    unix_identity,
)
from weightd_daemon.transport.connections import ClientConnections, ConnectionCallbacks
from weightd_daemon.transport.listener import unread_bytes
from weightd_daemon.transport.memory_budget import MemoryBudget
from weightd_daemon.zmq_proxy.control import PeerIdentity
from weightd_protocol.errors import RequestError, ResourceExhausted
from weightd_protocol.framing import Message, message_prefix

LIMIT_S = 20.0
BUDGET_BYTES = 2**20
LIMITS = UserConnectionLimits(max_connections=3)
IDENTITY = ClientIdentity(ClientOrigin("process 1 of uid 7", "uid 7"))


class ConnectionsHarness:
    """Client connections that record messages and send no replies."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.budget = MemoryBudget(BUDGET_BYTES, lambda _: IDENTITY.origin.principal)
        self.messages: list[tuple[ClientConnection, Message]] = []
        self.errors: list[str] = []
        self.excess: RequestError | None = None
        self.tenants: dict[str, Tenant] = {}
        self.disconnected: list[ClientConnection] = []
        calls = ConnectionCallbacks(
            free_memory=lambda key, nbytes: False,
            limit_account_of=lambda identity: self.limit_account_of(identity),  # noqa: PLW0108 - tests replace it
            assign_tenant=lambda connection: self.assign_tenant(connection),  # noqa: PLW0108 - tests replace it
            on_message=lambda connection, message: self.on_message(connection, message),  # noqa: PLW0108 - tests replace it
            on_disconnecting=lambda connection, error: self.errors.append(str(error)),
            on_disconnected=self.disconnected.append,
        )
        self.connections = ClientConnections(self.loop, self.budget, ConnectionAdmission(LIMITS), calls)
        self.stack = contextlib.ExitStack()

    def limit_account_of(self, identity: ClientIdentity) -> str:
        return identity.origin.principal

    def on_message(self, connection: ClientConnection, message: Message) -> None:
        self.messages.append((connection, message))

    def assign_tenant(self, connection: ClientConnection) -> RequestError | None:
        connection.tenant = self.tenants.setdefault(connection.user, Tenant(connection.user, TenantConfig()))
        return self.excess

    def connect(self, identity: ClientIdentity = IDENTITY) -> socket.socket:
        """Connect a new client and return its end of the socket."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self.connections.adopt(ours, identity)
        return self.stack.enter_context(theirs)

    def until(self, check: Callable[[], object]) -> None:
        for _ in range(int(LIMIT_S / 0.05)):
            if check():
                return
            self.loop.run_once(0.05)
        raise TimeoutError

    @property
    def frames(self) -> list[list[bytes]]:
        return [[bytes(frame) for frame in message.frames] for _, message in self.messages]

    @property
    def keys(self) -> list[bytes]:
        return [each.key for each in self.connections]


@pytest.fixture
def harness() -> Iterator[ConnectionsHarness]:
    made = ConnectionsHarness()
    yield made
    made.stack.close()
    made.connections.close()
    made.loop.close()


def message(*frames: bytes) -> bytes:
    return b"".join([message_prefix(frames), *frames])


def test_slow_sender_does_not_block_others(harness: ConnectionsHarness) -> None:
    slow, quick = harness.connect(), harness.connect()
    for byte in message(b"slow"):
        slow.send(bytes([byte]))
        quick.send(message(b"quick"))
        count = len(harness.messages)
        harness.until(lambda: len(harness.messages) > count)  # noqa: B023
    harness.until(lambda: [b"slow"] in harness.frames)
    assert harness.frames.count([b"quick"]) == len(message(b"slow"))


@pytest.mark.parametrize("closes", [False, True])
def test_messages_are_read_in_turns_until_the_end(harness: ConnectionsHarness, closes: bool) -> None:
    busy, quiet = harness.connect(), harness.connect()
    many = [[b"%d" % number] for number in range(1000)]
    busy.send(b"".join(message(*frames) for frames in many))
    if closes:
        busy.close()
    quiet.send(message(b"quiet"))
    harness.loop.run_once(0.0)
    assert [b"quiet"] in harness.frames
    assert 0 < len(harness.frames) < 50
    # Each run_once finds more messages without waiting.
    while len(harness.frames) <= len(many):
        before = len(harness.frames)
        harness.loop.run_once(LIMIT_S)
        assert before < len(harness.frames) < before + 50
    busy.close()
    harness.until(lambda: harness.disconnected)
    assert [each for each in harness.frames if each != [b"quiet"]] == many


def test_disconnected_client_is_not_read_further(harness: ConnectionsHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    client, other = harness.connect(), harness.connect()
    [connection, _] = harness.connections

    def hang_up(by: ClientConnection, received: Message) -> None:
        harness.messages.append((by, received))
        if by is not connection:
            count.append(len(harness.messages))
            harness.connections.disconnect(connection, "for a test")

    count: list[int] = []
    monkeypatch.setattr(harness, "on_message", hang_up)
    client.send(message(b"x") * 1000)
    other.send(message(b"end"))
    harness.until(lambda: harness.disconnected)
    assert [len(harness.messages)] == count


def test_partial_message_reserves_its_memory(harness: ConnectionsHarness) -> None:
    client = harness.connect()
    body = bytes(BUDGET_BYTES // 2)
    sent = message(b"e", b"d", body)
    client.setblocking(True)
    client.sendall(sent[:100_000])
    harness.until(lambda: harness.budget.used_bytes == len(body) + 2)
    # A message beyond the budget is read and dropped except for its header.
    other = Stream(harness.connect())
    other.send([b"other", b"d", bytes(BUDGET_BYTES)])
    harness.until(lambda: other.flush() and harness.messages)
    assert (harness.frames, harness.messages[0][1].is_complete) == ([[b"other", b"d"]], False)
    rest = Stream(client)
    rest.connection.setblocking(False)
    left = memoryview(sent)[100_000:]
    while left:
        with contextlib.suppress(BlockingIOError):
            left = left[client.send(left) :]
        harness.loop.run_once(0.0)
    harness.until(lambda: len(harness.messages) == 2)
    assert (harness.frames[1], harness.budget.used_bytes) == ([b"e", b"d", body], 0)


def test_disconnect_releases_partial_message(harness: ConnectionsHarness) -> None:
    client = harness.connect()
    client.send(message(b"e", b"d", bytes(BUDGET_BYTES // 2))[:1000])
    harness.until(lambda: harness.budget.used_bytes)
    client.close()
    harness.until(lambda: harness.disconnected)
    assert (harness.budget.used_bytes, harness.keys, harness.messages) == (0, [], [])


def test_framing_error_disconnects_only_its_client(harness: ConnectionsHarness) -> None:
    bad, good = harness.connect(), harness.connect()
    bad.send(message(b"before") + b"GET / HTTP/1.1\r\n")
    harness.until(lambda: harness.disconnected)
    assert harness.frames == []  # messages of the same read are dropped, too
    assert "expected a message of 1 to 66 frames" in harness.errors[0]
    assert bad.recv(100) == b""
    good.send(message(b"good"))
    harness.until(lambda: harness.frames == [[b"good"]])


def test_unread_responses_are_limited_and_sent_later(
    harness: ConnectionsHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "MAX_UNREAD_BYTES", BUDGET_BYTES // 2)
    client = Stream(harness.connect())
    [key] = harness.keys
    answer = [b"e", b"d", bytes(100_000)]
    sent = 0
    while harness.connections.send(key, answer):
        sent += 1
    assert harness.connections.dropped_messages == 1
    assert 0 < harness.budget.used_by(key) <= BUDGET_BYTES // 2
    assert not harness.connections.send(key, answer)
    assert caplog.text.count("does not read") == 1
    read: list[Message] = []

    def has_read() -> bool:
        read.extend(client.receive())
        return len(read) == sent

    harness.until(has_read)
    assert [[*map(bytes, each.frames)] for each in read] == [answer] * sent
    assert harness.budget.used_bytes == 0
    assert harness.connections.send(key, answer)


def test_unread_responses_are_limited_by_the_budget(harness: ConnectionsHarness) -> None:
    harness.connect()
    [key] = harness.keys
    while harness.connections.send(key, [b"e", b"d", bytes(100_000)]):
        pass
    assert BUDGET_BYTES - 200_000 < harness.budget.used_bytes <= BUDGET_BYTES


def test_drops_response_to_a_disconnected_client(harness: ConnectionsHarness) -> None:
    harness.connect().close()
    [key] = harness.keys
    for _ in range(2):
        assert harness.connections.send(key, [b"late"])
        harness.until(lambda: harness.disconnected)
    assert harness.connections.dropped_messages == 2


def test_corked_messages_are_sent_at_the_end_of_the_turn(harness: ConnectionsHarness) -> None:
    clients = [harness.connect() for _ in range(4)]
    reads, slow, ends, closes = harness.connections
    clients.pop().close()
    harness.connections.cork()
    for number in range(2000):
        for each in (reads, ends, closes):
            harness.connections.send(each.key, [b"%d" % number])
    for _ in range(60):
        harness.connections.send(slow.key, [bytes(10_000)])
    with pytest.raises(BlockingIOError):
        clients[0].recv(1)
    harness.connections.disconnect(ends, "as a test")
    harness.loop.run_once(0.0)
    everything = b"".join(message(b"%d" % number) for number in range(2000))
    assert [each.recv(2 * len(everything)) == everything for each in (clients[0], clients[2])] == [True, True]
    assert slow.unread_bytes == harness.budget.used_by(slow.key) > 0
    read = Stream(clients[1])
    sizes: list[int] = []
    while len(sizes) < 60:
        sizes += [len(each.frames[0]) for each in read.receive()]
        harness.loop.run_once(0.0)
    assert (slow.unread_bytes, {*sizes}) == (0, {10_000})
    harness.until(lambda: closes in harness.disconnected)
    assert harness.connections.send(reads.key, [b"now"])
    assert clients[0].recv(100) == message(b"now")


def test_disconnected_client_gets_its_last_responses(harness: ConnectionsHarness) -> None:
    client = harness.connect()
    [connection] = harness.connections
    assert harness.connections.send(connection.key, [b"last words"])
    client.send(message(b"late"))
    harness.connections.disconnect(connection, "as a test")
    harness.until(lambda: harness.disconnected == [connection])
    assert (client.recv(100), harness.messages) == (message(b"last words"), [])
    with pytest.raises(ConnectionResetError):  # unread data of the client make the kernel reset the connection
        client.recv(100)


def test_drops_messages_behind_the_rejected_one(harness: ConnectionsHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    client = harness.connect()

    def refuse(connection: ClientConnection, message: Message) -> None:
        harness.messages.append((connection, message))
        harness.connections.disconnect(connection, "as a test")

    monkeypatch.setattr(harness, "on_message", refuse)
    client.send(message(b"bad") + message(b"worse"))
    harness.until(lambda: harness.disconnected)
    assert harness.frames == [[b"bad"]]


def test_close_sends_the_last_responses(harness: ConnectionsHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Stream(harness.connect())
    [key] = harness.keys
    for _ in range(4):
        harness.connections.send(key, [b"e", b"d", bytes(100_000)])
    read: list[Any] = []

    wait = harness.loop.run_once

    def reading(seconds: float) -> None:
        read.extend(client.receive())
        wait(0.0)

    monkeypatch.setattr(harness.loop, "run_once", reading)
    harness.connections.close()
    with contextlib.suppress(ConnectionError):
        while True:
            read.extend(client.receive())
    assert len(read) == 4


# --- identity --------------------------------------------------------------------------------------------------------


@pytest.fixture
def listener(harness: ConnectionsHarness, tmp_path: Path) -> socket.socket:
    listener = harness.stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.setblocking(False)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    harness.connections.listen(listener)
    return listener


def test_identity_comes_from_the_kernel(harness: ConnectionsHarness, listener: socket.socket) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(listener.getsockname())
        harness.until(lambda: harness.keys)
        [connection] = harness.connections
        user = f"uid {os.getuid()}"
        gids = (os.getgid(), *os.getgroups())
        origin = ClientOrigin(f"process {os.getpid()} of {user}", user)
        assert connection.identity == ClientIdentity(
            origin, is_direct=True, credential=PeerCredential(os.getuid(), gids, is_operator=True)
        )


def test_proxied_client_is_never_an_operator() -> None:
    with socket.socket() as connection:
        number = connection.fileno()
        near = proxied_identity(connection, "inside", PeerIdentity(0, 12, "uid 0", (7, 8)))
        proof = PeerCredential(0, (7, 8))
        assert near == ClientIdentity(ClientOrigin("process 12 of uid 0", "uid 0"), credential=proof, listener="inside")
        far = proxied_identity(connection, "outside", PeerIdentity(None, None, "host 10.0.0.1", public_key="k"))
        origin = ClientOrigin(f"connection {number} of host 10.0.0.1", "host 10.0.0.1")
        assert far == ClientIdentity(origin, credential=PeerCredential(key="k"), listener="outside")


@pytest.mark.parametrize("uid", [os.getuid() + 1, 12345])
@pytest.mark.parametrize(("pid", "near"), [(12, "process 12"), (0, "connection 5")])
def test_other_users_are_no_operators(uid: int, pid: int, near: str) -> None:
    class Connected:
        def getsockopt(self, level: int, option: int, *_: object) -> bytes:
            return struct.pack("=iII", pid, uid, 3) if option == socket.SO_PEERCRED else struct.pack("=II", 4, 5)

        def fileno(self) -> int:
            return 5

    identity = unix_identity(cast(socket.socket, Connected()))
    proof = PeerCredential(uid, (3, 4, 5))
    assert identity == ClientIdentity(
        ClientOrigin(f"{near} of uid {uid}", f"uid {uid}"), is_direct=True, credential=proof
    )


def test_excess_connection_of_a_tenant_is_closed(harness: ConnectionsHarness) -> None:
    harness.excess = ResourceExhausted("as a test")
    harness.connect()
    harness.until(lambda: harness.disconnected)
    assert (harness.errors, harness.keys) == (["as a test"], [])


def test_limits_connections_that_hold_descriptors(harness: ConnectionsHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MAX_AWAITING_MESSAGE", 2)
    memory = memfd.create(1)
    harness.stack.callback(os.close, memory)
    slow = [harness.connect(IDENTITY._replace(is_direct=True)) for _ in range(3)]
    for each in slow[:2]:
        socket.send_fds(each, [b"\1"], [memory])
        harness.until(lambda: any(one.stream.descriptors for one in [*harness.connections]))
    harness.loop.run_once(0)
    slow[0].send(bytes(3) + b"\1\0\0\0a")
    harness.until(lambda: harness.messages)
    socket.send_fds(slow[2], [b"\1"], [memory])
    harness.until(lambda: [*harness.connections][2].stream.descriptors)
    harness.loop.run_once(0)
    assert not harness.disconnected
    late = harness.connect(IDENTITY._replace(is_direct=True))
    socket.send_fds(late, [b"\1"], [memory])
    harness.until(lambda: harness.disconnected)
    assert len(harness.keys) == 3


def test_disconnects_the_user_holding_most_descriptors(
    harness: ConnectionsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_MAX_AWAITING_MESSAGE", 2)
    memory = memfd.create(1)
    harness.stack.callback(os.close, memory)
    quiet = ClientIdentity(ClientOrigin("process 2 of uid 8", "uid 8"), is_direct=True)
    for identity in (IDENTITY._replace(is_direct=True), IDENTITY._replace(is_direct=True), quiet):
        client = harness.connect(identity)
        socket.send_fds(client, [b"\1"], [memory])
        harness.until(lambda: [*harness.connections][-1].stream.descriptors or harness.disconnected)
        harness.loop.run_once(0)
    harness.until(lambda: harness.disconnected)
    assert [each.user for each in harness.disconnected] == [IDENTITY.origin.principal]
    assert [each.user for each in harness.connections] == [IDENTITY.origin.principal, "uid 8"]


def test_busy_tenant_does_not_block_others(harness: ConnectionsHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_TIME_SLICE_S", 0.0)
    busy, quiet = ClientIdentity(ClientOrigin("busy", "busy")), ClientIdentity(ClientOrigin("quiet", "quiet"))
    first, storm = harness.connect(quiet), [harness.connect(busy) for _ in range(10)]
    # Both have sent a message recently.
    for number, each in enumerate((first, storm[0])):
        each.sendall(message(b"%d" % number))
        harness.until(lambda: len(harness.messages) > number)  # noqa: B023 - it is called at once
    harness.messages.clear()
    for each in storm:
        each.sendall(message(b"noise") * 20)
    harness.until(lambda: harness.messages)
    for answer in range(3):
        before = len(harness.messages)
        first.sendall(message(b"%d" % answer))
        harness.until(lambda: [b"%d" % answer] in harness.frames[before:])  # noqa: B023 - it is called at once
        assert len(harness.messages) - before <= 3
    # No message is lost.
    harness.until(lambda: len(harness.messages) == 10 * 20 + 3)
    assert {*Counter(connection.key for connection, _ in harness.messages).values()} == {3, 20}


def test_closed_connection_loses_its_turn(harness: ConnectionsHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_TIME_SLICE_S", 0.0)
    one, other = (harness.connect(ClientIdentity(ClientOrigin(name, name))) for name in ("one", "other"))
    for each in (one, other):
        each.sendall(message(b"x") * 3)
    harness.until(lambda: len(harness.messages) == 6)
    other.sendall(message(b"x") * 10)
    harness.until(lambda: len(harness.messages) > 6)
    [mine, theirs] = harness.connections
    harness.connections.disconnect(theirs, "as a test")
    count = len(harness.messages)
    one.sendall(message(b"y"))
    harness.until(lambda: [b"y"] in harness.frames)
    other.close()
    harness.until(lambda: harness.disconnected == [theirs])
    assert len(harness.messages) == count + 1
    assert [*harness.connections] == [mine]


@pytest.fixture
def connect_unix(harness: ConnectionsHarness, tmp_path: Path) -> Callable[[], socket.socket]:
    """Return a function that connects to a listening Unix socket."""
    listener = harness.stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.setblocking(False)
    listener.bind(str(tmp_path / "s"))
    listener.listen(100)
    harness.connections.listen(listener)

    def connect() -> socket.socket:
        made = harness.stack.enter_context(socket.socket(socket.AF_UNIX))
        made.connect(str(tmp_path / "s"))
        return made

    return connect


def test_refuses_connections_over_the_users_limit_early(
    harness: ConnectionsHarness,
    connect_unix: Callable[[], socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("weightd_daemon.transport.connection.is_operator", lambda uid: False)
    assigned: list[ClientConnection] = []

    def assign(connection: ClientConnection) -> None:
        assigned.append(connection)

    monkeypatch.setattr(harness, "assign_tenant", assign)
    connected = [connect_unix() for _ in range(3)]
    harness.until(lambda: len(harness.keys) == 3)
    excess = [connect_unix() for _ in range(20)]
    for each in excess:
        each.setblocking(False)
    answers: list[bytes] = []
    for each in excess:
        harness.until(lambda: _has_reply(each, answers))  # noqa: B023
    assert all(b"this user has 3 connections already (max_user_connections)" in answer for answer in answers)
    assert (len(harness.keys), len(assigned)) == (3, 3)
    assert [f"uid {os.getuid()} refused" in line for line in caplog.messages] == [True]
    # Other users, and connections from proxies, are not limited.
    harness.connect()
    connected[0].close()
    harness.until(lambda: harness.disconnected)
    connect_unix()
    harness.until(lambda: len(harness.keys) == 4)


def _has_reply(peer: socket.socket, answers: list[bytes]) -> bool:
    try:
        answers.append(peer.recv(1000))
    except BlockingIOError:
        return False
    return True


def test_users_of_one_limit_account_share_the_limit(
    harness: ConnectionsHarness, connect_unix: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightd_daemon.transport.connection.is_operator", lambda uid: False)
    owners = ["one", "other"]
    monkeypatch.setattr(harness, "limit_account_of", lambda identity: owners[-1])
    for _ in range(3):
        connect_unix()
    harness.until(lambda: len(harness.keys) == 3)
    refused = connect_unix()
    refused.setblocking(False)
    answers: list[bytes] = []
    harness.until(lambda: _has_reply(refused, answers))
    assert b"max_user_connections" in answers[0]
    owners.pop()
    connect_unix()
    harness.until(lambda: len(harness.keys) == 4)
    assert [each.limit_account for each in harness.connections] == ["other"] * 3 + ["one"]


def test_operators_are_not_limited(harness: ConnectionsHarness, connect_unix: Callable[[], socket.socket]) -> None:
    for _ in range(5):
        connect_unix()
    harness.until(lambda: len(harness.keys) == 5)


def test_closed_connections_are_not_reported_every_turn(
    harness: ConnectionsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 40
    tenants = [ClientIdentity(ClientOrigin("process 1", name)) for name in ("uid 1", "uid 2")]
    for tenant in tenants:
        harness.connect(tenant).send(message(b"speaks"))
    harness.until(lambda: len(harness.messages) == 2)
    for _ in range(count):
        harness.connect(tenants[0]).close()
    reports: Counter[bytes] = Counter()
    receive = harness.connections.reader.on_readable

    def counted(connection: ClientConnection) -> None:
        reports[connection.key] += 1
        receive(connection)

    monkeypatch.setattr(harness.connections.reader, "on_readable", counted)
    for _ in range(count):
        harness.connect(tenants[0]).close()
    harness.until(lambda: len(harness.disconnected) == 2 * count)
    assert max(reports.values()) <= 2


# --- kernel buffers ---------------------------------------------------------------------------------------------------


def test_connection_counts_until_its_data_is_read(
    harness: ConnectionsHarness, connect_unix: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightd_daemon.transport.connection.is_operator", lambda uid: False)
    monkeypatch.setattr(listener_module, "_POLL_INTERVAL_S", 0.0)
    connected = [connect_unix() for _ in range(3)]
    harness.until(lambda: len(harness.keys) == 3)
    for key in harness.keys:
        harness.connections.send(key, [b"answer"])
    for each in connected:
        each.shutdown(socket.SHUT_WR)
    harness.until(lambda: len(harness.disconnected) == 3)
    refused = connect_unix()
    refused.setblocking(False)
    answers: list[bytes] = []
    harness.until(lambda: _has_reply(refused, answers))
    assert b"this user has 3 connections already" in answers[0]
    assert connected[0].recv(1000) == message(b"answer")
    assert connected[0].recv(1000) == b""
    connected[1].close()
    harness.until(lambda: connect_unix().fileno() and len(harness.keys) == 2)
    refused = connect_unix()
    refused.setblocking(False)
    harness.until(lambda: _has_reply(refused, answers))
    assert b"this user has 3 connections already" in answers[1]
    assert len(harness.keys) == 2


def test_unread_refusals_are_limited(
    harness: ConnectionsHarness, connect_unix: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightd_daemon.transport.connection.is_operator", lambda uid: False)
    monkeypatch.setattr(listener_module, "_MAX_UNREAD_REFUSALS", 2)
    monkeypatch.setattr(listener_module, "_POLL_INTERVAL_S", 0.0)
    for _ in range(3):
        connect_unix()
    harness.until(lambda: len(harness.keys) == 3)

    def refused(count: int) -> list[bool]:
        peers = [connect_unix() for _ in range(count)]
        harness.until(lambda: len(select.select(peers, [], [], 0)[0]) == count)
        replied = [bool(each.recv(1000)) for each in peers]
        for each in peers:
            each.close()
        return replied

    assert refused(4) == [True, True, False, False]
    harness.until(lambda: refused(1) == [True])


def test_buffers_shrink_beyond_a_number_of_connections(
    harness: ConnectionsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "_MAX_DEFAULT_BUFFERS", 2)
    near = IDENTITY._replace(is_direct=True)
    clients = [harness.connect(near) for _ in range(4)]
    clients += [harness.connect(near._replace(origin=ClientOrigin("process 1 of uid 8", "uid 8"))) for _ in range(2)]
    for each in harness.connections:
        harness.connections.send(each.key, [bytes(500_000)])
    kept = [unread_bytes(each.stream.connection) for each in harness.connections]
    assert all(nbytes > 100_000 for nbytes in [*kept[:2], *kept[4:]])
    assert all(nbytes < 25_000 for nbytes in kept[2:4])
    # The rest is sent when the client reads.
    received: list[int] = []

    def read() -> bool:
        with contextlib.suppress(BlockingIOError):
            received.append(len(clients[2].recv(10**6)))
        return sum(received) == len(message(bytes(500_000)))

    while not read():
        harness.loop.run_once(0.0)


def test_excess_connections_are_closed_and_logged_once(
    harness: ConnectionsHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "max_client_descriptors", lambda: 10)
    clients = [harness.connect() for _ in range(10)]
    assert not any(each.is_closing for each in harness.connections)
    clients += [harness.connect() for _ in range(3)]
    assert [each.is_closing for each in harness.connections].count(True) == 3
    harness.until(lambda: len(harness.keys) == 10)
    # Tenants may have changed: each connection still counts once.
    harness.connections.reassign_tenants()
    for count in (9, 8, 7):
        clients = [each for each in clients if not is_closed(each)]
        clients.pop().close()
        harness.until(lambda expected=count: len(harness.keys) == expected)  # type: ignore[misc]
    assert [each.levelname for each in caplog.records if "client of" not in each.message] == ["ERROR", "WARNING"]
    assert not any(each.is_closing for each in harness.connections)


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
