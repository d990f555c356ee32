"""Stands between a replica and its daemon: starts it, starts it again if it ends, and ends it with the replica.

A replica may be killed at any moment, alone or with the raylet above it, and Ray kills the children of whoever exits.
So this process is nobody's child, and knows by the end of a pipe that the replica is no more; the daemon is its child,
and the kernel ends it with this one. What both leave then, the next replica on this host removes (`work_dirs`).
The daemon has all that it needs in one directory: its configuration, which is written here, its sockets and its cache.

On stdin comes one line, the order in JSON, and then nothing until the end of file: that is the replica's. On stdout go
lines of JSON, the reports. stderr is the log of both.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from weightd_common import endpoints, process_start
from weightd_common.process_start import die_with_parent
from weightd_daemon.platform import exit_watch
from weightd_protocol import limits
from weightd_protocol.errors import InvalidArgument, WeightdError
from weightd_ray.work_dirs import WorkDir, work_dir

Table = Mapping[str, Any]

# Of the names that the daemon puts into the directory: "/", the key, ".sock.channel". The longest path of its sockets.
_MAX_NAME_BYTES = 27

MAX_DIRECTORY_BYTES = limits.MAX_IPC_PATH_BYTES - _MAX_NAME_BYTES

# Who would read an answer has gone when the daemon is told to end: there is nothing to wait for but workers.
_DRAIN_TIMEOUT_S = 2.0


def client_address(directory: Path) -> str:
    """Return where clients reach the daemon that has this directory."""
    return f"unix://{endpoints.unix_path(_socket_address(directory))}"


def config_text(directory: Path, models: Mapping[str, Table]) -> str:
    """Return the file of a daemon that has all that it needs in one directory.

    Raises:
        InvalidArgument: paths of sockets would be too long there.
    """
    size = len(str(directory).encode("utf-8", "surrogateescape"))
    if size > MAX_DIRECTORY_BYTES:
        raise InvalidArgument(
            f"directory: sockets in {directory} would have paths that are too long: expected at most "
            f"{MAX_DIRECTORY_BYTES} bytes, got {size}"
        )
    daemon = {
        "socket": _socket_address(directory),
        "runtime_dir": str(directory),
        "cache_dir": str(directory / "cache"),
        "drain_timeout": _DRAIN_TIMEOUT_S,
    }
    return (
        "\n".join(f"{key} = {_toml_value(value)}" for key, value in {"daemon": daemon, "models": models}.items()) + "\n"
    )


def _socket_address(directory: Path) -> str:
    return f"ipc://{directory}/d"


def _toml_value(value: Any) -> str:
    """Return a value of TOML as TOML has it: text, numbers, booleans and lists are JSON's, tables are inline ones."""
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        return f"{{ {', '.join(f'{_toml_string(key)} = {_toml_value(each)}' for key, each in table.items())} }}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml_value(each) for each in cast('list[Any]', value))}]"
    return _toml_string(value) if isinstance(value, str) else json.dumps(value)


def _toml_string(text: str) -> str:
    # The one character that JSON leaves as it is and TOML does not.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


_ORDER_FD = 0
_REPORT_FD = 1
_LOG_FD = 2

# Of the daemon, beyond those that it gives its requests: workers end, files are removed.
_STOP_TIMEOUT_S = 10.0

# Before a daemon that has ended is started again: twice as much each time, and from the beginning after so long a life.
_INITIAL_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
_BACKOFF_RESET_S = 60.0

# An order is a few hundred bytes: the table of a model.
_MAX_ORDER_BYTES = 256 * 1024

# Exit statuses after which another start would end the same (weightd_daemon.exit_codes): wrong usage or configuration,
# and, in a directory that nobody else has, what cannot be created there.
_PERMANENT_FAILURES = frozenset({64, 73, 78})


def supervisor_command(base: Path) -> list[str]:
    """Return what starts a guard for a replica whose directories are in `base`."""
    return [sys.executable, "-m", __name__, str(base)]


def encode_order(models: Mapping[str, Table]) -> bytes:
    """Return what a guard is told: the tables of the models."""
    return json.dumps({"models": models}).encode() + b"\n"


class Backoff:
    """How long is waited before each start."""

    def __init__(self) -> None:
        self._next_s = _INITIAL_BACKOFF_S

    def next_delay_s(self, uptime_s: float) -> float:
        """Return the seconds to wait after a daemon that has lived so many."""
        if uptime_s >= _BACKOFF_RESET_S:
            self._next_s = _INITIAL_BACKOFF_S
        delay_s, self._next_s = self._next_s, min(2 * self._next_s, _MAX_BACKOFF_S)
        return delay_s


