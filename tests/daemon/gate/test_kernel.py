"""What the kernel knows of a connection, whatever its other end says of itself."""

from __future__ import annotations

import itertools
import os
import socket

import pytest

from weightd.daemon.gate.kernel import handle, identity, shut_down, write
from weightd.daemon.gate.link import PeerIdentity


def test_over_a_unix_socket_it_knows_user_groups_and_process() -> None:
    ours, theirs = socket.socketpair()
    with theirs, ours:
        connection = handle(ours.fileno())
        expected = PeerIdentity(os.getuid(), os.getpid(), "", (os.getgid(), *os.getgroups()))
        assert identity(connection) == expected
    assert identity(connection) == PeerIdentity(None, None, "")


def test_another_socket_under_the_same_number_is_left_alone() -> None:
    (ours, _), (other, theirs) = pairs = socket.socketpair(), socket.socketpair()
    connection = handle(ours.fileno())
    os.dup2(other.fileno(), ours.fileno())
    shut_down(connection)
    write(connection, b"for somebody else")
    assert identity(connection) == PeerIdentity(None, None, "")
    other.send(b"still open")
    assert theirs.recv(100) == b"still open"
    for each in itertools.chain(*pairs):
        each.close()


def test_over_tcp_it_knows_the_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        ours, _ = server.accept()
        with ours:
            assert identity(handle(ours.fileno())) == PeerIdentity(None, None, "127.0.0.1")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_of_a_socket_for_both_versions_of_ip_it_knows_the_same_host() -> None:
    with (
        socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server,
        socket.create_connection(("127.0.0.1", server.getsockname()[1])),
    ):
        ours, _ = server.accept()
        with ours:
            assert identity(handle(ours.fileno())) == PeerIdentity(None, None, "127.0.0.1")
