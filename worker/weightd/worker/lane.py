"""The lane: a stream to the daemon. For a child that was spawned it is one of two ways (`connection`).

For one that was forked it is the only way: a ZeroMQ context has threads, which a process that is to be forked must not
have, and takes memory, which each has for itself.
"""

from __future__ import annotations

import operator
import select
import socket
import time
from typing import Any, List, Optional, Sequence

from weightd.protocol import limits
from weightd.protocol.errors import RemoteProtocolError
from weightd.protocol.framing import LARGE_BYTES, Incoming
from weightd.shared import paths
from weightd.shared.stream import Stream, enlarge_send_buffer

Frames = Sequence[Any]

# How soon after its start the next daemon hears of its children. In between they ask the kernel this often.
RECONNECT_S = 0.02

_frames = operator.attrgetter("frames")


def connected(path: str, *, takes_descriptors: bool = False) -> Optional[Stream]:
    """Return a lane to the daemon that listens there, None if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError:
        # The daemon has none, or has gone already.
        connection.close()
        return None
    enlarge_send_buffer(connection)
    return Stream(connection, Incoming(limits.MAX_CHILD_HEADER_BYTES), accepts_descriptors=takes_descriptors)


def send(lane: Stream, *messages: Frames) -> bool:
    """Send messages, together; wait until the kernel has all of them. Return False if the daemon has gone."""
    try:
        if not _sent(lane, messages):
            writable = select.poll()
            writable.register(lane, select.POLLOUT)
            while not lane.flush():
                writable.poll()
    except ConnectionError:
        return False
    return True


def _sent(lane: Stream, messages: Sequence[Frames]) -> bool:
    if len(messages) == 1:
        return lane.send(messages[0])
    lane.cork()
    for frames in messages:
        lane.send(frames)
    return lane.uncork()


def read(lane: Stream, messages: List[Frames]) -> None:
    """Add what has come; a large frame is read up to its end, and no further.

    Raises:
        ConnectionError: the daemon has gone.
    """
    received = lane.receive()
    messages += map(_frames, received)
    while received and received[-1].lengths[-1] >= LARGE_BYTES:
        received = lane.receive()
        messages += map(_frames, received)


def wait(lane: Stream, timeout: float = -1) -> bool:
    """Wait so many seconds, -1 for any time, for something to read; return whether there is."""
    readable = select.poll()
    readable.register(lane, select.POLLIN)
    return bool(readable.poll(None if timeout < 0 else 1000 * timeout))


class LaneConnection:
    """What a `Connection` is, over a lane alone: to the daemon that is there, and then to the one that follows it.

    Args:
        address: of the daemon; the lane lies beside.
    """

    def __init__(self, address: str) -> None:
        self._path = paths.channel_path(address)
        self._readable = select.poll()
        self._lane: Optional[Stream] = None
        self._woken_by = -1
        self._connect()
        while self._lane is None:
            self._connect_later()

    def receive(self, timeout: float = -1) -> Optional[List[Frames]]:
        """As that of a `Connection`: return what has come, nothing in time, or None when another daemon is there."""
        messages: List[Frames] = []
        while self._lane is not None:
            try:
                # Where there is much to do there is always something: who waits first, asks the kernel twice.
                read(self._lane, messages)
            except ConnectionError:
                self._readable.unregister(self._lane)
                self._lane.close()
                self._lane = None
            else:
                if messages or not timeout or not self._wait(timeout):
                    break
        if messages or self._lane is not None or not timeout:
            return messages
        return self._follow(timeout)

    def watch(self, descriptor: int) -> None:
        """As that of a `Connection`; while it waits for another daemon it does not look."""
        self._woken_by = descriptor
        self._readable.register(descriptor, select.POLLIN)

    def send(self, *messages: Frames) -> bool:
        """Send messages, together; return False if they are lost, for there is no daemon."""
        return self._lane is not None and send(self._lane, *messages)

    answer = send

    def take_descriptor(self) -> int:
        """As that of a `Connection`."""
        if self._lane is None or not self._lane.descriptors:
            raise RemoteProtocolError("descriptors: expected one, got none")
        return self._lane.descriptors.popleft()

    def _wait(self, timeout: float) -> bool:
        ready = self._readable.poll(None if timeout < 0 else 1000 * timeout)
        return any(descriptor != self._woken_by for descriptor, _ in ready)

    def _follow(self, timeout: float) -> Optional[List[Frames]]:
        end = float("inf") if timeout < 0 else time.monotonic() + timeout
        while self._lane is None:
            if time.monotonic() >= end:
                return []
            self._connect_later()
        return None

    def _connect(self) -> None:
        self._lane = connected(self._path, takes_descriptors=True)
        if self._lane is not None:
            self._readable.register(self._lane, select.POLLIN)

    def _connect_later(self) -> None:
        time.sleep(RECONNECT_S)
        self._connect()
