"""Rate limits for log lines about clients: for each client, and for all clients together.

A client can cause the same event thousands of times a second. Without limits, its log lines would push out the lines
about other clients and about the daemon: from the log, from the daemon's event log, and from the journal, which limits
the rate of each service.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from weightd_daemon.platform import event_loop
from weightd_daemon.platform.log_setup import client_extra

WINDOW_S = 10.0
"""Length in seconds of the period in which lines are counted for the limits."""

# Maximum number of lines about one user, host or tenant in a period. Each kind of event is logged at most once in a
# period; the next line of this kind gives the number of suppressed lines.
_MAX_LINES_PER_CLIENT = 8

# Maximum number of lines about all clients in a period. By default, journald drops the lines of a service beyond 10,000
# in 30 s.
_MAX_LINES = 100

# Maximum number of pairs of client and event kind whose suppressed lines are counted separately. All further suppressed
# lines share one count.
_MAX_COUNTED_KINDS = 1024


class ClientLog:
    """Rate-limited writer of log lines about clients.

    Args:
        now: returns monotonic seconds.
    """

    def __init__(self, now: Callable[[], float] = event_loop.now) -> None:
        self._now = now
        self._window_ends_at = -float("inf")
        self._logged_kinds: set[tuple[str, str]] = set()
        self._line_counts: Counter[str] = Counter()
        self._suppressed_counts: Counter[tuple[str, str]] = Counter()

    def log(self, log: logging.Logger, level: int, client: str, text: str, *args: object, kind: str = "") -> None:
        """Write a line about an event that a client has caused, unless a limit is reached.

        Args:
            log: the logger that writes the line.
            level: the level of the line.
            client: the user, host or tenant that has caused the event; "" if it is not known.
            text: a format string.
            args: the arguments of `text`.
            kind: the kind of the event. Events of one kind and client are logged at most once in a period. Default:
                `text`.
        """
        if not log.isEnabledFor(level):
            return
        now = self._now()
        if now >= self._window_ends_at:
            self._window_ends_at = now + WINDOW_S
            self._logged_kinds.clear()
            self._line_counts.clear()
        key = client, kind or text
        if (
            key in self._logged_kinds
            or self._line_counts[client] >= _MAX_LINES_PER_CLIENT
            or self._line_counts.total() >= _MAX_LINES
        ):
            is_counted = key in self._suppressed_counts or len(self._suppressed_counts) < _MAX_COUNTED_KINDS
            self._suppressed_counts[key if is_counted else ("", "")] += 1
            return
        self._logged_kinds.add(key)
        self._line_counts[client] += 1
        suppressed = self._suppressed_counts.pop(key, 0)
        suffix = f" ({suppressed} more of {client or 'clients'} suppressed)" if suppressed else ""
        log.log(level, "%s%s", text % args, suffix, extra=client_extra(client))
