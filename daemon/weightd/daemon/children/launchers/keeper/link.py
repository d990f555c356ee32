"""The daemon's end of the keeper's socket."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from weightd.daemon.children.launch import Launch
from weightd.daemon.children.launchers.launcher import Kept
from weightd.daemon.host import clock, spawning
from weightd.daemon.host.processes import Process

_log = logging.getLogger("weightd")

LOG = "keeper.log"
"""In its directory: what it says if it fails."""

_CHUNK_BYTES = 65536

_NONE = -1

# Nothing of site-packages, but the modules that this process has found.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from weightd.daemon.children.launchers.keeper import process; process.main()"
)

# It does nothing that takes long: to start a process, or to wait for one that has ended.
_PATIENCE_S = 10.0


class KeeperLost(OSError):
    """The keeper has died, or hangs."""


class Keeper:
    """Has holders and workers started and waited for.

    Args:
        descriptor: this end of the keeper's socket; this object owns it.

    Attributes:
        pid: the keeper's.

    Raises:
        KeeperLost: nobody answers there.
    """

    def __init__(self, descriptor: int) -> None:
        self._link = socket.socket(fileno=descriptor)
        self._link.settimeout(_PATIENCE_S)
        self._readable = select.poll()
        self._readable.register(self._link, select.POLLIN)
        # What has come of lines that are not read yet.
        self._received = b""
        # The last descriptor that has come; it belongs to the last answer.
        self._descriptor = _NONE
        # An answer to a daemon that died before it read it is told from one to this daemon.
        self._ids = itertools.count(time.monotonic_ns())
        try:
            self.pid: int = self._ask({"children": True})["pid"]
        except KeeperLost:
            self._link.close()
            raise

    @property
    def descriptor(self) -> int:
        """Whoever holds a duplicate of this keeps the children alive."""
        return self._link.fileno()

    def kept(self) -> list[Kept]:
        """Return every child that has not been waited for."""
        return [Kept(pid, name, Path(log)) for pid, name, log in self._ask({"children": True})["children"]]

    def end_strays(self) -> None:
        """End what was forked for a daemon that ended before it had it adopted."""
        self._ask({"strays": 0})

    def end_strays_of(self, parent: int) -> None:
        """End what a child that has ended had forked without telling.

        Raises:
            KeeperLost: nobody answers.
        """
        self._ask({"strays": parent})

    def start(self, launch: Launch) -> Process:
        """Start a child in a session of its own.

        Raises:
            OSError: it cannot be started.
        """
        request = {"start": launch.name, "argv": list(launch.command), "stdin": launch.order.decode()}
        answer = self._ask({**request, "log": str(launch.log), "environment": dict(launch.environment)})
        return self.watch(Kept(answer["pid"], launch.name, launch.log))

    def adopt(self, name: str, pid: int, log: Path) -> Process:
        """Have a child watched that another child has forked.

        Raises:
            OSError: there is no such child, or no descriptors are left.
        """
        self._ask({"adopt": name, "pid": pid, "log": str(log)})
        return self.watch(Kept(pid, name, log))

    def watch(self, kept: Kept) -> Process:
        """Have a child watched that has not been waited for.

        Raises:
            OSError: no descriptors are left.
        """
        try:
            # The parent can be told of the exit on every system.
            self._ask({"watch": kept.pid})
            return Process(kept.pid, self._take_descriptor(), kept.log, lambda: self._reap(kept.pid))
        except KeeperLost:
            raise
        except ChildProcessError:
            raise KeeperLost(f"process {kept.pid} is gone with its keeper") from None
        except OSError:
            # Nobody could watch it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(kept.pid, signal.SIGKILL)
            self._reap(kept.pid)
            raise

    def kill(self) -> None:
        """End it, and with it every kept."""
        self._kill()
        self.close()

    def close(self) -> None:
        """Let go of it: unless somebody else holds the socket's end, too, it ends everything."""
        self._link.close()
        self._drop_descriptor()

    def end(self, seconds: float) -> None:
        """Have it end, and wait until it has ended everything; kill it after so long."""
        # It notices this, while the socket still shows when it has exited.
        with contextlib.suppress(OSError):  # it has gone
            self._link.shutdown(socket.SHUT_WR)
        if not self._has_gone(seconds):
            self._kill()
            self._has_gone(seconds)
        self.close()

    def _kill(self) -> None:
        # As long as it lives its pid is its own.
        if not self._has_gone():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _has_gone(self, seconds: float = 0.0) -> bool:
        """Return whether it has exited, or does so within so many seconds: nobody else has its end of the socket."""
        hangup = select.poll()
        # Not what it still has to say.
        hangup.register(self._link, 0)
        return bool(clock.poll(hangup, seconds))

    def _reap(self, pid: int) -> int | None:
        try:
            status: int = self._ask({"reap": pid})["status"]
        except KeeperLost:
            return None  # the kernel has ended it when the keeper died, or it had ended before
        return status

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            number = next(self._ids)
            # After what an earlier daemon may have begun to send.
            self._link.sendall(b"\n" + json.dumps({"id": number, **request}).encode() + b"\n")
            answer = self._answer(number)
        except (OSError, ValueError) as error:
            raise KeeperLost(f"the keeper does not answer: {error}") from None
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]), answer["path"])
        return answer

    def _answer(self, number: int) -> dict[str, Any]:
        """Return the answer to a request; what is before it was for a daemon that has not read it, or not all of it."""
        while True:
            line, newline, rest = self._received.partition(b"\n")
            if not newline:
                # The time-out of `recv` would go on while this process is stopped.
                if not clock.poll(self._readable, _PATIENCE_S):
                    raise OSError("timed out")
                more, descriptors, flags, _ = socket.recv_fds(self._link, _CHUNK_BYTES, 1)
                for each in descriptors:
                    os.set_inheritable(each, False)
                if descriptors or flags & socket.MSG_CTRUNC:
                    self._drop_descriptor()
                    self._descriptor = descriptors[0] if descriptors else _NONE
                if not more:
                    raise OSError("it has gone")
                self._received += more
                continue
            self._received = rest
            with contextlib.suppress(ValueError):
                answer: Any = json.loads(line)
                if isinstance(answer, dict) and answer.get("id") == number:  # pyright: ignore[reportUnknownMemberType]
                    return cast("dict[str, Any]", answer)

    def _take_descriptor(self) -> int:
        descriptor, self._descriptor = self._descriptor, _NONE
        if descriptor == _NONE:
            # The kernel has closed it.
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return descriptor

    def _drop_descriptor(self) -> None:
        """Close a descriptor that was sent to a daemon before this one, which has not taken it."""
        if self._descriptor != _NONE:
            os.close(self._descriptor)
            self._descriptor = _NONE


