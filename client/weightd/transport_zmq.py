"""Connection to a daemon over ZeroMQ.

libzmq hides the loss of a connection. It reconnects forever and sends queued messages to the next peer, while the
caller waits for responses that will never arrive. So this module watches a socket monitor, which reports when the
connection is established and when it is lost.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from typing import Any, Deque, List, Optional, Sequence, cast

import zmq

from weightd import address as addresses
from weightd.address import CurveKeys
from weightd.connection import ConnectSteps, DaemonConnection
from weightd.polling import SelectPoller, new_poller
from weightd_common import zmq_io
from weightd_protocol import limits
from weightd_protocol.errors import InvalidArgument, Unauthenticated, Unavailable
from weightd_protocol.framing import Message

# TCP connections have heartbeats, because a host that loses power or network does not close its connections. Unix
# sockets need none: the kernel closes the socket of a process that has exited.
_TCP_HEARTBEAT_INTERVAL_MS = 5_000
_TCP_HEARTBEAT_TIMEOUT_MS = 15_000

# Plain integers, because `&` on the flag objects of pyzmq takes a microsecond.
_EVENTS, _POLLIN, _POLLOUT = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)

_CONNECT_RETRIED = zmq.EVENT_CONNECT_RETRIED
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_MONITORED_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _CONNECT_RETRIED | _HANDSHAKE_FAILED


_UNAUTHENTICATED_TEXT = (
    "handshake with {} failed: no tenant has the client's key, server_key is not the listener's key, or only one side "
    "uses CURVE"
)


class _Contexts:
    """Shares one ZeroMQ context among all connections of this process, because each context starts two threads."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._user_count = 0

    def take(self) -> zmq.Context[zmq.Socket[bytes]]:
        with self._lock:
            if not self._user_count:
                self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            self._user_count += 1
            return self._context

    def release(self) -> None:
        with self._lock:
            self._user_count -= 1
            if not self._user_count:
                self._context.term()


_contexts = _Contexts()
# A forked process has a copy of the context, but not its threads, so it needs a new context.
os.register_at_fork(after_in_child=_contexts.reset)


