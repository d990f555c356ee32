"""ZeroMQ ROUTER sockets: creation, integration into the event loop, sending and receiving."""

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
    """Make the routing ids of the next ROUTER socket unpredictable.

    libzmq 4.3.5 takes the first routing id from rand(), which it never seeds, and counts up from it. If a peer guesses
    the next id and announces this id as its own, libzmq aborts the process when libzmq assigns the id.
    """
    _libc.srand(int.from_bytes(os.urandom(4), "little"))


# Maximum number of messages that one call of `receive_batch` reads, so that a busy socket does not block the loop.
RECEIVE_BATCH_SIZE = 64

# pyzmq's constants as plain integers, which are faster than its enumerations.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)

# Umask of a Unix socket to which only its owner may connect.
PRIVATE_UMASK = 0o177

# Maximum time in milliseconds for which a stopping daemon waits until libzmq has sent its last messages.
LINGER_MS = 1000

# The format of libzmq's property "Peer-Address" for a peer on a Unix socket. The address of a TCP peer does not match.
_UNIX_PEER = re.compile(r"localhost:(?P<uid>[0-9]{1,10}):(?P<gid>[0-9]{1,10}):(?P<pid>[0-9]{1,10})")


class ReceivedMessage(NamedTuple):
    """A received message: the sender's routing id, all further frames, and the first frame as `peer_pid` needs it."""

    peer: bytes
    frames: Sequence[Any]
    identity: zmq.Frame


def bind_router(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """Return a new ROUTER socket bound to `address`. Only processes of this user can connect to it.

    Raises:
        PathInUse: the address cannot be bound.
    """
    seed_routing_ids()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
    # With this option, sending to a disconnected peer raises an error. Without it, libzmq would drop the message.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # The umask gives the socket its permissions at its creation. If a chmod set them later, another user could connect
    # before the chmod.
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
    """Have a loop call `handler` whenever a socket is readable; return a function that makes the loop check again.

    The descriptor of a ZeroMQ socket becomes readable once for a new message, and any use of the socket may make it
    unreadable again before the loop sees this. So code that uses the socket outside of `handler` must call the returned
    function afterwards. The loop does not check the socket itself in each turn, because that takes longer than the wait
    for all other descriptors.
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
    """Yield the messages that have arrived, at most `RECEIVE_BATCH_SIZE`. Large tensor frames are not copied."""
    for _ in range(RECEIVE_BATCH_SIZE):
        try:
            identity, *frames = zmq_io.receive(socket, zmq_io.NOBLOCK)
        except zmq.Again:
            return
        yield ReceivedMessage(identity.bytes, [zmq_io.frame_content(frame) for frame in frames], identity)
        # Check for a further message first: this is cheaper than the exception of a read that finds none.
        if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return


def send(socket: zmq.Socket[bytes], peer: bytes, frames: Sequence[Any]) -> bool:
    """Send a message without waiting; return whether libzmq has accepted it. Large frames are not copied."""
    try:
        zmq_io.send(socket, [peer, *frames], zmq_io.NOBLOCK)
    except zmq.ZMQError as error:
        # These errors mean that the peer is not connected, or that libzmq's send queue for the peer is full (1,000
        # messages). In both cases, libzmq has not accepted the message.
        if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            raise
        return False
    return True


def peer_pid(identity: zmq.Frame) -> int | None:
    """Return the pid of the process that sent a message over a Unix socket; None over TCP.

    `identity` is the first frame of the message. libzmq reads the pid from the kernel (SO_PEERCRED) some time after it
    has accepted the connection. If the connection has ended by then, the pid may be one that the peer claims.
    """
    try:
        peer = _UNIX_PEER.fullmatch(str(identity.get("Peer-Address")))
    except zmq.ZMQError:
        return None
    return int(peer["pid"]) if peer is not None else None