def start(directory: Path, *others: Path) -> Keeper:
    """Start a keeper that removes the directory and the other paths at its end. It holds a lock on the directory.

    Raises:
        OSError: it cannot be started.
    """
    ours, its = socket.socketpair()
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # The same errno as of a process that cannot be started.
            raise OSError(errno.EBUSY, "another keeper has the directory", str(directory)) from None
        # Isolated, and without site-packages: it needs nothing of them, and they would double its size.
        # The directory last: as long as it is there, whoever waits for its lock waits for everything.
        argv = [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps(sys.path), *map(str, others), str(directory)]
        # Not the daemon's output: whoever reads that waits for its end.
        with Path(os.devnull).open("rb") as nothing, os.fdopen(_log_of(directory), "ab") as log:
            output = log.fileno()
            spawning.spawn(argv, os.environ, [nothing.fileno(), output, output, its.fileno(), lock])
        return Keeper(ours.detach())
    finally:
        ours.close()
        its.close()
        os.close(lock)


def _log_of(directory: Path) -> int:
    return os.open(directory / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def wait_until_gone(directory: Path, seconds: float) -> bool:
    """Wait until no keeper has a lock on the directory; return False if one still has it after so many seconds."""
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    deadline = clock.now() + seconds
    told = False
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told:
                    _log.info("waiting for the processes of the daemon before this one to end")
                    told = True
                if clock.now() >= deadline:
                    return False
                time.sleep(0.02)
            else:
                return True
    finally:
        os.close(lock)
