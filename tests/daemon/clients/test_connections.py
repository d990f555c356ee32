"""What the kernel knows of a connection, whatever its other end says of itself."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any

import zmq

from weightd.daemon.clients.connections import credentials, peer_uid, user


def frame(uid: int, descriptor: int) -> Any:
    """The first frame of a message, of which the library says this."""
    return SimpleNamespace(get={"Peer-Address": f"localhost:{uid}:0:7", zmq.SRCFD: descriptor}.__getitem__)


def test_the_user_is_whom_the_kernel_knows_too() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        mine = frame(os.getuid(), ours.fileno())
        assert (peer_uid(mine), peer_uid(frame(os.getuid() + 1, ours.fileno()))) == (os.getuid(), None)
        assert user(ours.fileno()) == f"uid {os.getuid()}"
    assert peer_uid(mine) is None  # it is closed


def test_over_tcp_the_kernel_knows_the_host_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        ours, _ = server.accept()
        with ours:
            assert (credentials(ours.fileno()), peer_uid(frame(os.getuid(), ours.fileno()))) == (None, None)
            assert user(ours.fileno()) == "host 127.0.0.1"
