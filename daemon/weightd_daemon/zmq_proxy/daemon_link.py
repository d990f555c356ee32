"""The control link of a proxy to the daemon: reports of the proxy, and its log lines."""

from __future__ import annotations

import errno

from weightd_common.rate_limits import RateLimitedLog
from weightd_common.stream import Stream
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import EventLoop, Timer
from weightd_daemon.zmq_proxy import control
from weightd_daemon.zmq_proxy.control import ERROR, WARNING

# The minimal interval between two log lines about refused, or about closed, connections of one user.
_LOG_INTERVAL_S = 10.0

# The interval of attempts to send descriptors while the kernel refuses them to this process.
_RETRY_INTERVAL_S = 0.1


class DaemonLink:
    """Sends control messages to the daemon. Messages that the daemon does not read yet are queued.

    Args:
        stream: the stream to the daemon.
        loop: reports when the stream is writable.
    """

    def __init__(self, stream: Stream, loop: EventLoop) -> None:
        self.stream = stream
        self._loop = loop
        self._is_closed = False
        self._disconnect_log = RateLimitedLog(_LOG_INTERVAL_S)
        self._refusal_log = RateLimitedLog(_LOG_INTERVAL_S)
        self._retry_timer = Timer(self._on_retry)
        loop.add_timer(self._retry_timer)

    def close(self) -> None:
        """Send nothing more, because the daemon has closed its end."""
        self._is_closed = True
        self._loop.remove(self.stream.fileno())

    def log_error(self, text: str) -> None:
        """Log an error of the proxy itself."""
        self.send(control.encode_log_line(ERROR, text))

    def log_disconnect(self, user: str, reason: str) -> None:
        """Log why a client of a user is disconnected, at most once per user and interval."""
        self._log_rate_limited(self._disconnect_log, user, f"disconnecting a client of {user}: {reason}")

    def log_refusal(self, user: str, reason: str) -> None:
        """Log why a new connection of a user is refused, at most once per user and interval."""
        self._log_rate_limited(self._refusal_log, user, f"new connection of {user} refused: {reason}")

    def send(self, message: bytes, *descriptors: int) -> None:
        """Send a message to the daemon.

        Raises:
            OSError: the message has to be queued, and no descriptor is left for copies of its descriptors. The message
                is not sent.
        """
        if self._is_closed:
            return
        try:
            is_sent = self.stream.send([message], descriptors)
        except ConnectionError:
            return  # the daemon has exited: the loop reports the end of the link
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            self.stream.queue([message], descriptors)
            is_sent = False
        if not is_sent:
            self._loop.watch_writes(self.stream.fileno(), self._flush)

    def _flush(self) -> None:
        try:
            if not self.stream.flush():
                return
        except ConnectionError:
            pass  # as in `send`
        except OSError:
            # The processes of this user have more descriptors in flight than the kernel allows (unix(7), ETOOMANYREFS).
            # The link stays writable meanwhile, so a timer has to delay the next attempt.
            self._retry_timer.set(event_loop.now() + _RETRY_INTERVAL_S)
        self._loop.unwatch_writes(self.stream.fileno())

    def _on_retry(self, _: float) -> None:
        if not self._is_closed:
            self._loop.watch_writes(self.stream.fileno(), self._flush)

    def _log_rate_limited(self, rate_limited_log: RateLimitedLog, user: str, text: str) -> None:
        """Log a line that a user can cause at any rate."""
        suppressed_count = rate_limited_log.record(user, event_loop.now())
        if suppressed_count is not None:
            suffix = f" ({suppressed_count} more of {user} suppressed)" if suppressed_count else ""
            self.send(control.encode_log_line(WARNING, text + suffix))
