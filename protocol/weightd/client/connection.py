"""One connection to a daemon, from the handshake to its loss; then another one is made.

libzmq hides a lost connection: it would connect again for ever and send what is queued to whoever comes next, while
answers that will never come are waited for. Here a socket monitor makes both ends of a connection's life events.
"""

from __future__ import annotations

import select
import time
from typing import Any, List, Optional, cast

import zmq

from weightd.client import address as addresses
from weightd.protocol import limits
from weightd.protocol.errors import DeadlineExceeded, InvalidArgument, Unavailable
from weightd.shared import monitor, multipart

# A host that vanishes does not close its TCP connections; a unix socket's peer cannot vanish unseen.
_TCP_HEARTBEAT_MS = 5_000
_TCP_SILENCE_MS = 15_000

_REFUSED = zmq.EVENT_CONNECT_RETRIED
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED | _HANDSHAKE_FAILED


class Connection:
    """A DEALER socket that is connected, or lost for good. Made by `connect`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.address = address
        self._closed = False
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
        # Answers wait here until they are asked for; a bound would make the daemon drop them. They are at most as
        # many as the requests that their owner has under way.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        if address.startswith("tcp://"):
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, _TCP_HEARTBEAT_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _TCP_SILENCE_MS)
        self._unanswered = 0
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        # To poll the monitor as a ZeroMQ socket would cost a few microseconds in every call. Its file descriptor is
        # readable from the moment that libzmq has something to say on it, until `_has_ended` has looked.
        alarm = self._monitor.FD
        self._alarm = select.poll()
        self._alarm.register(alarm, select.POLLIN)
        self._readable = zmq.Poller()
        self._readable.register(self._socket, zmq.POLLIN)
        self._readable.register(alarm, zmq.POLLIN)
        self._writable = zmq.Poller()
        self._writable.register(self._socket, zmq.POLLOUT)
        self._writable.register(alarm, zmq.POLLIN)

    def open(self, deadline: float) -> None:
        """Connect, and wait for the end of the handshake.

        Raises:
            InvalidArgument, PermissionDenied, Unavailable: as `address.check`.
            DeadlineExceeded: somebody listens, but does not answer.
        """
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            raise InvalidArgument(f"{self.address}: {error.strerror}") from None
        while self._monitor.poll(_milliseconds(deadline)):
            event = monitor.receive(self._monitor).number
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self._has_ended():
                return
            if event != _REFUSED:
                raise Unavailable(f"who listens at {self.address} hung up: it is stopping, overloaded, or no weightd")
            if self.address.startswith("tcp://"):
                raise Unavailable(f"no daemon at {self.address}: nobody answers there")
            # libzmq tries again by itself: that is right where only the socket's backlog is full.
            addresses.check(self.address)
        raise DeadlineExceeded(f"no handshake with {self.address} in time: the daemon hangs")

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or had to be: then nothing but another connection helps."""
        return self._closed

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to receive: no answer that is due, no loss. Cheap."""
        return self._unanswered == 0 and not self._alarm.poll(0)

    def send(self, frames: List[Any], deadline: float) -> None:
        """Send a request, as `tell`; it will be answered."""
        self.tell(frames, deadline)
        self._unanswered += 1

    def tell(self, frames: List[Any], deadline: float) -> None:
        """Send a message; waits while the daemon reads nothing. Large frames are not copied.

        Raises:
            Unavailable: the connection is lost.
            DeadlineExceeded: the daemon has read nothing by the deadline.
        """
        while True:
            try:
                multipart.send(self._socket, frames, multipart.NOBLOCK)
            except zmq.Again:
                if not self._writable.poll(_milliseconds(deadline)):
                    raise DeadlineExceeded(
                        f"could not send to {self.address} in time: the daemon does not read"
                    ) from None
            except BaseException:
                self.close()  # A half message may be sent.
                raise
            else:
                return
            if self._has_ended():
                raise self._loss()

    def receive(self, deadline: float) -> Optional[List[bytes]]:
        """Return the next message, None if there is none by the deadline.

        Raises:
            Unavailable: the connection is lost, and all that had come before is read.
        """
        if self._closed:
            raise self._loss()
        while self._readable.poll(_milliseconds(deadline)):
            try:
                frames = [frame.bytes for frame in multipart.receive(self._socket, multipart.NOBLOCK)]
            except zmq.Again:
                # No message is left, so it is the monitor.
                if self._has_ended():
                    raise self._loss() from None
            except BaseException:
                self.close()  # A half message may be read.
                raise
            else:
                self._unanswered -= 1
                return frames
        return None

    def close(self) -> None:
        """Hang up; what is queued is dropped."""
        if not self._closed:
            self._closed = True
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)

    def _has_ended(self) -> bool:
        # After the handshake, whatever the monitor has to say is bad. True means: do not look again, close it.
        return bool(cast(int, self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _loss(self) -> Unavailable:
        return Unavailable(f"the connection to {self.address} is lost: the daemon has ended, or has hung up")


def connect(context: zmq.Context[zmq.Socket[bytes]], address: str, deadline: float) -> Connection:
    """Return a connection to the daemon at `address`.

    Raises:
        RequestError: as `Connection.open`.
    """
    addresses.check(address)
    try:
        connection = Connection(context, address)
    except zmq.ZMQError as error:
        raise Unavailable(f"cannot make a socket: {error.strerror}") from None
    try:
        connection.open(deadline)
    except BaseException:
        connection.close()
        raise
    return connection


def _milliseconds(deadline: float) -> int:
    return max(0, int((deadline - time.monotonic()) * 1000) + 1)
