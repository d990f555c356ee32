"""Connections from a child to the daemon, which reconnect when the daemon restarts.

A spawned child uses a ZeroMQ socket and a channel, which is a stream socket (`WorkerConnection`). A forked child, and a
template, use the channel alone (`ChannelConnection`): a ZeroMQ context has threads, which a process must not have when
it is forked, and takes private memory in each process.
"""

from __future__ import annotations

import operator
import select
import socket
import time
from typing import Any, List, Optional, Sequence, Union

import zmq

from weightd_common import endpoints, zmq_io
from weightd_common.stream import Stream, enlarge_send_buffer
from weightd_protocol import limits
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.framing import LARGE_BYTES, FrameReader

Frames = Sequence[Any]

# Time between two attempts to connect to the next daemon, and so the maximum delay until it finds its children.
RECONNECT_INTERVAL_S = 0.02
_RECONNECT_INTERVAL_MS = int(1000 * RECONNECT_INTERVAL_S)

# Plain integers, because the constants of pyzmq cost a microsecond at each use.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_frames_of = operator.attrgetter("frames")


class WorkerConnection:
    """Connection of a spawned child: a ZeroMQ socket for its life cycle, and a channel for requests and results.

    The channel is reconnected whenever the socket is, so that no result for an earlier daemon reaches the next one. A
    daemon without a channel socket sends requests over the ZeroMQ socket, and receives the results there.

    Args:
        socket: a DEALER socket, not yet connected.
        address: the address to connect the socket to. The channel's socket is next to it.
    """

    def __init__(self, socket: zmq.Socket[bytes], address: str) -> None:
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_INTERVAL_MS)
        self._socket = socket
        self._path = endpoints.channel_path(address)
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._connection_count = 0
        self._channel: Optional[Stream] = None
        # The descriptors of the two ZeroMQ sockets are edge-triggered: they become readable once, and again only after
        # the events have been queried. A query takes longer than a read from the channel.
        self._has_zmq_event = True
        self._zmq_fds = [int(each.getsockopt(zmq.FD)) for each in (socket, self._monitor)]
        self._epoll = select.epoll()
        for each in self._zmq_fds:
            self._epoll.register(each, select.EPOLLIN)
        self._watched_fd = -1
        socket.connect(address)

    def receive(self, timeout_s: float = -1) -> Optional[List[Frames]]:
        """Return the messages received, with the channel's first; None after a reconnect to another daemon.

        Args:
            timeout_s: seconds to wait for messages or a reconnect, -1 without limit. After a timeout, and when the
                watched descriptor is readable, the list may be empty. With 0 a reconnect is not reported yet.
        """
        messages: List[Frames] = []
        is_woken = False
        while not messages:
            has_zmq_event = self._has_zmq_event
            ready = self._epoll.poll(0 if has_zmq_event else timeout_s)
            for descriptor, _ in ready:
                if descriptor in self._zmq_fds:
                    self._has_zmq_event = True
                elif descriptor == self._watched_fd:
                    is_woken = True
                else:
                    self._read_channel(messages)
            if self._has_zmq_event:
                self._read_socket(messages)
                if timeout_s and not messages and self._has_reconnected():
                    return None
            elif not ready:
                break
            if is_woken or not timeout_s:
                break
        return messages

    def watch(self, descriptor: int) -> None:
        """Have `receive` return, as after a timeout, when this descriptor is readable."""
        self._watched_fd = descriptor
        self._epoll.register(descriptor, select.EPOLLIN)

    def send(self, frames: Frames) -> bool:
        """Send a message, and return True: without a daemon, the socket keeps the message for the next one."""
        # Sending may consume an event of the edge-triggered descriptor, so `receive` has to query the events.
        self._has_zmq_event = True
        zmq_io.send(self._socket, frames)
        return True

    def take_descriptor(self) -> int:
        """Return the oldest descriptor that was received on the channel. The caller owns it."""
        if self._channel is None or not self._channel.descriptors:
            raise RemoteProtocolError("descriptors: expected one, got none")
        return self._channel.descriptors.popleft()

    def reply(self, *messages: Frames) -> None:
        """Send results together and wait until the kernel has them. They are dropped if the daemon has exited."""
        if self._channel is not None:
            send(self._channel, *messages)
        else:
            for frames in messages:
                self.send(frames)

    def _read_channel(self, messages: List[Frames]) -> None:
        channel = self._channel
        assert channel is not None  # noqa: S101 - its descriptor is in the epoll
        try:
            read(channel, messages)
        except ConnectionError:
            # The daemon has exited or closed the channel. A last order, or a reconnect, arrives over the socket.
            self._epoll.unregister(channel.fileno())

    def _read_socket(self, messages: List[Frames]) -> None:
        while int(self._socket.getsockopt(_EVENTS)) & _POLLIN:
            messages.append(list(map(zmq_io.frame_content, zmq_io.receive(self._socket))))

    def _has_reconnected(self) -> bool:
        """Connect the channel for each connection of the ZeroMQ socket; return True if it is not the first one."""
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
            # Closing the descriptor removes it from the epoll.
            self._channel.close()
            self._channel = None
        self._channel = connect(self._path, takes_descriptors=True)
        if self._channel is not None:
            self._epoll.register(self._channel.fileno(), select.EPOLLIN)


