"""The daemon's end of the shim's socket."""

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

from weightd_daemon.platform import event_loop, process_spawner
from weightd_daemon.platform.processes import ChildProcess
from weightd_daemon.processes.spec import ProcessSpec, SurvivingProcess

_log = logging.getLogger("weightd")

LOG_NAME = "shim.log"
"""In its directory: what it says if it fails."""

_CHUNK_BYTES = 65536

_NO_DESCRIPTOR = -1

# Nothing of site-packages, but the modules that this process has found.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from weightd_daemon.processes.shim import process; process.main()"
)

# It does nothing that takes long: to start a process, or to wait for one that has ended.
_TIMEOUT_S = 10.0


class ShimLost(OSError):
    """The shim has died, or hangs."""


class ShimClient:
    """Has holders and workers started and waited for.

    Args:
        descriptor: this end of the shim's socket; this object owns it.

    Attributes:
        pid: the shim's.

    Raises:
        ShimLost: nobody answers there.
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.settimeout(_TIMEOUT_S)
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)
        # What has come of lines that are not read yet.
        self._buffer = b""
        # The last descriptor that has come; it belongs to the last answer.
        self._received_descriptor = _NO_DESCRIPTOR
        # An answer to a daemon that died before it read it is told from one to this daemon.
        self._request_ids = itertools.count(time.monotonic_ns())
        try:
            self.pid: int = self._call({"children": True})["pid"]
        except ShimLost:
            self._socket.close()
            raise

    @property
    def descriptor(self) -> int:
        """Whoever holds a duplicate of this keeps the children alive."""
        return self._socket.fileno()

    def surviving_processes(self) -> list[SurvivingProcess]:
        """Return every child that has not been waited for."""
        return [SurvivingProcess(pid, name, Path(log)) for pid, name, log in self._call({"children": True})["children"]]

    def kill_orphans(self) -> None:
        """End what was forked for a daemon that ended before it had it adopted."""
        self._call({"orphans": 0})

    def kill_orphans_of(self, parent: int) -> None:
        """End what a child that has ended had forked without telling.

        Raises:
            ShimLost: nobody answers.
        """
        self._call({"orphans": parent})

    def start(self, process_spec: ProcessSpec) -> ChildProcess:
        """Start a child in a session of its own.

        Raises:
            OSError: it cannot be started.
        """
        request = {
            "start": process_spec.name,
            "argv": list(process_spec.command),
            "stdin": process_spec.stdin_data.decode(),
        }
        reply = self._call({**request, "log": str(process_spec.log), "environment": dict(process_spec.environment)})
        return self.watch(SurvivingProcess(reply["pid"], process_spec.name, process_spec.log))

    def adopt(self, name: str, pid: int, log: Path) -> ChildProcess:
        """Have a child watched that another child has forked.

        Raises:
            OSError: there is no such child, or no descriptors are left.
        """
        self._call({"adopt": name, "pid": pid, "log": str(log)})
        return self.watch(SurvivingProcess(pid, name, log))

    def watch(self, survivor: SurvivingProcess) -> ChildProcess:
        """Have a child watched that has not been waited for.

        Raises:
            OSError: no descriptors are left.
        """
        try:
            # The parent can be told of the exit on every system.
            self._call({"watch": survivor.pid})
            return ChildProcess(survivor.pid, self._take_descriptor(), survivor.log, lambda: self._reap(survivor.pid))
        except ShimLost:
            raise
        except ChildProcessError:
            raise ShimLost(f"process {survivor.pid} is gone with its shim") from None
        except OSError:
            # Nobody could watch it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(survivor.pid, signal.SIGKILL)
            self._reap(survivor.pid)
            raise

    def kill(self) -> None:
        """End it, and with it every kept."""
        self._kill()
        self.close()

    def close(self) -> None:
        """Let go of it: unless somebody else holds the socket's end, too, it ends everything."""
        self._socket.close()
        self._drop_descriptor()

    def stop(self, timeout_s: float) -> None:
        """Have it end, and wait until it has ended everything; kill it after so long."""
        # It notices this, while the socket still shows when it has exited.
        with contextlib.suppress(OSError):  # it has gone
            self._socket.shutdown(socket.SHUT_WR)
        if not self._has_exited(timeout_s):
            self._kill()
            self._has_exited(timeout_s)
        self.close()

    def _kill(self) -> None:
        # As long as it lives its pid is its own.
        if not self._has_exited():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _has_exited(self, timeout_s: float = 0.0) -> bool:
        """Return whether it has exited, or does so within so many seconds: nobody else has its end of the socket."""
        poller = select.poll()
        # Not what it still has to say.
        poller.register(self._socket, 0)
        return bool(event_loop.poll(poller, timeout_s))

    def _reap(self, pid: int) -> int | None:
        try:
            status: int = self._call({"reap": pid})["status"]
        except ShimLost:
            return None  # the kernel has ended it when the shim died, or it had ended before
        return status

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            request_id = next(self._request_ids)
            # After what an earlier daemon may have begun to send.
            self._socket.sendall(b"\n" + json.dumps({"id": request_id, **request}).encode() + b"\n")
            reply = self._read_reply(request_id)
        except (OSError, ValueError) as error:
            raise ShimLost(f"the shim does not answer: {error}") from None
        if "errno" in reply:
            raise OSError(reply["errno"], os.strerror(reply["errno"]), reply["path"])
        return reply

    def _read_reply(self, request_id: int) -> dict[str, Any]:
        """Return the answer to a request; what is before it was for a daemon that has not read it, or not all of it."""
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if not newline:
                # The time-out of `recv` would go on while this process is stopped.
                if not event_loop.poll(self._poller, _TIMEOUT_S):
                    raise OSError("timed out")
                more, descriptors, flags, _ = socket.recv_fds(self._socket, _CHUNK_BYTES, 1)
                for each in descriptors:
                    os.set_inheritable(each, False)
                if descriptors or flags & socket.MSG_CTRUNC:
                    self._drop_descriptor()
                    self._received_descriptor = descriptors[0] if descriptors else _NO_DESCRIPTOR
                if not more:
                    raise OSError("it has gone")
                self._buffer += more
                continue
            self._buffer = rest
            with contextlib.suppress(ValueError):
                answer: Any = json.loads(line)
                if isinstance(answer, dict) and answer.get("id") == request_id:  # pyright: ignore[reportUnknownMemberType]
                    return cast("dict[str, Any]", answer)

    def _take_descriptor(self) -> int:
        descriptor, self._received_descriptor = self._received_descriptor, _NO_DESCRIPTOR
        if descriptor == _NO_DESCRIPTOR:
            # The kernel has closed it.
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return descriptor

    def _drop_descriptor(self) -> None:
        """Close a descriptor that was sent to a daemon before this one, which has not taken it."""
        if self._received_descriptor != _NO_DESCRIPTOR:
            os.close(self._received_descriptor)
            self._received_descriptor = _NO_DESCRIPTOR


