"""State of a client that the blocking and the asyncio client have in common."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from time import monotonic
from typing import Any, Deque, List, Optional, Tuple
from weakref import WeakSet

from weightd import arguments, transport_zmq
from weightd.address import Address, CurveKeys, NoDaemon, default_addresses, no_daemon_error, parse_address
from weightd.channels.sockets import ChannelSockets
from weightd.connection import ConnectSteps, DaemonConnection, NotConnected, unix_connect_steps
from weightd.pending import PendingCall
from weightd.protocol_core import ClientCore
from weightd_protocol import limits
from weightd_protocol.codec import encode
from weightd_protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    PermissionDenied,
    RemoteProtocolError,
    RequestError,
    Unavailable,
    WeightdError,
)

DEFAULT_TIMEOUT_S = 30.0

_TCP_SCHEME = "tcp://"

# Seconds until the next attempt to connect to a listener whose backlog is full.
BUSY_RETRY_INTERVAL_S = 0.002

# Errors after which the connection cannot be used any more. `DaemonConnection.receive` and `ClientCore.on_message`
# raise them.
CONNECTION_LOST_ERRORS = (Unavailable, RemoteProtocolError)

_MAX_TIMEOUT_S = limits.MAX_TIMEOUT_US / 1e6
_MAX_GRACE_S = 0.5

# If a wait ends more than this many seconds after its deadline, the process must have been suspended.
_SUSPENDED_THRESHOLD_S = 0.1

# Extra seconds for reading a response that arrived while the process was suspended, or shortly afterwards.
_RESUME_GRACE_S = 0.5


class WrongProcess(WeightdError):
    """A client was used in a process that was forked from its creator.

    Create a client in each process: it costs little.
    """


class ClientClosed(WeightdError):
    """A client was used after `close`, or was closed while a call was in progress."""


# All sessions of this process. After a fork, the child process marks its copies of the sessions as unusable.
_sessions: WeakSet[ClientSession] = WeakSet()


class ClientSession:
    """Session of a client: its calls and its current connection. When the connection is lost, all calls fail.

    Attributes:
        address: the daemon's address. Before the first connection, the default address that the client is trying.
        timeout: the default timeout of a call in seconds.
        default_timeout_and_grace: the result of `resolve_timeout` for the default timeout.
        core: the client's side of the protocol: calls in progress and their messages.
        channels: the sockets of the direct channels.
        connection: the current connection. Before the first connection and after a loss, a closed connection.
        closed: whether the user has closed the client.
        is_forked_copy: True in a process that was forked from the process that created the client.
        protocol_error: the error with which the last connection ended, if the daemon sent a reason or violated the
            protocol; otherwise None.
    """

    def __init__(
        self, address: Optional[str], timeout: float, tenant: Optional[str] = None, curve: Optional[CurveKeys] = None
    ) -> None:
        addresses = default_addresses() if address is None else [arguments.parse_text("address", address)]
        self._addresses = [*map(parse_address, addresses)]
        self.address: Address = self._addresses[0]
        if curve is not None and not self.address.text.startswith(_TCP_SCHEME):
            raise InvalidArgument(f"expected no keys for {self.address.text}: only tcp:// listeners use keys")
        self._curve = curve
        self.closed = False
        self.is_forked_copy = False
        self.timeout = arguments.parse_seconds("timeout", timeout, _MAX_TIMEOUT_S)
        self.default_timeout_and_grace = self.resolve_timeout(self.timeout)
        self.core = ClientCore(tenant)
        self.channels = ChannelSockets(self.core.channels, self.core.track, self.core.untrack, self.core.on_message)
        self.connection: DaemonConnection = NotConnected()
        self.protocol_error: Optional[RemoteProtocolError] = None
        self._is_sending = False
        self._deferred: Deque[List[Any]] = deque()
        _sessions.add(self)

    def check_usable(self) -> None:
        """Check that the client is open and was created in this process.

        Raises:
            WrongProcess, ClientClosed: the client was created in another process, or is closed.
        """
        if self.closed or self.is_forked_copy:
            raise self.unusable_error()

    def resolve_timeout(self, timeout: Optional[float]) -> Tuple[float, float]:
        """Return the timeout and the grace period of a call in seconds.

        When the timeout has passed, the daemon sends an error with details that the client does not know. The grace
        period leaves time for this error to arrive.

        Raises:
            InvalidArgument: `timeout` is out of range.
            WrongProcess, ClientClosed: as `check_usable`.
        """
        if self.closed or self.is_forked_copy:
            raise self.unusable_error()
        if timeout is None:
            return self.default_timeout_and_grace
        timeout = arguments.parse_seconds("timeout", timeout, _MAX_TIMEOUT_S)
        return timeout, min(0.1 * timeout, _MAX_GRACE_S)

    def connect_steps(self) -> ConnectSteps[DaemonConnection]:
        """Connect to the first address at which a daemon listens, and return the connection.

        At each address the client tries the Unix socket first, then ZeroMQ. After the first connection it always uses
        the same address.

        Raises:
            RequestError: no address could be connected to. The text of the error gives the reason.
        """
        failures: List[NoDaemon] = []
        for address in self._addresses:
            self.address = address
            try:
                connection = yield from self._connect_steps_to(address)
            except NoDaemon as error:
                failures.append(error)
            else:
                self._addresses = [address]
                return connection
        raise no_daemon_error(failures) from None

    def _connect_steps_to(self, address: Address) -> ConnectSteps[DaemonConnection]:
        _, path, zeromq_address = address
        if not path:
            return (yield from transport_zmq.connect_steps(zeromq_address, self._curve))
        try:
            return (yield from unix_connect_steps(path))
        except RequestError as error:
            if not zeromq_address:
                raise
            refusal = error
        try:
            return (yield from transport_zmq.connect_steps(zeromq_address))
        except Unavailable:
            if isinstance(refusal, PermissionDenied):
                raise refusal from None
            raise

    def on_connected(self, connection: DaemonConnection) -> None:
        """Make `connection` the current connection of the session."""
        self.core.shm_tensors.on_connected(can_share=connection.accepts_descriptors)
        self.core.channels.on_connected(can_open=connection.accepts_descriptors)
        self.connection = connection

    def send(self, frames: List[Any], call: Optional[PendingCall] = None) -> int:
        """Send the message of `call`, or a message that has no response, such as a cancellation.

        The garbage collector may run in the middle of this method and call it again to cancel a request. The
        cancellation is then sent after the message that is being sent.

        Returns:
            0 if all of the message was sent. Otherwise the value that `connection.sent_count` will have when all of it
            has been sent.

        Raises:
            ConnectionLost: nothing was sent, because the connection is lost or, if `call` is given, because earlier
                data is still waiting to be sent.
        """
        core = self.core
        connection = self.connection
        if call is not None:
            if connection.unsent_count:
                raise connection.not_sent_error()
            frames = core.track(call, frames)
        elif self._is_sending:
            self._deferred.append(frames)
            return 0
        self._is_sending = True
        try:
            sharing = core.shm_tensors
            if call is not None and sharing.announced_regions is not sharing.arena.regions:
                for message, region in sharing.take_region_messages():
                    connection.send(encode(message), () if region is None else (region.descriptor,))
            all_sent = connection.send(frames)
            if self._deferred or core.channels.requests.ask_at < monotonic():
                all_sent = self._send_others(connection) and all_sent
        except OSError:
            if call is not None:
                core.untrack(call)
            connection.mark_broken()
            raise connection.not_sent_error() from None
        except BaseException:
            connection.mark_broken()
            raise
        finally:
            self._is_sending = False
        return 0 if all_sent else connection.get_sent_target()

    def _send_others(self, connection: DaemonConnection) -> bool:
        """Send the deferred cancellations, and ask for direct channels. Return whether all of the messages was sent.

        If the connection is lost here, the next `receive` reports the loss.
        """
        all_sent = True
        with contextlib.suppress(OSError):
            while self._deferred:
                all_sent = connection.send(self._deferred.popleft())
            for message in self.core.channels.requests.take_messages():
                connection.expect_descriptors(True)
                all_sent = connection.send(encode(message))
        return all_sent

    def receive(self) -> None:
        """Process the messages of the daemon that have arrived, as the reader.

        Raises:
            WeightdError: one of `CONNECTION_LOST_ERRORS`.
        """
        connection, core = self.connection, self.core
        channels, requests = core.channels, core.channels.requests
        for message in connection.receive():
            core.on_message(message.frames)
            if requests.has_responses:
                self._open_channels(connection)
        if channels.notices:
            for call in self.channels.apply_notices():
                self._send_again(call)

    def _open_channels(self, connection: DaemonConnection) -> None:
        """Open the channels that the daemon has granted. It sends the descriptor with the message or before it."""
        requests = self.core.channels.requests
        for message in requests.take_opened():
            descriptor = connection.take_descriptor()
            if descriptor is None:
                requests.on_refused(message.id)
            else:
                self.channels.open(message, descriptor)
        connection.expect_descriptors(requests.is_pending)

    def _send_again(self, call: PendingCall) -> None:
        """Send a request to the daemon that was lost on a channel. `receive` reports a lost connection."""
        with self.channels.lock:
            if not self.core.is_tracked(call):
                return
            frames = self.channels.take_frames(call)
            if frames is None:
                self.core.untrack(call)
            else:
                self._send_lost(frames)
        if frames is None:
            call.fail(DeadlineExceeded("request was lost on a direct channel, and its deadline has passed"))

    def _send_lost(self, frames: List[Any]) -> None:
        connection = self.connection
        self._is_sending = True
        try:
            if not connection.send(frames):
                connection.get_sent_target()
            self._send_others(connection)
        except OSError:
            connection.mark_broken()
        finally:
            self._is_sending = False

    def cancel_on_channel(self, call: PendingCall) -> bool:
        """Cancel a call on a direct channel, and drop its answer. Return False if the call is on no channel."""
        if call.channel is None:
            return False
        if self.core.calls.pop(call.id, None) is not None:
            call.fail(Cancelled("the client has cancelled the request"))
        return True

    def drop_connection(self, error: BaseException) -> None:
        """Close the connection and fail all calls in progress with `error`, the reason for closing it."""
        kind = type(error) if isinstance(error, CONNECTION_LOST_ERRORS) else Unavailable
        text = str(error) or f"the connection to {self.connection.address} was closed in the middle of a message"
        self.connection.close()
        self._deferred.clear()
        self.protocol_error = error if isinstance(error, RemoteProtocolError) else None
        self.core.shm_tensors.on_disconnected()
        self.core.fail_all(kind, text, on_channels=False)
        self.channels.on_disconnected()

    def mark_closed(self) -> None:
        """Mark the client as closed and fail all calls with `ClientClosed`. The transport closes the connection."""
        self.closed = True
        self.connection.mark_broken()
        self.core.channels.usable.clear()
        self.core.fail_all(ClientClosed, str(self.unusable_error()))

    # --- errors of both clients ---------------------------------------------------------------------------------

    def unusable_error(self) -> WeightdError:
        """Return the error for the use of a client that is closed or was created in another process."""
        if self.is_forked_copy:
            return WrongProcess("this client was created in another process; create one client in each process")
        return ClientClosed("this client is closed")

    def connect_timeout_error(self) -> DeadlineExceeded:
        """Return the error for a connection that was not established before the deadline."""
        return DeadlineExceeded(f"handshake with {self.address.text} timed out: the daemon does not respond")

    def send_timeout_error(self) -> DeadlineExceeded:
        """Return the error for a message that could not be sent before the deadline."""
        return DeadlineExceeded(f"sending to {self.address.text} timed out: the daemon does not read")

    def answer_timeout_error(self, call: PendingCall) -> DeadlineExceeded:
        """Return the error for a response that did not arrive before the deadline."""
        silent = "the daemon does" if call.channel is None else "the workers of the model do"
        return DeadlineExceeded(f"request to {self.address.text} timed out: {silent} not respond")


def extended_deadline(started_at: float, deadline: float) -> Optional[float]:
    """Return a later deadline if a wait timed out only because the process was suspended; otherwise None.

    While the process was suspended, the response may have arrived; it is then in the socket's buffer and has to be
    read.
    """
    now = monotonic()
    return now + _RESUME_GRACE_S if started_at < deadline < now - _SUSPENDED_THRESHOLD_S else None


def _mark_forked_copies() -> None:
    for session in list(_sessions):
        session.is_forked_copy = True


os.register_at_fork(after_in_child=_mark_forked_copies)
