"""Log lines about what clients do: limited for each client and in all.

A client can cause the same event thousands of times a second. The log, the events that the daemon keeps, and the rate
that the journal allows the service belong to all clients and to the daemon itself.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from weightd.daemon.host import clock
from weightd.daemon.host.logs import of_client

WINDOW_S = 10.0
"""The limits hold for periods of so many seconds."""

# Lines about one user, host or tenant. There is one about each kind of event, with how many lines were left out.
_MOST_OF_CLIENT = 8

# Lines about all clients. journald by default drops what a service logs beyond 10,000 lines in 30 s.
_MOST = 100

# Kinds of events that are counted; those of further clients are counted together.
_MOST_COUNTED = 1024


class ClientLog:
    """Writes log lines about clients, and leaves out those beyond the limits.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: Callable[[], float] = clock.now) -> None:
        self._now = now
        self._until = -float("inf")
        self._told: set[tuple[str, str]] = set()
        self._lines: Counter[str] = Counter()
        self._left_out: Counter[tuple[str, str]] = Counter()

    def log(self, log: logging.Logger, level: int, client: str, text: str, *args: object, kind: str = "") -> None:
        """Write a line that a client has caused, unless there have been too many.

        Args:
            log: writes the line.
            level: of the line.
            client: who has caused the event: a user, a host or a tenant; "" if that is not known.
            text: of the line, a format string.
            args: of `text`.
            kind: of the event. Default: `text`.
        """
        if not log.isEnabledFor(level):
            return
        now = self._now()
        if now >= self._until:
            self._until = now + WINDOW_S
            self._told.clear()
            self._lines.clear()
        key = client, kind or text
        if key in self._told or self._lines[client] >= _MOST_OF_CLIENT or self._lines.total() >= _MOST:
            is_counted = key in self._left_out or len(self._left_out) < _MOST_COUNTED
            self._left_out[key if is_counted else ("", "")] += 1
            return
        self._told.add(key)
        self._lines[client] += 1
        left_out = self._left_out.pop(key, 0)
        more = f" ({left_out} more of {client or 'clients'} since the last such line)" if left_out else ""
        log.log(level, "%s%s", text % args, more, extra=of_client(client))
