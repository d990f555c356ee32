"""What a service manager gives and wants to know: sd_notify(3), sd_listen_fds(3).

The daemon has more to do with one, and its own: a gateway is nobody's parent, and keeps nothing over a restart.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import MutableMapping

_log = logging.getLogger("weightd.gateway")

# sd_listen_fds(3): the first descriptor that is passed.
_FIRST_DESCRIPTOR = 3

_PATIENCE_S = 2.0


class Manager:
    """The service manager that has started this process, or nobody: then everything here does nothing.

    Args:
        environment: of the process. What concerns this process alone is taken out of it.

    Attributes:
        sockets: those that listen already.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        self._address = environment.pop("NOTIFY_SOCKET", "")
        self.sockets = [socket.socket(fileno=each) for each in _inherited(environment)]
        for name in ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"):
            environment.pop(name, None)

    def notify(self, *assignments: str) -> None:
        """Tell it something, such as "READY=1"; where that cannot be, the log has it."""
        if not self._address:
            return
        # "@" begins the name of an abstract socket.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(_PATIENCE_S)
                sender.connect(address)
                sender.send("\n".join(assignments).encode())
        except OSError as error:
            _log.warning("the service manager cannot be told %s: %s", assignments[0], error)

    def reloading(self) -> None:
        """A reload begins; it ends with the next READY=1."""
        # Type=notify-reload of systemd 253 tells by the time which READY=1 belongs to it.
        self.notify("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")


def _inherited(environment: MutableMapping[str, str]) -> range:
    count = environment.get("LISTEN_FDS", "")
    if environment.get("LISTEN_PID") != str(os.getpid()) or not count.isdecimal():
        return range(0)
    descriptors = range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + int(count))
    for each in descriptors:
        os.set_inheritable(each, False)
    return descriptors
