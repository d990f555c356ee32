"""Clients that come and go, over real sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from testkit.waiting import until
from weightd.daemon.gate.doorman import PATIENCE_S, Doorman
from weightd.daemon.gate.link import PeerIdentity
from weightd.daemon.gate.peers import Connection, Peers
from weightd.daemon.gate.reader import Reader

LIMIT_MS = 20_000

Socket = zmq.Socket[bytes]


class Door:
    """Does what a gate does with its peers, until something is there."""

    def __init__(self, router: Socket, peers: Peers) -> None:
        self.router, self.peers = router, peers
        self._ended: list[Connection] = []
        self._poller = zmq.Poller()
        for each in (router, *peers.sources):
            self._poller.register(each, zmq.POLLIN)

    def wait(self, check: Callable[[], object]) -> None:
        while not check():
            assert self._poller.poll(LIMIT_MS)
            self._ended += self.peers.ended()

    def heard(self) -> list[tuple[bytes, Connection | None]]:
        """Return what has come, and from whom."""
        self.wait(lambda: self.router.poll(0))
        reader = Reader(self.router)
        heard: list[tuple[bytes, Connection | None]] = []
        while reader.is_ready:
            message = reader.read()
            assert message is not None
            route, [frame] = message
            heard.append((frame.bytes, self.peers.sender(route, frame)))
        return heard

    def known(self) -> Connection:
        [(_, connection)] = self.heard()
        assert connection is not None
        return connection

    def come(self, count: int) -> list[Connection]:
        """Wait until so many are connected."""
        self.wait(lambda: len(self.peers.connections) == count)
        return list(self.peers.connections.values())

    def gone(self) -> list[Connection]:
        self.wait(lambda: self._ended)
        ended, self._ended = self._ended, []
        return ended


@pytest.fixture
def door(router: Socket, peers: Peers) -> Door:
    return Door(router, peers)


def test_a_connection_is_known_as_long_as_it_lasts_and_its_end_is_told_once(
    door: Door, peers: Peers, connect: Callable[..., Socket]
) -> None:
    one = connect()
    first = door.known()
    two = connect()
    second = door.known()
    assert (list(peers.connections.values()), peers.ended()) == ([first, second], [])
    assert first.identity == PeerIdentity(os.getuid(), os.getpid(), "", (os.getgid(), *os.getgroups()))
    one.send(b"again")
    assert door.known() is first
    one.close(linger=0)
    assert door.gone() == [first]
    assert (peers.ended(), list(peers.connections.values())) == ([], [second])
    assert (peers.is_there(first), peers.is_there(second)) == (False, True)
    two.send(b"still here")
    assert door.known() is second


def test_who_comes_with_the_name_of_one_that_has_gone_is_another(
    door: Door, peers: Peers, connect: Callable[..., Socket]
) -> None:
    before: list[Connection] = []
    for _ in range(20):
        client = connect(b"me")
        before.append(door.known())
        client.close(linger=0)
        assert door.gone() == before[-1:]
        assert not peers.any_named
        assert not door.router.poll(20)  # the library lets go of the name
    assert len(set(before)) == 20


# It connects as a user, says its pid once it is let in, and stays until its stdin ends.
_STRANGER = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
connection = socket.socket(socket.AF_UNIX)
connection.connect(chr(0) + sys.argv[1])
connection.sendall(bytes.fromhex(sys.argv[3]))
answer = b""
while len(answer) < 66 or len(answer) < 66 + answer[65]:
    answer += connection.recv(4096)
pid = b"%d" % os.getpid()
connection.sendall(bytes([0, len(pid)]) + pid)
sys.stdin.read()
"""
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"


@pytest.mark.parametrize("uids", [(0, 0), (0, 1), (1, 0)])
def test_what_was_sent_before_another_came_on_the_descriptor_is_not_taken_for_his(
    door: Door, uids: tuple[int, int]
) -> None:
    if os.getuid():
        uids = (os.getuid(), os.getuid())
    place = f"weightd-{os.getpid()}-{time.monotonic_ns()}"
    door.router.bind(f"ipc://@{place}")

    def stranger(uid: int) -> subprocess.Popen[bytes]:
        arguments = [place, str(uid), (_GREETING + _READY).hex()]
        return subprocess.Popen([sys.executable, "-I", "-S", "-c", _STRANGER, *arguments], stdin=subprocess.PIPE)

    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with stranger(uids[0]) as first:
        there = count()
        [one] = door.come(1)
        door.wait(lambda: door.router.poll(0))
    until(lambda: count() == there - 1, "the library has closed its connection")
    with stranger(uids[1]) as second:
        assert door.gone() == [one]
        [two] = door.come(1)
        assert two.descriptor == one.descriptor
        # What both have sent is there to be read, and the first is not there any more.
        heard = door.heard()
        while len(heard) < 2:
            heard += door.heard()
        assert (two.identity.uid, two.identity.pid) == (uids[1], second.pid)
        assert dict(heard) == {b"%d" % first.pid: None, b"%d" % second.pid: two}


def test_of_whom_the_library_knows_nothing_nothing_is_heard(peers: Peers) -> None:
    assert peers.sender(b"\0abcd", zmq.Frame(b"hello")) is None


def test_a_peer_of_an_older_protocol_is_hung_up(door: Door, address: str) -> None:
    with socket.socket(socket.AF_UNIX) as old:
        old.connect(address.removeprefix("ipc://"))
        old.sendall(b"\x01\x00\x06\x00hello")  # ZMTP 1.0: no name, then a message
        assert len(door.gone()) == 1
    assert not door.router.poll(0)


def test_who_is_connected_and_has_said_nothing_is_silent(
    door: Door, peers: Peers, connect: Callable[..., Socket], address: str
) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(address.removeprefix("ipc://"))
        connect()
        client = door.known()
        door.come(2)
        assert [each.heard for each in peers.silent.values()] == [None]
        assert client not in peers.silent.values()
        assert not peers.any_named
    door.gone()
    assert peers.silent == {}


def test_who_has_the_same_routing_id_as_another_is_told(
    door: Door, peers: Peers, connect: Callable[..., Socket]
) -> None:
    one = connect(b"me")
    assert door.known().route == b"me"
    other = connect(b"me")
    door.come(2)
    for _ in range(10):
        assert not peers.ended()  # it is let in
        assert not door.router.poll(10)  # the library drops what it says
    assert peers.any_named
    Doorman(peers, 0, b"another has the same", lambda level, text: None).tick(time.monotonic() + PATIENCE_S)
    assert other.poll(LIMIT_MS)
    assert other.recv() == b"another has the same"
    door.gone()
    assert not one.poll(0)


def test_over_tcp_the_kernel_knows_the_host(context: zmq.Context[Socket]) -> None:
    with context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as client:
        peers = Peers(router)
        router.bind("tcp://127.0.0.1:*")
        client.connect(str(router.getsockopt_string(zmq.LAST_ENDPOINT)))
        client.send(b"hello")
        assert Door(router, peers).known().identity == PeerIdentity(None, None, "127.0.0.1")
        peers.close()