class ChannelConnection:
    """Connection of a forked child or a template: has the methods of `WorkerConnection`, with a channel alone.

    It connects when it is made, and reconnects when another daemon takes over.

    Args:
        address: the daemon's address. The channel's socket is next to it.
    """

    def __init__(self, address: str) -> None:
        self._path = endpoints.channel_path(address)
        self._poll = select.poll()
        self._channel: Optional[Stream] = None
        self._watched_fd = -1
        self._connect()
        while self._channel is None:
            self._retry_connect()

    def receive(self, timeout_s: float = -1) -> Optional[List[Frames]]:
        """Return the messages received, an empty list after a timeout, or None after a reconnect to another daemon.

        See `WorkerConnection.receive` for the argument.
        """
        messages: List[Frames] = []
        while self._channel is not None:
            try:
                # Under load there is always something to read, so polling first would cost a second system call.
                read(self._channel, messages)
            except ConnectionError:
                self._poll.unregister(self._channel)
                self._channel.close()
                self._channel = None
            else:
                if messages or not timeout_s or not self._wait_readable(timeout_s):
                    break
        if messages or self._channel is not None or not timeout_s:
            return messages
        return self._wait_reconnect(timeout_s)

    def watch(self, descriptor: int) -> None:
        """Have `receive` return when this descriptor is readable, except while it waits for another daemon."""
        self._watched_fd = descriptor
        self._poll.register(descriptor, select.POLLIN)

    def send(self, *messages: Frames) -> bool:
        """Send messages together. Return False, and drop them, if no daemon is connected."""
        return self._channel is not None and send(self._channel, *messages)

    reply = send

    def take_descriptor(self) -> int:
        """Return the oldest descriptor that was received. The caller owns it."""
        if self._channel is None or not self._channel.descriptors:
            raise RemoteProtocolError("descriptors: expected one, got none")
        return self._channel.descriptors.popleft()

    def _wait_readable(self, timeout_s: float) -> bool:
        ready = self._poll.poll(None if timeout_s < 0 else 1000 * timeout_s)
        return any(descriptor != self._watched_fd for descriptor, _ in ready)

    def _wait_reconnect(self, timeout_s: float) -> Optional[List[Frames]]:
        deadline = float("inf") if timeout_s < 0 else time.monotonic() + timeout_s
        while self._channel is None:
            if time.monotonic() >= deadline:
                return []
            self._retry_connect()
        return None

    def _connect(self) -> None:
        self._channel = connect(self._path, takes_descriptors=True)
        if self._channel is not None:
            self._poll.register(self._channel, select.POLLIN)

    def _retry_connect(self) -> None:
        time.sleep(RECONNECT_INTERVAL_S)
        self._connect()


Connection = Union[WorkerConnection, ChannelConnection]


def connect(path: str, *, takes_descriptors: bool = False) -> Optional[Stream]:
    """Return a channel to the daemon that listens at the path, or None if no daemon does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError:
        # The daemon has no channel socket, or has already exited.
        connection.close()
        return None
    enlarge_send_buffer(connection)
    return Stream(connection, FrameReader(limits.MAX_CHILD_HEADER_BYTES), accepts_descriptors=takes_descriptors)


def send(channel: Stream, *messages: Frames) -> bool:
    """Send messages together and wait until the kernel has all of them. Return False if the daemon has exited."""
    try:
        if not _try_send(channel, messages):
            writable = select.poll()
            writable.register(channel, select.POLLOUT)
            while not channel.flush():
                writable.poll()
    except ConnectionError:
        return False
    return True


def _try_send(channel: Stream, messages: Sequence[Frames]) -> bool:
    if len(messages) == 1:
        return channel.send(messages[0])
    channel.cork()
    for frames in messages:
        channel.send(frames)
    return channel.uncork()


def read(channel: Stream, messages: List[Frames]) -> None:
    """Append the messages that the channel has received. A large frame is read to its end, and nothing after it.

    Raises:
        ConnectionError: the daemon has exited or closed the channel.
    """
    received = channel.receive()
    messages += map(_frames_of, received)
    while received and received[-1].lengths[-1] >= LARGE_BYTES:
        received = channel.receive()
        messages += map(_frames_of, received)


def wait_readable(channel: Stream, timeout_s: float = -1) -> bool:
    """Wait until the channel is readable, at most `timeout_s` seconds, -1 without limit. Return whether it is."""
    readable = select.poll()
    readable.register(channel, select.POLLIN)
    return bool(readable.poll(None if timeout_s < 0 else 1000 * timeout_s))
