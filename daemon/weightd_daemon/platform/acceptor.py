"""Acceptor of connections on a listening socket. If descriptors or memory run out, it pauses only this socket."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

from weightd_common import stream
from weightd_common.rate_limits import RateLimitedLog
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import EventLoop, Timer

# Default maximum number of connections that are accepted each time the loop wakes up. Further connections stay in the
# kernel's backlog until the next wake-up.
_MAX_ACCEPTED = 64

# Maximum time in seconds for accepting connections in one wake-up, so that a flood of connections does not block the
# loop.
_SLICE_S = 2e-4

# Seconds for which the listener pauses after a wake-up in which a connection was refused, so that a flood of refused
# connections takes little of the loop's time.
_REFUSAL_BACKOFF_S = 1e-3

# Seconds for which the listener pauses after the process has run out of descriptors or memory. After the pause, it
# accepts connections again.
_EXHAUSTED_BACKOFF_S = 0.1

# Minimum number of seconds between two log lines about exhausted descriptors or memory.
_LOG_INTERVAL_S = 10.0

_NEVER = float("inf")


class Acceptor:
    """Acceptor of the connections on one listening socket.

    Args:
        listener: a listening, non-blocking socket.
        loop: watches the listener.
        on_connection: called with each accepted connection and takes ownership of it; returns False if it has refused
            the connection.
        report: called with a text for the log when no connection can be accepted.
        max_accepted: the maximum number of connections that are accepted each time the loop wakes up for the listener.
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
        """Accept waiting connections, up to the limits for one wake-up of the loop. If any was refused, then pause."""
        if self._accept_batch():
            self._loop.pause_reading(self._listener.fileno())
            self._resume_timer.set(event_loop.now() + _REFUSAL_BACKOFF_S)

    def stop(self) -> None:
        """Stop accepting connections."""
        self._resume_timer.set(_NEVER)
        self._loop.remove(self._listener.fileno())

    def _accept_batch(self) -> bool:
        """Accept connections until none waits or a limit for one wake-up is reached; return whether any was refused."""
        deadline = event_loop.now() + _SLICE_S
        has_refused = False
        for _ in range(self._max_accepted):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                break
            except OSError as error:
                # These errors mean that descriptors or memory are exhausted. Any other error means that the connection
                # has already ended, so continue with the next connection.
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._back_off(error)
                    return False
            else:
                has_refused |= self._on_connection(connection) is False
            if event_loop.now() >= deadline:
                break
        return has_refused

    def _back_off(self, error: OSError) -> None:
        """Pause the listener, because a connection that cannot be accepted would wake the loop again and again."""
        now = event_loop.now()
        if self._resume_timer.due_at == _NEVER:
            if self._rate_limited_log.record("", now) is not None:
                self._report(f"cannot accept connections on {self._listener.getsockname()}: {error.strerror}")
            self._loop.pause_reading(self._listener.fileno())
            self._resume_timer.set(now + _EXHAUSTED_BACKOFF_S)

    def _resume(self, _: float) -> None:
        self._loop.resume_reading(self._listener.fileno())


def refuse_descriptors(listener: socket.socket) -> bool:
    """Have the kernel refuse descriptors on connections of a listener; return whether no client can send any.

    Over TCP, no client can send descriptors.
    """
    return listener.family != socket.AF_UNIX or stream.refuse_descriptors(listener)
