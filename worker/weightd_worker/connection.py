"""Connections from a child process to the daemon, which reconnect when the daemon restarts.

A spawned child uses a ZeroMQ socket and a channel, which is a unix stream socket (`WorkerConnection`). A forked child
and a template use only a channel (`ChannelConnection`). They cannot use ZeroMQ, because a ZeroMQ context has threads,
and a process with threads cannot be forked. A ZeroMQ context would also take private memory in each process.
"""

from __future__ import annotations

import array
import fcntl
import operator
import select
import socket
import termios
import time
from typing import Any, List, Optional, Sequence, Set, Union

import zmq

from weightd_common import endpoints, zmq_io
from weightd_common.stream import Stream, enlarge_send_buffer
from weightd_protocol import limits
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.framing import LARGE_BYTES, FrameReader

Frames = Sequence[Any]

# Seconds between two attempts to connect to the daemon after a restart. A new daemon waits at most this long for a
# surviving child to connect.
RECONNECT_INTERVAL_S = 0.02
_RECONNECT_INTERVAL_MS = int(1000 * RECONNECT_INTERVAL_S)

# Maximum number of descriptors that one poll returns: all direct channels of a device, and the few of the connection.
_MAX_EVENTS = limits.MAX_CHANNELS + 8

# Bytes of the kernel's send buffer that `has_room` leaves free: enough for a small message about each direct channel,
# for which the kernel counts 768 bytes. At most a fraction of the buffer, whose size the system may limit.
_RESERVED_BYTES = 768 * limits.MAX_CHANNELS
_MAX_RESERVED_FRACTION = 0.375

# Plain integers, because each use of pyzmq's own constants takes a microsecond.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_frames_of = operator.attrgetter("frames")


class WorkerConnection:
    """Connection of a spawned child: a ZeroMQ socket for its life cycle, and a channel for requests and results.

    Whenever the ZeroMQ socket reconnects, the channel is closed and connected again, so that no result for an earlier
    daemon reaches the next daemon. If the daemon has no socket for channels, requests and results are sent over the
    ZeroMQ socket.

    Args:
        socket: a DEALER socket that is not connected yet.
        address: the daemon's ipc:// address for the ZeroMQ socket. The path of the socket for channels is derived from
            this address.

    Attributes:
        ready: the watched descriptors that were readable in the last call of `receive`.
    """

    def __init__(self, socket: zmq.Socket[bytes], address: str) -> None:
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_INTERVAL_MS)
        self._socket = socket
        self._path = endpoints.channel_path(address)
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._connection_count = 0
        self._channel: Optional[Stream] = None
        # Whether the events of the two ZeroMQ sockets must be queried. Their descriptors are edge-triggered: after one
        # has become readable, it does so again only after a query. A query takes longer than a read from the channel,
        # so `receive` avoids unnecessary queries.
        self._has_zmq_event = True
        self._zmq_fds = [int(each.getsockopt(zmq.FD)) for each in (socket, self._monitor)]
        self._epoll = select.epoll()
        for each in self._zmq_fds:
            self._epoll.register(each, select.EPOLLIN)
        self._watched_fds: Set[int] = set()
        self.ready: Sequence[int] = ()
        socket.connect(address)

    def receive(self, timeout_s: float = -1) -> Optional[List[Frames]]:
        """Return the received messages, first the channel's messages; None after a reconnect to another daemon.

        The list is empty if no message arrives before the timeout, or if a watched descriptor (`watch`) becomes
        readable.

        Args:
            timeout_s: seconds to wait for messages or a reconnect; -1 for no limit. With 0, a reconnect is reported
                only by a later call with another timeout.
        """
        messages: List[Frames] = []
        watched = self._watched_fds
        ready: List[int] = []
        while not messages:
            has_zmq_event = self._has_zmq_event
            events = self._epoll.poll(0 if has_zmq_event else timeout_s, _MAX_EVENTS)
            for descriptor, _ in events:
                if descriptor in watched:
                    ready.append(descriptor)
                elif descriptor in self._zmq_fds:
                    self._has_zmq_event = True
                else:
                    self._read_channel(messages)
            if self._has_zmq_event:
                self._read_socket(messages)
                if timeout_s and not messages and self._has_reconnected():
                    self.ready = ready
                    return None
            elif not events:
                break
            if ready or not timeout_s:
                break
        self.ready = ready
        return messages

    def watch(self, descriptor: int) -> None:
        """Make `receive` return when `descriptor` is readable, even if no message has arrived."""
        self._watched_fds.add(descriptor)
        self._epoll.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        """Undo `watch`. Call it before the descriptor is closed."""
        self._watched_fds.remove(descriptor)
        self._epoll.unregister(descriptor)

    def send(self, frames: Frames) -> bool:
        """Send a message over the ZeroMQ socket. If no daemon runs, the socket keeps the message for the next daemon.

        Always return True, because the message is not lost; see `ChannelConnection.send`.
        """
        # Sending may make the socket's edge-triggered descriptor unreadable although a message has arrived. So
        # `receive` must query the events.
        self._has_zmq_event = True
        zmq_io.send(self._socket, frames)
        return True

    def take_descriptor(self) -> int:
        """Remove and return the oldest file descriptor received on the channel. The caller must close it."""
        if self._channel is None or not self._channel.descriptors:
            raise RemoteProtocolError("descriptors: expected one, got none")
        return self._channel.descriptors.popleft()

    def reply(self, *messages: Frames) -> bool:
        """Send results together, and wait until the kernel has accepted them.

        If the daemon has exited, drop them and return False.
        """
        if self._channel is not None:
            return send(self._channel, *messages)
        for frames in messages:
            self.send(frames)
        return True

    def has_room(self, nbytes: int) -> bool:
        """Return whether `reply` can send a message of `nbytes` bytes on the channel now without waiting."""
        return self._channel is not None and has_room(self._channel, nbytes)

    def _read_channel(self, messages: List[Frames]) -> None:
        channel = self._channel
        assert channel is not None  # noqa: S101 - its descriptor is in the epoll
        try:
            read(channel, messages)
        except ConnectionError:
            # The daemon has exited or closed the channel, so stop polling the channel. Continue to poll the ZeroMQ
            # socket: it may still receive a last order, and it shows when a daemon runs again.
            self._epoll.unregister(channel.fileno())

    def _read_socket(self, messages: List[Frames]) -> None:
        while int(self._socket.getsockopt(_EVENTS)) & _POLLIN:
            messages.append(list(map(zmq_io.frame_content, zmq_io.receive(self._socket))))

    def _has_reconnected(self) -> bool:
        """Connect the channel if the ZeroMQ socket has connected. Return True if it had connected before."""
        while int(self._monitor.getsockopt(_EVENTS)) & _POLLIN:
            zmq_io.receive_event(self._monitor)
            self._connection_count += 1
            self._connect_channel()
            if self._connection_count > 1:
                return True
        self._has_zmq_event = False
        return False

    def _connect_channel(self) -> None:
        if self._channel is not None:
            # Closing the channel also removes its descriptor from the epoll set.
            self._channel.close()
            self._channel = None
        self._channel = connect(self._path, takes_descriptors=True)
        if self._channel is not None:
            self._epoll.register(self._channel.fileno(), select.EPOLLIN)


