"""Clients over real sockets, and a loop that the test drives."""

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
ROOM = 2**20
LIMITS = UserConnectionLimits(max_connections=3)
SOMEBODY = ClientIdentity(ClientOrigin("process 1 of uid 7", "uid 7"))


class Hall:
    """Connections that answer nothing by themselves."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.room = MemoryBudget(ROOM, lambda _: SOMEBODY.origin.principal)
        self.messages: list[tuple[ClientConnection, Message]] = []
        self.broken: list[str] = []
        self.excess: RequestError | None = None
        self.tenants: dict[str, Tenant] = {}
        self.gone: list[ClientConnection] = []
        calls = ConnectionCallbacks(
            free_memory=lambda key, nbytes: False,
            limit_account_of=lambda identity: self.limit_account_of(identity),  # noqa: PLW0108 - tests replace it
            assign_tenant=lambda connection: self.assign_tenant(connection),  # noqa: PLW0108 - tests replace it
            on_message=lambda connection, message: self.on_message(connection, message),  # noqa: PLW0108 - tests replace it
            on_disconnecting=lambda connection, error: self.broken.append(str(error)),
            on_disconnected=self.gone.append,
        )
        self.connections = ClientConnections(self.loop, self.room, ConnectionAdmission(LIMITS), calls)
        self.stack = contextlib.ExitStack()

    def limit_account_of(self, identity: ClientIdentity) -> str:
        return identity.origin.principal

    def on_message(self, connection: ClientConnection, message: Message) -> None:
        self.messages.append((connection, message))

    def assign_tenant(self, connection: ClientConnection) -> RequestError | None:
        connection.tenant = self.tenants.setdefault(connection.user, Tenant(connection.user, TenantConfig()))
        return self.excess

    def come(self, identity: ClientIdentity = SOMEBODY) -> socket.socket:
        """Return the other end of a new client's connection."""
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
def hall() -> Iterator[Hall]:
    made = Hall()
    yield made
    made.stack.close()
    made.connections.close()
    made.loop.close()


def message(*frames: bytes) -> bytes:
    return b"".join([message_prefix(frames), *frames])


def test_who_sends_a_byte_at_a_time_makes_nobody_wait(hall: Hall) -> None:
    slow, quick = hall.come(), hall.come()
    for byte in message(b"slow"):
        slow.send(bytes([byte]))
        quick.send(message(b"quick"))
        count = len(hall.messages)
        hall.until(lambda: len(hall.messages) > count)  # noqa: B023
    hall.until(lambda: [b"slow"] in hall.frames)
    assert hall.frames.count([b"quick"]) == len(message(b"slow"))


@pytest.mark.parametrize("goes", [False, True])
def test_who_sends_many_at_once_has_them_heard_in_turns_and_then_its_end(hall: Hall, goes: bool) -> None:
    greedy, modest = hall.come(), hall.come()
    many = [[b"%d" % number] for number in range(1000)]
    greedy.send(b"".join(message(*frames) for frames in many))
    if goes:
        greedy.close()
    modest.send(message(b"modest"))
    hall.loop.run_once(0.0)
    assert [b"modest"] in hall.frames
    assert 0 < len(hall.frames) < 50
    # No event is waited for.
    while len(hall.frames) <= len(many):
        before = len(hall.frames)
        hall.loop.run_once(LIMIT_S)
        assert before < len(hall.frames) < before + 50
    greedy.close()
    hall.until(lambda: hall.gone)
    assert [each for each in hall.frames if each != [b"modest"]] == many


