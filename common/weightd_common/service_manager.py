"""Communication with the service manager: sd_notify(3), sd_listen_fds(3) and sd_watchdog_enabled(3).

These protocols consist of environment variables and datagrams, so no library is needed. Besides systemd, other service
managers such as podman and s6 implement parts of them.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import socket
import stat
import time
from typing import Dict, List, Mapping, MutableMapping, Optional, Sequence, Tuple

SEND_TIMEOUT_S = 2.0
"""If the service manager's queue is full, a message that must not be lost waits at most this number of seconds."""

CLIENTS = "clients"
"""Name under which `ServiceManager.inherited` lists the sockets on which clients connect."""

# Number of the first descriptor that a service manager passes, see sd_listen_fds(3).
_FIRST_DESCRIPTOR = 3

_LISTEN_VARIABLES = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")

_log = logging.getLogger("weightd")


class ServiceManager:
    """The service manager that has started this process. Without a service manager, all methods do nothing.

    Args:
        environment: the environment of the process. The service manager's variables for this process are removed from
            it, so that child processes do not inherit them.
        stored: the names under which this program stores descriptors in the manager for the next process of the
            service.
        notify_timeout_s: seconds for which `notify` waits if the manager is busy.

    Attributes:
        inherited: the descriptors that the manager has passed, by name. Descriptors stored by an earlier process have
            the names in `stored`. Listening sockets and all other descriptors have the name `CLIENTS`.
        watchdog_s: seconds within which the manager expects a keep-alive message; None without a watchdog.
    """

    def __init__(
        self, environment: MutableMapping[str, str], stored: Sequence[str] = (), notify_timeout_s: float = 0.0
    ) -> None:
        self._address = environment.pop("NOTIFY_SOCKET", "")
        self._notify_timeout_s = notify_timeout_s
        self.watchdog_s = _parse_watchdog(environment)
        self.inherited = _group_by_name(_take_listen_fds(environment), stored)
        # Values by key of assignments such as "READY=1" that could not be sent yet, because the manager was busy.
        self._unsent: Dict[str, str] = {}
        for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
            environment.pop(name, None)

    @property
    def is_present(self) -> bool:
        """Whether a service manager expects notifications."""
        return bool(self._address)

    def notify(self, *assignments: str) -> None:
        """Send assignments such as "READY=1" to the manager.

        If the manager is busy, the assignments are sent with the next notification. If the manager has closed its
        socket, they are dropped. With the default timeout of 0 the method never waits.
        """
        for each in assignments:
            key, _, value = each.partition("=")
            self._unsent[key] = value
        if self._unsent:
            message = "\n".join(f"{key}={value}" for key, value in self._unsent.items())
            with contextlib.suppress(BlockingIOError):
                self._send(message, [], self._notify_timeout_s)
                self._unsent.clear()

    def notify_reloading(self) -> None:
        """Announce a reload, which ends with the next READY=1."""
        # For units of Type=notify-reload, systemd compares this time with the time of its reload request, to recognize
        # the answer to the request.
        self.notify("RELOADING=1", f"MONOTONIC_USEC={int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)}")

    def store_descriptor(self, name: str, descriptor: int) -> None:
        """Store a duplicate of a descriptor in the manager for the next process of this service.

        The descriptor replaces all descriptors that are already stored under this name.
        """
        self.remove_descriptor(name)
        with contextlib.suppress(BlockingIOError):
            self._send(f"FDSTORE=1\nFDNAME={name}", [descriptor], SEND_TIMEOUT_S)
            return
        _log.warning("the service manager is busy and does not hold %s; the next daemon cannot take it over", name)

    def remove_descriptor(self, name: str) -> None:
        """Make the manager close the descriptors that it stores under this name."""
        with contextlib.suppress(BlockingIOError):
            self._send(f"FDSTOREREMOVE=1\nFDNAME={name}", [], SEND_TIMEOUT_S)

    def _send(self, message: str, descriptors: Sequence[int], timeout_s: float) -> None:
        """Send a message to the manager. Errors other than a full queue are only logged.

        Raises:
            BlockingIOError: the manager's queue was full for `timeout_s`.
        """
        if not self._address:
            return
        try:
            _send(self._address, message, descriptors, timeout_s)
        except BlockingIOError:
            raise
        except OSError as error:
            _log.warning("cannot notify the service manager: %s: %s", message.partition("\n")[0], error)


def _send(address: str, message: str, descriptors: Sequence[int], timeout_s: float) -> None:
    """Send a message to a service manager.

    Args:
        address: the address of the manager's socket: the value of NOTIFY_SOCKET.
        message: assignments such as "READY=1", one on each line.
        descriptors: descriptors of which the manager receives duplicates.
        timeout_s: seconds to wait if the manager's queue is full.

    Raises:
        BlockingIOError: the queue was full for `timeout_s`.
        OSError: the message cannot be sent.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(timeout_s)
            # In NOTIFY_SOCKET, a leading "@" stands for the NUL byte with which the address of an abstract socket
            # begins.
            sender.connect("\0" + address[1:] if address.startswith("@") else address)
            sender.sendmsg([message.encode()], rights)
    except (BlockingIOError, socket.timeout) as error:
        raise BlockingIOError(str(error)) from None


def _parse_watchdog(environment: Mapping[str, str]) -> Optional[float]:
    microseconds = environment.get("WATCHDOG_USEC", "")
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()) or not microseconds.isdecimal():
        return None
    return int(microseconds) / 1e6 or None


def _take_listen_fds(environment: MutableMapping[str, str]) -> List[Tuple[int, str]]:
    """Return the descriptors that the manager has passed to this process, with their names.

    The variables that describe these descriptors are removed from the environment.
    """
    found = [*_listen_fds(environment)]
    for name in _LISTEN_VARIABLES:
        environment.pop(name, None)
    for descriptor, _ in found:
        os.set_inheritable(descriptor, False)
    return found


def _listen_fds(environment: Mapping[str, str]) -> Sequence[Tuple[int, str]]:
    count = environment.get("LISTEN_FDS", "")
    if environment.get("LISTEN_PID") != str(os.getpid()) or not count.isdecimal():
        return ()
    names = environment.get("LISTEN_FDNAMES", "").split(":")
    names += [""] * (int(count) - len(names))
    return [(_FIRST_DESCRIPTOR + index, names[index]) for index in range(int(count))]


def _group_by_name(descriptors: Sequence[Tuple[int, str]], stored: Sequence[str]) -> Mapping[str, List[int]]:
    inherited: Dict[str, List[int]] = {}
    for descriptor, name in descriptors:
        # Only the names of stored descriptors are known, so all other descriptors get the name CLIENTS. If a socket
        # unit sets no name for its sockets, systemd names them after the unit, or "unknown" in old versions.
        is_own = name in stored and not _is_listening(descriptor)
        inherited.setdefault(name if is_own else CLIENTS, []).append(descriptor)
    return inherited


def _is_listening(descriptor: int) -> bool:
    """Return whether the descriptor is a listening socket.

    The daemon never stores a listening socket. So a listening socket is from a socket unit, even if the unit has given
    the socket the name of a stored descriptor.
    """
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
        return bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