class ChannelConnection:
    """Connection of a forked child or a template: has the methods of `WorkerConnection`, but uses only a channel.

    The constructor waits until the channel is connected. When the daemon restarts, `receive` reconnects the channel.

    Args:
        address: the daemon's ipc:// address for its children, from which the path of the socket for channels is
            derived.

    Attributes:
        ready: the watched descriptors that were readable in the last call of `receive`.
    """

    def __init__(self, address: str) -> None:
        self._path = endpoints.channel_path(address)
        self._epoll = select.epoll()
        self._channel: Optional[Stream] = None
        self._channel_fd = -1
        self._watched_fds: Set[int] = set()
        self._next_connect_at = 0.0
        self.ready: Sequence[int] = ()
        self._connect()
        while self._channel is None:
            time.sleep(RECONNECT_INTERVAL_S)
            self._connect()

    def receive(self, timeout_s: float = -1) -> Optional[List[Frames]]:
        """Return the received messages; None after a reconnect to another daemon. See `WorkerConnection.receive`."""
        messages: List[Frames] = []
        self.ready = ()
        # Usually, read without polling first: under load a message is always available, and polling would only cost
        # another system call. Watched descriptors are as likely to be readable as the channel, so poll them first.
        must_poll = bool(self._watched_fds)
        while self._channel is not None:
            if must_poll and not self._wait_readable(timeout_s):
                return messages
            try:
                read(self._channel, messages)
            except ConnectionError:
                self._disconnect()
            else:
                if messages or len(self.ready) or not timeout_s:
                    return messages
                must_poll = True
        if messages or not (timeout_s or self._watched_fds):
            return messages
        return self._wait_reconnect(timeout_s)

    def watch(self, descriptor: int) -> None:
        """Make `receive` return when `descriptor` is readable, even if no message has arrived."""
        self._watched_fds.add(descriptor)
        self._epoll.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        """Undo `watch`. Call it before the descriptor is closed."""
        self._watched_fds.remove(descriptor)
        self._epoll.unregister(descriptor)

    def send(self, *messages: Frames) -> bool:
        """Send messages together. If no daemon is connected, drop them and return False."""
        return self._channel is not None and send(self._channel, *messages)

    reply = send

    def has_room(self, nbytes: int) -> bool:
        """Return whether `send` can send a message of `nbytes` bytes now without waiting."""
        return self._channel is not None and has_room(self._channel, nbytes)

    def take_descriptor(self) -> int:
        """Remove and return the oldest received file descriptor. The caller must close it."""
        if self._channel is None or not self._channel.descriptors:
            raise RemoteProtocolError("descriptors: expected one, got none")
        return self._channel.descriptors.popleft()

    def _wait_readable(self, timeout_s: float) -> bool:
        """Wait until the channel or a watched descriptor is readable. Return whether the channel is."""
        ready = [descriptor for descriptor, _ in self._epoll.poll(timeout_s, _MAX_EVENTS)]
        self.ready = ready
        if self._channel_fd in ready:
            ready.remove(self._channel_fd)
            return True
        return False

    def _wait_reconnect(self, timeout_s: float) -> Optional[List[Frames]]:
        """Connect to the next daemon. Return None when connected, or [] after the timeout or for `ready`."""
        deadline = float("inf") if timeout_s < 0 else time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            if now >= self._next_connect_at and timeout_s:
                self._connect()
                if self._channel is not None:
                    return None
            self._wait_readable(max(0.0, min(self._next_connect_at, deadline) - now))
            if self.ready or time.monotonic() >= deadline:
                return []

    def _disconnect(self) -> None:
        assert self._channel is not None  # noqa: S101 - the caller has read from it
        self._epoll.unregister(self._channel_fd)
        self._channel.close()
        self._channel, self._channel_fd = None, -1
        self._next_connect_at = time.monotonic() + RECONNECT_INTERVAL_S

    def _connect(self) -> None:
        self._channel = connect(self._path, takes_descriptors=True)
        self._next_connect_at = time.monotonic() + RECONNECT_INTERVAL_S
        if self._channel is not None:
            self._channel_fd = self._channel.fileno()
            self._epoll.register(self._channel_fd, select.EPOLLIN)


