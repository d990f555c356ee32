"""ROUTER sockets: how they are bound, and how messages are read from and written to them."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import zmq

from weightd.daemon.host.directories import ClaimError
from weightd.daemon.host.listening import addresses
from weightd.protocol import limits
from weightd.shared import multipart

# A wake-up reads at most this many messages, so that one busy socket cannot starve the other.
BATCH = 64

# Only this user may connect.
PRIVATE = 0o177

# The last answers of a daemon that stops get this long to leave.
LINGER_MS = 1000

# How the library writes what the kernel says of a unix peer. A TCP peer's address has other parts between its colons.
_UNIX_PEER = re.compile(r"localhost:(?P<uid>[0-9]{1,10}):(?P<gid>[0-9]{1,10}):(?P<pid>[0-9]{1,10})")

_libc = ctypes.CDLL(None)


class Received(NamedTuple):
    """A message: who sent it, the header and the tensor frames, and the peer's pid where the kernel told it."""

    peer: bytes
    frames: Sequence[Any]
    identity: zmq.Frame


def bind(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    *,
    umask: int = PRIVATE,
    options: Mapping[int, int] = MappingProxyType({}),
    descriptors: Sequence[int] = (),
    max_frame_bytes: int = limits.MAX_FRAME_BYTES,
) -> zmq.Socket[bytes]:
    """Return a ROUTER socket bound to `address`.

    Args:
        context: makes it.
        address: where to listen.
        umask: of a unix socket that is made, which says who may connect.
        options: of the socket, beside those that all have.
        descriptors: sockets that listen already, one of them at `address`: the socket accepts from all of them, and
            closes them in the end. They no longer block, in any process that holds them.
        max_frame_bytes: a peer that announces a larger frame is hung up before there is memory for it.

    Raises:
        ClaimError: the address cannot be bound.
    """
    _seed()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, min(max_frame_bytes, limits.MAX_FRAME_BYTES))
    # A peer that is gone is an error here, not a silent drop.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    for option, value in options.items():
        socket.setsockopt(option, value)
    try:
        if descriptors:
            _accept(socket, descriptors)
        else:
            _listen(socket, address, umask)
    except ClaimError:
        socket.close(linger=0)
        raise
    return socket


def _seed() -> None:
    """Let nobody know which routing ids the next ROUTER socket will give.

    libzmq 4.3.5 counts them up from a number of rand(), which it never seeds, and aborts the process when one that it
    gives is taken: by a peer that has announced it as its own.
    """
    _libc.srand(int.from_bytes(os.urandom(4), "little"))


def _accept(socket: zmq.Socket[bytes], descriptors: Sequence[int]) -> None:
    for address, descriptor in zip(addresses(descriptors), descriptors, strict=True):
        if address.startswith("tcp://["):
            socket.setsockopt(zmq.IPV6, 1)
        # libzmq's I/O thread accepts when the kernel says that somebody is there. Where another process, or a socket
        # that is being closed, was faster, an accept that blocks would hold up the thread until the next one comes.
        os.set_blocking(descriptor, False)
        socket.setsockopt(zmq.USE_FD, descriptor)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ClaimError(f"cannot accept connections to {address}: {error.strerror}") from None


def _listen(socket: zmq.Socket[bytes], address: str, umask: int) -> None:
    # The permissions of a unix socket are what the umask leaves: they are right from its first moment.
    before = os.umask(umask)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ClaimError(f"cannot listen on {address}: {error.strerror}") from None
    finally:
        os.umask(before)


def receive(socket: zmq.Socket[bytes]) -> Iterator[Received]:
    """Yield the messages that wait, at most a batch. Large tensor frames are not copied."""
    for _ in range(BATCH):
        try:
            identity, *frames = multipart.receive(socket, multipart.NOBLOCK)
        except zmq.Again:
            return
        yield Received(identity.bytes, [multipart.content(frame) for frame in frames], identity)
        # Cheaper than the exception of a read that finds nothing.
        if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return


def send(socket: zmq.Socket[bytes], peer: bytes, frames: Sequence[Any]) -> bool:
    """Send without waiting; return whether the peer could be reached. Large frames pass on uncopied."""
    try:
        multipart.send(socket, [peer, *frames], multipart.NOBLOCK)
    except zmq.ZMQError as error:
        _check_unreachable(error)
        return False
    return True


def send_tracked(
    socket: zmq.Socket[bytes], peer: bytes, frames: Sequence[Any]
) -> list[tuple[zmq.MessageTracker, int]] | None:
    """Send as `send` does; return a tracker for each large frame with its bytes, or None if the peer is unreachable."""
    try:
        return multipart.send_tracked(socket, [peer, *frames], multipart.NOBLOCK)
    except zmq.ZMQError as error:
        _check_unreachable(error)
        return None


def send_marked(socket: zmq.Socket[bytes], peer: bytes, frames: Sequence[Any]) -> zmq.MessageTracker | None:
    """Send small frames as `send` does; return a tracker that is done once the first is written, or None."""
    try:
        return multipart.send_marked(socket, [peer, *frames], multipart.NOBLOCK)
    except zmq.ZMQError as error:
        _check_unreachable(error)
        return None


def _check_unreachable(error: zmq.ZMQError) -> None:
    """Raise the error again unless it says that there is no such peer, or that a thousand messages wait for it."""
    if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
        raise error


class UnixPeer(NamedTuple):
    """The process behind a unix socket, as the library was told by the kernel (SO_PEERCRED) when it connected."""

    uid: int
    pid: int


def unix_peer(identity: zmq.Frame) -> UnixPeer | None:
    """Return who has sent a message, by its first frame; None over TCP.

    The library asks the kernel some moments after it has accepted the connection: where that has ended by then, this
    may be what the peer says of itself.
    """
    try:
        peer = _UNIX_PEER.fullmatch(str(identity.get("Peer-Address")))
    except zmq.ZMQError:
        return None
    return UnixPeer(int(peer["uid"]), int(peer["pid"])) if peer is not None else None


def peer_pid(identity: zmq.Frame) -> int | None:
    """Return the pid of the process behind a unix socket; None over TCP."""
    peer = unix_peer(identity)
    return peer.pid if peer is not None else None
