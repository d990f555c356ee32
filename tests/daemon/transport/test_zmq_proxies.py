"""Proxies as processes, clients that speak ZeroMQ, and a daemon that says to each what it has said."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from testkit.waiting import until
from weightd_common.stream import Stream
from weightd_daemon.platform.client_log import ClientLog
from weightd_daemon.platform.connection_limiter import UserConnectionLimits
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.listen import listen_on
from weightd_daemon.platform.log_setup import client_of
from weightd_daemon.platform.tenant_lookup import TenantCredentials
from weightd_daemon.transport.zmq_proxies import ListenerAuth, ProxyLimits, ZmqProxies, backoff_s
from weightd_daemon.zmq_proxy.control import PeerIdentity
from weightd_protocol.framing import MAX_FRAMES

LIMIT_MS = 20_000
MIB = 2**20

Socket = zmq.Socket[bytes]

OPEN = ListenerAuth()

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\0NULL" + bytes(48)
READY = b"\4\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
FREE = UserConnectionLimits(0, 0.0)


class Daemon:
    """A daemon that says to each client what it has said, but "leave" ends a connection.

    Args:
        listeners: that have proxies.
        max_memory_bytes: of a proxy.
        lock: who is let in by each.
        limits: of the connections of one user.
    """

    def __init__(
        self,
        listeners: dict[str, socket.socket],
        max_memory_bytes: int = 256 * MIB,
        lock: ListenerAuth = OPEN,
        limits: UserConnectionLimits = FREE,
    ) -> None:
        self.loop = EventLoop()
        self.lanes: dict[Stream, tuple[str, PeerIdentity]] = {}
        each = {name: (listener, lock) for name, listener in listeners.items()}
        self.gates = ZmqProxies(each, self.loop, self._adopt, ProxyLimits(max_memory_bytes, limits), ClientLog())
        self.answered = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        until(lambda: all(each.pid for each in self.gates.proxies), "the gates are there")

    @property
    def unsent(self) -> int:
        return sum(each.unsent for each in list(self.lanes))

    def close(self, *, flush: bool = False) -> None:
        if self._ends.is_set():
            return
        self._ends.set()
        self._thread.join()
        for each in list(self.lanes):
            if flush:
                each.connection.setblocking(True)
                each.flush()
            each.close()
        self.gates.close()
        self.loop.close()

    def _run(self) -> None:
        while not self._ends.is_set():
            self.loop.run_once(0.05)

    def _adopt(self, listener: str, connection: socket.socket, identity: PeerIdentity) -> None:
        lane = Stream(connection)
        self.lanes[lane] = listener, identity
        self.loop.add(lane.fileno(), functools.partial(self._answer, lane))

    def _answer(self, lane: Stream) -> None:
        try:
            for message in lane.receive():
                self.answered += 1
                if not lane.send(message.frames):
                    self.loop.watch_writes(lane.fileno(), functools.partial(self._flush, lane))
                if message.frames[0] == b"leave":
                    raise ConnectionResetError
        except ConnectionError:
            self.loop.remove(lane.fileno())
            lane.close()
            del self.lanes[lane]

    def _flush(self, lane: Stream) -> None:
        if lane.flush():
            self.loop.unwatch_writes(lane.fileno())


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def serve(address: str) -> Iterator[Callable[..., Daemon]]:
    made: list[Daemon] = []
    with listen_on(address) as listener:

        def started(max_memory_bytes: int = 256 * MIB, lock: ListenerAuth = OPEN, **others: socket.socket) -> Daemon:
            made.append(Daemon({"default": listener, **others}, max_memory_bytes, lock))
            return made[-1]

        yield started
        for each in made:
            each.close()


@pytest.fixture
def connect(address: str) -> Iterator[Callable[..., Socket]]:
    made: list[Socket] = []
    with zmq.Context() as context:

        def connected(to: str = address, **options: object) -> Socket:
            client = context.socket(zmq.DEALER)
            client.setsockopt(zmq.LINGER, 0)
            for name, value in options.items():
                client.setsockopt(getattr(zmq, name), value)  # type: ignore[arg-type]
            if to:
                client.connect(to)
            made.append(client)
            return client

        yield connected
        context.destroy(linger=0)


def answer(client: Socket) -> list[bytes]:
    assert client.poll(LIMIT_MS)
    return client.recv_multipart()


def ask(client: Socket, *frames: bytes) -> list[bytes]:
    client.send_multipart(frames)
    return answer(client)


def is_answered(client: Socket) -> bool:
    """Send a message, which is lost if the library has not noticed yet that its connection has ended."""
    client.send(b"again")
    return bool(client.poll(500)) and client.recv() == b"again"


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_messages_pass_as_they_are_and_who_says_them_is_told(
    serve: Callable[..., Daemon], connect: Callable[..., Socket], kind: str
) -> None:
    with listen_on("tcp://127.0.0.1:0") as tcp:
        daemon = serve(other=tcp)
        port = tcp.getsockname()[1]
        client = connect(*[f"tcp://127.0.0.1:{port}"] if kind == "tcp" else [])
        large = os.urandom(5 * MIB)
        for frames in ([b"one"], [b"", b"", b""], [b"a", b"", large, b"", large[: 2 * MIB]], [b"x"] * MAX_FRAMES):
            assert ask(client, *frames) == frames
        user = f"uid {os.getuid()}"
        near = PeerIdentity(os.getuid(), os.getpid(), user, (os.getgid(), *os.getgroups()))
        expected = ("default", near) if kind == "ipc" else ("other", PeerIdentity(None, None, user))
        assert list(daemon.lanes.values()) == [expected]


def test_with_curve_only_keys_that_are_known_are_let_in_and_the_daemon_is_told_whose(
    serve: Callable[..., Daemon], connect: Callable[..., Socket], address: str
) -> None:
    (server, secret), (one, its), (other, others) = (zmq.curve_keypair() for _ in range(3))
    daemon = serve(lock=ListenerAuth(secret.decode(), [one.decode()]))

    def come(public: bytes, private: bytes, of: bytes = server) -> tuple[Socket, Socket]:
        client = connect("", CURVE_SERVERKEY=of, CURVE_PUBLICKEY=public, CURVE_SECRETKEY=private)
        # Before it connects: who is refused does not come again.
        monitor = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED)
        client.connect(address)
        return client, monitor

    known, _ = come(one, its)
    assert ask(known, b"hello") == [b"hello"]
    [(_, identity)] = daemon.lanes.values()
    assert (identity.public_key, identity.uid) == (one.decode(), os.getuid())
    for stranger, monitor in (come(other, others), come(one, others), come(one, its, other)):
        stranger.send(b"hello")
        assert monitor.poll(LIMIT_MS)
        assert not stranger.poll(0)
    plain = connect()
    plain.send(b"hello")
    # A reload has another key in the place of the first; who is there, the daemon ends if it wants that.
    daemon.gates.update_auth({"default": ListenerAuth(keys=[other.decode()])})
    stranger, monitor = come(one, its)
    assert monitor.poll(LIMIT_MS)
    welcome, _ = come(other, others)
    assert ask(welcome, b"hello") == [b"hello"]
    assert ask(known, b"again") == [b"again"]
    assert not plain.poll(0)
    # A proxy that takes the place of another knows it, too.
    [gate] = daemon.gates.proxies
    before = gate.pid
    os.kill(before, signal.SIGKILL)
    until(lambda: gate.pid not in (0, before), "there is another gate")
    welcome, _ = come(other, others)
    assert ask(welcome, b"hello") == [b"hello"]
    assert {identity.public_key for _, identity in daemon.lanes.values()} >= {other.decode()}


# More than a header of the wire may have, and more than a socket takes at once.
@pytest.mark.parametrize("count", [2_000, 20_000])
def test_a_gate_is_told_all_keys_however_many_they_are(
    serve: Callable[..., Daemon], connect: Callable[..., Socket], count: int
) -> None:
    keys = [f"{number:040}" for number in range(count)]
    lock = ListenerAuth(tenants=[TenantCredentials("team", [os.getuid()], keys=keys)])
    daemon = serve(lock=lock)
    client = connect()
    assert ask(client, b"first") == [b"first"]
    daemon.gates.update_auth({"default": lock})
    until(lambda: not any(each.stream and each.stream.unsent for each in daemon.gates._listeners), "all was sent")
    assert ask(client, b"second") == [b"second"]
    assert [each.restarts for each in daemon.gates.proxies] == [0]


def test_whoever_has_shown_no_key_pushes_out_nobody_who_has(
    serve: Callable[..., Daemon], connect: Callable[..., Socket], address: str
) -> None:
    (server, secret), (one, its) = (zmq.curve_keypair() for _ in range(2))
    tables = [TenantCredentials("one", keys=[one.decode()])]
    daemon = serve(lock=ListenerAuth(secret.decode(), [one.decode()], 8, tables))
    keys = {"CURVE_SERVERKEY": server, "CURVE_PUBLICKEY": one, "CURVE_SECRETKEY": its}
    with contextlib.ExitStack() as stack:

        def crowd() -> None:
            for _ in range(20):
                raw = stack.enter_context(socket.socket(socket.AF_UNIX))
                raw.connect(address.removeprefix("ipc://"))
                raw.sendall(GREETING[:20])

        own = [connect(**keys) for _ in range(3)]
        for _ in range(2):
            assert [ask(each, b"hello") for each in own] == 3 * [[b"hello"]]
            crowd()
        own.append(connect(**keys))
        assert [ask(each, b"hello") for each in own] == 4 * [[b"hello"]]
        # A client whose connection ends connects again: these have not.
        assert len(daemon.lanes) == 4


def test_a_listener_takes_no_descriptors(serve: Callable[..., Daemon], address: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.getsockopt(socket.SOL_SOCKET, 83)
        except OSError:
            pytest.skip("SO_PASSRIGHTS needs Linux 6.16")
        serve()
        client.connect(address.removeprefix("ipc://"))
        client.settimeout(LIMIT_MS / 1000)
        assert client.recv(1) == b"\xff"
        with pytest.raises(PermissionError):
            socket.send_fds(client, [b"\xff"], [0])


def test_who_goes_is_gone_for_the_daemon_and_whom_it_ends_is_hung_up_after_its_last_words(
    serve: Callable[..., Daemon], connect: Callable[..., Socket]
) -> None:
    daemon = serve()
    [gate] = daemon.gates.proxies
    one, two = connect(), connect()
    for client in (one, two):
        assert ask(client, b"hello") == [b"hello"]
    until(lambda: gate.peers == 2, "both are counted")
    one.close()
    until(lambda: len(daemon.lanes) == 1 and gate.peers == 1, "it is gone")
    monitor = two.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    assert ask(two, b"leave") == [b"leave"]
    assert monitor.poll(LIMIT_MS)
    # The library comes back by itself.
    assert ask(two, b"again") == [b"again"]


def test_a_routing_id_means_nothing_and_two_clients_may_have_the_same(
    serve: Callable[..., Daemon], connect: Callable[..., Socket]
) -> None:
    daemon = serve()
    twins = [connect(ROUTING_ID=b"me") for _ in range(2)]
    for number, client in enumerate(twins):
        client.send(b"%d" % number)
    assert [answer(client) for client in twins] == [[b"0"], [b"1"]]
    assert len(daemon.lanes) == 2


# --- what dies ------------------------------------------------------------------------------------------------------


def test_a_gate_that_dies_takes_nothing_with_it_but_its_connections(
    serve: Callable[..., Daemon], connect: Callable[..., Socket], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = f"ipc://{tmp_path}/other"
    with caplog.at_level(logging.INFO), listen_on(other) as listener:
        daemon = serve(other=listener)
        gate, neighbour = daemon.gates.proxies
        one, two = connect(), connect(other)
        for client in (one, two):
            assert ask(client, b"hello") == [b"hello"]
        pids = {gate.pid}
        for deaths in (1, 2):
            os.kill(gate.pid, signal.SIGKILL)
            begin = time.monotonic()
            until(lambda: gate.pid not in {0, *pids}, "it is back")
            pids.add(gate.pid)
            until(lambda: is_answered(one), "it serves")
            assert time.monotonic() - begin < 10
            assert (gate.restarts, neighbour.restarts) == (deaths, 0)
        assert ask(two, b"still here") == [b"still here"]
        until(lambda: "killed by SIGKILL" in caplog.text, "its end is told")


def test_one_that_keeps_dying_is_replaced_at_once_and_then_ever_more_seldom() -> None:
    assert [backoff_s(count) for count in (1, 2, 3, 4, 8, 9, 10_000)] == [0.0, 0.05, 0.1, 0.2, 3.2, 5.0, 5.0]


def test_a_gate_for_which_there_is_no_descriptor_is_started_later(
    serve: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightd_daemon.transport.zmq_proxies._MAX_BACKOFF_S", 0.1)
    [gate] = serve().gates.proxies
    tried: list[None] = []

    def refuse(*_: object) -> None:
        tried.append(None)
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as few:
        few.setattr(socket, "socketpair", refuse)
        os.kill(gate.pid, signal.SIGKILL)
        until(lambda: len(tried) > 1, "it is tried again")
    until(lambda: gate.pid, "the next gate is there")


def test_without_zygote_all_gates_are_back(serve: Callable[..., Daemon], connect: Callable[..., Socket]) -> None:
    daemon = serve()
    before = daemon.gates.pids
    os.kill(before[0], signal.SIGKILL)
    until(lambda: len(daemon.gates.pids) == 2 and not set(daemon.gates.pids) & set(before), "both are others")
    assert ask(connect(), b"hello") == [b"hello"]


def test_a_zygote_that_hangs_is_replaced_once_a_gate_is_needed(
    serve: Callable[..., Daemon], connect: Callable[..., Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightd_daemon.transport.zmq_proxies._FORK_TIMEOUT_S", 1.0)
    daemon = serve()
    before = daemon.gates.pids
    os.kill(before[0], signal.SIGSTOP)
    assert ask(connect(), b"hello") == [b"hello"]
    os.kill(before[1], signal.SIGKILL)
    until(lambda: len(daemon.gates.pids) == 2 and not set(daemon.gates.pids) & set(before), "both are others")
    assert ask(connect(), b"again") == [b"again"]
    assert not _lives(before[0])


def test_where_no_zygote_can_be_started_it_is_tried_again(
    serve: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightd_daemon.transport.zmq_proxies._MAX_BACKOFF_S", 0.1)
    daemon = serve()
    tried: list[None] = []

    def refuse(*_: object) -> None:
        tried.append(None)
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as few:
        few.setattr("weightd_daemon.transport.zmq_proxies.launch", refuse)
        os.kill(daemon.gates.pids[0], signal.SIGKILL)
        until(lambda: len(tried) > 1, "it is tried again")
        assert daemon.gates.pids == []
    until(lambda: len(daemon.gates.pids) == 2, "zygote and gate are there")


def test_when_the_daemon_ends_its_last_answers_arrive_and_no_process_is_left(
    serve: Callable[..., Daemon], connect: Callable[..., Socket], address: str
) -> None:
    daemon = serve()
    client = connect()
    assert ask(client, b"hello") == [b"hello"]
    client.send_multipart([b"last", b"", bytes(20 * MIB)])
    until(lambda: daemon.answered == 2, "it is answered")
    pids = daemon.gates.pids
    daemon.close(flush=True)
    assert [len(each) for each in answer(client)] == [4, 0, 20 * MIB]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


_DAEMON = """
import sys
from weightd_daemon.transport.zmq_proxies import ListenerAuth, ProxyLimits, ZmqProxies
from weightd_daemon.zmq_proxy import zygote
from weightd_daemon.platform.connection_limiter import UserConnectionLimits
from weightd_daemon.platform.client_log import ClientLog
from weightd_daemon.platform.listen import listen_on
from weightd_daemon.platform.event_loop import EventLoop
forked = zygote.fork()
loop = EventLoop()
with listen_on(sys.argv[1]) as listener:
    limits = ProxyLimits(1 << 28, UserConnectionLimits(0, 0.0))
    listeners = {"default": (listener, ListenerAuth())}
    gates = ZmqProxies(listeners, loop, lambda *_: None, limits, ClientLog(), forked)
    while len(gates.pids) < 2:
        loop.run_once()
    print(*gates.pids, flush=True)
    while True:
        loop.run_once()