def test_who_is_hung_up_has_nothing_more_heard(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    client, other = hall.come(), hall.come()
    [connection, _] = hall.connections

    def hang_up(by: ClientConnection, received: Message) -> None:
        hall.messages.append((by, received))
        if by is not connection:
            count.append(len(hall.messages))
            hall.connections.disconnect(connection, "for a test")

    count: list[int] = []
    monkeypatch.setattr(hall, "on_message", hang_up)
    client.send(message(b"x") * 1000)
    other.send(message(b"end"))
    hall.until(lambda: hall.gone)
    assert [len(hall.messages)] == count


def test_a_message_that_has_begun_takes_room_until_it_is_there(hall: Hall) -> None:
    client = hall.come()
    body = bytes(ROOM // 2)
    sent = message(b"e", b"d", body)
    client.setblocking(True)
    client.sendall(sent[:100_000])
    hall.until(lambda: hall.room.used_bytes == len(body) + 2)
    # What does not fit beside it is read and dropped, all but its header.
    other = Stream(hall.come())
    other.send([b"other", b"d", bytes(ROOM)])
    hall.until(lambda: other.flush() and hall.messages)
    assert (hall.frames, hall.messages[0][1].is_complete) == ([[b"other", b"d"]], False)
    rest = Stream(client)
    rest.connection.setblocking(False)
    left = memoryview(sent)[100_000:]
    while left:
        with contextlib.suppress(BlockingIOError):
            left = left[client.send(left) :]
        hall.loop.run_once(0.0)
    hall.until(lambda: len(hall.messages) == 2)
    assert (hall.frames[1], hall.room.used_bytes) == ([b"e", b"d", body], 0)


def test_who_goes_in_the_middle_of_a_message_leaves_nothing_behind(hall: Hall) -> None:
    client = hall.come()
    client.send(message(b"e", b"d", bytes(ROOM // 2))[:1000])
    hall.until(lambda: hall.room.used_bytes)
    client.close()
    hall.until(lambda: hall.gone)
    assert (hall.room.used_bytes, hall.keys, hall.messages) == (0, [], [])


def test_who_breaks_the_framing_is_told_and_hung_up_and_nobody_else(hall: Hall) -> None:
    bad, good = hall.come(), hall.come()
    bad.send(message(b"before") + b"GET / HTTP/1.1\r\n")
    hall.until(lambda: hall.gone)
    assert hall.frames == []  # what came with it is of no use any more
    assert "expected a message of 1 to 66 frames" in hall.broken[0]
    assert bad.recv(100) == b""
    good.send(message(b"good"))
    hall.until(lambda: hall.frames == [[b"good"]])


def test_what_a_client_does_not_read_is_counted_and_bounded_and_sent_when_it_reads(
    hall: Hall, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "MAX_UNREAD_BYTES", ROOM // 2)
    client = Stream(hall.come())
    [key] = hall.keys
    answer = [b"e", b"d", bytes(100_000)]
    sent = 0
    while hall.connections.send(key, answer):
        sent += 1
    assert hall.connections.dropped_messages == 1
    assert 0 < hall.room.used_by(key) <= ROOM // 2
    assert not hall.connections.send(key, answer)
    assert caplog.text.count("does not read") == 1
    read: list[Message] = []

    def has_read() -> bool:
        read.extend(client.receive())
        return len(read) == sent

    hall.until(has_read)
    assert [[*map(bytes, each.frames)] for each in read] == [answer] * sent
    assert hall.room.used_bytes == 0
    assert hall.connections.send(key, answer)


def test_the_room_of_all_bounds_what_one_does_not_read(hall: Hall) -> None:
    hall.come()
    [key] = hall.keys
    while hall.connections.send(key, [b"e", b"d", bytes(100_000)]):
        pass
    assert ROOM - 200_000 < hall.room.used_bytes <= ROOM


def test_an_answer_to_who_has_gone_is_dropped(hall: Hall) -> None:
    hall.come().close()
    [key] = hall.keys
    for _ in range(2):
        assert hall.connections.send(key, [b"late"])
        hall.until(lambda: hall.gone)
    assert hall.connections.dropped_messages == 2


def test_what_is_held_comes_at_the_end_of_the_turn_also_to_who_does_not_read_and_to_who_is_hung_up(hall: Hall) -> None:
    clients = [hall.come() for _ in range(4)]
    reads, slow, ends, goes = hall.connections
    clients.pop().close()
    hall.connections.cork()
    for number in range(2000):
        for each in (reads, ends, goes):
            hall.connections.send(each.key, [b"%d" % number])
    for _ in range(60):
        hall.connections.send(slow.key, [bytes(10_000)])
    with pytest.raises(BlockingIOError):
        clients[0].recv(1)
    hall.connections.disconnect(ends, "as a test")
    hall.loop.run_once(0.0)
    everything = b"".join(message(b"%d" % number) for number in range(2000))
    assert [each.recv(2 * len(everything)) == everything for each in (clients[0], clients[2])] == [True, True]
    assert slow.unread_bytes == hall.room.used_by(slow.key) > 0
    read = Stream(clients[1])
    sizes: list[int] = []
    while len(sizes) < 60:
        sizes += [len(each.frames[0]) for each in read.receive()]
        hall.loop.run_once(0.0)
    assert (slow.unread_bytes, {*sizes}) == (0, {10_000})
    hall.until(lambda: goes in hall.gone)
    assert hall.connections.send(reads.key, [b"now"])
    assert clients[0].recv(100) == message(b"now")


def test_who_is_hung_up_reads_what_it_was_told_and_is_not_heard_any_more(hall: Hall) -> None:
    client = hall.come()
    [connection] = hall.connections
    assert hall.connections.send(connection.key, [b"last words"])
    client.send(message(b"late"))
    hall.connections.disconnect(connection, "as a test")
    hall.until(lambda: hall.gone == [connection])
    assert (client.recv(100), hall.messages) == (message(b"last words"), [])
    with pytest.raises(ConnectionResetError):  # it had said more than was read
        client.recv(100)


def test_behind_the_message_for_which_it_is_hung_up_nothing_is_heard(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = hall.come()

    def refuse(connection: ClientConnection, message: Message) -> None:
        hall.messages.append((connection, message))
        hall.connections.disconnect(connection, "as a test")

    monkeypatch.setattr(hall, "on_message", refuse)
    client.send(message(b"bad") + message(b"worse"))
    hall.until(lambda: hall.gone)
    assert hall.frames == [[b"bad"]]


def test_the_last_answers_are_read_before_all_are_let_go(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Stream(hall.come())
    [key] = hall.keys
    for _ in range(4):
        hall.connections.send(key, [b"e", b"d", bytes(100_000)])
    read: list[Any] = []

    wait = hall.loop.run_once

    def reading(seconds: float) -> None:
        read.extend(client.receive())
        wait(0.0)

    monkeypatch.setattr(hall.loop, "run_once", reading)
    hall.connections.close()
    with contextlib.suppress(ConnectionError):
        while True:
            read.extend(client.receive())
    assert len(read) == 4


# --- who it is -------------------------------------------------------------------------------------------------------


@pytest.fixture
def listener(hall: Hall, tmp_path: Path) -> socket.socket:
    listener = hall.stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.setblocking(False)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    hall.connections.listen(listener)
    return listener


def test_whoever_connects_is_known_by_the_kernels_word(hall: Hall, listener: socket.socket) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(listener.getsockname())
        hall.until(lambda: hall.keys)
        [connection] = hall.connections
        user = f"uid {os.getuid()}"
        gids = (os.getgid(), *os.getgroups())
        origin = ClientOrigin(f"process {os.getpid()} of {user}", user)
        assert connection.identity == ClientIdentity(
            origin, is_direct=True, credential=PeerCredential(os.getuid(), gids, is_operator=True)
        )


def test_a_gates_word_is_no_reason_to_obey() -> None:
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
def test_another_user_may_not_operate_and_a_process_without_a_number_here_is_its_connection(
    uid: int, pid: int, near: str
) -> None:
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


def test_who_is_one_too_many_is_told_and_hung_up(hall: Hall) -> None:
    hall.excess = ResourceExhausted("as a test")
    hall.come()
    hall.until(lambda: hall.gone)
    assert (hall.broken, hall.keys) == (["as a test"], [])


def test_few_keep_descriptors_open_by_a_message_that_does_not_end(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MAX_AWAITING_MESSAGE", 2)
    memory = memfd.create(1)
    hall.stack.callback(os.close, memory)
    slow = [hall.come(SOMEBODY._replace(is_direct=True)) for _ in range(3)]
    for each in slow[:2]:
        socket.send_fds(each, [b"\1"], [memory])
        hall.until(lambda: any(one.stream.descriptors for one in [*hall.connections]))
    hall.loop.run_once(0)
    slow[0].send(bytes(3) + b"\1\0\0\0a")
    hall.until(lambda: hall.messages)
    socket.send_fds(slow[2], [b"\1"], [memory])
    hall.until(lambda: [*hall.connections][2].stream.descriptors)
    hall.loop.run_once(0)
    assert not hall.gone
    late = hall.come(SOMEBODY._replace(is_direct=True))
    socket.send_fds(late, [b"\1"], [memory])
    hall.until(lambda: hall.gone)
    assert len(hall.keys) == 3


def test_the_user_that_keeps_most_descriptors_without_a_message_is_hung_up_and_no_other(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_MAX_AWAITING_MESSAGE", 2)
    memory = memfd.create(1)
    hall.stack.callback(os.close, memory)
    modest = ClientIdentity(ClientOrigin("process 2 of uid 8", "uid 8"), is_direct=True)
    for identity in (SOMEBODY._replace(is_direct=True), SOMEBODY._replace(is_direct=True), modest):
        client = hall.come(identity)
        socket.send_fds(client, [b"\1"], [memory])
        hall.until(lambda: [*hall.connections][-1].stream.descriptors or hall.gone)
        hall.loop.run_once(0)
    hall.until(lambda: hall.gone)
    assert [each.user for each in hall.gone] == [SOMEBODY.origin.principal]
    assert [each.user for each in hall.connections] == [SOMEBODY.origin.principal, "uid 8"]


def test_a_tenant_that_says_much_over_many_connections_keeps_no_other_waiting(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_TIME_SLICE_S", 0.0)
    loud, modest = ClientIdentity(ClientOrigin("loud", "loud")), ClientIdentity(ClientOrigin("modest", "modest"))
    first, storm = hall.come(modest), [hall.come(loud) for _ in range(10)]
    # Both have spoken of late.
    for number, each in enumerate((first, storm[0])):
        each.sendall(message(b"%d" % number))
        hall.until(lambda: len(hall.messages) > number)  # noqa: B023 - it is called at once
    hall.messages.clear()
    for each in storm:
        each.sendall(message(b"noise") * 20)
    hall.until(lambda: hall.messages)
    for answer in range(3):
        before = len(hall.messages)
        first.sendall(message(b"%d" % answer))
        hall.until(lambda: [b"%d" % answer] in hall.frames[before:])  # noqa: B023 - it is called at once
        assert len(hall.messages) - before <= 3
    # Nobody's is lost, and each connection's come in their order.
    hall.until(lambda: len(hall.messages) == 10 * 20 + 3)
    assert {*Counter(connection.key for connection, _ in hall.messages).values()} == {3, 20}


def test_who_goes_while_it_waits_for_its_turn_is_gone(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_TIME_SLICE_S", 0.0)
    one, other = (hall.come(ClientIdentity(ClientOrigin(name, name))) for name in ("one", "other"))
    for each in (one, other):
        each.sendall(message(b"x") * 3)
    hall.until(lambda: len(hall.messages) == 6)
    other.sendall(message(b"x") * 10)
    hall.until(lambda: len(hall.messages) > 6)
    [mine, its] = hall.connections
    hall.connections.disconnect(its, "as a test")
    heard = len(hall.messages)
    one.sendall(message(b"y"))
    hall.until(lambda: [b"y"] in hall.frames)
    other.close()
    hall.until(lambda: hall.gone == [its])
    assert len(hall.messages) == heard + 1
    assert [*hall.connections] == [mine]


@pytest.fixture
def unix(hall: Hall, tmp_path: Path) -> Callable[[], socket.socket]:
    """Return a function that connects to a Unix socket at which the connections listen."""
    listener = hall.stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.setblocking(False)
    listener.bind(str(tmp_path / "s"))
    listener.listen(100)
    hall.connections.listen(listener)

    def connect() -> socket.socket:
        made = hall.stack.enter_context(socket.socket(socket.AF_UNIX))
        made.connect(str(tmp_path / "s"))
        return made

    return connect


def test_connections_beyond_the_limit_of_a_user_are_refused_before_any_work(
    hall: Hall,
    unix: Callable[[], socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("weightd_daemon.transport.connection.is_operator", lambda uid: False)
    introduced: list[ClientConnection] = []

    def introduce(connection: ClientConnection) -> None:
        introduced.append(connection)

    monkeypatch.setattr(hall, "assign_tenant", introduce)
    there = [unix() for _ in range(3)]
    hall.until(lambda: len(hall.keys) == 3)
    excess = [unix() for _ in range(20)]
    for each in excess:
        each.setblocking(False)
    answers: list[bytes] = []
    for each in excess:
        hall.until(lambda: _has_answer(each, answers))  # noqa: B023
    assert all(b"this user has 3 connections already (max_user_connections)" in answer for answer in answers)
    assert (len(hall.keys), len(introduced)) == (3, 3)
    assert [f"uid {os.getuid()} refused" in line for line in caplog.messages] == [True]
    # Other users, and connections of listeners, are not affected.
    hall.come()
    there[0].close()
    hall.until(lambda: hall.gone)
    unix()
    hall.until(lambda: len(hall.keys) == 4)


def _has_answer(peer: socket.socket, answers: list[bytes]) -> bool:
    try:
        answers.append(peer.recv(1000))
    except BlockingIOError:
        return False
    return True


def test_the_limits_of_a_user_hold_for_all_users_of_one_owner(
    hall: Hall, unix: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightd_daemon.transport.connection.is_operator", lambda uid: False)
    owners = ["one", "other"]
    monkeypatch.setattr(hall, "limit_account_of", lambda identity: owners[-1])
    for _ in range(3):
        unix()
    hall.until(lambda: len(hall.keys) == 3)
    refused = unix()
    refused.setblocking(False)
    answers: list[bytes] = []
    hall.until(lambda: _has_answer(refused, answers))
    assert b"max_user_connections" in answers[0]
    owners.pop()
    unix()
    hall.until(lambda: len(hall.keys) == 4)
    assert [each.limit_account for each in hall.connections] == ["other"] * 3 + ["one"]


def test_operators_connect_beyond_the_limit_of_a_user(hall: Hall, unix: Callable[[], socket.socket]) -> None:
    for _ in range(5):
        unix()
    hall.until(lambda: len(hall.keys) == 5)


def test_many_connections_that_end_while_they_wait_for_their_turn_are_not_reported_in_each_turn(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 40
    tenants = [ClientIdentity(ClientOrigin("process 1", name)) for name in ("uid 1", "uid 2")]
    for tenant in tenants:
        hall.come(tenant).send(message(b"speaks"))
    hall.until(lambda: len(hall.messages) == 2)
    for _ in range(count):
        hall.come(tenants[0]).close()
    reports: Counter[bytes] = Counter()
    receive = hall.connections.reader.on_readable

    def counted(connection: ClientConnection) -> None:
        reports[connection.key] += 1
        receive(connection)

    monkeypatch.setattr(hall.connections.reader, "on_readable", counted)
    for _ in range(count):
        hall.come(tenants[0]).close()
    hall.until(lambda: len(hall.gone) == 2 * count)
    assert max(reports.values()) <= 2


# --- what the kernel keeps --------------------------------------------------------------------------------------------


def test_a_connection_counts_as_open_until_its_client_has_read_everything(
    hall: Hall, unix: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightd_daemon.transport.connection.is_operator", lambda uid: False)
    monkeypatch.setattr(listener_module, "_POLL_INTERVAL_S", 0.0)
    there = [unix() for _ in range(3)]
    hall.until(lambda: len(hall.keys) == 3)
    for key in hall.keys:
        hall.connections.send(key, [b"answer"])
    for each in there:
        each.shutdown(socket.SHUT_WR)
    hall.until(lambda: len(hall.gone) == 3)
    refused = unix()
    refused.setblocking(False)
    answers: list[bytes] = []
    hall.until(lambda: _has_answer(refused, answers))
    assert b"this user has 3 connections already" in answers[0]
    assert there[0].recv(1000) == message(b"answer")
    assert there[0].recv(1000) == b""
    there[1].close()
    hall.until(lambda: unix().fileno() and len(hall.keys) == 2)
    refused = unix()
    refused.setblocking(False)
    hall.until(lambda: _has_answer(refused, answers))
    assert b"this user has 3 connections already" in answers[1]
    assert len(hall.keys) == 2


def test_a_user_that_does_not_read_why_it_is_refused_is_not_told_without_end(
    hall: Hall, unix: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightd_daemon.transport.connection.is_operator", lambda uid: False)
    monkeypatch.setattr(listener_module, "_MAX_UNREAD_REFUSALS", 2)
    monkeypatch.setattr(listener_module, "_POLL_INTERVAL_S", 0.0)
    for _ in range(3):
        unix()
    hall.until(lambda: len(hall.keys) == 3)

    def refused(count: int) -> list[bool]:
        peers = [unix() for _ in range(count)]
        hall.until(lambda: len(select.select(peers, [], [], 0)[0]) == count)
        told = [bool(each.recv(1000)) for each in peers]
        for each in peers:
            each.close()
        return told

    assert refused(4) == [True, True, False, False]
    hall.until(lambda: refused(1) == [True])


def test_beyond_some_connections_of_a_user_the_kernel_keeps_less_of_what_each_does_not_read(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "_MAX_DEFAULT_BUFFERS", 2)
    near = SOMEBODY._replace(is_direct=True)
    clients = [hall.come(near) for _ in range(4)]
    clients += [hall.come(near._replace(origin=ClientOrigin("process 1 of uid 8", "uid 8"))) for _ in range(2)]
    for each in hall.connections:
        hall.connections.send(each.key, [bytes(500_000)])
    kept = [unread_bytes(each.stream.connection) for each in hall.connections]
    assert all(nbytes > 100_000 for nbytes in [*kept[:2], *kept[4:]])
    assert all(nbytes < 25_000 for nbytes in kept[2:4])
    # What is beyond that comes when the client reads.
    received: list[int] = []

    def read() -> bool:
        with contextlib.suppress(BlockingIOError):
            received.append(len(clients[2].recv(10**6)))
        return sum(received) == len(message(bytes(500_000)))

    while not read():
        hall.loop.run_once(0.0)


def test_beyond_the_limit_of_descriptors_clients_are_disconnected_and_the_log_says_so_once(
    hall: Hall, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "max_client_descriptors", lambda: 10)
    clients = [hall.come() for _ in range(10)]
    assert not any(each.is_closing for each in hall.connections)
    clients += [hall.come() for _ in range(3)]
    assert [each.is_closing for each in hall.connections].count(True) == 3
    hall.until(lambda: len(hall.keys) == 10)
    # Who is who may have changed: nobody counts twice.
    hall.connections.reassign_tenants()
    for count in (9, 8, 7):
        clients = [each for each in clients if not is_closed(each)]
        clients.pop().close()
        hall.until(lambda expected=count: len(hall.keys) == expected)  # type: ignore[misc]
    assert [each.levelname for each in caplog.records if "client of" not in each.message] == ["ERROR", "WARNING"]
    assert not any(each.is_closing for each in hall.connections)


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
