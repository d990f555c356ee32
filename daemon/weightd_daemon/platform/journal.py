"""Events for the journal of systemd, with fields that it can be asked for: its native protocol.

See https://systemd.io/JOURNAL_NATIVE_PROTOCOL/. An event is one datagram, however many lines its text has; one that is
too long for a datagram is passed as a sealed file in memory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Mapping

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
