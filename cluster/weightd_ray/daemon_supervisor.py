"""The process between a replica and its daemon: keeps the daemon running, and stops it when the replica ends.

A replica may be killed at any moment, alone or together with its raylet, and Ray kills the children of a worker that
exits. Therefore the supervisor detaches from the replica, and detects the replica's end by the end of file on a pipe.
The daemon is a child of the supervisor, and the kernel kills the daemon if the supervisor dies. In that case the next
replica on the host removes the files of the supervisor and the daemon (`work_dirs`). One directory contains everything
that the daemon needs: its sockets, its cache and its configuration, which the supervisor writes.

The supervisor reads an order, one line of JSON with the model tables, from stdin. The end of file after this line means
that the replica stops or has been killed. Each line on stdout is a report to the replica in JSON. stderr is the log of
the supervisor and the daemon.
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

# Bytes of the longest socket name that the daemon adds to the directory: "/", the daemon's key and ".sock.channel".
_MAX_NAME_BYTES = 27

MAX_DIRECTORY_BYTES = limits.MAX_IPC_PATH_BYTES - _MAX_NAME_BYTES

# Seconds of the daemon's drain timeout. When the supervisor stops the daemon, the replica no longer reads responses, so
# the daemon only has to wait for its workers.
_DRAIN_TIMEOUT_S = 2.0


def client_address(directory: Path) -> str:
    """Return the client address of the daemon in a directory."""
    return f"unix://{endpoints.unix_path(_socket_address(directory))}"


def config_text(directory: Path, models: Mapping[str, Table]) -> str:
    """Return the configuration file of a daemon whose files are all in one directory.

    Raises:
        InvalidArgument: the path is too long for sockets.
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
    """Return a value in TOML syntax. Only tables differ from JSON: they become inline tables."""
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        return f"{{ {', '.join(f'{_toml_string(key)} = {_toml_value(each)}' for key, each in table.items())} }}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml_value(each) for each in cast('list[Any]', value))}]"
    return _toml_string(value) if isinstance(value, str) else json.dumps(value)


def _toml_string(text: str) -> str:
    # JSON permits DEL (0x7f) in strings, but TOML does not.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


_ORDER_FD = 0
_REPORT_FD = 1
_LOG_FD = 2

# Seconds until a daemon that does not stop is killed: its drain timeout, and time to end workers and remove files.
_STOP_TIMEOUT_S = 10.0

# Seconds before a restart of the daemon: the initial delay, its maximum after doubling at each restart, and the uptime
# of the daemon after which the delay is reset.
_INITIAL_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
_BACKOFF_RESET_S = 60.0

# Maximum bytes of an order. A typical order has a few hundred bytes: the table of one model.
_MAX_ORDER_BYTES = 256 * 1024

# Exit statuses (weightd_daemon.exit_codes) after which a restart would fail again: usage errors, invalid configuration,
# and a file that cannot be created. For such a file a restart cannot help, because no other process uses the directory
# and could remove the cause.
_PERMANENT_FAILURES = frozenset({64, 73, 78})


def supervisor_command(base: Path) -> list[str]:
    """Return the command that starts the supervisor of a replica with its directories in `base`."""
    return [sys.executable, "-m", __name__, str(base)]


def encode_order(models: Mapping[str, Table]) -> bytes:
    """Return the order for a supervisor: the line of JSON that contains the model tables."""
    return json.dumps({"models": models}).encode() + b"\n"


class Backoff:
    """The delay before each restart, which grows exponentially."""

    def __init__(self) -> None:
        self._next_s = _INITIAL_BACKOFF_S

    def next_delay_s(self, uptime_s: float) -> float:
        """Return the seconds to wait before the restart of a daemon that has exited after `uptime_s` seconds."""
        if uptime_s >= _BACKOFF_RESET_S:
            self._next_s = _INITIAL_BACKOFF_S
        delay_s, self._next_s = self._next_s, min(2 * self._next_s, _MAX_BACKOFF_S)
        return delay_s


class DaemonSupervisor:
    """Keeps one daemon running until it should stop.

    Args:
        start: starts a daemon and returns its process.
        stop_fds: descriptors that become readable, or reach the end of file, when the supervisor should stop.
        report: sends a report to the replica.
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
        """Start the daemon. Restart it whenever it exits, until the supervisor should stop or a restart cannot help."""
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
                self._report({"failed": f"the daemon exited with status {status}; see the log of the replica"})
                return
            delay_s = self._backoff.next_delay_s(time.monotonic() - started_at)
            _log(f"daemon exited with status {status}; restarting in {delay_s:g} s")
            if select.select(self._stop_fds, [], [], delay_s)[0]:
                return

    def _wait(self, daemon: subprocess.Popen[bytes]) -> bool:
        """Wait until the daemon exits or the supervisor should stop; return whether the supervisor should stop."""
        exit_fd = exit_watch.watch_exit(daemon.pid)
        try:
            return not {exit_fd}.issuperset(select.select([exit_fd, *self._stop_fds], [], [])[0])
        finally:
            os.close(exit_fd)


def main() -> int:
    """Run the supervisor and return its exit status."""
    try:
        line = _read_order()
    except InvalidArgument as error:
        _send_report({"failed": str(error)})
        return 1
    if os.fork():
        # The supervisor must outlive the replica to remove files, but Ray kills the children of a worker that exits. So
        # the initial process exits, and its child continues as the supervisor.
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
            # If the error has no path, as for a full disk, report the base directory.
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
        # `preexec_fn` is safe, because this process has only one thread.
        preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509
    )


def _stop_daemon(daemon: subprocess.Popen[bytes]) -> None:
    """Terminate the daemon if it still runs, and kill it after a timeout."""
    daemon.terminate()
    try:
        daemon.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _read_order() -> str:
    """Read the order, which may arrive in several parts."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(_ORDER_FD, _MAX_ORDER_BYTES)
        line += chunk
        if not chunk or len(line) > _MAX_ORDER_BYTES:
            raise InvalidArgument(f"expected a command line of at most {_MAX_ORDER_BYTES} bytes, got {len(line)}")
    return line.decode()


@contextlib.contextmanager
def _stop_signal_fd() -> Generator[int, None, None]:
    """Provide a descriptor that becomes readable at SIGTERM, and ignore SIGINT and SIGHUP, which terminals send."""
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _ignore_signal)
    # The supervisor inherits blocked signals from the replica's thread that started it; this call unblocks them.
    process_start.reset_signals(signal.SIGINT, signal.SIGHUP)
    yield reading


def _ignore_signal(number: int, frame: object) -> None:
    """Do nothing; the handler exists so that the signal writes to the wakeup descriptor."""


def _send_report(report: Mapping[str, Any]) -> None:
    # The replica has exited, which the supervisor detects by the end of file on stdin.
    with contextlib.suppress(BrokenPipeError):
        os.write(_REPORT_FD, json.dumps(report).encode() + b"\n")


def _log(text: str) -> None:
    print(f"weightd_ray: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
