"""What the kernel knows of a connection, whatever its other end says of itself."""

from __future__ import annotations

import os
import socket
from typing import Any

import zmq

from weightd.daemon.clients.connections import credentials, peer_uid, user


class Property:
    """The first frame of a message, of which the library says this."""

    def __init__(self, address: str, descriptor: int) -> None:
        self._properties: dict[str | int, str | int] = {"Peer-Address": address, zmq.SRCFD: descriptor}

    def get(self, name: str | int) -> str | int:
        return self._properties[name]


def test_the_user_is_whom_the_kernel_knows_too() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        mine: Any = Property(f"localhost:{os.getuid()}:0:7", ours.fileno())
        claimed: Any = Property(f"localhost:{os.getuid() + 1}:0:7", ours.fileno())
        assert (peer_uid(mine), peer_uid(claimed)) == (os.getuid(), None)
        assert user(ours.fileno()) == f"uid {os.getuid()}"
    assert peer_uid(mine) is None  # it is closed


def test_over_tcp_the_kernel_knows_the_host_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        ours, _ = server.accept()
        with ours:
            claimed: Any = Property(f"localhost:{os.getuid()}:0:7", ours.fileno())
            assert (credentials(ours.fileno()), peer_uid(claimed)) == (None, None)
            assert user(ours.fileno()) == "host 127.0.0.1"
