"""Whoever connects to a socket that listens is let in; where nothing is left to have it with, it waits, and only it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

from weightd_common.rate_limits import RateLimitedLog
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import EventLoop, Timer

# With one wake-up, by default: more wait for the next one.
_MAX_ACCEPTED = 64

# A wake-up accepts no further connection after this time, so that a flood of connections does not hold up the loop.
_SLICE_S = 2e-4

# After it has refused some, so that a flood of connections that are all refused takes a small part of the loop's time.
_REFUSAL_BACKOFF_S = 1e-3

# Where there is no descriptor for the next one, until some have gone.
_EXHAUSTED_BACKOFF_S = 0.1

# Between two lines of the log about that.
_LOG_INTERVAL_S = 10.0

# Of <asm-generic/socket.h>; in no module of Python's.
_SO_PASSRIGHTS = 83

_NEVER = float("inf")


class Acceptor:
    """Accepts connections.

    Args:
        listener: listens, and does not block.
        loop: calls when somebody has connected.
        on_connection: is given each connection, and owns it; returns False where it has refused the connection.
        report: is given the line for the log where no connection can be accepted.
        max_accepted: that are accepted at once.
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
        """Let in who has connected until now."""
        if self._accept_batch():
            self._loop.pause_reading(self._listener.fileno())
            self._resume_timer.set(event_loop.now() + _REFUSAL_BACKOFF_S)

    def stop(self) -> None:
        """Accept nothing more."""
        self._resume_timer.set(_NEVER)
        self._loop.remove(self._listener.fileno())

    def _accept_batch(self) -> bool:
        """Accept connections for a moment; return whether any was refused."""
        deadline = event_loop.now() + _SLICE_S
        has_refused = False
        for _ in range(self._max_accepted):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                break
            except OSError as error:
                # It has gone again, or nothing is left to have it with: then others have to go first.
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._back_off(error)
                    return False
            else:
                has_refused |= self._on_connection(connection) is False
            if event_loop.now() >= deadline:
                break
        return has_refused

    def _back_off(self, error: OSError) -> None:
        """Else the loop would be told at once, and again and again, that somebody waits there."""
        now = event_loop.now()
        if self._resume_timer.due_at == _NEVER:
            if self._rate_limited_log.record("", now) is not None:
                self._report(f"no connection can be accepted at {self._listener.getsockname()}: {error.strerror}")
            self._loop.pause_reading(self._listener.fileno())
            self._resume_timer.set(now + _EXHAUSTED_BACKOFF_S)

    def _resume(self, _: float) -> None:
        self._loop.resume_reading(self._listener.fileno())


def refuse_descriptors(listener: socket.socket) -> bool:
    """Have the kernel refuse descriptors that clients send; return whether none can come.

    Over Unix sockets this needs Linux 6.16. The flag of a connection is that which the listener had when it was made.
    """
    if listener.family != socket.AF_UNIX:
        return True
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
    except OSError:
        return False
    return True