def start_shim(directory: Path, *extra_paths: Path) -> ShimClient:
    """Start a shim that removes the directory and the other paths at its end. It holds a lock on the directory.

    Raises:
        OSError: it cannot be started.
    """
    ours, theirs = socket.socketpair()
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # The same errno as of a process that cannot be started.
            raise OSError(errno.EBUSY, "another shim has the directory", str(directory)) from None
        # Isolated, and without site-packages: it needs nothing of them, and they would double its size.
        # The directory last: as long as it is there, whoever waits for its lock waits for everything.
        argv = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _PROGRAM,
            json.dumps(sys.path),
            *map(str, extra_paths),
            str(directory),
        ]
        # Not the daemon's output: whoever reads that waits for its end.
        with Path(os.devnull).open("rb") as nothing, os.fdopen(_open_log(directory), "ab") as log:
            output = log.fileno()
            process_spawner.spawn(argv, os.environ, [nothing.fileno(), output, output, theirs.fileno(), lock])
        return ShimClient(ours.detach())
    finally:
        ours.close()
        theirs.close()
        os.close(lock)


def _open_log(directory: Path) -> int:
    return os.open(directory / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def wait_until_exited(directory: Path, timeout_s: float) -> bool:
    """Wait until no shim has a lock on the directory; return False if one still has it after so many seconds."""
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    deadline = event_loop.now() + timeout_s
    has_logged = False
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not has_logged:
                    _log.info("waiting for the processes of the previous daemon to end")
                    has_logged = True
                if event_loop.now() >= deadline:
                    return False
                time.sleep(0.02)
            else:
                return True
    finally:
        os.close(lock)
