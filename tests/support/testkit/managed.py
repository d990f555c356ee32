"""A daemon as a service manager runs it: it tells how it goes, is passed sockets, and has descriptors kept."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from testkit.service import Service

_LIMIT_S = 60.0

# Puts descriptors where sd_listen_fds(3) says, with the pid that only the process itself knows.
_EXEC = """
import os, sys
count = int(sys.argv[1])
passed = [os.dup2(int(each), 100 + index) for index, each in enumerate(sys.argv[2 : 2 + count])]
os.closerange(3, 100)
for index, each in enumerate(passed):
    os.dup2(each, 3 + index)
os.closerange(100, 200)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[2 + count], sys.argv[2 + count :])
"""


class ManagedService(Service):
    """A `Service` that can be restarted while its processes go on, as under systemd.

    Attributes:
        told: each assignment that the daemons have sent, in order.
    """

    watchdog_s = 30.0

    def __enter__(self) -> ManagedService:
        self.told: list[str] = []
        self._ended = False
        self._kept: dict[str, int] = {}
        self._news = threading.Condition()
        self._listener: socket.socket | None = None
        super().__enter__()
        return self

    def __exit__(self, *arguments: Any) -> None:
        try:
            super().__exit__(*arguments)
        finally:
            self.forget()
            self._ended = True
            self._notified.shutdown(socket.SHUT_RDWR)  # which the thread that reads it hears
            self._hearing.join()
            self._notified.close()
            if self._listener is not None:
                self._listener.close()

    def restart(self, number: int) -> int:
        """End the daemon by a signal, and start the next one as soon as it is gone; return the exit status."""
        os.kill(self.pid, number)
        status = self.wait()
        self.start_again()
        return status

    def wait(self) -> int:
        """Wait for the end of the daemon; return its exit status."""
        status = self._process.wait(_LIMIT_S)
        self._log.finish()
        # systemd, too, hears what a process has said before it hears of its end.
        beyond = len(self.told)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"X_END=1", str(self._runtime / "notify"))
        self.wait_until_told("X_END=1", beyond)
        return status

    def start_again(self) -> None:
        """Start the next daemon."""
        self._launch(self.config)

    def forget(self) -> None:
        """Close what the daemon wanted kept, as at the end of the service."""
        while self._kept:
            os.close(self._kept.popitem()[1])

    def wait_until_told(self, assignment: str, beyond: int = 0) -> int:
        """Wait until an assignment of `told` from this index on begins so; return the index after it."""
        deadline = time.monotonic() + _LIMIT_S

        def index() -> int:
            return next((i for i, each in enumerate(self.told) if i >= beyond and each.startswith(assignment)), -1)

        with self._news:
            self._news.wait_for(lambda: index() >= 0, deadline - time.monotonic())
            assert index() >= 0, f"not told {assignment!r}, but {self.told[beyond:]}"
            return index() + 1

    def _popen(self, command: list[str]) -> subprocess.Popen[str]:
        if self._listener is None:
            self._listener = _bound(socket.SOCK_STREAM, Path(self.address[len("ipc://") :]))
            self._listener.listen(128)
            self._notified = _bound(socket.SOCK_DGRAM, self._runtime / "notify")
            self._hearing = threading.Thread(target=self._hear, daemon=True)
            self._hearing.start()
        passed = {"clients": self._listener.fileno(), **self._kept}
        environment = {
            **self._env,
            "NOTIFY_SOCKET": str(self._runtime / "notify"),
            "WATCHDOG_USEC": str(int(1e6 * self.watchdog_s)),
            "LISTEN_FDS": str(len(passed)),
            "LISTEN_FDNAMES": ":".join(passed),
        }
        argv = [sys.executable, "-S", "-c", _EXEC, str(len(passed)), *map(str, passed.values()), *command]
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            pass_fds=tuple(passed.values()),
        )

    def _hear(self) -> None:
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._notified, 65536, 4)
            if self._ended:
                return
            assert message, "a notification without an assignment"
            assignments: dict[str, str] = {}
            for each in message.decode().split("\n"):
                key, _, value = each.partition("=")
                assignments[key] = value
            name = assignments.get("FDNAME", "")
            if "FDSTOREREMOVE" in assignments and name in self._kept:
                os.close(self._kept.pop(name))
            if "FDSTORE" in assignments:
                self._kept[name] = descriptors[0]
            with self._news:
                self.told += [f"{key}={value}" for key, value in assignments.items()]
                self._news.notify_all()


def _bound(kind: int, path: Path) -> socket.socket:
    """A socket bound there, which nothing is left of when it is closed but the path."""
    each = socket.socket(socket.AF_UNIX, kind)
    each.bind(str(path))
    return each
