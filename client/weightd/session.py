"""What a client does that neither waits nor knows how its user does: by threads, or by a loop."""

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

# Where somebody listens who is too busy to accept, after which time one looks again.
BUSY_RETRY_INTERVAL_S = 0.002

# What tells that a connection is of no use any more: raised by its `receive`, or by what `received` makes of a message.
CONNECTION_LOST_ERRORS = (Unavailable, RemoteProtocolError)

_MAX_TIMEOUT_S = limits.MAX_TIMEOUT_US / 1e6
_MAX_GRACE_S = 0.5

# A wait that ends so late shows that this process did not run.
_SUSPENDED_THRESHOLD_S = 0.1

# For reading an answer that has come meanwhile, the rest of a long one included.
_RESUME_GRACE_S = 0.5


class WrongProcess(WeightdError):
    """A client is used by a process that was forked from the one that made it. Make one there: they are cheap."""


class ClientClosed(WeightdError):
    """A client is used after `close`, or was closed while it was used."""


# Those of this process.
_sessions: WeakSet[ClientSession] = WeakSet()


class ClientSession:
    """A client's calls and the connection that they are made over: with that, all of them end.

    Attributes:
        address: where the daemon is looked for; of several, the one that is being tried, or was tried last.
        timeout: seconds that a call waits unless it says otherwise.
        default_timeout_and_grace: what `resolve_timeout` returns of them.
        core: knows the calls.
        connection: the one there is, or the last one: then it is closed.
        closed: whether the user has closed it.
        is_forked_copy: whether this process was forked from the one that made it.
        protocol_error: why the daemon has ended the last connection, if it has said that.
    """

    def __init__(
        self, address: Optional[str], timeout: float, tenant: Optional[str] = None, curve: Optional[CurveKeys] = None
    ) -> None:
        addresses = default_addresses() if address is None else [arguments.parse_text("address", address)]
        self._addresses = [*map(parse_address, addresses)]
        self.address: Address = self._addresses[0]
        if curve is not None and not self.address.text.startswith(_TCP_SCHEME):
            raise InvalidArgument(f"expected no keys for {self.address.text}: the kernel tells who connects there")
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
        """Raise if it must not be used.

        Raises:
            WrongProcess, ClientClosed: that is so.
        """
        if self.closed or self.is_forked_copy:
            raise self.unusable_error()

    def resolve_timeout(self, timeout: Optional[float]) -> Tuple[float, float]:
        """Return how many seconds a call may take that is given this timeout, and how much longer to wait.

        In that time the daemon tells of the deadline itself, and says more than the client could.

        Raises:
            InvalidArgument: it is out of bounds.
        """
        if timeout is None:
            return self.default_timeout_and_grace
        timeout = arguments.parse_seconds("timeout", timeout, _MAX_TIMEOUT_S)
        return timeout, min(0.1 * timeout, _MAX_GRACE_S)

    def connect_steps(self) -> ConnectSteps[DaemonConnection]:
        """Connect to the first address where a daemon listens, in the first way that is possible.

        From the first connection on, the client stays with that daemon: it never changes to another one.

        Raises:
            RequestError: there is none; the text says why.
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
        """From now on, this is the connection."""
        self.core.shm_tensors.on_connected(can_share=connection.accepts_descriptors)
        self.connection = connection

    def send(self, frames: List[Any], call: Optional[PendingCall] = None) -> int:
        """Send a message, if it is not a `call`'s, then one that is not answered.

        The latter may be sent by the collector of garbage, in the middle of another one: then it goes after that.

        Returns:
            0 if it has gone; else what `has_sent` takes.

        Raises:
            Gone: nothing of it was sent: the connection is lost or, if it is a call's, something else has to go first.
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
                # If it is lost now, whoever reads will notice.
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
        """Close the connection, for this reason; what is under way ends in it."""
        kind = type(error) if isinstance(error, CONNECTION_LOST_ERRORS) else Unavailable
        text = str(error) or f"the connection to {self.connection.address} was given up in the middle of a message"
        self.connection.close()
        self._deferred.clear()
        self.protocol_error = error if isinstance(error, RemoteProtocolError) else None
        self.core.shm_tensors.on_disconnected()
        self.core.fail_all(kind, text)

    def mark_closed(self) -> None:
        """The user closes it: what is under way ends in `ClientClosed`. The connection is still to be closed."""
        self.closed = True
        self.connection.mark_broken()
        self.core.fail_all(ClientClosed, str(self.unusable_error()))

    # --- errors, the same for all -------------------------------------------------------------------------------

    def unusable_error(self) -> WeightdError:
        """Return the error of what cannot go on, as the client is closed, or another process's."""
        if self.is_forked_copy:
            return WrongProcess("this client belongs to the process that made it; make one in each process")
        return ClientClosed("this client is closed")

    def connect_timeout_error(self) -> DeadlineExceeded:
        """Return the error of who has waited in vain to be connected."""
        return DeadlineExceeded(f"no handshake with {self.address.text} in time: the daemon hangs")

    def send_timeout_error(self) -> DeadlineExceeded:
        """Return the error of who has waited in vain until a message had gone."""
        return DeadlineExceeded(f"could not send to {self.address.text} in time: the daemon does not read")

    def answer_timeout_error(self) -> DeadlineExceeded:
        """Return the error of who has waited in vain for an answer."""
        return DeadlineExceeded(f"no answer from {self.address.text} in time: the daemon does not answer")


def extended_deadline(started_at: float, deadline: float) -> Optional[float]:
    """Return a later deadline for a wait since `started_at` that has ended without an answer.

    None if it was long enough.

    If this process was stopped beyond the deadline, the answer may have come in time and wait in the socket.
    """
    now = monotonic()
    return now + _RESUME_GRACE_S if started_at < deadline < now - _SUSPENDED_THRESHOLD_S else None


def _mark_forked_copies() -> None:
    for session in list(_sessions):
        session.is_forked_copy = True


os.register_at_fork(after_in_child=_mark_forked_copies)
