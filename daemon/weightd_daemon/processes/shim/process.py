"""The shim process. `client.start_shim` starts it. Its arguments are the paths that it removes when it exits.

The shim imports little, to stay small, and does little, so that it never has to be replaced. It handles one request at
a time. Requests (left) and replies (right) are lines of JSON:

    {"start": NAME, "argv": [...], "stdin": TEXT, "log": PATH, "environment": {...}}                     {"pid": PID}
        Start a child.
    {"adopt": NAME, "pid": PID, "log": PATH}                                                             {"pid": PID}
        Add a child that another child has forked.
    {"watch": PID}                                                                                       {"pid": PID}
        Send, with the reply, a descriptor that becomes readable when the child exits.
    {"orphans": SESSION}                                         {"pid": SHIM_PID, "children": [[PID, NAME, LOG], ...]}
        Kill the processes in this session that a child has forked and no daemon has adopted; with 0, in any session.
    {"reap": PID}                                                                                  {"status": STATUS}
        Wait until the child has exited. A negative status is the number of a signal.
    {"children": true}                                           {"pid": SHIM_PID, "children": [[PID, NAME, LOG], ...]}
        List the children that have not been reaped.

The reply to a failed request is {"errno": ERRNO, "path": PATH}. Each request has an "id", which its reply repeats. The
shim skips lines that are not requests: a daemon that was killed may have sent only a part of a request. A child stays a
zombie until it is reaped, so that no other process can get its pid.

An orphan is a forked process whose daemon exited before it adopted the process. The next daemon requests that the shim
kill all orphans; otherwise the shim kills them when it exits.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import Collection, Iterable
from typing import Any

from weightd_common import process_start
from weightd_daemon.platform import exit_watch

SOCKET_FD = 3
"""Descriptor of the shim's end of the stream socket pair that connects it with the daemon."""

LOCK_FD = 4
"""Descriptor of the directory on which the shim holds a lock as long as it lives."""

# A service manager may send these signals to every process of the service. The shim ignores them: it exits only when
# the daemon's end of its socket is closed.
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Signals whose default action is restored in children. Otherwise children would inherit that the shim, or Python
# itself, ignores these signals.
_DEFAULT_SIGNALS = (*_IGNORED_SIGNALS, signal.SIGPIPE, signal.SIGXFSZ)

# Key in a reply for the descriptor that the shim sends with the reply. The key is removed before the reply is encoded.
_DESCRIPTOR_KEY = "descriptor"


