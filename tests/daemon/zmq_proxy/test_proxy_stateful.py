"""A proxy in this thread: clients and the daemon act in any order between turns of its loop."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weightd_common.stream import Stream
from weightd_daemon.platform.connection_limiter import NO_TENANT
from weightd_daemon.platform.listen import listen_on
from weightd_daemon.platform.tenant_lookup import TenantCredentials
from weightd_daemon.zmq_proxy import client as clients
from weightd_daemon.zmq_proxy import control
from weightd_daemon.zmq_proxy.control import PeerConnected, ProxyConfig
from weightd_daemon.zmq_proxy.proxy import ZmqProxy
from weightd_protocol.codec import encode
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.messages.inference import Error

from .peer import GREETING, MORE, PING, READY, frame, message

_KIB = 1024
_TURNS = 2000
_USERS = ("uid 1", "uid 2", "uid 3")

_HELLO = GREETING + READY
_LARGE = frame(MORE, bytes(300 * _KIB))
_PARTS = {
    "message": message([b"x"]),
    "many messages": message([b"x"]) * 200,
    "many frames": message([b""] * 66),
    "pings": PING * 3,
    "a late command": READY,
    "more frames": b"\1\0" * 200,
    "a message of some KB": frame(0, bytes(20_000)),
    "large": _LARGE,
    "large, unfinished": _LARGE[:9_000],
    "zeros": bytes(100_000),
}

# The number of bytes of the handshake that a client sends.
_BEGINS = st.sampled_from([len(_HELLO), len(_HELLO), len(_HELLO), len(GREETING), 20, 0])

_SIZES = st.sampled_from([None, None, 1, 70_000, 900_000])

_FEW = st.integers(0, 3)

[_NO_TEXT] = encode(Error("", "INVALID_ARGUMENT", ""))


class _Refusing:
    """The proxy's end of the link; while `refuses`, the kernel passes no descriptors."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.refuses = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def sendmsg(self, pieces: Any, ancillary: Any = ()) -> int:
        if self.refuses and ancillary:
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return self._connection.sendmsg(pieces, ancillary)


