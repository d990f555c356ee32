"""The connection to the daemon, which may end and come back: a daemon that restarts leaves its children running."""

from __future__ import annotations

import select
from typing import List, Optional

import zmq

from weightd_common import endpoints, zmq_io
from weightd_common.stream import Stream
from weightd_protocol.errors import RemoteProtocolError
from weightd_worker import channel as channels
from weightd_worker.channel import Frames

_RECONNECT_INTERVAL_MS = int(1000 * channels.RECONNECT_INTERVAL_S)

# Plain integers: the library's own constants cost a microsecond each time.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


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
            channels.send(self._channel, *messages)
        else:
            for frames in messages:
                self.send(frames)

    def _read_channel(self, messages: List[Frames]) -> None:
        channel = self._channel
        assert channel is not None  # noqa: S101 - it is in the epoll
        try:
            channels.read(channel, messages)
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
        self._channel = channels.connect(self._path, takes_descriptors=True)
        if self._channel is not None:
            self._epoll.register(self._channel.fileno(), select.EPOLLIN)
