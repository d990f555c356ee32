"""The connection to the daemon, which may end and come back: a daemon that restarts leaves its children running.

A child that was spawned has two ways to the daemon, a ZeroMQ socket and a channel, which is a stream
(`WorkerConnection`). A child that was forked has the channel alone (`ChannelConnection`): a ZeroMQ context has threads,
which a process that is to be forked must not have, and takes memory, which each process has for itself.
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

# How soon after its start the next daemon hears of its children. In between they ask the kernel this often.
RECONNECT_INTERVAL_S = 0.02
_RECONNECT_INTERVAL_MS = int(1000 * RECONNECT_INTERVAL_S)

# Plain integers: the library's own constants cost a microsecond each time.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_frames_of = operator.attrgetter("frames")


class WorkerConnection:
    """Two ways to one daemon: a ZeroMQ socket for the life of this process, and a channel for requests and answers.

    The channel is connected anew whenever the socket is, so that nothing of an earlier daemon's reaches the next one. A
    daemon that has none asks over the socket, and is answered there.

    Args:
        socket: a DEALER, not connected yet.
        address: to connect it to; the channel's socket is next to it.
    """

    def __init__(self, socket: zmq.Socket[bytes], address: str) -> None:
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_INTERVAL_MS)
        self._socket = socket
        self._path = endpoints.channel_path(address)
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._connection_count = 0
        self._channel: Optional[Stream] = None
        # Of the two sockets of the library the descriptors only tell that there is something to look at, and not again
        # before it was looked at; asking for the events is looking. It takes longer than to read from the channel.
        self._has_zmq_event = True
        self._zmq_fds = [int(each.getsockopt(zmq.FD)) for each in (socket, self._monitor)]
        self._epoll = select.epoll()
        for each in self._zmq_fds:
            self._epoll.register(each, select.EPOLLIN)
        self._watched_fd = -1
        socket.connect(address)

    def receive(self, timeout_s: float = -1) -> Optional[List[Frames]]:
        """Return the messages that have come, those of the channel first; None when another daemon is there.

        Args:
            timeout_s: seconds to wait for one of the two, -1 for any time; if nothing comes, no message is returned.
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
        """Have `receive` return when this one can be read, too, as if the time was over."""
        self._watched_fd = descriptor
        self._epoll.register(descriptor, select.EPOLLIN)

    def send(self, frames: Frames) -> bool:
        """Send a message: if no daemon is there, the next one gets it, so this is always True."""
        # What comes meanwhile is told to who sends.
        self._has_zmq_event = True
        zmq_io.send(self._socket, frames)
        return True

    def take_descriptor(self) -> int:
        """Return what came with the last message that has one; whoever takes it owns it."""
        if self._channel is None or not self._channel.descriptors:
            raise RemoteProtocolError("descriptors: expected one, got none")
        return self._channel.descriptors.popleft()

    def reply(self, *messages: Frames) -> None:
        """Send answers, together: to who has asked, or to nobody if that one is gone. Waits until they are read."""
        if self._channel is not None:
            send(self._channel, *messages)
        else:
            for frames in messages:
                self.send(frames)

    def _read_channel(self, messages: List[Frames]) -> None:
        channel = self._channel
        assert channel is not None  # noqa: S101 - it is in the epoll
        try:
            read(channel, messages)
        except ConnectionError:
            # The daemon has gone, or has done with this process: the next one, or a last order, comes another way.
            self._epoll.unregister(channel.fileno())

    def _read_socket(self, messages: List[Frames]) -> None:
        while int(self._socket.getsockopt(_EVENTS)) & _POLLIN:
            messages.append(list(map(zmq_io.frame_content, zmq_io.receive(self._socket))))

    def _has_reconnected(self) -> bool:
        """Look at the monitor; return whether another daemon has followed the one before. Else all was looked at."""
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
            # It leaves the epoll as it is closed.
            self._channel.close()
            self._channel = None
        self._channel = connect(self._path, takes_descriptors=True)
        if self._channel is not None:
            self._epoll.register(self._channel.fileno(), select.EPOLLIN)


class ChannelConnection:
    """What a `WorkerConnection` is, over a channel alone.

    To the daemon that is there, and then to the one that follows it.

    Args:
        address: of the daemon; the channel's socket is next to it.
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
        """As that of a `WorkerConnection`.

        Return what has come, nothing in time, or None when another daemon is there.
        """
        messages: List[Frames] = []
        while self._channel is not None:
            try:
                # Where there is much to do there is always something: who waits first, asks the kernel twice.
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
        """As that of a `WorkerConnection`; while it waits for another daemon it does not look."""
        self._watched_fd = descriptor
        self._poll.register(descriptor, select.POLLIN)

    def send(self, *messages: Frames) -> bool:
        """Send messages, together; return False if they are lost, for there is no daemon."""
        return self._channel is not None and send(self._channel, *messages)

    reply = send

    def take_descriptor(self) -> int:
        """As that of a `WorkerConnection`."""
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
    """Return a channel to the daemon that listens there, None if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError:
        # The daemon has none, or has gone already.
        connection.close()
        return None
    enlarge_send_buffer(connection)
    return Stream(connection, FrameReader(limits.MAX_CHILD_HEADER_BYTES), accepts_descriptors=takes_descriptors)


def send(channel: Stream, *messages: Frames) -> bool:
    """Send messages, together; wait until the kernel has all of them. Return False if the daemon has gone."""
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
    """Add what has come; a large frame is read up to its end, and no further.

    Raises:
        ConnectionError: the daemon has gone.
    """
    received = channel.receive()
    messages += map(_frames_of, received)
    while received and received[-1].lengths[-1] >= LARGE_BYTES:
        received = channel.receive()
        messages += map(_frames_of, received)


def wait_readable(channel: Stream, timeout_s: float = -1) -> bool:
    """Wait so many seconds, -1 for any time, for something to read; return whether there is."""
    readable = select.poll()
    readable.register(channel, select.POLLIN)
    return bool(readable.poll(None if timeout_s < 0 else 1000 * timeout_s))
