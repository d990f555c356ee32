"""A connection over ZeroMQ, from the handshake to its loss.

libzmq hides a lost connection: it would connect again for ever and send what is queued to whoever comes next, while
answers that will never come are waited for. Here a socket monitor makes both ends of a connection's life events.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from typing import Any, Deque, List, Optional, Sequence, cast

import zmq

from weightd.client import address as addresses
from weightd.client.connection import Connection, Making
from weightd.client.curve import Curve
from weightd.client.polling import SelectPoller, new_poller
from weightd.protocol import limits
from weightd.protocol.errors import InvalidArgument, Unauthenticated, Unavailable
from weightd.protocol.framing import Message
from weightd.shared import monitor, multipart

# A host that vanishes does not close its TCP connections; a unix socket's peer cannot vanish unseen.
_TCP_HEARTBEAT_MS = 5_000
_TCP_SILENCE_MS = 15_000

# Plain integers: `&` of pyzmq's own flags takes a microsecond.
_EVENTS, _POLLIN, _POLLOUT = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)

_REFUSED = zmq.EVENT_CONNECT_RETRIED
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED | _HANDSHAKE_FAILED


_UNKNOWN = (
    "no handshake with {}: either no tenant there has the client's key, or the server_key is not the listener's, or "
    "only one of the two speaks CURVE"
)


class _Contexts:
    """One context for all connections of this process: it is two threads."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._users = 0

    def take(self) -> zmq.Context[zmq.Socket[bytes]]:
        with self._lock:
            if not self._users:
                self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            self._users += 1
            return self._context

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._context.term()


_contexts = _Contexts()
# The threads of the one there is do not live on in a forked process.
os.register_at_fork(after_in_child=_contexts.reset)


