"""The control link of a proxy to the daemon, over which the proxy reports clients and sends log lines."""

from __future__ import annotations

import errno

from weightd_common.rate_limits import RateLimitedLog
from weightd_common.stream import Stream
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import EventLoop, Timer
from weightd_daemon.zmq_proxy import control
from weightd_daemon.zmq_proxy.control import ERROR, WARNING

# Minimum number of seconds between two log lines about refused connections of one user, and between two log lines about
# disconnected clients of one user.
_LOG_INTERVAL_S = 10.0

# Seconds between attempts to send descriptors while the kernel refuses to take them.
_RETRY_INTERVAL_S = 0.1


class DaemonLink:
    """Sends control messages to the daemon. Messages that do not fit into the socket's buffer are queued.

    Args:
        stream: the stream of the control link.
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
        """Stop sending messages, because the daemon has closed its end of the link."""
        self._is_closed = True
        self._loop.remove(self.stream.fileno())

    def log_error(self, text: str) -> None:
        """Send a log line about an error of the proxy to the daemon."""
        self.send(control.encode_log_line(ERROR, text))

    def log_disconnect(self, user: str, reason: str) -> None:
        """Log why a client of a user is disconnected, at most once in `_LOG_INTERVAL_S` for each user."""
        self._log_rate_limited(self._disconnect_log, user, f"disconnecting a client of {user}: {reason}")

    def log_refusal(self, user: str, reason: str) -> None:
        """Log why a new connection of a user is refused, at most once in `_LOG_INTERVAL_S` for each user."""
        self._log_rate_limited(self._refusal_log, user, f"new connection of {user} refused: {reason}")

    def send(self, message: bytes, *descriptors: int) -> None:
        """Send a message with descriptors to the daemon, or queue it.

        Raises:
            OSError: the message has to be queued, but its descriptors cannot be copied, because the process has reached
                its limit of descriptors. The message is dropped.
        """
        if self._is_closed:
            return
        try:
            is_sent = self.stream.send([message], descriptors)
        except ConnectionError:
            return  # the daemon has exited: `ZmqProxy` reads the end of the link and stops
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
            # The kernel refuses the descriptors, because this user's processes have sent too many that were not
            # received yet (ETOOMANYREFS in unix(7)). The link stays writable meanwhile, so a timer delays the next
            # attempt.
            self._retry_timer.set(event_loop.now() + _RETRY_INTERVAL_S)
        self._loop.unwatch_writes(self.stream.fileno())

    def _on_retry(self, _: float) -> None:
        if not self._is_closed:
            self._loop.watch_writes(self.stream.fileno(), self._flush)

    def _log_rate_limited(self, rate_limited_log: RateLimitedLog, user: str, text: str) -> None:
        """Send a log line to the daemon, unless one about this user was sent in the last `_LOG_INTERVAL_S`."""
        suppressed_count = rate_limited_log.record(user, event_loop.now())
        if suppressed_count is not None:
            suffix = f" ({suppressed_count} more of {user} suppressed)" if suppressed_count else ""
            self.send(control.encode_log_line(WARNING, text + suffix))
