"""ZeroMQ proxies as processes, with ZeroMQ clients and a daemon that echoes each message."""

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
NO_LIMITS = UserConnectionLimits(0, 0.0)


class EchoDaemon:
    """A daemon that echoes each message; after "leave" it closes the connection.

    Args:
        listeners: the listeners that get a proxy.
        max_memory_bytes: the limit of one proxy.
        auth: the authentication of each listener.
        limits: the connection limits of one user.
    """

    def __init__(
        self,
        listeners: dict[str, socket.socket],
        max_memory_bytes: int = 256 * MIB,
        auth: ListenerAuth = OPEN,
        limits: UserConnectionLimits = NO_LIMITS,
    ) -> None:
        self.loop = EventLoop()
        self.streams: dict[Stream, tuple[str, PeerIdentity]] = {}
        each = {name: (listener, auth) for name, listener in listeners.items()}
        self.zmq_proxies = ZmqProxies(each, self.loop, self._adopt, ProxyLimits(max_memory_bytes, limits), ClientLog())
        self.answered = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        until(lambda: all(each.pid for each in self.zmq_proxies.proxies), "the proxies have started")

    @property
    def unsent(self) -> int:
        return sum(each.unsent for each in list(self.streams))

    def close(self, *, flush: bool = False) -> None:
        if self._ends.is_set():
            return
        self._ends.set()
        self._thread.join()
        for each in list(self.streams):
            if flush:
                each.connection.setblocking(True)
                each.flush()
            each.close()
        self.zmq_proxies.close()
        self.loop.close()

    def _run(self) -> None:
        while not self._ends.is_set():
            self.loop.run_once(0.05)

    def _adopt(self, listener: str, connection: socket.socket, identity: PeerIdentity) -> None:
        stream = Stream(connection)
        self.streams[stream] = listener, identity
        self.loop.add(stream.fileno(), functools.partial(self._answer, stream))

    def _answer(self, stream: Stream) -> None:
        try:
            for message in stream.receive():
                self.answered += 1
                if not stream.send(message.frames):
                    self.loop.watch_writes(stream.fileno(), functools.partial(self._flush, stream))
                if message.frames[0] == b"leave":
                    raise ConnectionResetError
        except ConnectionError:
            self.loop.remove(stream.fileno())
            stream.close()
            del self.streams[stream]

    def _flush(self, stream: Stream) -> None:
        if stream.flush():
            self.loop.unwatch_writes(stream.fileno())


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def serve(address: str) -> Iterator[Callable[..., EchoDaemon]]:
    made: list[EchoDaemon] = []
    with listen_on(address) as listener:

        def started(
            max_memory_bytes: int = 256 * MIB, auth: ListenerAuth = OPEN, **others: socket.socket
        ) -> EchoDaemon:
            made.append(EchoDaemon({"default": listener, **others}, max_memory_bytes, auth))
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


def receive(client: Socket) -> list[bytes]:
    assert client.poll(LIMIT_MS)
    return client.recv_multipart()


def request(client: Socket, *frames: bytes) -> list[bytes]:
    client.send_multipart(frames)
    return receive(client)


def is_answered(client: Socket) -> bool:
    """Send a message, which is lost if libzmq has not noticed the end of the previous connection; return success."""
    client.send(b"again")
    return bool(client.poll(500)) and client.recv() == b"again"


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_passes_messages_and_the_clients_identity(
    serve: Callable[..., EchoDaemon], connect: Callable[..., Socket], kind: str
) -> None:
    with listen_on("tcp://127.0.0.1:0") as tcp:
        daemon = serve(other=tcp)
        port = tcp.getsockname()[1]
        client = connect(*[f"tcp://127.0.0.1:{port}"] if kind == "tcp" else [])
        large = os.urandom(5 * MIB)
        for frames in ([b"one"], [b"", b"", b""], [b"a", b"", large, b"", large[: 2 * MIB]], [b"x"] * MAX_FRAMES):
            assert request(client, *frames) == frames
        user = f"uid {os.getuid()}"
        near = PeerIdentity(os.getuid(), os.getpid(), user, (os.getgid(), *os.getgroups()))
        expected = ("default", near) if kind == "ipc" else ("other", PeerIdentity(None, None, user))
        assert list(daemon.streams.values()) == [expected]


