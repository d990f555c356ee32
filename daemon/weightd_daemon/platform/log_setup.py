"""The daemon's log: on stderr an event is one line, in the journal one entry."""

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

# A journal that is busy is waited for so long, and then given the event by another way.
_TIMEOUT_S = 1.0

_TOO_LONG_ERRNOS = (errno.EMSGSIZE, errno.ENOBUFS)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class Journal:
    """Writes events.

    Args:
        address: of the journal's socket.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(_TIMEOUT_S)

    def write(self, fields: Mapping[str, str]) -> None:
        """Write an event.

        Raises:
            OSError: the journal does not take it.
        """
        event = b"".join(encode_field(name, value) for name, value in fields.items())
        try:
            self._socket.sendto(event, self._address)
        except OSError as error:
            if error.errno not in _TOO_LONG_ERRNOS:
                raise
            self._send_memfd(event)

    def close(self) -> None:
        """Give the descriptor back."""
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
    """Return a field; a value of several lines follows its length."""
    raw = value.encode("utf-8", "backslashreplace")
    if b"\n" in raw:
        return b"%s\n%s%s\n" % (name.encode(), len(raw).to_bytes(8, "little"), raw)
    return b"%s=%s\n" % (name.encode(), raw)


_log = logging.getLogger("weightd")

_STDERR = 2

# Of a record: what the event is about.
_FIELDS = "journal_fields"


def set_up(level: int) -> None:
    """Log to stderr, from this level on."""
    handler: logging.Handler
    if is_connected_to_journal(os.environ, _STDERR):
        handler = JournalHandler(Journal(ADDRESS))
        sys.excepthook = _log_uncaught
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(LineFormatter("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def print_error(text: str) -> None:
    """Say on stderr why the command ends, or what it has found: one line, whatever names it holds."""
    line = to_one_line(f"weightd: {text}")
    print(
        add_priority(line, priority_of(logging.ERROR)) if is_connected_to_journal(os.environ, _STDERR) else line,
        file=sys.stderr,
    )


class LineFormatter(logging.Formatter):
    """An event is one line, whatever was said by others in it; only a traceback follows on lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: D102, N802 - the name is logging's
        return to_one_line(super().formatMessage(record))


class JournalHandler(logging.Handler):
    """Gives each event to the journal, with what it is about as fields; where that cannot be, to stderr by lines."""

    def __init__(self, writer: Journal) -> None:
        super().__init__()
        self._journal = writer
        # Time and level are fields there and not part of the text.
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
    """Return `extra` of an event: what it is about, for who asks the journal."""
    fields = {"MODEL": model, "GENERATION": "" if generation is None else str(generation), "CHILD": child}
    return fields_extra({name: value for name, value in fields.items() if value})


def fields_extra(fields: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return `extra` of an event with these fields in the journal."""
    return {_FIELDS: {**fields}}


def client_extra(client: str) -> dict[str, dict[str, str]]:
    """Return `extra` of an event that a client has caused: a user, a host or a tenant; "" if it is not known which."""
    return {_FIELDS: {"CLIENT": client}}


def client_of(record: logging.LogRecord) -> str | None:
    """Return which client has caused an event, "" if that is not known; None if none has."""
    client: str | None = getattr(record, _FIELDS, {}).get("CLIENT")
    return client


def subject_of(record: logging.LogRecord) -> tuple[str, int | None, str]:
    """Return what an event is about: model, generation and child, as far as it is about one."""
    fields = getattr(record, _FIELDS, {})
    generation = fields.get("GENERATION")
    return fields.get("MODEL", ""), None if generation is None else int(generation), fields.get("CHILD", "")


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Log what nobody has caught: Python would print it without a priority."""
    _log.critical("weightd fails", exc_info=(kind, error, trace))


def log_resource_error(text: str) -> None:
    """Log a warning whose cause may be a limit of the system."""
    logging.getLogger("weightd").warning("%s", with_limit_hint(text))
