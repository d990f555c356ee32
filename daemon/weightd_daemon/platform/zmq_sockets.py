"""ROUTER sockets: creation, integration into the event loop, and message I/O."""

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

    libzmq 4.3.5 counts routing ids up from a value of rand(), which it never seeds. It aborts the process if a routing
    id that it assigns is already taken by a peer that has announced the same id.
    """
    _libc.srand(int.from_bytes(os.urandom(4), "little"))


# A wake-up reads at most this many messages, so that one busy socket cannot starve the other.
RECEIVE_BATCH_SIZE = 64

# Plain integers, because pyzmq's enumerations are slower.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)

# Only this user may connect.
PRIVATE_UMASK = 0o177

# The time for which a stopping daemon waits until its last messages are sent.
LINGER_MS = 1000

# The format in which libzmq reports the credentials of a unix peer. The address of a TCP peer does not match it.
_UNIX_PEER = re.compile(r"localhost:(?P<uid>[0-9]{1,10}):(?P<gid>[0-9]{1,10}):(?P<pid>[0-9]{1,10})")


class ReceivedMessage(NamedTuple):
    """A message: the sender's routing id, the header and tensor frames, and the identity frame for `peer_pid`."""

    peer: bytes
    frames: Sequence[Any]
    identity: zmq.Frame


def bind_router(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """Return a ROUTER socket bound to `address`, to which only processes of this user can connect.

    Raises:
        PathInUse: the address cannot be bound.
    """
    seed_routing_ids()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
    # Sending to a peer that is gone raises an error instead of dropping the message.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # The kernel applies the umask when it creates the socket, so its permissions are right from the first moment.
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
    """Have a loop call `handler` whenever a socket is readable; return a function that schedules another check.

    The descriptor of a ZeroMQ socket reports a new message once, and the next use of the socket may consume the report.
    Checking the socket itself takes longer than waiting for all other descriptors, so the loop does not check it in
    each turn: code that uses the socket outside of the handler calls the returned function afterwards.
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
    """Yield the waiting messages, at most a batch. Large tensor frames are not copied."""
    for _ in range(RECEIVE_BATCH_SIZE):
        try:
            identity, *frames = zmq_io.receive(socket, zmq_io.NOBLOCK)
        except zmq.Again:
            return
        yield ReceivedMessage(identity.bytes, [zmq_io.frame_content(frame) for frame in frames], identity)
        # This check is cheaper than the exception of a read that finds no message.
        if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return


def send(socket: zmq.Socket[bytes], peer: bytes, frames: Sequence[Any]) -> bool:
    """Send without waiting; return whether the message was accepted. Large frames are not copied."""
    try:
        zmq_io.send(socket, [peer, *frames], zmq_io.NOBLOCK)
    except zmq.ZMQError as error:
        # The peer is not connected, or a thousand messages are queued for it.
        if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            raise
        return False
    return True


def peer_pid(identity: zmq.Frame) -> int | None:
    """Return the pid of the process behind a unix socket, from the first frame of its message; None over TCP.

    libzmq reads the pid from the kernel (SO_PEERCRED) some moments after it has accepted the connection. If the
    connection has ended by then, the value may be what the peer claims.
    """
    try:
        peer = _UNIX_PEER.fullmatch(str(identity.get("Peer-Address")))
    except zmq.ZMQError:
        return None
    return int(peer["pid"]) if peer is not None else None