class ZeroMqConnection(Connection):
    """A DEALER socket. Made by `connecting`; before, it is not connected."""

    transport = "zmq"
    is_plain = False

    def __init__(self, address: str, curve: Optional[Curve] = None) -> None:
        super().__init__(address)
        # A socket is for one thread at a time; a signal's handler may come to it in the middle of what its thread does.
        self._lock = threading.RLock()
        self._queue: Deque[List[Any]] = deque()
        context = _contexts.take()
        try:
            self._socket = context.socket(zmq.DEALER)
        except BaseException:
            _contexts.give_back()
            raise
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
        # Answers wait here until they are asked for; a bound would make the daemon drop them. They are at most as
        # many as the requests that their owner has under way.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        if address.startswith("tcp://"):
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, _TCP_HEARTBEAT_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _TCP_SILENCE_MS)
        if curve is not None:
            secret = curve.secret.encode()
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, curve.server.encode())
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._is_secured = curve is not None
        self._monitor = self._socket.get_monitor_socket(_MONITORED)
        # To poll the monitor as a ZeroMQ socket would cost a few microseconds in every call. Its file descriptor is
        # readable from the moment that libzmq has something to say on it, until `_has_ended` has looked.
        alarm = self._monitor.FD
        self._alarm = new_poller((alarm,))
        # Of frames that are not copied pyzmq keeps account in a thread, which as a green thread would stop all others.
        self._copied_below = math.inf if isinstance(self._alarm, SelectPoller) else multipart.ZERO_COPY_BYTES
        self.descriptors = (self._socket.FD, alarm)

    def opening(self) -> Making[None]:
        """Connect, and wait for the end of the handshake.

        Raises:
            InvalidArgument, PermissionDenied, Unavailable: as `address.check`.
            Unauthenticated: the daemon knows no such key, or the two do not speak CURVE with one another.
        """
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            raise InvalidArgument(f"{self.address}: {error.strerror}") from None
        except UnicodeEncodeError:
            raise InvalidArgument(f"expected an address that UTF-8 can encode, got {self.address!r}") from None
        while True:
            while not self._has_ended():
                yield self.descriptors[1]
            event = monitor.receive(self._monitor).number
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self._has_ended():
                return
            if event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL) or (
                self._is_secured and event != _REFUSED
            ):
                raise Unauthenticated(_UNKNOWN.format(self.address))
            if event != _REFUSED:
                raise Unavailable(f"who listens at {self.address} hung up: it is stopping, overloaded, or no weightd")
            if self.address.startswith("tcp://"):
                raise Unavailable(f"no daemon at {self.address}: nobody answers there")
            # libzmq tries again by itself: that is right where only the socket's backlog is full.
            addresses.check(self.address)

    def send(self, frames: List[Any], descriptors: Sequence[int] = ()) -> bool:
        """As `Connection.send`. libzmq takes what is sent for a daemon that has ended, so that is looked for."""
        with self._lock:
            if not self.is_spoilt and self._alarm.poll(0) and self._has_ended():
                self.spoil()
            if self.is_spoilt:
                raise ConnectionResetError
            if self._queue or not self._sends(frames):
                self._queue.append(frames)
                self.unsent += 1
                return False
            return True

    def hold(self) -> None:
        """As `Connection.hold`. The library puts messages together by itself."""

    def let_go(self) -> None:
        """As `Connection.let_go`. Nothing was."""

    def left(self) -> int:
        """As `Connection.left`."""
        return self.sent + self.unsent

    def flush(self) -> None:
        """As `Connection.flush`."""
        with self._lock:
            while self._queue and not self.closed and self._sends(self._queue[0]):
                self._queue.popleft()
                self.unsent -= 1
                self.sent += 1

    def receive(self) -> List[Message]:
        """As `Connection.receive`: all that have come."""
        with self._lock:
            if self.closed:
                raise self.loss()
            messages = self._messages()
            if not messages and (self.is_spoilt or (self._alarm.poll(0) and self._has_ended())):
                # The monitor does not tell twice, and there may be what came while we looked.
                self.spoil()
                messages = self._messages()
                if not messages:
                    raise self.loss()
            return messages

    def is_idle(self) -> bool:
        """As `Connection.is_idle`. To ask is what has the descriptor tell of the next message."""
        with self._lock:
            wanted = _POLLIN | _POLLOUT if self._queue else _POLLIN
            return self.closed or not (self.is_spoilt or cast(int, self._socket.getsockopt(_EVENTS)) & wanted)

    def close(self) -> None:
        """As `Connection.close`."""
        with self._lock:
            if not self.closed:
                self.closed = self.is_spoilt = True
                self._socket.disable_monitor()
                self._monitor.close(linger=0)
                self._socket.close(linger=0)
                _contexts.give_back()

    def _sends(self, frames: List[Any]) -> bool:
        try:
            multipart.send(self._socket, frames, multipart.NOBLOCK, self._copied_below)
        except zmq.Again:
            return False
        return True

    def _messages(self) -> List[Message]:
        messages: List[Message] = []
        try:
            while True:
                frames = [frame.bytes for frame in multipart.receive(self._socket, multipart.NOBLOCK)]
                messages.append(Message(frames, (*map(len, frames),)))
                # To ask is cheaper than the exception of a read that finds nothing.
                if not cast(int, self._socket.getsockopt(_EVENTS)) & _POLLIN:
                    return messages
        except zmq.Again:
            return messages

    def _has_ended(self) -> bool:
        # After the handshake, whatever the monitor has to say is bad. True means: do not look again, close it.
        return bool(cast(int, self._monitor.getsockopt(_EVENTS)) & _POLLIN)


def connecting(address: str, curve: Optional[Curve] = None) -> Making[Connection]:
    """Connect to the ZeroMQ socket at `address`, with these keys.

    Raises:
        RequestError: as `ZeroMqConnection.opening`.
    """
    addresses.check(address)
    try:
        connection = ZeroMqConnection(address, curve)
    except zmq.ZMQError as error:
        raise Unavailable(f"cannot make a socket: {error.strerror}") from None
    try:
        yield from connection.opening()
    except BaseException:
        connection.close()
        raise
    return connection