Connection = Union[WorkerConnection, ChannelConnection]


def connect(path: str, *, takes_descriptors: bool = False) -> Optional[Stream]:
    """Return a channel to the daemon that listens at `path`, or None if no daemon listens there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError:
        # The daemon has no socket for channels, or it has already exited.
        connection.close()
        return None
    enlarge_send_buffer(connection)
    return Stream(connection, FrameReader(limits.MAX_CHILD_HEADER_BYTES), accepts_descriptors=takes_descriptors)


def send(channel: Stream, *messages: Frames) -> bool:
    """Send messages together, and wait until the kernel has accepted all. Return False if the daemon has exited."""
    try:
        if not _try_send(channel, messages):
            writable = select.poll()
            writable.register(channel, select.POLLOUT)
            while not channel.flush():
                writable.poll()
    except ConnectionError:
        return False
    return True


def has_room(channel: Stream, nbytes: int) -> bool:
    """Return whether the kernel accepts a message of `nbytes` bytes now as a whole, with room left for small messages.

    If the daemon has read everything, the result is True even if the message is larger than the buffer.
    """
    if channel.unsent:
        return False
    unread = array.array("i", [0])
    fcntl.ioctl(channel.fileno(), termios.TIOCOUTQ, unread)
    if not unread[0]:
        return True
    capacity = channel.connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    reserved = min(_RESERVED_BYTES, int(_MAX_RESERVED_FRACTION * capacity))
    # The kernel splits the message into parts of at least 32 KiB, and counts less than 8 KiB more for each.
    return unread[0] + nbytes + 8192 * (2 + nbytes // 32768) + reserved <= capacity


def _try_send(channel: Stream, messages: Sequence[Frames]) -> bool:
    if len(messages) == 1:
        return channel.send(messages[0])
    channel.cork()
    for frames in messages:
        channel.send(frames)
    return channel.uncork()


def read(channel: Stream, messages: List[Frames]) -> None:
    """Read from the channel once, and append the complete messages to `messages`.

    A read stops at the end of a large frame. So if the last message ends with a large frame, the function reads again,
    to get the messages after it.

    Raises:
        ConnectionError: the daemon has exited or closed the channel.
    """
    received = channel.receive()
    messages += map(_frames_of, received)
    while received and received[-1].lengths[-1] >= LARGE_BYTES:
        received = channel.receive()
        messages += map(_frames_of, received)


def wait_readable(channel: Stream, timeout_s: float = -1) -> bool:
    """Wait until the channel is readable, for at most `timeout_s` seconds (-1: no limit). Return whether it is."""
    readable = select.poll()
    readable.register(channel, select.POLLIN)
    return bool(readable.poll(None if timeout_s < 0 else 1000 * timeout_s))
