"""Listening sockets that somebody else has made, and clients that connect to them."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from weightd.daemon.gate.listening import accept, make_router
from weightd.daemon.gate.reader import Reader
from weightd.daemon.host.listening import addresses

LIMIT_MS = 20_000

Listen = Callable[..., socket.socket]
Socket = zmq.Socket[bytes]


@pytest.fixture
def listen() -> Iterator[Listen]:
    made: list[socket.socket] = []

    def listener(family: int, address: Any) -> socket.socket:
        made.append(socket.socket(family))
        made[-1].bind(address)
        made[-1].listen()
        return made[-1]

    yield listener
    for each in made:
        each.close()


def serve(context: zmq.Context[Socket], listener: socket.socket, max_frame_bytes: int = 2**20) -> Socket:
    router = make_router(context, max_frame_bytes)
    accept(router, listener.dup(), addresses([listener.fileno()])[0])
    return router


def heard(router: Socket) -> list[list[bytes]]:
    assert router.poll(LIMIT_MS)
    reader = Reader(router)
    messages: list[list[bytes]] = []
    while (message := reader.read()) is not None:
        messages.append([frame.bytes for frame in message[1]])
    return messages


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("family", "at"),
    [
        (socket.AF_UNIX, "{}/s"),
        (socket.AF_INET, ("127.0.0.1", 0)),
        pytest.param(
            *(socket.AF_INET6, ("::1", 0)), marks=pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
        ),
    ],
)
def test_who_has_connected_before_anybody_accepts_is_heard_by_one_gate_after_another(
    listen: Listen, tmp_path: Path, family: int, at: Any
) -> None:
    listener = listen(family, at.format(tmp_path) if isinstance(at, str) else at)
    # Each has a context of its own, as each gate has: when it ends, its sockets are closed, and not ours.
    for _ in range(2):
        with zmq.Context() as context, context.socket(zmq.DEALER) as early:
            early.setsockopt(zmq.IPV6, 1)
            early.setsockopt(zmq.LINGER, 0)
            early.connect(addresses([listener.fileno()])[0])
            early.send(b"early")
            assert select.select([listener], [], [], LIMIT_MS / 1000)[0]
            with serve(context, listener) as router:
                assert heard(router) == [[b"early"]]


def test_two_that_accept_from_one_socket_do_not_block_each_other(
    context: zmq.Context[Socket], listen: Listen, tmp_path: Path
) -> None:
    listener = listen(socket.AF_UNIX, str(tmp_path / "s"))
    assert listener.getblocking()  # as systemd passes it
    poller = zmq.Poller()
    with serve(context, listener) as first, serve(context, listener) as second:
        poller.register(first, zmq.POLLIN)
        poller.register(second, zmq.POLLIN)
        # Both wait in one I/O thread, and both are told of each client.
        for number in range(20):
            with context.socket(zmq.DEALER) as client:
                client.connect(f"ipc://{tmp_path}/s")
                client.send(b"%d" % number)
                [(router, _)] = poller.poll(LIMIT_MS)
                assert heard(router) == [[b"%d" % number]]


def test_who_announces_a_larger_frame_than_there_may_be_is_hung_up(
    context: zmq.Context[Socket], listen: Listen, tmp_path: Path
) -> None:
    listener = listen(socket.AF_UNIX, str(tmp_path / "s"))
    client, other = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    monitor = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    with serve(context, listener, 1000) as router, client, other:
        for each in (client, other):
            each.setsockopt(zmq.LINGER, 0)
            each.connect(f"ipc://{tmp_path}/s")
        client.send(bytes(1001))
        assert monitor.poll(LIMIT_MS)
        other.send(bytes(1000))
        assert heard(router) == [[bytes(1000)]]
        client.disable_monitor()
        monitor.close()
