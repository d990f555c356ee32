"""A proxy's link to the daemon: what it reports and logs there, and the daemon's orders."""

from __future__ import annotations

import errno

from weightd_common.rate_limits import RateLimitedLog
from weightd_common.stream import Stream
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import EventLoop, Timer
from weightd_daemon.zmq_proxy import control
from weightd_daemon.zmq_proxy.control import ERROR, WARNING

# Between two lines of the log about connections of one user that were hung up or refused.
_LOG_INTERVAL_S = 10.0

# While the kernel lets this process send no descriptor, the proxy tries again after so long.
_RETRY_INTERVAL_S = 0.1


class DaemonLink:
    """Sends messages to the daemon, and waits where it does not read.

    Args:
        stream: to the daemon.
        loop: calls when it can be written to.
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
        """The daemon has closed its end: send nothing more."""
        self._is_closed = True
        self._loop.remove(self.stream.fileno())

    def log_error(self, text: str) -> None:
        """Log that the proxy itself cannot do something."""
        self.send(control.encode_log_line(ERROR, text))

    def log_disconnect(self, user: str, reason: str) -> None:
        """Log why a client of a user is disconnected."""
        self._log_rate_limited(self._disconnect_log, user, f"disconnecting a client of {user}: {reason}")

    def log_refusal(self, user: str, reason: str) -> None:
        """Log why a new connection of a user is refused."""
        self._log_rate_limited(self._refusal_log, user, f"new connection of {user} refused: {reason}")

    def send(self, message: bytes, *descriptors: int) -> None:
        """Send a message to the daemon.

        Raises:
            OSError: no descriptor is left for those that cannot be sent at once; the message is not sent.
        """
        if self._is_closed:
            return  # the link is closed
        try:
            is_sent = self.stream.send([message], descriptors)
        except ConnectionError:
            return  # the daemon has gone: the link tells
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
            pass  # as above
        except OSError:
            # Processes of this user have more descriptors in flight than the kernel allows this process (unix(7),
            # ETOOMANYREFS). The link can be written to all the while.
            self._retry_timer.set(event_loop.now() + _RETRY_INTERVAL_S)
        self._loop.unwatch_writes(self.stream.fileno())

    def _on_retry(self, _: float) -> None:
        if not self._is_closed:
            self._loop.watch_writes(self.stream.fileno(), self._flush)

    def _log_rate_limited(self, rate_limited_log: RateLimitedLog, user: str, text: str) -> None:
        """Log what a user can bring about as often as it likes."""
        suppressed_count = rate_limited_log.record(user, event_loop.now())
        if suppressed_count is not None:
            suffix = f" ({suppressed_count} more of {user} suppressed)" if suppressed_count else ""
            self.send(control.encode_log_line(WARNING, text + suffix))