def test_curve_admits_known_keys_and_reports_them(
    serve: Callable[..., EchoDaemon], connect: Callable[..., Socket], address: str
) -> None:
    (server, secret), (one, private_key), (other, others) = (zmq.curve_keypair() for _ in range(3))
    daemon = serve(auth=ListenerAuth(secret.decode(), [one.decode()]))

    def come(public: bytes, private: bytes, of: bytes = server) -> tuple[Socket, Socket]:
        client = connect("", CURVE_SERVERKEY=of, CURVE_PUBLICKEY=public, CURVE_SECRETKEY=private)
        # The monitor must exist before the connection, since a refused client does not reconnect.
        monitor = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED)
        client.connect(address)
        return client, monitor

    known, _ = come(one, private_key)
    assert request(known, b"hello") == [b"hello"]
    [(_, identity)] = daemon.streams.values()
    assert (identity.public_key, identity.uid) == (one.decode(), os.getuid())
    for stranger, monitor in (come(other, others), come(one, others), come(one, private_key, other)):
        stranger.send(b"hello")
        assert monitor.poll(LIMIT_MS)
        assert not stranger.poll(0)
    plain = connect()
    plain.send(b"hello")
    # A reload replaces the first key; the proxy keeps existing connections.
    daemon.zmq_proxies.update_auth({"default": ListenerAuth(keys=[other.decode()])})
    stranger, monitor = come(one, private_key)
    assert monitor.poll(LIMIT_MS)
    welcome, _ = come(other, others)
    assert request(welcome, b"hello") == [b"hello"]
    assert request(known, b"again") == [b"again"]
    assert not plain.poll(0)
    # A restarted proxy gets the new keys, too.
    [proxy] = daemon.zmq_proxies.proxies
    before = proxy.pid
    os.kill(before, signal.SIGKILL)
    until(lambda: proxy.pid not in (0, before), "the proxy has restarted")
    welcome, _ = come(other, others)
    assert request(welcome, b"hello") == [b"hello"]
    assert {identity.public_key for _, identity in daemon.streams.values()} >= {other.decode()}


# More keys than fit into one header, and more than the socket accepts at once.
@pytest.mark.parametrize("count", [2_000, 20_000])
def test_proxy_gets_any_number_of_keys(
    serve: Callable[..., EchoDaemon], connect: Callable[..., Socket], count: int
) -> None:
    keys = [f"{number:040}" for number in range(count)]
    auth = ListenerAuth(tenants=[TenantCredentials("team", [os.getuid()], keys=keys)])
    daemon = serve(auth=auth)
    client = connect()
    assert request(client, b"first") == [b"first"]
    daemon.zmq_proxies.update_auth({"default": auth})
    until(
        lambda: not any(each.stream and each.stream.unsent for each in daemon.zmq_proxies._listeners),
        "the keys are sent",
    )
    assert request(client, b"second") == [b"second"]
    assert [each.restarts for each in daemon.zmq_proxies.proxies] == [0]


