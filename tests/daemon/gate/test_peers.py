"""Clients that come and go, over real sockets."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

import pytest
import zmq

from testkit.waiting import until
from weightd.daemon.gate.doorman import PATIENCE_S, Doorman
from weightd.daemon.gate.link import PeerIdentity
from weightd.daemon.gate.peers import Connection, Peers
from weightd.daemon.gate.reader import Reader

LIMIT_MS = 20_000

Socket = zmq.Socket[bytes]


def sender(router: Socket, peers: Peers) -> Connection | None:
    assert router.poll(LIMIT_MS)
    [received] = Reader(router).read()
    return peers.sender(received.identity)


def known(router: Socket, peers: Peers) -> Connection:
    found = sender(router, peers)
    assert found is not None
    return found


def gone(peers: Peers) -> list[Connection]:
    assert peers.pending or peers.monitor.poll(LIMIT_MS)
    return peers.ended()


def test_a_connection_is_known_as_long_as_it_lasts_and_its_end_is_told_once(
    router: Socket, peers: Peers, connect: Callable[..., Socket]
) -> None:
    one = connect()
    first = known(router, peers)
    two = connect()
    second = known(router, peers)
    assert (list(peers.connections.values()), peers.ended()) == ([first, second], [])
    assert first.identity == PeerIdentity(os.getuid(), os.getpid(), "")
    one.send(b"again")
    assert known(router, peers) is first
    one.close(linger=0)
    assert gone(peers) == [first]
    assert (peers.ended(), list(peers.connections.values())) == ([], [second])
    assert (peers.is_there(first), peers.is_there(second)) == (False, True)
    two.send(b"still here")
    assert known(router, peers) is second


@pytest.mark.parametrize("name", [b"", b"me"])
def test_who_comes_after_it_on_the_same_descriptor_is_another(
    router: Socket, peers: Peers, connect: Callable[..., Socket], name: bytes
) -> None:
    before: list[Connection] = []
    for _ in range(20):
        client = connect(name)
        before.append(known(router, peers))
        client.close(linger=0)
        # The news and the next client's message may come in the same moment; a name has to be free first.
        if name:
            assert gone(peers) == before[-1:]
            assert not peers.any_named
            assert not router.poll(20)
    assert len(set(before)) == 20


def test_of_a_peer_of_an_older_protocol_nothing_is_known(router: Socket, peers: Peers, address: str) -> None:
    with socket.socket(socket.AF_UNIX) as old:
        old.connect(address.removeprefix("ipc://"))
        old.sendall(b"\x01\x00\x06\x00hello")  # ZMTP 1.0: no name, then a message
        assert sender(router, peers) is None


def test_who_is_connected_and_has_said_nothing_is_silent(
    router: Socket, peers: Peers, connect: Callable[..., Socket], address: str
) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(address.removeprefix("ipc://"))
        connect()
        client = known(router, peers)
        until(lambda: peers.ended() or len(peers.connections) == 2, "both are known")
        assert [each.heard for each in peers.silent.values()] == [None]
        assert client not in peers.silent.values()
        assert not peers.any_named
    gone(peers)
    assert peers.silent == {}


def test_who_has_the_same_routing_id_as_another_is_told(
    router: Socket, peers: Peers, connect: Callable[..., Socket]
) -> None:
    one = connect(b"me")
    assert known(router, peers).route == b"me"
    other = connect(b"me")
    until(lambda: peers.ended() or len(peers.connections) == 2, "it is connected")
    assert not router.poll(100)  # the library drops what the other says
    assert peers.any_named
    Doorman(peers, b"another has the same", lambda level, text: None).tick(time.monotonic() + PATIENCE_S)
    assert other.poll(LIMIT_MS)
    assert other.recv() == b"another has the same"
    gone(peers)
    assert not one.poll(0)


def test_over_tcp_the_kernel_knows_the_host(context: zmq.Context[Socket]) -> None:
    with context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as client:
        router.bind("tcp://127.0.0.1:*")
        peers = Peers(router)
        client.connect(str(router.getsockopt_string(zmq.LAST_ENDPOINT)))
        client.send(b"hello")
        assert known(router, peers).identity == PeerIdentity(None, None, "127.0.0.1")
        peers.close()
