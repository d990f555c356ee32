"""ProxyClient: identity from the kernel, buffers, and descriptors sent by clients."""

from __future__ import annotations

import contextlib
import os
import socket
import time

import pytest

from testkit.lingering import lingering
from weightd_common.peers import Peers
from weightd_common.stream import Stream
from weightd_daemon.platform.fd_closer import DescriptorCloser
from weightd_daemon.zmq_proxy.client import (
    DescriptorsSent,
    ProxyClient,
    configure_socket,
    identify_user,
    kernel_buffer_bytes,
)
from weightd_daemon.zmq_proxy.control import PeerIdentity
from weightd_daemon.zmq_proxy.zmtp import NullMechanism, ZmtpConnection, ZmtpLimits

from .peer import GREETING, READY

KIB = 1024
LINGER_S = 30


def accepted(host: str, family: int = socket.AF_INET) -> tuple[socket.socket, socket.socket]:
    with socket.create_server((host, 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as listener:
        other = socket.create_connection((host if host != "::" else "127.0.0.1", listener.getsockname()[1]))
        return listener.accept()[0], other


def test_unix_client_is_identified_by_the_kernel() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        made = ProxyClient(ours, "uid 0", ZmtpConnection(NullMechanism(), ZmtpLimits(1, 1)), 0.0, lambda _: True)
        assert made.identity() == PeerIdentity(
            os.getuid(), os.getpid(), f"uid {os.getuid()}", (os.getgid(), *os.getgroups())
        )
        assert identify_user(ours, None) == (f"uid {os.getuid()}", True)


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::", socket.AF_INET6)])
def test_local_tcp_client_is_identified_by_its_socket(host: str, family: int) -> None:
    ours, theirs = accepted(host, family)
    with ours, theirs, contextlib.closing(Peers()) as peers:
        assert identify_user(ours, peers) == (f"uid {os.getuid()}", True)


def test_closed_tcp_client_is_not_identified() -> None:
    ours, theirs = accepted("127.0.0.1")
    theirs.close()
    with ours, contextlib.closing(Peers()) as peers, pytest.raises(OSError, match="it has disconnected"):
        identify_user(ours, peers)


def test_kernel_buffers_of_one_user_are_limited() -> None:
    assert [kernel_buffer_bytes(count) for count in (1, 128, 256, 1024, 100_000)] == [
        256 * KIB,
        256 * KIB,
        128 * KIB,
        32 * KIB,
        8 * KIB,
    ]
    # Each connection has one buffer to the client and two to the daemon; 1,024 connections are the default
    # limit.
    assert sum(map(kernel_buffer_bytes, range(1, 1025))) < 128 * 1024 * KIB
    ours, theirs = accepted("127.0.0.1")
    with ours, theirs:
        configure_socket(ours, 1024)
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * 32 * KIB
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 2 * 32 * KIB
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.parametrize("what", ["a small message", "a large frame", "nothing"])
def test_slow_close_of_a_received_descriptor_does_not_block(what: str) -> None:
    """Before Linux 6.16 the kernel cannot forbid clients to send descriptors."""
    ours, theirs = socket.socketpair()
    made = ProxyClient(
        ours,
        "uid 1",
        ZmtpConnection(NullMechanism(), ZmtpLimits(1 << 24, 1 << 24)),
        0.0,
        lambda _: True,
        DescriptorCloser(print),
    )
    sent, reads_nothing = lingering(LINGER_S)
    with theirs, reads_nothing:
        if what == "a large frame":
            theirs.sendall(GREETING + READY + b"\2" + (1 << 20).to_bytes(8, "big"))
            made.receive()
        with sent:
            socket.send_fds(theirs, [bytes(100)], [sent.fileno()])
            # The descriptor in flight keeps the file open, so this close does not wait.
        begin = time.monotonic()
        if what != "nothing":
            with pytest.raises(DescriptorsSent):
                made.receive()
        made.close()
        assert time.monotonic() - begin < LINGER_S / 10


def test_unsent_data_is_buffered_and_counted() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setblocking(False)
        made = ProxyClient(ours, "uid 0", ZmtpConnection(NullMechanism(), ZmtpLimits(1, 1)), 0.0, lambda _: True)
        piece = bytes(100 * KIB)
        sent = [made.send([b"head", piece]) for _ in range(10)]
        assert not all(sent)
        assert made.send([b"tail"]) is False
        waits = made.count_buffered_bytes()
        assert 0 < waits < 10 * (4 + len(piece)) + 4
        received = b""
        while not made.flush():
            received += theirs.recv(1 << 20)
        made.close()
        received += b"".join(iter(lambda: theirs.recv(1 << 20), b""))
    assert received == 10 * (b"head" + piece) + b"tail"


def test_counts_bytes_that_the_daemon_has_not_read() -> None:
    ours, theirs = socket.socketpair()
    near, peer = socket.socketpair()
    with theirs, peer:
        made = ProxyClient(near, "uid 0", ZmtpConnection(NullMechanism(), ZmtpLimits(1, 1)), 0.0, lambda _: True)
        made.daemon_stream = Stream(ours)
        made.daemon_stream.send([bytes(1 << 20)])
        assert made.count_buffered_bytes() == made.daemon_stream.unsent > 0
        made.close()
        assert peer.recv(1) == b""
