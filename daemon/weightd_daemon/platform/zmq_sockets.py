"""ROUTER sockets: how they are bound, and how messages are read from and written to them."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import zmq

from weightd_common import zmq_io
from weightd_daemon.platform.directories import PathInUse
from weightd_daemon.platform.event_loop import EventLoop
from weightd_protocol import limits

_libc = ctypes.CDLL(None)


def seed_routing_ids() -> None:
    """Let nobody know which ones the next ROUTER socket will give.

    libzmq 4.3.5 counts them up from a number of rand(), which it never seeds, and aborts the process when one that it
    gives is taken: by a peer that has announced it as its own.
    """
    _libc.srand(int.from_bytes(os.urandom(4), "little"))


# A wake-up reads at most this many messages, so that one busy socket cannot starve the other.
RECEIVE_BATCH_SIZE = 64

# Plain integers: pyzmq's own are slower.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)

# Only this user may connect.
PRIVATE_UMASK = 0o177

# The last answers of a daemon that stops get this long to leave.
LINGER_MS = 1000

# How the library writes what the kernel says of a unix peer. A TCP peer's address has other parts between its colons.
_UNIX_PEER = re.compile(r"localhost:(?P<uid>[0-9]{1,10}):(?P<gid>[0-9]{1,10}):(?P<pid>[0-9]{1,10})")


class ReceivedMessage(NamedTuple):
    """A message: who sent it, the header and the tensor frames, and the peer's pid where the kernel told it."""

    peer: bytes
    frames: Sequence[Any]
    identity: zmq.Frame


def bind_router(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """Return a ROUTER socket bound to `address`, to which processes of this user can connect.

    Raises:
        PathInUse: the address cannot be bound.
    """
    seed_routing_ids()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
    # A peer that is gone is an error here, not a silent drop.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # The permissions of a unix socket are what the umask leaves: they are right from its first moment.
    old_umask = os.umask(PRIVATE_UMASK)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise PathInUse(f"cannot listen on {address}: {error.strerror}") from None
    finally:
        os.umask(old_umask)
    return socket


def watch_socket(loop: EventLoop, socket: zmq.Socket[bytes], handler: Callable[[], object]) -> Callable[[], None]:
    """Have a loop call `handler` whenever a socket is readable.

    The descriptor of a ZeroMQ socket reports once that a message has come, and whoever uses the socket next may take
    the report. To ask the socket takes longer than to wait for all others, so the loop does not ask it in each turn:
    whoever has used the socket outside of the handler calls what is returned.
    """

    def check_readable() -> None:
        if int(socket.getsockopt(_EVENTS)) & _POLLIN:
            schedule_check()
            handler()

    schedule_check = functools.partial(loop.call_soon, check_readable)
    loop.add(int(socket.FD), schedule_check)
    schedule_check()
    return schedule_check


def receive_batch(socket: zmq.Socket[bytes]) -> Iterator[ReceivedMessage]:
    """Yield the messages that wait, at most a batch. Large tensor frames are not copied."""
    for _ in range(RECEIVE_BATCH_SIZE):
        try:
            identity, *frames = zmq_io.receive(socket, zmq_io.NOBLOCK)
        except zmq.Again:
            return
        yield ReceivedMessage(identity.bytes, [zmq_io.frame_content(frame) for frame in frames], identity)
        # Cheaper than the exception of a read that finds nothing.
        if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return


def send(socket: zmq.Socket[bytes], peer: bytes, frames: Sequence[Any]) -> bool:
    """Send without waiting; return whether the peer could be reached. Large frames pass on uncopied."""
    try:
        zmq_io.send(socket, [peer, *frames], zmq_io.NOBLOCK)
    except zmq.ZMQError as error:
        # There is no such peer, or a thousand messages wait for it.
        if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            raise
        return False
    return True


def peer_pid(identity: zmq.Frame) -> int | None:
    """Return the pid of the process behind a unix socket, by the first frame of its message; None over TCP.

    The library was told by the kernel (SO_PEERCRED), some moments after it has accepted the connection: where that had
    ended by then, this may be what the peer says of itself.
    """
    try:
        peer = _UNIX_PEER.fullmatch(str(identity.get("Peer-Address")))
    except zmq.ZMQError:
        return None
    return int(peer["pid"]) if peer is not None else None
