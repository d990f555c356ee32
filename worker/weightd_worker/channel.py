"""The channel: a stream to the daemon. For a child that was spawned it is one of two ways (`connection`).

For one that was forked it is the only way: a ZeroMQ context has threads, which a process that is to be forked must not
have, and takes memory, which each has for itself.
"""

from __future__ import annotations

import operator
import select
import socket
import time
from typing import Any, List, Optional, Sequence

from weightd_common import endpoints
from weightd_common.stream import Stream, enlarge_send_buffer
from weightd_protocol import limits
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.framing import LARGE_BYTES, FrameReader

Frames = Sequence[Any]

# How soon after its start the next daemon hears of its children. In between they ask the kernel this often.
RECONNECT_INTERVAL_S = 0.02

_frames_of = operator.attrgetter("frames")


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


class ChannelConnection:
    """What a `ChannelConnection` is, over a channel alone.

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
        """As that of a `ChannelConnection`.

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
        """As that of a `ChannelConnection`; while it waits for another daemon it does not look."""
        self._watched_fd = descriptor
        self._poll.register(descriptor, select.POLLIN)

    def send(self, *messages: Frames) -> bool:
        """Send messages, together; return False if they are lost, for there is no daemon."""
        return self._channel is not None and send(self._channel, *messages)

    reply = send

    def take_descriptor(self) -> int:
        """As that of a `ChannelConnection`."""
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