class DaemonSupervisor:
    """Sees to one daemon, until it is told to end.

    Args:
        start: returns a new daemon.
        stop_fds: a descriptor that becomes readable, or ends, when that is so.
        report: tells the replica.
    """

    def __init__(
        self,
        start: Callable[[], subprocess.Popen[bytes]],
        stop_fds: Sequence[int],
        report: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._start = start
        self._stop_fds = stop_fds
        self._report = report
        self._backoff = Backoff()

    def run(self) -> None:
        """Have a daemon all the time."""
        while True:
            started_at = time.monotonic()
            self._report({"starts": True})
            daemon = self._start()
            try:
                should_stop = self._wait(daemon)
            finally:
                _stop_daemon(daemon)
            if should_stop:
                return
            status = daemon.returncode
            if status in _PERMANENT_FAILURES:
                self._report({"failed": f"the daemon ends with status {status}; the log of the replica says why"})
                return
            delay_s = self._backoff.next_delay_s(time.monotonic() - started_at)
            _log(f"the daemon has ended with status {status}: starts it again in {delay_s:g} s")
            if select.select(self._stop_fds, [], [], delay_s)[0]:
                return

    def _wait(self, daemon: subprocess.Popen[bytes]) -> bool:
        """Return when the daemon has ended; or, and then True, when this is to end."""
        exit_fd = exit_watch.watch_exit(daemon.pid)
        try:
            return not {exit_fd}.issuperset(select.select([exit_fd, *self._stop_fds], [], [])[0])
        finally:
            os.close(exit_fd)


def main() -> int:
    """Do all of it; return the exit status."""
    try:
        line = _read_order()
    except InvalidArgument as error:
        _send_report({"failed": str(error)})
        return 1
    if os.fork():
        # Ray kills the children of a worker that exits; this one has things to remove first.
        os._exit(0)
    os.setsid()
    with _stop_signal_fd() as stop_fd:
        try:
            models = json.loads(line)["models"]
            with work_dir(Path(sys.argv[1])) as directory:
                path = directory.path
                (path / "weightd.toml").write_text(config_text(path, models), "utf-8")
                _send_report({"address": client_address(path), "pid": os.getpid()})
                DaemonSupervisor(lambda: _start_daemon(directory), [_ORDER_FD, stop_fd], _send_report).run()
        except WeightdError as error:
            _send_report({"failed": str(error)})
            return 1
        except OSError as error:
            # A write to a full disk says nothing of where that was.
            _send_report({"failed": f"{error.filename or sys.argv[1]}: {error.strerror}"})
            return 1
    return 0


def _start_daemon(work_dir: WorkDir) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    return subprocess.Popen(
        [sys.executable, "-m", "weightd_daemon", "serve", str(work_dir.path / "weightd.toml")],
        stdin=subprocess.DEVNULL,
        stdout=_LOG_FD,
        pass_fds=[work_dir.lock_fd],
        # There is one thread here.
        preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509
    )


def _stop_daemon(daemon: subprocess.Popen[bytes]) -> None:
    """End it, if it has not ended: in order, or else at once."""
    daemon.terminate()
    try:
        daemon.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _read_order() -> str:
    """Return the order, which may come in pieces."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(_ORDER_FD, _MAX_ORDER_BYTES)
        line += chunk
        if not chunk or len(line) > _MAX_ORDER_BYTES:
            raise InvalidArgument(f"expected an order, a line of at most {_MAX_ORDER_BYTES} bytes, got {len(line)}")
    return line.decode()


@contextlib.contextmanager
def _stop_signal_fd() -> Generator[int, None, None]:
    """Return what becomes readable at SIGTERM; a terminal's signals are for others."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _ignore_signal)
    # A thread of the replica may have blocked some, and a new process inherits that.
    process_start.reset_signals(signal.SIGINT, signal.SIGHUP)
    yield reading


def _ignore_signal(number: int, frame: object) -> None:
    """The wakeup is all that is wanted."""


def _send_report(report: Mapping[str, Any]) -> None:
    # Who would read it may have gone: then that is known by the other pipe.
    with contextlib.suppress(BrokenPipeError):
        os.write(_REPORT_FD, json.dumps(report).encode() + b"\n")


def _log(text: str) -> None:
    print(f"weightd_ray: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
