"""The daemon's side of the connection to the shim."""

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
"""Name of the file in the shim's directory to which the shim writes its stdout and stderr."""

_CHUNK_BYTES = 65536

_NO_DESCRIPTOR = -1

# The Python code of the shim process. It sets the module path of this process, because the shim runs without
# site-packages.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from weightd_daemon.processes.shim import process; process.main()"
)

# Seconds that the daemon waits for a reply of the shim. The shim's operations are short: it starts processes, and reaps
# processes that have exited.
_TIMEOUT_S = 10.0


class ShimLost(OSError):
    """The shim has exited or does not reply."""


class ShimClient:
    """Client of a shim: starts, adopts and reaps holders and workers through it.

    Args:
        descriptor: the daemon's end of the shim's socket, which this object owns.

    Attributes:
        pid: the pid of the shim.

    Raises:
        ShimLost: the shim does not reply.
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.settimeout(_TIMEOUT_S)
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)
        # The bytes of replies that are not complete or not parsed yet.
        self._buffer = b""
        # The descriptor that was received with the last reply, until `_take_descriptor` returns it.
        self._received_descriptor = _NO_DESCRIPTOR
        # Numbers that no earlier daemon has used for its requests. By the number, `_read_reply` recognizes and skips a
        # reply to an earlier daemon that is still in the socket.
        self._request_ids = itertools.count(time.monotonic_ns())
        try:
            self.pid: int = self._call({"children": True})["pid"]
        except ShimLost:
            self._socket.close()
            raise

    @property
    def descriptor(self) -> int:
        """The daemon's end of the shim's socket. The shim exits when this descriptor and its duplicates are closed."""
        return self._socket.fileno()

    def surviving_processes(self) -> list[SurvivingProcess]:
        """Return every child that has not been reaped."""
        return [SurvivingProcess(pid, name, Path(log)) for pid, name, log in self._call({"children": True})["children"]]

    def kill_orphans(self) -> None:
        """Kill the processes that were forked for an earlier daemon and that no daemon has adopted."""
        self._call({"orphans": 0})

    def kill_orphans_of(self, parent: int) -> None:
        """Kill the processes that the exited child with the pid `parent` had forked but not reported.

        Raises:
            ShimLost: the shim does not reply.
        """
        self._call({"orphans": parent})

    def start(self, process_spec: ProcessSpec) -> ChildProcess:
        """Start a child in a new session.

        Raises:
            OSError: the child cannot be started.
        """
        request = {
            "start": process_spec.name,
            "argv": list(process_spec.command),
            "stdin": process_spec.stdin_data.decode(),
        }
        reply = self._call({**request, "log": str(process_spec.log), "environment": dict(process_spec.environment)})
        return self.watch(SurvivingProcess(reply["pid"], process_spec.name, process_spec.log))

    def adopt(self, name: str, pid: int, log: Path) -> ChildProcess:
        """Watch a child that another child has forked.

        Raises:
            OSError: there is no such child, or no descriptors are left.
        """
        self._call({"adopt": name, "pid": pid, "log": str(log)})
        return self.watch(SurvivingProcess(pid, name, log))

    def watch(self, survivor: SurvivingProcess) -> ChildProcess:
        """Watch a child that has not been reaped. A child that cannot be watched is killed.

        Raises:
            OSError: no descriptors are left.
        """
        try:
            # The shim creates the descriptor that reports the exit: on a system without pidfds, only the parent of a
            # process can watch its exit.
            self._call({"watch": survivor.pid})
            return ChildProcess(survivor.pid, self._take_descriptor(), survivor.log, lambda: self._reap(survivor.pid))
        except ShimLost:
            raise
        except ChildProcessError:
            raise ShimLost(f"process {survivor.pid} exited with its shim") from None
        except OSError:
            # Kill the child: without a descriptor, the daemon would not notice its exit.
            with contextlib.suppress(ProcessLookupError):
                os.kill(survivor.pid, signal.SIGKILL)
            self._reap(survivor.pid)
            raise

    def kill(self) -> None:
        """Kill the shim, and thereby all its children."""
        self._kill()
        self.close()

    def close(self) -> None:
        """Close the socket. The shim then kills its children and exits, unless a service manager holds a duplicate."""
        self._socket.close()
        self._drop_descriptor()

    def stop(self, timeout_s: float) -> None:
        """Stop the shim with its children, and wait for its exit; after `timeout_s` seconds, kill the shim."""
        # The shutdown makes the shim read the end of the stream and exit. The daemon's end stays open for reading, so
        # that `_has_exited` can detect the exit.
        with contextlib.suppress(OSError):  # the shim has exited
            self._socket.shutdown(socket.SHUT_WR)
        if not self._has_exited(timeout_s):
            self._kill()
            self._has_exited(timeout_s)
        self.close()

    def _kill(self) -> None:
        # As long as the shim has not exited, no other process can have its pid, so the signal cannot hit another
        # process.
        if not self._has_exited():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _has_exited(self, timeout_s: float = 0.0) -> bool:
        """Return whether the shim exits within `timeout_s` seconds. Its exit closes its end of the socket."""
        poller = select.poll()
        # Without POLLIN, the poll ignores unread replies. It reports only that the shim's end was closed.
        poller.register(self._socket, 0)
        return bool(event_loop.poll(poller, timeout_s))

    def _reap(self, pid: int) -> int | None:
        try:
            status: int = self._call({"reap": pid})["status"]
        except ShimLost:
            return None  # only the shim, which has exited, could read the exit status
        return status

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            request_id = next(self._request_ids)
            # The first newline ends a request of which an earlier daemon may have sent only a part.
            self._socket.sendall(b"\n" + json.dumps({"id": request_id, **request}).encode() + b"\n")
            reply = self._read_reply(request_id)
        except (OSError, ValueError) as error:
            raise ShimLost(f"the shim does not answer: {error}") from None
        if "errno" in reply:
            raise OSError(reply["errno"], os.strerror(reply["errno"]), reply["path"])
        return reply

    def _read_reply(self, request_id: int) -> dict[str, Any]:
        """Return the reply to a request. Skip replies to earlier daemons, even incomplete ones."""
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if not newline:
                # Unlike a timeout of `recv`, the timeout of `event_loop.poll` does not count the time for which this
                # process is suspended, for example by SIGSTOP.
                if not event_loop.poll(self._poller, _TIMEOUT_S):
                    raise OSError("timed out")
                more, descriptors, flags, _ = socket.recv_fds(self._socket, _CHUNK_BYTES, 1)
                for each in descriptors:
                    os.set_inheritable(each, False)
                if descriptors or flags & socket.MSG_CTRUNC:
                    self._drop_descriptor()
                    self._received_descriptor = descriptors[0] if descriptors else _NO_DESCRIPTOR
                if not more:
                    raise OSError("it has disconnected")
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
            # The kernel has discarded the descriptor, because this process has too many open descriptors.
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return descriptor

    def _drop_descriptor(self) -> None:
        """Close a received descriptor that is not used, such as one for an earlier daemon."""
        if self._received_descriptor != _NO_DESCRIPTOR:
            os.close(self._received_descriptor)
            self._received_descriptor = _NO_DESCRIPTOR


def start_shim(directory: Path, *extra_paths: Path) -> ShimClient:
    """Start a shim. It holds a lock on `directory`, and removes `directory` and `extra_paths` when it exits.

    Raises:
        OSError: the shim cannot be started.
    """
    ours, theirs = socket.socketpair()
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Raise a plain OSError, as for every other reason why the shim cannot be started. Its text names the
            # reason.
            raise OSError(errno.EBUSY, "another shim uses the directory", str(directory)) from None
        # Python runs isolated and without site-packages: the shim does not need these packages, and they would double
        # its memory. `directory` is the last argument, so that the shim removes it last: `wait_until_exited` takes the
        # absence of `directory` as the sign that the shim has finished.
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
        # The shim does not inherit the daemon's stdout and stderr. If these are pipes, their readers would otherwise
        # wait until the shim has exited, too.
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
    """Wait until no shim holds a lock on `directory`. Return False if a shim still does after `timeout_s` seconds."""
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