class ZeroMqConnection(DaemonConnection):
    """Connection over a ZeroMQ DEALER socket. `connect_steps` creates and connects it."""

    transport = "zmq"
    is_level_triggered = False

    def __init__(self, address: str, curve: Optional[CurveKeys] = None) -> None:
        super().__init__(address)
        # Only one thread at a time may use a ZeroMQ socket. The lock is reentrant, because a signal handler may use the
        # socket while its thread holds the lock.
        self._lock = threading.RLock()
        self._send_queue: Deque[List[Any]] = deque()
        context = _contexts.take()
        try:
            self._socket = context.socket(zmq.DEALER)
        except BaseException:
            _contexts.release()
            raise
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
        # No limit for the queue of received responses: at a limit, the daemon would drop responses. The queue has at
        # most one response for each request in progress.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        if address.startswith("tcp://"):
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, _TCP_HEARTBEAT_INTERVAL_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _TCP_HEARTBEAT_TIMEOUT_MS)
        if curve is not None:
            secret = curve.secret_key.encode()
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, curve.server_key.encode())
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._uses_curve = curve is not None
        self._monitor = self._socket.get_monitor_socket(_MONITORED_EVENTS)
        # The descriptor becomes readable when a monitor event occurs, and stays readable until `_has_monitor_event` is
        # called. Polling the monitor with `zmq.Poller` instead would take a few microseconds per call.
        monitor_descriptor = self._monitor.FD
        self._monitor_poller = new_poller((monitor_descriptor,))
        # If pyzmq does not copy a frame, a thread of pyzmq waits until the frame is sent. Under eventlet this thread is
        # a green thread, and its wait would block all other green threads, so copy every frame.
        self._copy_below_bytes = math.inf if isinstance(self._monitor_poller, SelectPoller) else zmq_io.ZERO_COPY_BYTES
        self.descriptors = (self._socket.FD, monitor_descriptor)

    def handshake_steps(self) -> ConnectSteps[None]:
        """Connect the socket and wait until the ZeroMQ handshake has ended.

        Raises:
            InvalidArgument, PermissionDenied, Unavailable: as `address.check_reachable`.
            Unauthenticated: no tenant has the client's key, `server_key` is not the listener's key, or only one side
                uses CURVE.
        """
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            raise InvalidArgument(f"{self.address}: {error.strerror}") from None
        except UnicodeEncodeError:
            raise InvalidArgument(f"expected an address that UTF-8 can encode, got {self.address!r}") from None
        while True:
            while not self._has_monitor_event():
                yield self.descriptors[1]
            event = zmq_io.receive_event(self._monitor).number
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self._has_monitor_event():
                return
            if event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL) or (
                self._uses_curve and event != _CONNECT_RETRIED
            ):
                raise Unauthenticated(_UNAUTHENTICATED_TEXT.format(self.address))
            if event != _CONNECT_RETRIED:
                raise Unavailable(
                    f"the peer at {self.address} closed the connection: it is stopping, overloaded, or not weightd"
                )
            if self.address.startswith("tcp://"):
                raise Unavailable(f"no daemon at {self.address}: no response")
            # libzmq has scheduled another attempt to connect. Wait for this attempt only if the backlog of the listener
            # is full; `check_reachable` raises any other error.
            addresses.check_reachable(self.address)

    def send(self, frames: List[Any], descriptors: Sequence[int] = ()) -> bool:
        """See `DaemonConnection.send`.

        libzmq accepts messages even after the daemon has exited, so this method first checks the monitor for a loss.
        """
        with self._lock:
            if not self.is_broken and self._monitor_poller.poll(0) and self._has_monitor_event():
                self.mark_broken()
            if self.is_broken:
                raise ConnectionResetError
            if self._send_queue or not self._try_send(frames):
                self._send_queue.append(frames)
                self.unsent_count += 1
                return False
            return True

    def cork(self) -> None:
        """See `DaemonConnection.cork`. Does nothing, because libzmq itself combines small messages."""

    def uncork(self) -> None:
        """See `DaemonConnection.uncork`. Does nothing."""

    def get_sent_target(self) -> int:
        """See `DaemonConnection.get_sent_target`."""
        return self.sent_count + self.unsent_count

    def flush(self) -> None:
        """See `DaemonConnection.flush`."""
        with self._lock:
            while self._send_queue and not self.closed and self._try_send(self._send_queue[0]):
                self._send_queue.popleft()
                self.unsent_count -= 1
                self.sent_count += 1

    def receive(self) -> List[Message]:
        """See `DaemonConnection.receive`. Every call returns all messages that have arrived."""
        with self._lock:
            if self.closed:
                raise self.lost_error()
            messages = self._receive_available()
            if not messages and (self.is_broken or (self._monitor_poller.poll(0) and self._has_monitor_event())):
                # Record the loss, because the monitor reports it only once. Then read again: messages may have arrived
                # before the loss.
                self.mark_broken()
                messages = self._receive_available()
                if not messages:
                    raise self.lost_error()
            return messages

    def is_idle(self) -> bool:
        """See `DaemonConnection.is_idle`. The descriptor reports the next message only after this call."""
        with self._lock:
            wanted_events = _POLLIN | _POLLOUT if self._send_queue else _POLLIN
            return self.closed or not (self.is_broken or cast(int, self._socket.getsockopt(_EVENTS)) & wanted_events)

    def close(self) -> None:
        """See `DaemonConnection.close`."""
        with self._lock:
            if not self.closed:
                self.closed = self.is_broken = True
                self._socket.disable_monitor()
                self._monitor.close(linger=0)
                self._socket.close(linger=0)
                _contexts.release()

    def _try_send(self, frames: List[Any]) -> bool:
        try:
            zmq_io.send(self._socket, frames, zmq_io.NOBLOCK, self._copy_below_bytes)
        except zmq.Again:
            return False
        return True

    def _receive_available(self) -> List[Message]:
        messages: List[Message] = []
        try:
            while True:
                frames = [frame.bytes for frame in zmq_io.receive(self._socket, zmq_io.NOBLOCK)]
                messages.append(Message(frames, (*map(len, frames),)))
                # Checking for a message is cheaper than the exception that `receive` raises without a message.
                if not cast(int, self._socket.getsockopt(_EVENTS)) & _POLLIN:
                    return messages
        except zmq.Again:
            return messages

    def _has_monitor_event(self) -> bool:
        # After the handshake, every monitor event means that the connection is lost. The caller must then close the
        # connection.
        return bool(cast(int, self._monitor.getsockopt(_EVENTS)) & _POLLIN)


def connect_steps(address: str, curve: Optional[CurveKeys] = None) -> ConnectSteps[DaemonConnection]:
    """Connect to the ZeroMQ socket at `address` with the keys `curve`, and return the connection.

    Raises:
        RequestError: as `ZeroMqConnection.handshake_steps`.
    """
    addresses.check_reachable(address)
    try:
        connection = ZeroMqConnection(address, curve)
    except zmq.ZMQError as error:
        raise Unavailable(f"cannot create a socket: {error.strerror}") from None
    try:
        yield from connection.handshake_steps()
    except BaseException:
        connection.close()
        raise
    return connection