"""


def test_what_a_daemon_has_forked_dies_with_it(address: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", _DAEMON, address], stdout=subprocess.PIPE, env=environment) as daemon:
        assert daemon.stdout is not None
        pids = [int(each) for each in daemon.stdout.readline().split()]
        for pid, name in zip(pids, ["weightd-zygote\n", "zmq-proxy defau\n"], strict=True):
            until(lambda: Path(f"/proc/{pid}/comm").read_text("ascii") == name, name)  # noqa: B023
        daemon.kill()
    until(lambda: not any(_lives(pid) for pid in pids), "they have died")


def _lives(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text("ascii")
    except FileNotFoundError:
        return False


# --- who is hostile -------------------------------------------------------------------------------------------------


@pytest.fixture
def raw(address: str) -> Iterator[Callable[..., socket.socket]]:
    made: list[socket.socket] = []

    def connected(*, is_ready: bool = False) -> socket.socket:
        """A connection, or one of a DEALER socket whose handshake is done."""
        made.append(socket.socket(socket.AF_UNIX))
        made[-1].settimeout(LIMIT_MS / 1000)
        made[-1].connect(address.removeprefix("ipc://"))
        if is_ready:
            made[-1].sendall(GREETING + READY)
            said = b""
            while b"ROUTER" not in said:
                said += made[-1].recv(4096)
        return made[-1]

    yield connected
    for each in made:
        each.close()


def descriptors(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def is_hung_up(connection: socket.socket) -> bool:
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


def test_garbage_and_who_stops_in_the_middle_concern_nobody_else(
    serve: Callable[..., Daemon], connect: Callable[..., Socket], raw: Callable[..., socket.socket]
) -> None:
    daemon = serve()
    client = connect()
    pid = daemon.gates.proxies[0].pid
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b"\0" * 100, os.urandom(10_000), b"\xff"):
        raw().sendall(data)
        assert ask(client, b"hello") == [b"hello"]
    named = raw(is_ready=True)
    named.sendall(b"\x02" + struct.pack(">Q", 2**62))
    assert is_hung_up(named)  # more than a frame may have
    raw(is_ready=True).sendall(b"\x01\x04half")
    assert ask(client, b"hello") == [b"hello"]
    assert (daemon.gates.proxies[0].pid, len(daemon.lanes)) == (pid, 1)


def test_a_message_of_too_many_frames_ends_its_connection(
    serve: Callable[..., Daemon], connect: Callable[..., Socket], raw: Callable[..., socket.socket]
) -> None:
    daemon = serve()
    client, guilty = connect(), connect()
    assert ask(client, b"hello") == [b"hello"]
    [refusal] = ask(guilty, *[b"x"] * (MAX_FRAMES + 1))
    assert b"expected a message of at most 66 frames, got more" in refusal
    many = raw(is_ready=True)
    with contextlib.suppress(ConnectionError):
        many.sendall(b"\x01\x01x" * 200_000 + b"\0\x01x")
    assert is_hung_up(many)
    assert ask(client, b"hello") == [b"hello"]
    until(lambda: len(daemon.lanes) == 1, "the others are gone")


def test_the_daemon_logs_once_what_a_client_makes_its_gate_log_again_and_again(
    serve: Callable[..., Daemon], connect: Callable[..., Socket], caplog: pytest.LogCaptureFixture
) -> None:
    daemon = serve()
    for _ in range(20):
        ask(connect(), *[b"x"] * (MAX_FRAMES + 1))
    assert ask(connect(), b"hello") == [b"hello"]
    until(lambda: len(daemon.lanes) == 1, "the others are gone")
    lines = [each for each in caplog.records if "expected a message of at most" in each.getMessage()]
    # A period may end meanwhile.
    assert 1 <= len(lines) <= 2
    assert {client_of(each) for each in lines} == {f"uid {os.getuid()}"}


def test_a_message_that_does_not_end_is_ended(
    serve: Callable[..., Daemon], connect: Callable[..., Socket], raw: Callable[..., socket.socket]
) -> None:
    daemon = serve(max_memory_bytes=64 * MIB)
    pid = daemon.gates.proxies[0].pid
    client, endless = connect(), raw(is_ready=True)
    frames = (b"\x03" + struct.pack(">Q", 65536) + bytes(65536)) * 16
    with contextlib.suppress(ConnectionError):
        for _ in range(1000):
            endless.sendall(frames)
            assert ask(client, b"hello") == [b"hello"]
        pytest.fail("a gigabyte was taken")
    assert ask(client, b"hello") == [b"hello"]
    assert daemon.gates.proxies[0].pid == pid


def test_many_connections_are_served_and_forgotten(
    serve: Callable[..., Daemon], connect: Callable[..., Socket], raw: Callable[..., socket.socket]
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 16_384:
        pytest.skip("too few descriptors are allowed")
    daemon = serve()
    [gate] = daemon.gates.proxies
    client = connect()
    assert ask(client, b"hello") == [b"hello"]
    before = descriptors(gate.pid)
    crowd = [raw(is_ready=True) for _ in range(300)]
    for each in crowd:
        each.sendall(b"\0\x05hello")
    until(lambda: gate.peers == 301, "all are counted")
    assert ask(client, b"hello") == [b"hello"]
    for each in crowd:
        each.close()
    until(lambda: len(daemon.lanes) == 1, "all are gone")
    until(lambda: descriptors(gate.pid) == before, "nothing is left of them")


def test_who_does_not_read_waits_alone_and_the_daemon_sees_it(
    serve: Callable[..., Daemon], connect: Callable[..., Socket]
) -> None:
    daemon = serve()
    slow, client = connect(RCVHWM=1, SNDHWM=0), connect()
    for number in range(40):
        slow.send_multipart([b"%d" % number, b"", bytes(MIB)])
    until(lambda: daemon.answered == 40, "all is answered")
    assert ask(client, b"hello") == [b"hello"]
    # What the proxy, the library and the kernel keep of it, is little.
    assert daemon.unsent > 40 * MIB - 8 * MIB
    assert [answer(slow)[0] for _ in range(40)] == [b"%d" % number for number in range(40)]
    until(lambda: not daemon.unsent, "all is said")


# --- libzmq as a client ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_secured", [False, True])
def test_a_client_with_heartbeats_and_large_messages_is_served(
    serve: Callable[..., Daemon], connect: Callable[..., Socket], address: str, is_secured: bool
) -> None:
    (server, secret), (public, private) = (zmq.curve_keypair() for _ in range(2))
    keys = {"CURVE_SERVERKEY": server, "CURVE_PUBLICKEY": public, "CURVE_SECRETKEY": private} if is_secured else {}
    serve(lock=ListenerAuth(secret.decode() if is_secured else "", None))
    client = connect("", HEARTBEAT_IVL=20, HEARTBEAT_TIMEOUT=LIMIT_MS, **keys)
    monitor = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    client.connect(address)
    for sizes in ((1,), (10, 0, MIB), (1, 20 * MIB), (0, 300_000, 300_000, 5 * MIB)):
        frames = [os.urandom(size) for size in sizes]
        for _ in range(2):
            client.send_multipart([b"head", b"", *frames])
        for _ in range(2):
            assert answer(client) == [b"head", b"", *frames]
    # It is silent for several heartbeats.
    assert not client.poll(200)
    assert not monitor.poll(0)
    assert ask(client, b"again") == [b"again"]


def test_large_encrypted_messages_of_one_client_do_not_hold_up_another(
    serve: Callable[..., Daemon], connect: Callable[..., Socket], address: str
) -> None:
    (server, secret), (public, private) = (zmq.curve_keypair() for _ in range(2))
    keys = {"CURVE_SERVERKEY": server, "CURVE_PUBLICKEY": public, "CURVE_SECRETKEY": private}
    daemon = serve(lock=ListenerAuth(secret.decode(), None))
    large, small = (connect(address, **keys) for _ in range(2))
    assert ask(small, b"hello") == [b"hello"]
    for _ in range(2):
        large.send_multipart([b"", b"", bytes(24 * MIB)])
    asked = 0
    while daemon.answered < 2 + asked + 1:
        assert ask(small, b"hello") == [b"hello"]
        asked += 1
    assert asked > 20
    assert [len(answer(large)[2]) for _ in range(2)] == [24 * MIB] * 2


def test_a_connection_storm_of_one_user_leaves_a_client_alone(
    serve: Callable[..., Daemon], connect: Callable[..., Socket], raw: Callable[..., socket.socket]
) -> None:
    daemon = serve()
    client = connect()
    pid = daemon.gates.proxies[0].pid
    assert ask(client, b"hello") == [b"hello"]
    for number in range(300):
        peer = raw()
        if number % 2:
            peer.sendall(GREETING + READY)
        peer.close()
    assert ask(client, b"hello") == [b"hello"]
    assert daemon.gates.proxies[0].pid == pid
