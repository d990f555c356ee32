"""What a service manager gives and wants to know: sd_notify(3), sd_listen_fds(3), sd_watchdog_enabled(3).

The protocol is an environment variable and a datagram each, so it is written here; systemd is its first speaker, but
other managers (podman, s6) speak parts of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import time
from collections.abc import Mapping, MutableMapping

_log = logging.getLogger("weightd")

_PATIENCE_S = 2.0

# sd_listen_fds(3): the first descriptor that is passed.
_FIRST_DESCRIPTOR = 3

CLIENTS = "clients"
"""FileDescriptorName= of the sockets on which clients connect."""

KEEPER = "keeper"
CONFIG = "config"
"""Names of descriptors that are kept for the next daemon (FDSTORE=1): a link to the keeper, and what was configured."""


class Manager:
    """The service manager that has started this process, or nobody: then everything here does nothing.

    Args:
        environment: of the process. What concerns this process alone is taken out of it: children must not see it.

    Attributes:
        inherited: the descriptors that were passed, by name.
        watchdog: seconds within which a sign of life is expected; None if none is.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        self._address = environment.pop("NOTIFY_SOCKET", "")
        self.watchdog = _watchdog(environment)
        self.inherited = _inherited(environment)
        # What could not be told yet.
        self._unsent: dict[str, str] = {}
        for name in ("WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"):
            environment.pop(name, None)

    @property
    def there(self) -> bool:
        """Whether somebody wants to be notified."""
        return bool(self._address)

    def notify(self, *assignments: str) -> None:
        """Tell it something, such as "READY=1".

        A manager that is busy is told with the next notification, one that does not listen is not: a daemon that serves
        waits for neither.
        """
        for each in assignments:
            key, _, value = each.partition("=")
            self._unsent[key] = value
        if self._unsent:
            message = "\n".join(f"{key}={value}" for key, value in self._unsent.items())
            with contextlib.suppress(BlockingIOError):
                self._send(message, [], 0.0)
                self._unsent.clear()

    def reloading(self) -> None:
        """A reload begins; it ends with the next READY=1."""
        # Type=notify-reload of systemd 253 tells by the time which READY=1 belongs to it.
        self.notify("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def keep(self, name: str, descriptor: int) -> None:
        """Have it hold a duplicate of the descriptor for the next process of this service, in place of any other."""
        self.drop(name)
        with contextlib.suppress(BlockingIOError):
            self._send(f"FDSTORE=1\nFDNAME={name}", [descriptor], _PATIENCE_S)
            return
        _log.warning("the service manager is busy and does not hold %s: a restart will not go on with that", name)

    def drop(self, name: str) -> None:
        """Have it close what it holds under this name."""
        with contextlib.suppress(BlockingIOError):
            self._send(f"FDSTOREREMOVE=1\nFDNAME={name}", [], _PATIENCE_S)

    def _send(self, message: str, descriptors: list[int], patience: float) -> None:
        """Send a message.

        Raises:
            BlockingIOError: its queue, which is short, has been full for so many seconds.
        """
        if not self._address:
            return
        # "@" begins the name of an abstract socket.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(patience)
                sender.connect(address)
                socket.send_fds(sender, [message.encode()], descriptors)
        except (BlockingIOError, TimeoutError) as error:
            raise BlockingIOError(str(error)) from None
        except OSError as error:
            _log.warning("the service manager cannot be told %s: %s", message.partition("\n")[0], error)


def _watchdog(environment: Mapping[str, str]) -> float | None:
    microseconds = environment.get("WATCHDOG_USEC", "")
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()) or not microseconds.isdecimal():
        return None
    return int(microseconds) / 1e6 or None


def _inherited(environment: Mapping[str, str]) -> Mapping[str, list[int]]:
    count = environment.get("LISTEN_FDS", "")
    if environment.get("LISTEN_PID") != str(os.getpid()) or not count.isdecimal():
        return {}
    names = environment.get("LISTEN_FDNAMES", "").split(":")
    inherited: dict[str, list[int]] = {}
    for index in range(int(count)):
        descriptor = _FIRST_DESCRIPTOR + index
        os.set_inheritable(descriptor, False)
        # Units that give their sockets no name have them named after the unit, "unknown" in old versions.
        name = names[index] if index < len(names) else ""
        is_own = name in (KEEPER, CONFIG) and not _listens(descriptor)
        inherited.setdefault(name if is_own else CLIENTS, []).append(descriptor)
    return inherited


def _listens(descriptor: int) -> bool:
    """Whether clients connect there: nothing that a daemon has had kept is such a socket, however a unit names it."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
        return bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