def test_unauthenticated_clients_do_not_evict_others(
    serve: Callable[..., EchoDaemon], connect: Callable[..., Socket], address: str
) -> None:
    (server, secret), (one, private_key) = (zmq.curve_keypair() for _ in range(2))
    tables = [TenantCredentials("one", keys=[one.decode()])]
    daemon = serve(auth=ListenerAuth(secret.decode(), [one.decode()], 8, tables))
    keys = {"CURVE_SERVERKEY": server, "CURVE_PUBLICKEY": one, "CURVE_SECRETKEY": private_key}
    with contextlib.ExitStack() as stack:

        def flood() -> None:
            for _ in range(20):
                raw = stack.enter_context(socket.socket(socket.AF_UNIX))
                raw.connect(address.removeprefix("ipc://"))
                raw.sendall(GREETING[:20])

        own = [connect(**keys) for _ in range(3)]
        for _ in range(2):
            assert [request(each, b"hello") for each in own] == 3 * [[b"hello"]]
            flood()
        own.append(connect(**keys))
        assert [request(each, b"hello") for each in own] == 4 * [[b"hello"]]
        # A disconnected client would reconnect and be counted again.
        assert len(daemon.streams) == 4


def test_listener_accepts_no_descriptors(serve: Callable[..., EchoDaemon], address: str) -> None:
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


def test_disconnects_on_either_side_are_passed_on(
    serve: Callable[..., EchoDaemon], connect: Callable[..., Socket]
) -> None:
    daemon = serve()
    [proxy] = daemon.zmq_proxies.proxies
    one, two = connect(), connect()
    for client in (one, two):
        assert request(client, b"hello") == [b"hello"]
    until(lambda: proxy.peers == 2, "both clients are counted")
    one.close()
    until(lambda: len(daemon.streams) == 1 and proxy.peers == 1, "the client has disconnected")
    monitor = two.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    assert request(two, b"leave") == [b"leave"]
    assert monitor.poll(LIMIT_MS)
    # libzmq reconnects automatically.
    assert request(two, b"again") == [b"again"]


def test_clients_may_share_a_routing_id(serve: Callable[..., EchoDaemon], connect: Callable[..., Socket]) -> None:
    daemon = serve()
    twins = [connect(ROUTING_ID=b"me") for _ in range(2)]
    for number, client in enumerate(twins):
        client.send(b"%d" % number)
    assert [receive(client) for client in twins] == [[b"0"], [b"1"]]
    assert len(daemon.streams) == 2


# --- lost processes -------------------------------------------------------------------------------------------------


