"""Sockets that somebody else has opened: where they listen, and clients that connect to them."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from weightd.daemon.host.directories import ClaimError
from weightd.daemon.host.sockets import UnixPeer, addresses, bind, peer_pid, receive, send, unix_peer

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


def refusal(descriptor: int) -> str:
    with pytest.raises(ClaimError) as caught:
        addresses([descriptor])
    begin = f"descriptor {descriptor}, which was passed"
    assert str(caught.value).startswith(begin)
    return str(caught.value).removeprefix(begin)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


# --- where they listen ----------------------------------------------------------------------------------------------


def test_addresses_are_written_as_zeromq_writes_them(listen: Listen, tmp_path: Path) -> None:
    unix = listen(socket.AF_UNIX, str(tmp_path / "s"))
    tcp = listen(socket.AF_INET, ("127.0.0.1", 0))
    port = tcp.getsockname()[1]
    assert addresses([unix.fileno(), tcp.fileno()]) == [f"ipc://{tmp_path}/s", f"tcp://127.0.0.1:{port}"]
    assert addresses([]) == []
    # They are still open.
    assert unix.getsockname() == str(tmp_path / "s")


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
def test_an_ipv6_address_is_in_brackets(listen: Listen) -> None:
    tcp = listen(socket.AF_INET6, ("::1", 0))
    assert addresses([tcp.fileno()]) == [f"tcp://[::1]:{tcp.getsockname()[1]}"]


def test_what_zeromq_has_no_address_for_is_refused(listen: Listen, tmp_path: Path) -> None:
    expected = ": expected a stream socket with a path or a port"
    for each in (
        listen(socket.AF_UNIX, str(tmp_path / "d"), socket.SOCK_DGRAM),
        listen(socket.AF_UNIX, str(tmp_path / "p"), socket.SOCK_SEQPACKET),
        listen(socket.AF_INET, ("127.0.0.1", 0), socket.SOCK_DGRAM),
        listen(socket.AF_UNIX, f"\0weightd-test-{os.getpid()}"),
        listen(socket.AF_UNIX, ""),  # the kernel gives it an abstract name
    ):
        assert refusal(each.fileno()) == expected
        assert each.fileno() >= 0
        os.fstat(each.fileno())


def test_what_is_no_socket_is_refused() -> None:
    read, write = os.pipe()
    try:
        assert refusal(read) == ", is no socket: Socket operation on non-socket"
        os.fstat(read)
    finally:
        os.close(read)
        os.close(write)
    assert refusal(read) == ", is no socket: Bad file descriptor"


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


def test_one_socket_serves_clients_of_all_that_were_passed(
    context: zmq.Context[Socket], listen: Listen, tmp_path: Path
) -> None:
    unix = listen(socket.AF_UNIX, str(tmp_path / "s"))
    tcp = listen(socket.AF_INET, ("127.0.0.1", 0))
    where = addresses([unix.fileno(), tcp.fileno()])
    with bind(context, where[0], descriptors=[unix.detach(), tcp.detach()]) as router:
        assert talk(context, router, where[0]) == os.getpid()
        assert talk(context, router, where[1]) is None
        assert talk(context, router, where[0]) == os.getpid()


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
def test_clients_of_all_families_are_served(context: zmq.Context[Socket], listen: Listen, tmp_path: Path) -> None:
    passed = [
        listen(socket.AF_INET6, ("::1", 0)),
        listen(socket.AF_INET, ("127.0.0.1", 0)),
        listen(socket.AF_UNIX, str(tmp_path / "s")),
    ]
    where = addresses([each.fileno() for each in passed])
    with bind(context, where[2], descriptors=[each.detach() for each in passed]) as router:
        assert [talk(context, router, each) for each in where] == [None, None, os.getpid()]


def test_who_has_connected_before_the_daemon_was_there_is_served(
    context: zmq.Context[Socket], listen: Listen, tmp_path: Path
) -> None:
    unix = listen(socket.AF_UNIX, str(tmp_path / "s"))
    address = f"ipc://{tmp_path}/s"
    with context.socket(zmq.DEALER) as client:
        client.connect(address)
        client.send(b"early")
        # The kernel has the connection.
        assert select.select([unix], [], [], LIMIT_MS / 1000)[0]
        with bind(context, address, descriptors=[unix.detach()]) as router:
            assert router.poll(LIMIT_MS)
            [received] = receive(router)
    assert [bytes(frame) for frame in received.frames] == [b"early"]


def test_the_socket_is_the_service_managers_in_the_end_too(listen: Listen, tmp_path: Path) -> None:
    unix = listen(socket.AF_UNIX, str(tmp_path / "s"))
    for _ in range(2):
        # Each has a context of its own, as each daemon has: when it ends, its sockets are closed.
        with (
            zmq.Context() as context,
            bind(context, f"ipc://{tmp_path}/s", descriptors=[os.dup(unix.fileno())]) as router,
        ):
            talk(context, router, f"ipc://{tmp_path}/s")
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


def test_a_socket_of_the_wrong_kind_is_refused(context: zmq.Context[Socket], listen: Listen, tmp_path: Path) -> None:
    good = listen(socket.AF_UNIX, str(tmp_path / "s"))
    bad = listen(socket.AF_UNIX, str(tmp_path / "d"), socket.SOCK_DGRAM)
    with pytest.raises(ClaimError, match=f"^descriptor {bad.fileno()}, which was passed: expected a stream socket"):
        bind(context, f"ipc://{tmp_path}/s", descriptors=[good.fileno(), bad.fileno()])


# --- what a hostile peer may say of itself --------------------------------------------------------------------------


class Property:
    """The first frame of a message, of which the library says this."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, name: str) -> str:
        assert name == "Peer-Address"
        return self._address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1",
        "::1",
        "fd00:{uid}::1",
        "fd00:{uid}:1:2",
        "localhost:{uid}::1",
        "localhost:{uid}:1",
        "localhost:{uid}:1:2:3",
        "localhost:-1:1:2",
        "localhost:\u0660:1:2",
        "xlocalhost:{uid}:1:2",
    ],
)
def test_an_address_that_is_no_unix_peers_is_nobody(address: str) -> None:
    frame: Any = Property(address.format(uid=os.getuid()))
    assert (unix_peer(frame), peer_pid(frame)) == (None, None)


def test_a_unix_peer_is_what_the_library_was_told() -> None:
    frame: Any = Property("localhost:5:6:7")
    assert (unix_peer(frame), peer_pid(frame)) == (UnixPeer(uid=5, pid=7), 7)


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
