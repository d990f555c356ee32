"""Acceptor of connections on listening sockets. If descriptors or memory run out, only the affected listener pauses."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

from weightd_common.rate_limits import RateLimitedLog
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import EventLoop, Timer

# Default number of connections that one wake-up accepts; the others wait for the next one.
_MAX_ACCEPTED = 64

# A wake-up accepts no further connection after this time, so that a flood of connections does not block the loop.
_SLICE_S = 2e-4

# Pause after a wake-up that refused a connection, so that a flood of refused connections takes little of the loop's
# time.
_REFUSAL_BACKOFF_S = 1e-3

# Pause after the process has run out of descriptors or memory, until some are free again.
_EXHAUSTED_BACKOFF_S = 0.1

# Interval of the log line about such a pause.
_LOG_INTERVAL_S = 10.0

# From <asm-generic/socket.h>; Python's socket module does not have this constant.
_SO_PASSRIGHTS = 83

_NEVER = float("inf")


class Acceptor:
    """Acceptor of the connections on one listening socket.

    Args:
        listener: a listening, non-blocking socket.
        loop: watches the listener.
        on_connection: called with each connection, which it then owns; returns False if it has refused the connection.
        report: called with a text for the log when no connection can be accepted.
        max_accepted: how many connections one wake-up accepts.
    """

    def __init__(
        self,
        listener: socket.socket,
        loop: EventLoop,
        on_connection: Callable[[socket.socket], object],
        report: Callable[[str], object],
        max_accepted: int = _MAX_ACCEPTED,
    ) -> None:
        self._listener = listener
        self._loop = loop
        self._on_connection = on_connection
        self._report = report
        self._max_accepted = max_accepted
        self._resume_timer = Timer(self._resume)
        self._rate_limited_log = RateLimitedLog(_LOG_INTERVAL_S)
        loop.add(listener.fileno(), self.accept)
        loop.add_timer(self._resume_timer)

    def accept(self) -> None:
        """Accept the connections that are waiting, up to the limits of one wake-up."""
        if self._accept_batch():
            self._loop.pause_reading(self._listener.fileno())
            self._resume_timer.set(event_loop.now() + _REFUSAL_BACKOFF_S)

    def stop(self) -> None:
        """Stop accepting connections."""
        self._resume_timer.set(_NEVER)
        self._loop.remove(self._listener.fileno())

    def _accept_batch(self) -> bool:
        """Accept connections until a limit of one wake-up is reached; return whether any was refused."""
        deadline = event_loop.now() + _SLICE_S
        has_refused = False
        for _ in range(self._max_accepted):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                break
            except OSError as error:
                # Other errors mean that this connection has already ended. Out of resources: pause until some are free
                # again.
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._back_off(error)
                    return False
            else:
                has_refused |= self._on_connection(connection) is False
            if event_loop.now() >= deadline:
                break
        return has_refused

    def _back_off(self, error: OSError) -> None:
        """Pause the listener: the waiting connection would otherwise wake the loop again and again."""
        now = event_loop.now()
        if self._resume_timer.due_at == _NEVER:
            if self._rate_limited_log.record("", now) is not None:
                self._report(f"cannot accept connections on {self._listener.getsockname()}: {error.strerror}")
            self._loop.pause_reading(self._listener.fileno())
            self._resume_timer.set(now + _EXHAUSTED_BACKOFF_S)

    def _resume(self, _: float) -> None:
        self._loop.resume_reading(self._listener.fileno())


def refuse_descriptors(listener: socket.socket) -> bool:
    """Have the kernel refuse descriptors that clients send; return whether none can arrive.

    For Unix sockets this needs Linux 6.16. A connection inherits the flag that the listener had when the connection was
    made.
    """
    if listener.family != socket.AF_UNIX:
        return True
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
    except OSError:
        return False
    return True