class ProxyMachine(RuleBasedStateMachine):
    """A proxy with its clients and its daemon."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.user = _USERS[0]
        self.clients: list[socket.socket] = []
        self.streams: list[Stream] = []

    @initialize(memory=st.sampled_from([600 * _KIB, 4096 * _KIB]), max_connections=st.sampled_from([0, 3]))
    def begin(self, memory: int, max_connections: int) -> None:
        directory = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.path = str(Path(directory) / "s")
        patch = mock.patch.object(clients, "identify_user", self._user_of)
        self.stack.enter_context(patch)
        listener = self.stack.enter_context(listen_on(f"ipc://{self.path}"))
        ours, proxy_end = socket.socketpair()
        config = ProxyConfig(
            "default",
            "",
            memory,
            memory,
            max_connections,
            0,
            0.0,
            "",
            None,
            None,
            control.error_prefix(bytes(_NO_TEXT)),
        )
        self.link: Stream = Stream(ours, accepts_descriptors=True)
        stream = Stream(proxy_end)
        self.refusing = _Refusing(proxy_end)
        stream.connection = self.refusing  # type: ignore[assignment]
        proxy_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        self.proxy = ZmqProxy(listener, stream, config)
        self.stack.callback(proxy_end.close)
        self.stack.callback(self.proxy.close)

    def _user_of(self, *_: object) -> tuple[str, bool]:
        return self.user, False

    # --- clients ----------------------------------------------------------------------------------------------------

    @rule(user=st.sampled_from(_USERS), count=_BEGINS)
    def connect(self, user: str, count: int) -> None:
        self.user = user
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(self.path)
        peer.setblocking(False)
        peer.send(_HELLO[:count])
        self.clients.append(peer)
        self.turn(2)

    @precondition(lambda self: self.clients)
    @rule(which=st.integers(0, 99), parts=st.lists(st.sampled_from([*_PARTS]), min_size=1, max_size=4), turns=_FEW)
    def send(self, which: int, parts: list[str], turns: int) -> None:
        with contextlib.suppress(OSError):
            self.clients[which % len(self.clients)].send(b"".join(_PARTS[each] for each in parts))
        self.turn(turns)

    @precondition(lambda self: self.clients)
    @rule(which=st.integers(0, 99), count=st.sampled_from([1, 1 << 20]))
    def read(self, which: int, count: int) -> None:
        with contextlib.suppress(OSError):
            self.clients[which % len(self.clients)].recv(count)

    @precondition(lambda self: self.clients)
    @rule(which=st.integers(0, 99), how=st.sampled_from([None, socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR]))
    def leave(self, which: int, how: int | None) -> None:
        if how is None:
            self.clients.pop(which % len(self.clients)).close()
        else:
            with contextlib.suppress(OSError):
                self.clients[which % len(self.clients)].shutdown(how)

    # --- the daemon -------------------------------------------------------------------------------------------------

    @rule()
    def receive_link(self) -> None:
        while select.select([self.link], [], [], 0)[0]:
            for each in self.link.receive():
                if isinstance(control.parse_proxy_message(each.frames[0]), PeerConnected):
                    self.streams.append(Stream(socket.socket(fileno=self.link.descriptors.popleft())))

    @precondition(lambda self: self.streams)
    @rule(which=st.integers(0, 99), nbytes=_SIZES, reads=st.booleans(), turns=_FEW)
    def serve(self, which: int, nbytes: int | None, reads: bool, turns: int) -> None:
        stream = self.streams[which % len(self.streams)]
        try:
            if reads:
                stream.receive()
            if nbytes is None:
                stream.flush()
            else:
                stream.send([bytes(nbytes)])
        except (ConnectionError, RemoteProtocolError):
            self._end(stream)
        self.turn(turns)

    @precondition(lambda self: self.streams)
    @rule(which=st.integers(0, 99), how=st.sampled_from([None, socket.SHUT_RD, socket.SHUT_WR]))
    def end_stream(self, which: int, how: int | None) -> None:
        stream = self.streams[which % len(self.streams)]
        if how is None:
            self._end(stream)
        else:
            with contextlib.suppress(OSError):
                stream.connection.shutdown(how)

    def _end(self, stream: Stream) -> None:
        stream.close()
        self.streams.remove(stream)

    @rule(tenant=st.sampled_from(["a", NO_TENANT]))
    def reload(self, tenant: str) -> None:
        self.link.send([control.encode_allowed_peers(None, [TenantCredentials(tenant, [os.getuid()])])])

    @rule(refuses=st.booleans())
    def refuse_descriptors(self, refuses: bool) -> None:
        self.refusing.refuses = refuses

    # --- the proxy ---------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 5))
    def turn(self, count: int) -> None:
        for _ in range(count):
            self.proxy._loop.run_once(0.0)

    @invariant()
    def counters_are_right(self) -> None:
        if not hasattr(self, "proxy"):
            return
        proxy = self.proxy
        all_clients = [client for user in proxy._clients.users.values() for client in user.clients]
        assert proxy._clients.buffered_bytes == sum(client.buffered_bytes for client in all_clients)
        assert {name: user.buffered_bytes for name, user in proxy._clients.users.items()} == {
            name: sum(client.buffered_bytes for client in user.clients) for name, user in proxy._clients.users.items()
        }
        assert len(proxy._clients._limiter) == len(all_clients)
        assert proxy._relay._peer_count == sum(client.daemon_stream is not None for client in all_clients)
        assert proxy._relay._close_deadlines.keys() <= {*all_clients}
        for side in [
            side for client in all_clients for side in (client.client_socket, client.daemon_socket) if side is not None
        ]:
            assert side.is_open
            assert bool(proxy._loop._event_masks[side.fd] & select.EPOLLIN) == (not side.pause_reasons)

    def teardown(self) -> None:
        if not hasattr(self, "proxy"):
            return
        self.refusing.refuses = False
        proxy = self.proxy
        with self.stack:
            for each in self.clients:
                each.close()
            for _ in range(_TURNS):
                self.receive_link()
                for stream in self.streams:
                    stream.close()
                self.streams.clear()
                proxy._loop.run_once(0.01)
                if not proxy._clients.users and not proxy._relay._close_deadlines:
                    break
            self.link.close()
            assert (
                proxy._clients.users,
                proxy._relay._close_deadlines,
                proxy._clients.buffered_bytes,
                proxy._relay._peer_count,
            ) == ({}, {}, 0, 0)
            assert (proxy._clients.handshakes, len(proxy._clients._limiter), bool(proxy._relay._turns._queue)) == (
                {},
                0,
                False,
            )
            assert not proxy._clients._admission._open_connections


TestProxyMachine = ProxyMachine.TestCase
TestProxyMachine.settings = settings(max_examples=25, stateful_step_count=60, deadline=None)
