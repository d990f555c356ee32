"""Sockets that somebody else has opened: where they listen, and clients that connect to them."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from weightd.daemon.host.listening import addresses
from weightd.daemon.host.sockets import UnixPeer, bind, peer_pid, receive, send, unix_peer

LIMIT_MS = 20_000

Listen = Callable[..., socket.socket]
Socket = zmq.Socket[bytes]


@pytest.fixture
def listen() -> Iterator[Listen]:
    made: list[socket.socket] = []

    def listener(family: int, address: Any, kind: int = socket.SOCK_STREAM) -> socket.socket:
        each = socket.socket(family, kind)
        made.append(each)
        each.bind(address)
        if kind == socket.SOCK_STREAM:
            each.listen()
        return each

    yield listener
    for each in made:
        each.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[Socket]]:
    made: zmq.Context[Socket] = zmq.Context()
    yield made
    made.destroy(linger=0)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


# --- who connects ---------------------------------------------------------------------------------------------------


def talk(context: zmq.Context[Socket], router: Socket, address: str) -> int | None:
    """Send a message there and back; return the client's pid, if it is known."""
    client = context.socket(zmq.DEALER)
    if "[" in address:
        client.setsockopt(zmq.IPV6, 1)
    client.connect(address)
    client.send(address.encode())
    assert router.poll(LIMIT_MS)
    [received] = receive(router)
    assert [bytes(frame) for frame in received.frames] == [address.encode()]
    assert send(router, received.peer, [b"answer"])
    assert client.poll(LIMIT_MS)
    assert client.recv() == b"answer"
    client.close(linger=0)
    return peer_pid(received.identity)


FAMILIES = [
    [(socket.AF_UNIX, "{}/s"), (socket.AF_INET, ("127.0.0.1", 0))],
    pytest.param(
        [(socket.AF_INET6, ("::1", 0)), (socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_UNIX, "{}/s")],
        marks=pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6"),
    ),
]
WRITTEN = {socket.AF_UNIX: "ipc://{0}", socket.AF_INET: "tcp://{0}:{1}", socket.AF_INET6: "tcp://[{0}]:{1}"}


@pytest.mark.parametrize("families", FAMILIES)
def test_one_socket_serves_clients_of_all_that_were_passed(
    listen: Listen, tmp_path: Path, families: list[tuple[socket.AddressFamily, Any]]
) -> None:
    made = [listen(family, at.format(tmp_path) if isinstance(at, str) else at) for family, at in families]
    names = [each.getsockname() for each in made]
    where = addresses([each.fileno() for each in made])
    assert where == [
        WRITTEN[family].format(*([name] if isinstance(name, str) else name))
        for (family, _), name in zip(families, names, strict=True)
    ]
    # Each has a context of its own, as each daemon has: when it ends, its sockets are closed, and not ours.
    for _ in range(2):
        with zmq.Context() as context, context.socket(zmq.DEALER) as early:
            [unix] = [each for each in where if each.startswith("ipc")]
            early.connect(unix)
            early.send(b"early")
            # The kernel has the connection before anybody accepts.
            assert select.select([made[where.index(unix)]], [], [], LIMIT_MS / 1000)[0]
            with bind(context, unix, descriptors=[os.dup(each.fileno()) for each in made]) as router:
                assert router.poll(LIMIT_MS)
                [received] = receive(router)
                assert [bytes(frame) for frame in received.frames] == [b"early"]
                for each in (*where, where[0]):
                    assert talk(context, router, each) == (os.getpid() if each == unix else None)
    assert (tmp_path / "s").is_socket()


def test_two_that_accept_from_one_descriptor_do_not_block_each_other(
    context: zmq.Context[Socket], listen: Listen, tmp_path: Path
) -> None:
    unix = listen(socket.AF_UNIX, str(tmp_path / "s"))
    assert unix.getblocking()  # as systemd passes it
    address = f"ipc://{tmp_path}/s"
    poller = zmq.Poller()
    with (
        bind(context, address, descriptors=[os.dup(unix.fileno())]) as first,
        bind(context, address, descriptors=[os.dup(unix.fileno())]) as second,
    ):
        poller.register(first, zmq.POLLIN)
        poller.register(second, zmq.POLLIN)
        # Both wait in one I/O thread, and both are told of each client.
        for number in range(20):
            with context.socket(zmq.DEALER) as client:
                client.connect(address)
                client.send(b"%d" % number)
                [(router, _)] = poller.poll(LIMIT_MS)
                [received] = receive(router)
                assert [bytes(frame) for frame in received.frames] == [b"%d" % number]


# --- what a hostile peer may say of itself --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        *(
            (each, None)
            for each in ("", "127.0.0.1", "::1", "fd00:1::1", "fd00:1:1:2", "localhost:1::1", "localhost:1:1")
        ),
        *(
            (each, None)
            for each in ("localhost:1:1:2:3", "localhost:-1:1:2", "localhost:\u0660:1:2", "xlocalhost:1:1:2")
        ),
        ("localhost:5:6:7", UnixPeer(uid=5, pid=7)),
    ],
)
def test_only_an_address_of_a_unix_peer_is_somebody(address: str, peer: UnixPeer | None) -> None:
    frame: Any = SimpleNamespace(get={"Peer-Address": address}.__getitem__)
    assert (unix_peer(frame), peer_pid(frame)) == (peer, peer.pid if peer else None)


# The ids that the library gives to peers without one begin with a zero byte, and count up. It aborts where the next
# one is taken: this takes those that it gives in a process that has called rand() `n` times, and lets others come.
_SQUAT = """
import ctypes, sys, zmq
from weightd.daemon.host.sockets import (bind, receive)
libc = ctypes.CDLL(None)
libc.rand.restype = ctypes.c_uint
drawn = [libc.rand() for _ in range(6)]
libc.srand(1)  # as if never seeded
context, address = zmq.Context(), "ipc://" + sys.argv[1]
first = bind(context, address)
router = bind(context, address + "2")
peers = []

def come(routing_id):
    peer = context.socket(zmq.DEALER)
    peers.append(peer)
    if routing_id:
        peer.setsockopt(zmq.ROUTING_ID, routing_id)
    peer.connect(address + "2")
    peer.send(b"")
    assert router.poll(20000)
    return next(receive(router)).peer

for low, high in zip(drawn, drawn[1:]):
    begin = low | high << 31 & 0xFFFFFFFF
    for step in range(1, 4):
        come(b"\\0" + (begin + step & 0xFFFFFFFF).to_bytes(4, "big"))
print(*[come(b"").hex() for _ in range(3)], flush=True)
context.destroy(linger=0)
"""


def test_nobody_can_take_the_routing_ids_that_are_to_come(tmp_path: Path) -> None:
    runs = [
        subprocess.Popen([sys.executable, "-c", _SQUAT, f"{tmp_path}/{name}"], stdout=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    said = [run.communicate(timeout=LIMIT_MS / 1000)[0].split() for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert [len(each) for each in said] == [3, 3]
    assert set(said[0]).isdisjoint(said[1])
