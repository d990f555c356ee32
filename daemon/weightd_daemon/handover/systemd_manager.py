"""What a service manager gives and wants to know: sd_notify(3), sd_listen_fds(3), sd_watchdog_enabled(3)."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
from collections.abc import Mapping, MutableMapping, Sequence

from weightd_common import service_manager
from weightd_common.service_manager import SEND_TIMEOUT_S

_log = logging.getLogger("weightd")

CLIENTS = "clients"
"""FileDescriptorName= of the sockets on which clients connect."""

SHIM = "shim"
CONFIG = "config"
"""Names of descriptors that are kept for the next daemon (FDSTORE=1): a link to the shim, and what was configured."""


class ServiceManager:
    """The service manager that has started this process, or nobody: then everything here does nothing.

    Args:
        environment: of the process. What concerns this process alone is taken out of it: children must not see it.

    Attributes:
        inherited: the descriptors that were passed, by name.
        watchdog_s: seconds within which a sign of life is expected; None if none is.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        self._address = environment.pop("NOTIFY_SOCKET", "")
        self.watchdog_s = _parse_watchdog(environment)
        self.inherited = _group_by_name(service_manager.take_listen_fds(environment))
        # What could not be told yet.
        self._unsent: dict[str, str] = {}
        for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
            environment.pop(name, None)

    @property
    def is_present(self) -> bool:
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

    def notify_reloading(self) -> None:
        """A reload begins; it ends with the next READY=1."""
        self.notify(*service_manager.reloading_message())

    def store_descriptor(self, name: str, descriptor: int) -> None:
        """Have it hold a duplicate of the descriptor for the next process of this service, in place of any other."""
        self.remove_descriptor(name)
        with contextlib.suppress(BlockingIOError):
            self._send(f"FDSTORE=1\nFDNAME={name}", [descriptor], SEND_TIMEOUT_S)
            return
        _log.warning("the service manager is busy and does not hold %s: a restart will not go on with that", name)

    def remove_descriptor(self, name: str) -> None:
        """Have it close what it holds under this name."""
        with contextlib.suppress(BlockingIOError):
            self._send(f"FDSTOREREMOVE=1\nFDNAME={name}", [], SEND_TIMEOUT_S)

    def _send(self, message: str, descriptors: list[int], timeout_s: float) -> None:
        """Send a message.

        Raises:
            BlockingIOError: its queue, which is short, has been full for so many seconds.
        """
        if not self._address:
            return
        try:
            service_manager.send(self._address, message, descriptors, timeout_s)
        except BlockingIOError:
            raise
        except OSError as error:
            _log.warning("cannot notify the service manager: %s: %s", message.partition("\n")[0], error)


def _parse_watchdog(environment: Mapping[str, str]) -> float | None:
    microseconds = environment.get("WATCHDOG_USEC", "")
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()) or not microseconds.isdecimal():
        return None
    return int(microseconds) / 1e6 or None


def _group_by_name(descriptors: Sequence[tuple[int, str]]) -> Mapping[str, list[int]]:
    inherited: dict[str, list[int]] = {}
    for descriptor, name in descriptors:
        # Units that give their sockets no name have them named after the unit, "unknown" in old versions.
        is_own = name in (SHIM, CONFIG) and not _is_listening(descriptor)
        inherited.setdefault(name if is_own else CLIENTS, []).append(descriptor)
    return inherited


def _is_listening(descriptor: int) -> bool:
    """Whether clients connect there: nothing that a daemon has had kept is such a socket, however a unit names it."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
        return bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
