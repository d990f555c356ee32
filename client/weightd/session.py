"""State of a client that does not depend on how it waits: shared by the blocking and the asyncio client."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from time import monotonic
from typing import Any, Deque, List, Optional, Tuple
from weakref import WeakSet

from weightd import arguments, transport_zmq
from weightd.address import Address, CurveKeys, NoDaemon, default_addresses, no_daemon_error, parse_address
from weightd.connection import ConnectSteps, DaemonConnection, NotConnected, unix_connect_steps
from weightd.pending import PendingCall
from weightd.protocol_core import ClientCore
from weightd_protocol import limits
from weightd_protocol.codec import encode
from weightd_protocol.errors import (
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

# Pause before the next attempt to connect to a listener whose backlog is full.
BUSY_RETRY_INTERVAL_S = 0.002

# Errors after which a connection is unusable: raised by `receive`, or by `on_message` for a received message.
CONNECTION_LOST_ERRORS = (Unavailable, RemoteProtocolError)

_MAX_TIMEOUT_S = limits.MAX_TIMEOUT_US / 1e6
_MAX_GRACE_S = 0.5

# A wait that ends this much after its deadline shows that the process was suspended.
_SUSPENDED_THRESHOLD_S = 0.1

# Extra time to read a response that arrived while the process was suspended, including the rest of a long one.
_RESUME_GRACE_S = 0.5


class WrongProcess(WeightdError):
    """A client is used in a forked process. Create a client in each process: they are cheap."""


class ClientClosed(WeightdError):
    """A client is used after `close`, or was closed during a call."""


# All sessions of this process.
_sessions: WeakSet[ClientSession] = WeakSet()


class ClientSession:
    """Session of a client: its calls and its connection. When the connection is lost, all calls end.

    Attributes:
        address: the daemon's address. Before the first connection, the default address that is being tried.
        timeout: the default timeout of a call in seconds.
        default_timeout_and_grace: the result of `resolve_timeout` for this timeout.
        core: protocol state: the calls and their messages.
        connection: the current connection, or the last one, which is then closed.
        closed: whether the user has closed the client.
        is_forked_copy: whether this process was forked from the one that created the client.
        protocol_error: the reason for which the daemon ended the last connection, if it has sent one.
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
        self.timeout = arguments.parse_seconds("timeout", timeout, _MAX_TIMEOUT_S)
        self.default_timeout_and_grace = self.resolve_timeout(self.timeout)
        self.core = ClientCore(tenant)
        self.connection: DaemonConnection = NotConnected()
        self.closed = False
        self.is_forked_copy = False
        self.protocol_error: Optional[RemoteProtocolError] = None
        self._is_sending = False
        self._deferred: Deque[List[Any]] = deque()
        _sessions.add(self)

    def check_usable(self) -> None:
        """Check that the client may be used.

        Raises:
            WrongProcess, ClientClosed: the client may not be used in this process, or is closed.
        """
        if self.closed or self.is_forked_copy:
            raise self.unusable_error()

    def resolve_timeout(self, timeout: Optional[float]) -> Tuple[float, float]:
        """Return the timeout of a call in seconds, and a grace period.

        In the grace period the daemon can report the expired deadline itself, with more details than the client has.

        Raises:
            InvalidArgument: `timeout` is out of range.
        """
        if timeout is None:
            return self.default_timeout_and_grace
        timeout = arguments.parse_seconds("timeout", timeout, _MAX_TIMEOUT_S)
        return timeout, min(0.1 * timeout, _MAX_GRACE_S)

    def connect_steps(self) -> ConnectSteps[DaemonConnection]:
        """Connect to the first address at which a daemon listens, by the first transport that works.

        After the first connection the client stays with that address.

        Raises:
            RequestError: no connection was possible; the text gives the reason.
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
        """Make `connection` the current connection."""
        self.core.shm_tensors.on_connected(can_share=connection.accepts_descriptors)
        self.connection = connection

    def send(self, frames: List[Any], call: Optional[PendingCall] = None) -> int:
        """Send a message: the frames of `call`, or a message without a response.

        The garbage collector may send the latter while another message is being sent; it is then sent after that one.

        Returns:
            0 if the message was sent completely, otherwise the `sent_count` of the connection at which it will be.

        Raises:
            ConnectionLost: nothing was sent, because the connection is lost or, for a call, because other data must be
                sent first.
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
            while self._deferred:
                # If the connection is lost now, the next read reports it.
                with contextlib.suppress(OSError):
                    connection.send(self._deferred.popleft())
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

    def drop_connection(self, error: BaseException) -> None:
        """Close the connection because of `error`, and fail all calls in progress with that error."""
        kind = type(error) if isinstance(error, CONNECTION_LOST_ERRORS) else Unavailable
        text = str(error) or f"the connection to {self.connection.address} was closed in the middle of a message"
        self.connection.close()
        self._deferred.clear()
        self.protocol_error = error if isinstance(error, RemoteProtocolError) else None
        self.core.shm_tensors.on_disconnected()
        self.core.fail_all(kind, text)

    def mark_closed(self) -> None:
        """Fail all calls with `ClientClosed`. The transport must still close the connection."""
        self.closed = True
        self.connection.mark_broken()
        self.core.fail_all(ClientClosed, str(self.unusable_error()))

    # --- errors of both clients ---------------------------------------------------------------------------------

    def unusable_error(self) -> WeightdError:
        """Return the error for using a client that is closed or belongs to another process."""
        if self.is_forked_copy:
            return WrongProcess("this client was created in another process; create one client in each process")
        return ClientClosed("this client is closed")

    def connect_timeout_error(self) -> DeadlineExceeded:
        """Return the error for a connection attempt that has timed out."""
        return DeadlineExceeded(f"handshake with {self.address.text} timed out: the daemon does not respond")

    def send_timeout_error(self) -> DeadlineExceeded:
        """Return the error for a message that could not be sent in time."""
        return DeadlineExceeded(f"sending to {self.address.text} timed out: the daemon does not read")

    def answer_timeout_error(self) -> DeadlineExceeded:
        """Return the error for a response that has not arrived in time."""
        return DeadlineExceeded(f"request to {self.address.text} timed out: the daemon does not respond")


def extended_deadline(started_at: float, deadline: float) -> Optional[float]:
    """Return a later deadline for a wait that timed out, or None if the process really waited that long.

    If the process was suspended beyond the deadline, the response may have arrived in time and be in the socket's
    buffer.
    """
    now = monotonic()
    return now + _RESUME_GRACE_S if started_at < deadline < now - _SUSPENDED_THRESHOLD_S else None


def _mark_forked_copies() -> None:
    for session in list(_sessions):
        session.is_forked_copy = True


os.register_at_fork(after_in_child=_mark_forked_copies)
