"""Log of the daemon: one line per event on stderr, or one entry per event in systemd's journal."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import sys
from collections.abc import Mapping
from types import TracebackType

from weightd_common.log_text import add_priority, is_connected_to_journal, priority_of, to_one_line
from weightd_daemon.platform.resource_limits import with_limit_hint

ADDRESS = "/run/systemd/journal/socket"

# Seconds for which a write waits while the journal is busy. After that, the event goes to stderr.
_TIMEOUT_S = 1.0

_TOO_LONG_ERRNOS = (errno.EMSGSIZE, errno.ENOBUFS)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class Journal:
    """Connection to systemd's journal, which uses the journal's native protocol.

    Args:
        address: the path of the journal's socket.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(_TIMEOUT_S)

    def write(self, fields: Mapping[str, str]) -> None:
        """Write an event with these fields.

        Raises:
            OSError: the journal does not accept the event.
        """
        event = b"".join(encode_field(name, value) for name, value in fields.items())
        try:
            self._socket.sendto(event, self._address)
        except OSError as error:
            if error.errno not in _TOO_LONG_ERRNOS:
                raise
            self._send_memfd(event)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _send_memfd(self, event: bytes) -> None:
        descriptor = os.memfd_create("weightd-event", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(event)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor.to_bytes(4, "little"))]
            self._socket.sendmsg([], rights, 0, self._address)
        finally:
            os.close(descriptor)


def encode_field(name: str, value: str) -> bytes:
    """Encode a field for the journal's native protocol: NAME=VALUE, or with a length if the value has several lines."""
    raw = value.encode("utf-8", "backslashreplace")
    if b"\n" in raw:
        return b"%s\n%s%s\n" % (name.encode(), len(raw).to_bytes(8, "little"), raw)
    return b"%s=%s\n" % (name.encode(), raw)


_log = logging.getLogger("weightd")

_STDERR = 2

# Name of the attribute of a log record that has the event's journal fields.
_FIELDS = "journal_fields"


def set_up(level: int) -> None:
    """Send log records of this level and above to the journal if stderr is connected to it, else to stderr."""
    handler: logging.Handler
    if is_connected_to_journal(os.environ, _STDERR):
        handler = JournalHandler(Journal(ADDRESS))
        sys.excepthook = _log_uncaught
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(LineFormatter("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def print_error(text: str) -> None:
    """Print an error of a command, or a finding of `weightd check`, as one printable line on stderr."""
    line = to_one_line(f"weightd: {text}")
    print(
        add_priority(line, priority_of(logging.ERROR)) if is_connected_to_journal(os.environ, _STDERR) else line,
        file=sys.stderr,
    )


class LineFormatter(logging.Formatter):
    """Log formatter that makes one line of each message, without line breaks. A traceback follows on further lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: D102, N802 - the name is logging's
        return to_one_line(super().formatMessage(record))


class JournalHandler(logging.Handler):
    """Log handler that sends each event with its fields to the journal, or its text to stderr if the journal fails."""

    def __init__(self, writer: Journal) -> None:
        super().__init__()
        self._journal = writer
        # The text has no time and no level, because the journal keeps them in separate fields.
        self.setFormatter(LineFormatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:  # noqa: D102
        text = self.format(record)
        priority = priority_of(record.levelno)
        fields = {"MESSAGE": text, "PRIORITY": str(priority), "SYSLOG_IDENTIFIER": "weightd"}
        try:
            self._journal.write({**fields, **getattr(record, _FIELDS, {})})
        except OSError:
            print(add_priority(text, priority), file=sys.stderr, flush=True)

    def close(self) -> None:  # noqa: D102
        self._journal.close()
        super().close()


def subject_extra(model: str, generation: int | None = None, child: str = "") -> dict[str, dict[str, str]]:
    """Return the argument `extra` of a log call for an event about a model, generation or child process."""
    fields = {"MODEL": model, "GENERATION": "" if generation is None else str(generation), "CHILD": child}
    return fields_extra({name: value for name, value in fields.items() if value})


def fields_extra(fields: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the argument `extra` of a log call for an event with these journal fields."""
    return {_FIELDS: {**fields}}


def client_extra(client: str) -> dict[str, dict[str, str]]:
    """Return the argument `extra` of a log call for an event that a client has caused.

    `client` is the name of a user, a host or a tenant; "" if it is not known.
    """
    return {_FIELDS: {"CLIENT": client}}


def client_of(record: logging.LogRecord) -> str | None:
    """Return the client that has caused an event; "" if the client is not known, None if no client has caused it."""
    client: str | None = getattr(record, _FIELDS, {}).get("CLIENT")
    return client


def subject_of(record: logging.LogRecord) -> tuple[str, int | None, str]:
    """Return model, generation number and child process that an event is about; "" or None for an unset one."""
    fields = getattr(record, _FIELDS, {})
    generation = fields.get("GENERATION")
    return fields.get("MODEL", ""), None if generation is None else int(generation), fields.get("CHILD", "")


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Log an uncaught exception. Python itself would print it on stderr without a priority for the journal."""
    _log.critical("weightd failed", exc_info=(kind, error, trace))


def log_resource_error(text: str) -> None:
    """Log a warning; if a limit of the system is the cause, the line names the limit and how to raise it."""
    logging.getLogger("weightd").warning("%s", with_limit_hint(text))