class Shim:
    """Handles the requests of the daemon, and keeps the list of children, in the order of their start."""

    def __init__(self) -> None:
        self._children: dict[int, tuple[str, str]] = {}

    def handle_request(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: PLR0911 - one for each kind of request
        """Perform the operation that a request names, and return the reply."""
        try:
            if "start" in request:
                pid = _start_child(request["argv"], request["stdin"], request["log"], request["environment"])
                self._children[pid] = request["start"], request["log"]
                return {"pid": pid}
            if "adopt" in request:
                # Refuse a process that is not a child of the shim: for such a process, this call raises an error.
                os.waitid(os.P_PID, request["pid"], os.WEXITED | os.WNOHANG | os.WNOWAIT)
                self._children[request["pid"]] = request["adopt"], request["log"]
                return {"pid": request["pid"]}
            if "watch" in request:
                # Refuse a process that is not a child of the shim, as for "adopt": for such a process, this call raises
                # an error.
                os.waitid(os.P_PID, request["watch"], os.WEXITED | os.WNOHANG | os.WNOWAIT)
                return {"pid": request["watch"], _DESCRIPTOR_KEY: exit_watch.watch_exit(request["watch"])}
            if "orphans" in request:
                kill_all(find_orphans(self._children, request["orphans"]))
            if "reap" in request:
                _, status = os.waitpid(request["reap"], 0)
                del self._children[request["reap"]]
                return {"status": os.waitstatus_to_exitcode(status)}
        except OSError as error:
            return {"errno": error.errno, "path": error.filename}
        except (LookupError, TypeError, ValueError):
            return {"errno": errno.EINVAL, "path": None}
        return {"pid": os.getpid(), "children": [[pid, *each] for pid, each in self._children.items()]}

    def kill_all(self) -> None:
        """Kill every child, the latest first, so that holders outlive their workers."""
        kill_all(reversed(self._children))
        # Kill the orphans after the known children, because a known child can fork further processes until it is
        # killed.
        kill_all(find_orphans(self._children))


def find_orphans(known_pids: Collection[int], session_id: int = 0) -> list[int]:
    """Return the pids of this process's children that are not in `known_pids`.

    With `session_id`, return only the children in this session.
    """
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                stat = file.read()
                # Split the text after the last parenthesis, because the process name, in parentheses, may contain any
                # bytes. The state, the parent's pid, the process group and the session follow.
                _, parent, _, its_session = stat[stat.rindex(b")") + 2 :].split()[:4]
                if int(parent) == os.getpid() and int(entry) not in known_pids and session_id in (0, int(its_session)):
                    found.append(int(entry))
    return found


def kill_all(pids: Iterable[int]) -> None:
    """Kill and reap these children."""
    for pid in pids:
        _kill(pid)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _start_child(argv: list[str], stdin_data: str, log: str, environment: dict[str, str]) -> int:
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    # The child reads its arguments from stdin, because every user of the host can read a command line.
    stdin = os.memfd_create("weightd-order", os.MFD_CLOEXEC)
    try:
        _write_memfd(stdin, stdin_data.encode())
        return os.posix_spawnp(
            argv[0],
            argv,
            environment,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, stdin, 0),
                (os.POSIX_SPAWN_DUP2, output, 1),
                (os.POSIX_SPAWN_DUP2, output, 2),
            ],
            setsid=True,
            setsigdef=_DEFAULT_SIGNALS,
        )
    finally:
        os.close(stdin)
        os.close(output)


def _write_memfd(memory: int, content: bytes) -> None:
    """Write to a memfd and seek to its start."""
    with open(memory, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(memory, 0, os.SEEK_SET)


def _remove(path: str) -> None:
    """Remove a file, or a directory with all its entries."""
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
        for entry in os.listdir(path):
            _remove(f"{path}/{entry}")
        os.rmdir(path)


def _serve(shim: Shim, connection: socket.socket) -> None:
    for line in connection.makefile("rb"):
        try:
            request = json.loads(line)
            number = request["id"]
        except (LookupError, TypeError, ValueError):
            continue
        # Ignore that no daemon is left to read the reply: the loop then reads the end of the stream and ends.
        with contextlib.suppress(BrokenPipeError):
            _send(connection, {"id": number, **shim.handle_request(request)})


def _send(connection: socket.socket, reply: dict[str, Any]) -> None:
    descriptor = reply.pop(_DESCRIPTOR_KEY, None)
    line = json.dumps(reply).encode() + b"\n"
    if descriptor is None:
        connection.sendall(line)
        return
    try:
        socket.send_fds(connection, [line], [descriptor])
    finally:
        os.close(descriptor)


def main() -> None:
    """Serve requests until the daemon's end of the socket is closed; then kill all children and remove the paths.

    The daemon's end counts as closed when no process holds its descriptor or a duplicate of this descriptor.
    """
    process_start.reset_signals(*_IGNORED_SIGNALS)
    os.set_inheritable(LOCK_FD, False)
    shim = Shim()
    with socket.socket(fileno=SOCKET_FD) as link:
        link.set_inheritable(False)
        # `_serve` ends when the daemon's end is closed. It raises this error if the daemon has left a reply unread.
        with contextlib.suppress(ConnectionResetError):
            _serve(shim, link)
        # The `with` block closes the socket only after the children and the paths are gone, because `ShimClient.stop`
        # takes the close as the exit of the shim.
        shim.kill_all()
        for path in sys.argv[1:]:
            _remove(path)
