"""What the kernel knows of a connection, whatever its other end says of itself."""

from __future__ import annotations

import os
import socket

import pytest

from weightd.daemon.gate.kernel import identity
from weightd.daemon.gate.link import PeerIdentity


def test_over_a_unix_socket_it_knows_user_and_process() -> None:
    ours, theirs = socket.socketpair()
    with theirs, ours:
        descriptor = ours.fileno()
        assert identity(descriptor) == PeerIdentity(os.getuid(), os.getpid(), "")
    assert identity(descriptor) == PeerIdentity(None, None, "")


def test_over_tcp_it_knows_the_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        ours, _ = server.accept()
        with ours:
            assert identity(ours.fileno()) == PeerIdentity(None, None, "127.0.0.1")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
def test_of_a_socket_for_both_versions_of_ip_it_knows_the_same_host() -> None:
    with (
        socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server,
        socket.create_connection(("127.0.0.1", server.getsockname()[1])),
    ):
        ours, _ = server.accept()
        with ours:
            assert identity(ours.fileno()) == PeerIdentity(None, None, "127.0.0.1")
