"""A proxy in this thread: clients and the daemon act in any order between the turns of its loop."""

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

# Bytes of the handshake that a client sends.
_BEGINS = st.sampled_from([len(_HELLO), len(_HELLO), len(_HELLO), len(GREETING), 20, 0])

_SIZES = st.sampled_from([None, None, 1, 70_000, 900_000])

_FEW = st.integers(0, 3)

[_NO_TEXT] = encode(Error("", "INVALID_ARGUMENT", ""))


class _Refusing:
    """The proxy's end of the link; the kernel passes no descriptor while `refuses`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.refuses = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def sendmsg(self, pieces: Any, ancillary: Any = ()) -> int:
        if self.refuses and ancillary:
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return self._connection.sendmsg(pieces, ancillary)


class World(RuleBasedStateMachine):
    """The proxy, its clients and its daemon."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.user = _USERS[0]
        self.clients: list[socket.socket] = []
        self.lanes: list[Stream] = []

    @initialize(memory=st.sampled_from([600 * _KIB, 4096 * _KIB]), most=st.sampled_from([0, 3]))
    def begin(self, memory: int, most: int) -> None:
        directory = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.path = str(Path(directory) / "s")
        patch = mock.patch.object(clients, "identify_user", self._user_of)
        self.stack.enter_context(patch)
        listener = self.stack.enter_context(listen_on(f"ipc://{self.path}"))
        ours, its = socket.socketpair()
        terms = ProxyConfig(
            "default", "", memory, memory, most, 0, 0.0, "", None, None, control.error_prefix(bytes(_NO_TEXT))
        )
        self.link: Stream = Stream(ours, accepts_descriptors=True)
        stream = Stream(its)
        self.refusing = _Refusing(its)
        stream.connection = self.refusing  # type: ignore[assignment]
        its.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        self.gate = ZmqProxy(listener, stream, terms)
        self.stack.callback(its.close)
        self.stack.callback(self.gate.close)

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
    def hear(self) -> None:
        while select.select([self.link], [], [], 0)[0]:
            for each in self.link.receive():
                if isinstance(control.parse_proxy_message(each.frames[0]), PeerConnected):
                    self.lanes.append(Stream(socket.socket(fileno=self.link.descriptors.popleft())))

    @precondition(lambda self: self.lanes)
    @rule(which=st.integers(0, 99), nbytes=_SIZES, reads=st.booleans(), turns=_FEW)
    def serve(self, which: int, nbytes: int | None, reads: bool, turns: int) -> None:
        lane = self.lanes[which % len(self.lanes)]
        try:
            if reads:
                lane.receive()
            if nbytes is None:
                lane.flush()
            else:
                lane.send([bytes(nbytes)])
        except (ConnectionError, RemoteProtocolError):
            self._end(lane)
        self.turn(turns)

    @precondition(lambda self: self.lanes)
    @rule(which=st.integers(0, 99), how=st.sampled_from([None, socket.SHUT_RD, socket.SHUT_WR]))
    def end(self, which: int, how: int | None) -> None:
        lane = self.lanes[which % len(self.lanes)]
        if how is None:
            self._end(lane)
        else:
            with contextlib.suppress(OSError):
                lane.connection.shutdown(how)

    def _end(self, lane: Stream) -> None:
        lane.close()
        self.lanes.remove(lane)

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
            self.gate._loop.run_once(0.0)

    @invariant()
    def counts_are_right(self) -> None:
        if not hasattr(self, "gate"):
            return
        gate = self.gate
        everyone = [client for user in gate._clients.users.values() for client in user.clients]
        assert gate._clients.buffered_bytes == sum(client.buffered_bytes for client in everyone)
        assert {name: user.buffered_bytes for name, user in gate._clients.users.items()} == {
            name: sum(client.buffered_bytes for client in user.clients) for name, user in gate._clients.users.items()
        }
        assert len(gate._clients._limiter) == len(everyone)
        assert gate._relay._peer_count == sum(client.daemon_stream is not None for client in everyone)
        assert gate._relay._close_deadlines.keys() <= {*everyone}
        for side in [
            side for client in everyone for side in (client.client_socket, client.daemon_socket) if side is not None
        ]:
            assert side.is_open
            assert bool(gate._loop._event_masks[side.fd] & select.EPOLLIN) == (not side.pause_reasons)

    def teardown(self) -> None:
        if not hasattr(self, "gate"):
            return
        self.refusing.refuses = False
        gate = self.gate
        with self.stack:
            for each in self.clients:
                each.close()
            for _ in range(_TURNS):
                self.hear()
                for lane in self.lanes:
                    lane.close()
                self.lanes.clear()
                gate._loop.run_once(0.01)
                if not gate._clients.users and not gate._relay._close_deadlines:
                    break
            self.link.close()
            assert (
                gate._clients.users,
                gate._relay._close_deadlines,
                gate._clients.buffered_bytes,
                gate._relay._peer_count,
            ) == ({}, {}, 0, 0)
            assert (gate._clients.handshakes, len(gate._clients._limiter), bool(gate._relay._turns._queue)) == (
                {},
                0,
                False,
            )
            assert not gate._clients._admission._open_connections


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=25, stateful_step_count=60, deadline=None)
