"""Clients that come and go, over real sockets."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from testkit.waiting import until
from weightd.daemon.clients.doorman import PATIENCE_S, Doorman
from weightd.daemon.clients.listening import listen
from weightd.daemon.clients.peers import Peers
from weightd.daemon.host.sockets import receive
from weightd.daemon.requests.request import Origin
from weightd.protocol.codec import decode
from weightd.protocol.messages.types import TO_CLIENT

LIMIT_MS = 20_000

Socket = zmq.Socket[bytes]


@pytest.fixture
def peers(router: Socket) -> Iterator[Peers]:
    made = Peers(router)
    yield made
    router.disable_monitor()
    made.monitor.close(linger=0)


def seen(router: Socket, peers: Peers) -> bytes:
    assert router.poll(LIMIT_MS)
    received = next(receive(router))
    peers.seen(received, time.monotonic())
    return received.peer


def gone(peers: Peers) -> list[bytes]:
    assert peers.pending or peers.monitor.poll(LIMIT_MS)
    return list(peers.disconnected())


def test_a_connection_is_known_as_long_as_it_lasts_and_its_end_is_told_once(
    router: Socket, peers: Peers, connect: Callable[..., Socket]
) -> None:
    one = connect()
    first = seen(router, peers)
    connect()
    second = seen(router, peers)
    assert (len(peers.connections), list(peers.disconnected())) == (2, [])
    known = [peers.connection(client) for client in (first, second)]
    assert known == list(peers.connections.values())
    assert [each and (each.user, peers.clients_of(each)) for each in known] == [
        (f"uid {os.getuid()}", frozenset({client})) for client in (first, second)
    ]
    one.close(linger=0)
    assert gone(peers) == [first]
    assert list(peers.disconnected()) == []
    assert list(peers.connections.values()) == known[1:]
    assert peers.connection(first) is None


def test_who_comes_after_it_on_the_same_descriptor_is_another(
    router: Socket, peers: Peers, connect: Callable[..., Socket]
) -> None:
    for _ in range(20):
        one = connect()
        first = seen(router, peers)
        one.close(linger=0)
        # The news and the next client's message may come in the same moment.
        other = connect()
        second = seen(router, peers)
        assert gone(peers) == [first]
        other.close(linger=0)
        assert gone(peers) == [second]


@pytest.mark.parametrize("is_same", [False, True])
def test_who_is_back_under_its_own_name_has_not_gone(
    router: Socket, peers: Peers, context: zmq.Context[Socket], address: str, is_same: bool
) -> None:
    def named() -> Socket:
        made = context.socket(zmq.DEALER)
        made.setsockopt(zmq.ROUTING_ID, b"me")
        made.connect(address)
        made.send(b"hello")
        assert seen(router, peers) == b"me"
        return made

    named().close(linger=0)
    assert peers.monitor.poll(LIMIT_MS)
    assert not router.poll(100)  # the library learns that the name is free
    # What was free for the descriptor of the next connection.
    held = [] if is_same else [os.open("/dev/null", os.O_RDONLY)]
    back = named()
    assert (list(peers.disconnected()), peers.connection(b"me") is not None) == ([], True)
    back.close(linger=0)
    for each in held:
        os.close(each)


def test_a_peer_of_an_older_protocol_is_served_though_nothing_is_known_of_it(
    router: Socket, peers: Peers, address: str
) -> None:
    with socket.socket(socket.AF_UNIX) as old:
        old.connect(address.removeprefix("ipc://"))
        old.sendall(b"\x01\x00\x06\x00hello")  # ZMTP 1.0: no name, then a message
        assert len(seen(router, peers)) > 0
    assert list(peers.disconnected()) == []


def test_who_is_connected_and_has_said_nothing_is_silent(
    router: Socket, peers: Peers, connect: Callable[..., Socket], address: str
) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(address.removeprefix("ipc://"))
        connect()
        client = seen(router, peers)
        until(lambda: list(peers.disconnected()) or len(peers.connections) == 2, "both are known")
        assert [each.heard for each in peers.silent.values()] == [None]
        assert peers.connection(client) not in peers.silent.values()
        assert not peers.any_named
    gone(peers)
    assert peers.silent == {}


def test_who_has_the_same_routing_id_as_another_is_told(
    context: zmq.Context[Socket], router: Socket, peers: Peers, address: str
) -> None:
    with context.socket(zmq.DEALER) as one, context.socket(zmq.DEALER) as other:
        for count, each in enumerate((one, other), 1):
            each.setsockopt(zmq.ROUTING_ID, b"me")
            each.connect(address)
            each.send(b"hello")
            until(lambda: list(peers.disconnected()) or len(peers.connections) == count, "it is connected")  # noqa: B023
            if each is one:
                assert seen(router, peers) == b"me"
        assert not router.poll(100)  # the library drops what the other says
        assert peers.any_named
        Doorman(peers).tick(time.monotonic() + PATIENCE_S)
        assert other.poll(LIMIT_MS)
        error = decode([other.recv()], TO_CLIENT)
        assert "another client has the same routing id" in str(error)
        gone(peers)
        assert not one.poll(0)


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_who_a_client_is_the_kernel_says(context: zmq.Context[Socket], tmp_path: Path, kind: str) -> None:
    router = listen(context, f"ipc://{tmp_path}/s" if kind == "ipc" else "tcp://127.0.0.1:*")
    peers = Peers(router)
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.ROUTING_ID, b"me")
    client.connect(str(router.getsockopt_string(zmq.LAST_ENDPOINT)))
    client.send(b"hello")
    assert router.poll(LIMIT_MS)
    [received] = receive(router)
    assert peers.origin(b"me") == Origin("connection 6d65", "an unknown address")
    peers.seen(received, 0.0)
    uid = f"uid {os.getuid()}"
    expected = {
        "ipc": Origin(f"process {os.getpid()} of {uid}", uid),
        "tcp": Origin("connection 6d65 of host 127.0.0.1", "host 127.0.0.1"),
    }
    assert peers.origin(b"me") == expected[kind]
    client.close(linger=0)
    until(lambda: list(peers.disconnected()), "it is gone")
    assert peers.origin(b"me") == Origin("connection 6d65", "an unknown address")
    router.disable_monitor()
    peers.monitor.close(linger=0)
    router.close(linger=0)
