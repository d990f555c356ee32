"""What a service manager gives and wants to know: sd_notify(3), sd_listen_fds(3), sd_watchdog_enabled(3).

Each is an environment variable and at most a datagram, so it is written here; systemd is its first speaker, but other
managers (podman, s6) speak parts of it.
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
"""Seconds for what is worth waiting for: the queue of a manager is short."""

CLIENTS = "clients"
"""Name of the descriptors on which clients connect."""

# sd_listen_fds(3): the first descriptor that is passed.
_FIRST_DESCRIPTOR = 3

_LISTEN_VARIABLES = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")

_log = logging.getLogger("weightd")


class ServiceManager:
    """The service manager that has started this process, or nobody: then everything here does nothing.

    Args:
        environment: of the process. What concerns this process alone is taken out of it: children must not see it.
        stored: names of the descriptors that this program has the manager hold for its next process.
        notify_timeout_s: seconds to wait for a manager that is busy.

    Attributes:
        inherited: the descriptors that were passed: those of `stored` by their names, sockets that listen as `CLIENTS`.
        watchdog_s: seconds within which a sign of life is expected; None if none is.
    """

    def __init__(
        self, environment: MutableMapping[str, str], stored: Sequence[str] = (), notify_timeout_s: float = 0.0
    ) -> None:
        self._address = environment.pop("NOTIFY_SOCKET", "")
        self._notify_timeout_s = notify_timeout_s
        self.watchdog_s = _parse_watchdog(environment)
        self.inherited = _group_by_name(_take_listen_fds(environment), stored)
        # What could not be told yet.
        self._unsent: Dict[str, str] = {}
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
                self._send(message, [], self._notify_timeout_s)
                self._unsent.clear()

    def notify_reloading(self) -> None:
        """A reload begins; it ends with the next READY=1."""
        # Type=notify-reload of systemd 253 tells by the time which READY=1 belongs to it.
        self.notify("RELOADING=1", f"MONOTONIC_USEC={int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)}")

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

    def _send(self, message: str, descriptors: Sequence[int], timeout_s: float) -> None:
        """Send a message.

        Raises:
            BlockingIOError: its queue, which is short, has been full for so many seconds.
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
    """Tell a manager something.

    Args:
        address: that of the environment variable NOTIFY_SOCKET.
        message: assignments, a line each.
        descriptors: it gets duplicates of them.
        timeout_s: seconds to wait where its queue is full.

    Raises:
        BlockingIOError: its queue has been full for so long.
        OSError: it cannot be told.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(timeout_s)
            # "@" begins the name of an abstract socket.
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
    """Return the descriptors that were passed to this process, with their names, and take them from the environment."""
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
        # Units that give their sockets no name have them named after the unit, "unknown" in old versions.
        is_own = name in stored and not _is_listening(descriptor)
        inherited.setdefault(name if is_own else CLIENTS, []).append(descriptor)
    return inherited


def _is_listening(descriptor: int) -> bool:
    """Whether clients connect there: nothing that a daemon has had kept is such a socket, however a unit names it."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
        return bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
