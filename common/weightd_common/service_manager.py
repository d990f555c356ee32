"""How a service manager is spoken to, as systemd's are: sd_notify(3), sd_listen_fds(3).

The protocol is an environment variable and a datagram each, so it is written here; systemd is its first speaker, but
other managers (podman, s6) speak parts of it.
"""

from __future__ import annotations

import array
import os
import socket
import time
from typing import List, Mapping, MutableMapping, Sequence, Tuple

SEND_TIMEOUT_S = 2.0
"""Seconds for what is worth waiting for: the queue of a manager is short."""

# sd_listen_fds(3): the first descriptor that is passed.
_FIRST_DESCRIPTOR = 3

_LISTEN_VARIABLES = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


def send(address: str, message: str, descriptors: Sequence[int] = (), timeout_s: float = SEND_TIMEOUT_S) -> None:
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


def reloading_message() -> Tuple[str, str]:
    """Return what says that a reload begins, which ends with the next READY=1."""
    # Type=notify-reload of systemd 253 tells by the time which READY=1 belongs to it.
    return "RELOADING=1", f"MONOTONIC_USEC={int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)}"


def take_listen_fds(environment: MutableMapping[str, str]) -> List[Tuple[int, str]]:
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
