"""The gateway's log on stderr: each event is one line, even if it contains text from clients with line breaks."""

from __future__ import annotations

import logging
import os
import sys
import time

from weightd_common.log_text import add_priority, is_connected_to_journal, priority_of, to_one_line
from weightd_common.rate_limits import RateLimitedLog

_STDERR = 2

# Seconds between two log lines about unexpected errors of the same class.
_FAILURE_LOG_INTERVAL_S = 10.0

_failure_log = RateLimitedLog(_FAILURE_LOG_INTERVAL_S)


def log_failure(log: logging.Logger, what: str, error: BaseException | None) -> None:
    """Log an unexpected error with its traceback, rate-limited because a caller may be able to cause it repeatedly."""
    suppressed_count = _failure_log.record(type(error).__name__, time.monotonic())
    if suppressed_count is not None:
        more = f" ({suppressed_count} more since the last such line)" if suppressed_count else ""
        log.error("%s%s", what, more, exc_info=error)


class LineFormatter(logging.Formatter):
    """Formats an event as one line, followed by a traceback if any; for the journal, each line has a priority."""

    def __init__(self, *, journal: bool) -> None:
        super().__init__("%(message)s" if journal else "%(asctime)s %(levelname)-7s %(message)s")
        self._journal = journal

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: D102, N802 - the name is logging's
        return to_one_line(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:  # noqa: D102
        text = super().format(record)
        return add_priority(text, priority_of(record.levelno)) if self._journal else text


def set_up(level: int) -> None:
    """Log to stderr: messages of weightd from `level` on, messages of other libraries from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(journal=is_connected_to_journal(os.environ, _STDERR)))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("weightd").setLevel(level)


def print_error(text: str) -> None:
    """Print an error on stderr as one line, even if the error text contains line breaks."""
    line = to_one_line(f"weightd gateway: {text}")
    print(
        add_priority(line, priority_of(logging.ERROR)) if is_connected_to_journal(os.environ, _STDERR) else line,
        file=sys.stderr,
    )
