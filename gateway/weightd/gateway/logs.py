"""The gateway's log: on stderr an event is one line, whatever was said by others in it."""

from __future__ import annotations

import logging
import os
import sys

from weightd.shared.journal import prefixed, to_journal

_STDERR = 2

# Levels, from the most severe, and the priorities of syslog that they are: see sd-daemon(3).
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG = 7


class LineFormatter(logging.Formatter):
    """An event is one line; only a traceback follows on lines of its own. In the journal each has its priority."""

    def __init__(self, *, journal: bool) -> None:
        super().__init__("%(message)s" if journal else "%(asctime)s %(levelname)-7s %(message)s")
        self._journal = journal

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: D102, N802 - the name is logging's
        return flat(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:  # noqa: D102
        text = super().format(record)
        return prefixed(text, _priority(record.levelno)) if self._journal else text


def set_up(level: int) -> None:
    """Log to stderr, from this level on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(journal=to_journal(os.environ, _STDERR)))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("weightd").setLevel(level)


def complain(text: str) -> None:
    """Say on stderr why the command ends, or what it has found: one line, whatever names it holds."""
    line = flat(f"weightd gateway: {text}")
    print(prefixed(line, _priority(logging.ERROR)) if to_journal(os.environ, _STDERR) else line, file=sys.stderr)


def flat(text: str) -> str:
    """Return foreign text on one line, and without what could play tricks on a terminal."""
    lines = (line.strip() for line in text.replace("\t", " ").splitlines())
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in " | ".join(filter(None, lines)))


def _priority(level: int) -> int:
    return next((priority for least, priority in _PRIORITIES if level >= least), _DEBUG)
