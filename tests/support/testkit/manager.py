"""Minimal service manager: socket activation, file descriptor store and sd_notify, as systemd provides them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence

_LIMIT_S = 60.0

# Moves descriptors to 3 and above and sets LISTEN_PID to the pid of this process, see sd_listen_fds(3).
# They are first duplicated to numbers above all of them: dup2 would close one that has not been duplicated yet.
_EXEC = """
import fcntl, os, sys
count = int(sys.argv[1])
given = [int(each) for each in sys.argv[2 : 2 + count]]
above = max(3 + count, *given) + 1
moved = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in given]
os.closerange(3, above)
for number, each in enumerate(moved, 3):
    os.dup2(each, number)
    os.close(each)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[2 + count], sys.argv[2 + count :])
"""


class Manager:
    """A service manager that passes the listeners and the stored descriptors from one daemon to the next.

    Args:
        listening: path of the socket for ZeroMQ clients; the Unix socket for other clients is `listening`.unix.
        notified: path of the notification socket.
        watchdog_s: watchdog interval of the daemons, in seconds.

    Attributes:
        notifications: the assignments that daemons have sent, in order.
        stored_fds: the file descriptors that daemons have stored, by name.
    """

    def __init__(self, listening: Path, notified: Path, watchdog_s: float = 30.0) -> None:
        self.notifications: List[str] = []
        self.stored_fds: Dict[str, int] = {}
        self._watchdog_s = watchdog_s
        self._news = threading.Condition()
        self._ended = False
        self._listeners = [_bound(socket.SOCK_STREAM, each) for each in (listening, Path(f"{listening}.unix"))]
        for each in self._listeners:
            each.listen(128)
        self._path = notified
        self._notified = _bound(socket.SOCK_DGRAM, notified)
        self._receiver = threading.Thread(target=self._receive_notifications, daemon=True)
        self._receiver.start()

    def popen(self, command: Sequence[str], environment: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
        """Start a daemon. `options` are keyword arguments of Popen."""
        passed = [*(("clients", each.fileno()) for each in self._listeners), *self.stored_fds.items()]
        names, descriptors = zip(*passed)
        variables = {
            "NOTIFY_SOCKET": str(self._path),
            "WATCHDOG_USEC": str(int(1e6 * self._watchdog_s)),
            "LISTEN_FDS": str(len(passed)),
            "LISTEN_FDNAMES": ":".join(names),
        }
        argv = [sys.executable, "-S", "-c", _EXEC, str(len(passed)), *map(str, descriptors), *command]
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, env={**environment, **variables}, pass_fds=descriptors, **options
        )

    def drain_notifications(self) -> None:
        """Wait until all notifications sent so far are received, as systemd does before it handles an exit."""
        beyond = len(self.notifications)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"X_END=1", str(self._path))
        self.wait_for_notification("X_END=1", beyond)

    def wait_for_notification(self, assignment: str, beyond: int = 0) -> int:
        """Wait for a notification from index `beyond` on that starts with `assignment`; return the index after it."""
        deadline = time.monotonic() + _LIMIT_S

        def index() -> int:
            return next(
                (i for i, each in enumerate(self.notifications) if i >= beyond and each.startswith(assignment)), -1
            )

        with self._news:
            self._news.wait_for(lambda: index() >= 0, deadline - time.monotonic())
            assert index() >= 0, f"expected notification {assignment!r}, got {self.notifications[beyond:]}"
            return index() + 1

    def forget(self) -> None:
        """Close the stored file descriptors, as systemd does when the service stops."""
        while self.stored_fds:
            os.close(self.stored_fds.popitem()[1])

    def close(self) -> None:
        """Close all descriptors and stop the thread. The paths of the sockets stay."""
        self.forget()
        self._ended = True
        self._notified.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._receiver.join()
        self._notified.close()
        for each in self._listeners:
            each.close()

    def _receive_notifications(self) -> None:
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._notified, 65536, 4)
            if self._ended:
                return
            assert message, "a notification without an assignment"
            assignments: Dict[str, str] = {}
            for each in message.decode().split("\n"):
                key, _, value = each.partition("=")
                assignments[key] = value
            name = assignments.get("FDNAME", "")
            if "FDSTOREREMOVE" in assignments and name in self.stored_fds:
                os.close(self.stored_fds.pop(name))
            for descriptor in descriptors:
                # Python's recv_fds does not set O_CLOEXEC; a shim that inherited its own link would never exit.
                os.set_inheritable(descriptor, False)
            if "FDSTORE" in assignments:
                self.stored_fds[name] = descriptors[0]
            with self._news:
                self.notifications += [f"{key}={value}" for key, value in assignments.items()]
                self._news.notify_all()


def _bound(kind: int, path: Path) -> socket.socket:
    """Return a socket bound to a path. The path stays when the socket is closed."""
    each = socket.socket(socket.AF_UNIX, kind)
    each.bind(str(path))
    return each
