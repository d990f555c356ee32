"""The socket on which clients connect: what the library is told of it."""

from __future__ import annotations

import socket

import zmq

from weightd.daemon.gate.doorman import HANDSHAKE_MS
from weightd.daemon.gate.gate import LINGER_S
from weightd.daemon.host.routing import seed

# Requests of one client that wait to be read, whatever their size; one that sends faster waits in its own socket.
_RCVHWM = 64

_OPTIONS = {
    zmq.RCVHWM: _RCVHWM,
    zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
    # The kernel finds out within a minute that the host of a TCP client is gone. On a unix socket it knows at once.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}


def make_router(context: zmq.Context[zmq.Socket[bytes]], max_frame_bytes: int, secret: str = "") -> zmq.Socket[bytes]:
    """Return a ROUTER socket.

    Args:
        context: makes it.
        max_frame_bytes: a peer that announces a larger frame is hung up before there is memory for it.
        secret: key of CURVE, in Z85; "" for a socket without.
    """
    seed()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, int(1000 * LINGER_S))
    router.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    # A peer that is gone is an error here, not a silent drop.
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    for option, value in _OPTIONS.items():
        router.setsockopt(option, value)
    if secret:
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
    return router


def accept(router: zmq.Socket[bytes], listener: socket.socket, address: str) -> None:
    """Let clients connect to a socket that listens at an address; the library closes it in the end."""
    if listener.family == socket.AF_INET6:
        router.setsockopt(zmq.IPV6, 1)
    # The library's thread accepts when the kernel says that somebody is there. Where another process, or a gate that is
    # being closed, was faster, an accept that blocks would hold up the thread until the next one comes.
    listener.setblocking(False)
    router.setsockopt(zmq.USE_FD, listener.detach())
    router.bind(address)
