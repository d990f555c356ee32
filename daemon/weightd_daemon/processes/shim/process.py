"""The process itself, which `client.start_shim` starts with PATH... as its arguments.

It imports little, so that it stays small, and does little, so that it never has to be replaced. It answers one request
at a time:

    {"start": NAME, "argv": [...], "stdin": TEXT, "log": PATH, "environment": {...}}                     {"pid": PID}
    {"adopt": NAME, "pid": PID, "log": PATH}        a child that another has forked     {"pid": PID}
    {"watch": PID}             the answer carries a descriptor that becomes readable when the child exits {"pid": PID}
    {"orphans": SESSION}       ends what was forked and not adopted, of this session or, with 0, of any
                                                                         as for "children"
    {"reap": PID}              waits for its end                         {"status": STATUS}, negative for a signal
    {"children": true}         those that have not been reaped           {"pid": PID, "children": [[PID, NAME, LOG]]}

Requests and answers are lines. An error is {"errno": ERRNO, "path": PATH}. Each answer has the "id" of its request. A
line that is no request is what a daemon was sending when it was killed: it is skipped. A child stays a zombie until it
is reaped: until then its pid is its own. One that was forked for a daemon which ended before it had it adopted is
nobody's: the next one has it ended, and so does the end. Each PATH is removed at the end, a directory with all that is
in it.
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
"""Descriptor of its end of a pair of stream sockets."""

LOCK_FD = 4
"""Descriptor that holds a lock for as long as this process lives."""

# A service manager's "kill" may mean every process of the service: whoever ends the children, it is not that.
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# These and what Python ignores a child would ignore, too.
_DEFAULT_SIGNALS = (*_IGNORED_SIGNALS, signal.SIGPIPE, signal.SIGXFSZ)

# Of an answer with which a descriptor is sent, which is no part of the line.
_DESCRIPTOR_KEY = "descriptor"


class Shim:
    """The children, in the order in which they were started."""

    def __init__(self) -> None:
        self._children: dict[int, tuple[str, str]] = {}

    def handle_request(self, request: dict[str, Any]) -> dict[str, Any]:  # noqa: PLR0911 - one for each kind of request
        """Do what is asked."""
        try:
            if "start" in request:
                pid = _start_child(request["argv"], request["stdin"], request["log"], request["environment"])
                self._children[pid] = request["start"], request["log"]
                return {"pid": pid}
            if "adopt" in request:
                # Fails where it is not a child.
                os.waitid(os.P_PID, request["pid"], os.WEXITED | os.WNOHANG | os.WNOWAIT)
                self._children[request["pid"]] = request["adopt"], request["log"]
                return {"pid": request["pid"]}
            if "watch" in request:
                # As above.
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
        """Kill every child, those that came last first: holders outlive their workers."""
        kill_all(reversed(self._children))
        # After those that could make more.
        kill_all(find_orphans(self._children))


def find_orphans(known_pids: Collection[int], session_id: int = 0) -> list[int]:
    """Return the children of this process, as the kernel tells, that are not known; with `session_id` those of that."""
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                stat = file.read()
                # The name, in parentheses, may hold anything; state, parent, group and session follow.
                _, parent, _, its_session = stat[stat.rindex(b")") + 2 :].split()[:4]
                if int(parent) == os.getpid() and int(entry) not in known_pids and session_id in (0, int(its_session)):
                    found.append(int(entry))
    return found


def kill_all(pids: Iterable[int]) -> None:
    """Kill these children, and wait for their ends."""
    for pid in pids:
        _kill(pid)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _start_child(argv: list[str], stdin_data: str, log: str, environment: dict[str, str]) -> int:
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    # Not by the command line, which every user of the host may read.
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
    """Write to a file in memory, and go back to its begin."""
    with open(memory, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(memory, 0, os.SEEK_SET)


def _remove(path: str) -> None:
    """Remove a file, or a directory with all that is in it."""
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
        # Where nobody is left to hear it, the end of the lines comes next.
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
    """Serve until the other end of the socket is closed by everybody; then leave nothing behind."""
    process_start.reset_signals(*_IGNORED_SIGNALS)
    os.set_inheritable(LOCK_FD, False)
    shim = Shim()
    with socket.socket(fileno=SOCKET_FD) as link:
        link.set_inheritable(False)
        # Nobody is left, either way; a reset says that they have not read the last answer.
        with contextlib.suppress(ConnectionResetError):
            _serve(shim, link)
        # Its close says that all this is done: `ShimClient.stop` waits for it.
        shim.kill_all()
        for path in sys.argv[1:]:
            _remove(path)
