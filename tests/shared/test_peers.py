from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from testkit import loads
from testkit.users import ALICE, BOB, User, need_other_users
from weightd.shared.peers import UNKNOWN, Peer, Peers

LIMIT_S = 30.0


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.close()


def listener(stack: ExitStack, host: str) -> socket.socket:
    made = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
    made.bind((host, 0))
    made.listen()
    made.settimeout(LIMIT_S)
    return made


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_users_of_this_host_are_told_apart_over_tcp(peers: Peers, host: str) -> None:
    need_other_users()
    with ExitStack() as stack:
        listening = listener(stack, host)
        for uid in (ALICE, BOB):
            user = stack.enter_context(User(uid))
            user.begin(loads.crowd, [listening.getsockname()[:2]], 1)
            user.heard()
            connection, _ = listening.accept()
            with connection:
                assert peers.of(connection) == Peer(f"uid {uid}", is_local=True)
                user.end()


def test_the_own_user_is_an_operator(peers: Peers) -> None:
    with ExitStack() as stack:
        listening = listener(stack, "127.0.0.1")
        stack.enter_context(socket.create_connection(listening.getsockname()))
        connection = stack.enter_context(listening.accept()[0])
        assert peers.of(connection) == Peer(f"uid {os.getuid()}", is_local=True, is_operator=True)
        # Where the kernel cannot be asked, all users of this host are one peer.
        peers.close()
        assert peers.of(connection) == Peer("host 127.0.0.1", is_local=True)


def test_a_peer_that_has_left_is_nobody(peers: Peers) -> None:
    with ExitStack() as stack:
        listening = listener(stack, "127.0.0.1")
        socket.create_connection(listening.getsockname()).close()
        connection = stack.enter_context(listening.accept()[0])
        assert connection.recv(1) == b""
        assert not peers.of(connection).is_operator
        closed = socket.socket()
        closed.close()
        assert peers.of(closed) == UNKNOWN


def test_a_unix_socket_tells_its_user(peers: Peers) -> None:
    near, far = socket.socketpair()
    with near, far:
        uid = os.getuid()
        assert peers.of(near) == Peer(f"uid {uid}", uid, is_local=True, is_operator=True)


class Remote:
    """A connection from another host."""

    family = socket.AF_INET6

    def __init__(self, address: str) -> None:
        self._address = address

    def getpeername(self) -> tuple[str, int, int, int]:
        return self._address, 1234, 0, 0

    def getsockname(self) -> tuple[str, int, int, int]:
        return "2001:db8::1", 8000, 0, 0


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("2001:db8:1:2:3:4:5:6", "host 2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "host 2001:db8:1:2::/64"),
        ("2001:db8:1:3::9", "host 2001:db8:1:3::/64"),
        ("::ffff:10.0.0.7", "host 10.0.0.7"),
        ("fe80::1%eth0", "host fe80::/64"),
    ],
)
def test_another_host_is_its_address_or_its_network(peers: Peers, address: str, key: str) -> None:
    assert peers.of(Remote(address)) == Peer(key)  # type: ignore[arg-type]