def test_killed_proxy_restarts_and_affects_no_other(
    serve: Callable[..., EchoDaemon], connect: Callable[..., Socket], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = f"ipc://{tmp_path}/other"
    with caplog.at_level(logging.INFO), listen_on(other) as listener:
        daemon = serve(other=listener)
        proxy, other_proxy = daemon.zmq_proxies.proxies
        one, two = connect(), connect(other)
        for client in (one, two):
            assert request(client, b"hello") == [b"hello"]
        pids = {proxy.pid}
        for deaths in (1, 2):
            os.kill(proxy.pid, signal.SIGKILL)
            begin = time.monotonic()
            until(lambda: proxy.pid not in {0, *pids}, "the proxy has restarted")
            pids.add(proxy.pid)
            until(lambda: is_answered(one), "the proxy serves")
            assert time.monotonic() - begin < 10
            assert (proxy.restarts, other_proxy.restarts) == (deaths, 0)
        assert request(two, b"still here") == [b"still here"]
        until(lambda: "killed by SIGKILL" in caplog.text, "the exit is logged")


def test_restart_backoff_doubles_up_to_a_limit() -> None:
    assert [backoff_s(count) for count in (1, 2, 3, 4, 8, 9, 10_000)] == [0.0, 0.05, 0.1, 0.2, 3.2, 5.0, 5.0]


def test_proxy_restart_waits_for_a_descriptor(
    serve: Callable[..., EchoDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightd_daemon.transport.zmq_proxies._MAX_BACKOFF_S", 0.1)
    [proxy] = serve().zmq_proxies.proxies
    tried: list[None] = []

    def refuse(*_: object) -> None:
        tried.append(None)
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as few:
        few.setattr(socket, "socketpair", refuse)
        os.kill(proxy.pid, signal.SIGKILL)
        until(lambda: len(tried) > 1, "the start is retried")
    until(lambda: proxy.pid, "the proxy has restarted")


def test_lost_zygote_restarts_with_all_proxies(
    serve: Callable[..., EchoDaemon], connect: Callable[..., Socket]
) -> None:
    daemon = serve()
    before = daemon.zmq_proxies.pids
    os.kill(before[0], signal.SIGKILL)
    until(
        lambda: len(daemon.zmq_proxies.pids) == 2 and not set(daemon.zmq_proxies.pids) & set(before),
        "both have restarted",
    )
    assert request(connect(), b"hello") == [b"hello"]


def test_hung_zygote_is_replaced_when_needed(
    serve: Callable[..., EchoDaemon], connect: Callable[..., Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightd_daemon.transport.zmq_proxies._FORK_TIMEOUT_S", 1.0)
    daemon = serve()
    before = daemon.zmq_proxies.pids
    os.kill(before[0], signal.SIGSTOP)
    assert request(connect(), b"hello") == [b"hello"]
    os.kill(before[1], signal.SIGKILL)
    until(
        lambda: len(daemon.zmq_proxies.pids) == 2 and not set(daemon.zmq_proxies.pids) & set(before),
        "both have restarted",
    )
    assert request(connect(), b"again") == [b"again"]
    assert not _lives(before[0])


def test_zygote_start_is_retried(serve: Callable[..., EchoDaemon], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightd_daemon.transport.zmq_proxies._MAX_BACKOFF_S", 0.1)
    daemon = serve()
    tried: list[None] = []

    def refuse(*_: object) -> None:
        tried.append(None)
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as few:
        few.setattr("weightd_daemon.transport.zmq_proxies.launch", refuse)
        os.kill(daemon.zmq_proxies.pids[0], signal.SIGKILL)
        until(lambda: len(tried) > 1, "the start is retried")
        assert daemon.zmq_proxies.pids == []
    until(lambda: len(daemon.zmq_proxies.pids) == 2, "zygote and proxy have started")


def test_shutdown_delivers_last_responses_and_ends_proxies(
    serve: Callable[..., EchoDaemon], connect: Callable[..., Socket], address: str
) -> None:
    daemon = serve()
    client = connect()
    assert request(client, b"hello") == [b"hello"]
    client.send_multipart([b"last", b"", bytes(20 * MIB)])
    until(lambda: daemon.answered == 2, "the message is echoed")
    pids = daemon.zmq_proxies.pids
    daemon.close(flush=True)
    assert [len(each) for each in receive(client)] == [4, 0, 20 * MIB]
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
    proxies = ZmqProxies(listeners, loop, lambda *_: None, limits, ClientLog(), forked)
    while len(proxies.pids) < 2:
        loop.run_once()
    print(*proxies.pids, flush=True)
    while True:
        loop.run_once()
"""


def test_forked_processes_exit_with_the_daemon(address: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", _DAEMON, address], stdout=subprocess.PIPE, env=environment) as daemon:
        assert daemon.stdout is not None
        pids = [int(each) for each in daemon.stdout.readline().split()]
        for pid, name in zip(pids, ["weightd-zygote\n", "zmq-proxy defau\n"], strict=True):
            until(lambda: Path(f"/proc/{pid}/comm").read_text("ascii") == name, name)  # noqa: B023
        daemon.kill()
    until(lambda: not any(_lives(pid) for pid in pids), "the processes have exited")


def _lives(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text("ascii")
    except FileNotFoundError:
        return False


# --- hostile clients ------------------------------------------------------------------------------------------------


@pytest.fixture
def raw(address: str) -> Iterator[Callable[..., socket.socket]]:
    made: list[socket.socket] = []

    def connected(*, is_ready: bool = False) -> socket.socket:
        """Return a plain connection, or one whose handshake as a DEALER socket is complete."""
        made.append(socket.socket(socket.AF_UNIX))
        made[-1].settimeout(LIMIT_MS / 1000)
        made[-1].connect(address.removeprefix("ipc://"))
        if is_ready:
            made[-1].sendall(GREETING + READY)
            received = b""
            while b"ROUTER" not in received:
                received += made[-1].recv(4096)
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


def test_invalid_data_affects_no_other_client(
    serve: Callable[..., EchoDaemon], connect: Callable[..., Socket], raw: Callable[..., socket.socket]
) -> None:
    daemon = serve()
    client = connect()
    pid = daemon.zmq_proxies.proxies[0].pid
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b"\0" * 100, os.urandom(10_000), b"\xff"):
        raw().sendall(data)
        assert request(client, b"hello") == [b"hello"]
    named = raw(is_ready=True)
    named.sendall(b"\x02" + struct.pack(">Q", 2**62))
    assert is_hung_up(named)  # larger than the limit of a frame
    raw(is_ready=True).sendall(b"\x01\x04half")
    assert request(client, b"hello") == [b"hello"]
    assert (daemon.zmq_proxies.proxies[0].pid, len(daemon.streams)) == (pid, 1)


def test_too_many_frames_disconnect_the_client(
    serve: Callable[..., EchoDaemon], connect: Callable[..., Socket], raw: Callable[..., socket.socket]
) -> None:
    daemon = serve()
    client, bad = connect(), connect()
    assert request(client, b"hello") == [b"hello"]
    [refusal] = request(bad, *[b"x"] * (MAX_FRAMES + 1))
    assert b"expected a message of at most 66 frames, got more" in refusal
    many = raw(is_ready=True)
    with contextlib.suppress(ConnectionError):
        many.sendall(b"\x01\x01x" * 200_000 + b"\0\x01x")
    assert is_hung_up(many)
    assert request(client, b"hello") == [b"hello"]
    until(lambda: len(daemon.streams) == 1, "the others have disconnected")


def test_repeated_proxy_log_lines_are_logged_once(
    serve: Callable[..., EchoDaemon], connect: Callable[..., Socket], caplog: pytest.LogCaptureFixture
) -> None:
    daemon = serve()
    for _ in range(20):
        request(connect(), *[b"x"] * (MAX_FRAMES + 1))
    assert request(connect(), b"hello") == [b"hello"]
    until(lambda: len(daemon.streams) == 1, "the others have disconnected")
    lines = [each for each in caplog.records if "expected a message of at most" in each.getMessage()]
    # A log period may end in between.
    assert 1 <= len(lines) <= 2
    assert {client_of(each) for each in lines} == {f"uid {os.getuid()}"}


def test_endless_message_is_cut_off(
    serve: Callable[..., EchoDaemon], connect: Callable[..., Socket], raw: Callable[..., socket.socket]
) -> None:
    daemon = serve(max_memory_bytes=64 * MIB)
    pid = daemon.zmq_proxies.proxies[0].pid
    client, endless = connect(), raw(is_ready=True)
    frames = (b"\x03" + struct.pack(">Q", 65536) + bytes(65536)) * 16
    with contextlib.suppress(ConnectionError):
        for _ in range(1000):
            endless.sendall(frames)
            assert request(client, b"hello") == [b"hello"]
        pytest.fail("the proxy accepted a gigabyte")
    assert request(client, b"hello") == [b"hello"]
    assert daemon.zmq_proxies.proxies[0].pid == pid


def test_forgets_closed_connections(
    serve: Callable[..., EchoDaemon], connect: Callable[..., Socket], raw: Callable[..., socket.socket]
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 16_384:
        pytest.skip("needs a limit of 16,384 descriptors")
    daemon = serve()
    [proxy] = daemon.zmq_proxies.proxies
    client = connect()
    assert request(client, b"hello") == [b"hello"]
    before = descriptors(proxy.pid)
    clients = [raw(is_ready=True) for _ in range(300)]
    for each in clients:
        each.sendall(b"\0\x05hello")
    until(lambda: proxy.peers == 301, "all clients are counted")
    assert request(client, b"hello") == [b"hello"]
    for each in clients:
        each.close()
    until(lambda: len(daemon.streams) == 1, "the clients have disconnected")
    until(lambda: descriptors(proxy.pid) == before, "their descriptors are closed")


def test_slow_reader_does_not_block_others(serve: Callable[..., EchoDaemon], connect: Callable[..., Socket]) -> None:
    daemon = serve()
    slow, client = connect(RCVHWM=1, SNDHWM=0), connect()
    for number in range(40):
        slow.send_multipart([b"%d" % number, b"", bytes(MIB)])
    until(lambda: daemon.answered == 40, "all messages are echoed")
    assert request(client, b"hello") == [b"hello"]
    # Proxy, libzmq and kernel buffer a small part only.
    assert daemon.unsent > 40 * MIB - 8 * MIB
    assert [receive(slow)[0] for _ in range(40)] == [b"%d" % number for number in range(40)]
    until(lambda: not daemon.unsent, "everything is sent")


# --- libzmq as a client ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_secured", [False, True])
def test_serves_client_with_heartbeats_and_large_messages(
    serve: Callable[..., EchoDaemon], connect: Callable[..., Socket], address: str, is_secured: bool
) -> None:
    (server, secret), (public, private) = (zmq.curve_keypair() for _ in range(2))
    keys = {"CURVE_SERVERKEY": server, "CURVE_PUBLICKEY": public, "CURVE_SECRETKEY": private} if is_secured else {}
    serve(auth=ListenerAuth(secret.decode() if is_secured else "", None))
    client = connect("", HEARTBEAT_IVL=20, HEARTBEAT_TIMEOUT=LIMIT_MS, **keys)
    monitor = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    client.connect(address)
    for sizes in ((1,), (10, 0, MIB), (1, 20 * MIB), (0, 300_000, 300_000, 5 * MIB)):
        frames = [os.urandom(size) for size in sizes]
        for _ in range(2):
            client.send_multipart([b"head", b"", *frames])
        for _ in range(2):
            assert receive(client) == [b"head", b"", *frames]
    # The client is silent for several heartbeats.
    assert not client.poll(200)
    assert not monitor.poll(0)
    assert request(client, b"again") == [b"again"]


def test_large_encrypted_messages_do_not_block_others(
    serve: Callable[..., EchoDaemon], connect: Callable[..., Socket], address: str
) -> None:
    (server, secret), (public, private) = (zmq.curve_keypair() for _ in range(2))
    keys = {"CURVE_SERVERKEY": server, "CURVE_PUBLICKEY": public, "CURVE_SECRETKEY": private}
    daemon = serve(auth=ListenerAuth(secret.decode(), None))
    large, small = (connect(address, **keys) for _ in range(2))
    assert request(small, b"hello") == [b"hello"]
    for _ in range(2):
        large.send_multipart([b"", b"", bytes(24 * MIB)])
    asked = 0
    while daemon.answered < 2 + asked + 1:
        assert request(small, b"hello") == [b"hello"]
        asked += 1
    assert asked > 20
    assert [len(receive(large)[2]) for _ in range(2)] == [24 * MIB] * 2


def test_connection_storm_does_not_block_others(
    serve: Callable[..., EchoDaemon], connect: Callable[..., Socket], raw: Callable[..., socket.socket]
) -> None:
    daemon = serve()
    client = connect()
    pid = daemon.zmq_proxies.proxies[0].pid
    assert request(client, b"hello") == [b"hello"]
    for number in range(300):
        peer = raw()
        if number % 2:
            peer.sendall(GREETING + READY)
        peer.close()
    assert request(client, b"hello") == [b"hello"]
    assert daemon.zmq_proxies.proxies[0].pid == pid
