"""The zygote: a process from which the ZeroMQ proxies are forked.

The zygote has one thread and has imported all modules that a proxy needs. So a proxy starts within milliseconds and
shares most of its memory with the other proxies. The daemon forks the zygote before the daemon itself starts threads
and imports further modules. When the daemon exits, the kernel kills the zygote, and when the zygote exits, the kernel
kills the proxies.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from weightd_common import process_start
from weightd_common.process_start import die_with_parent, sigint_blocked
from weightd_common.stream import Stream
from weightd_daemon.platform import environment, event_loop
from weightd_daemon.zmq_proxy import control, proxy
from weightd_daemon.zmq_proxy.relay import LINGER_S
from weightd_daemon.zmq_proxy.sandbox import set_process_name

# Maximum number of seconds for which the zygote waits for the exit of the proxies after the daemon has closed their
# control links: their `LINGER_S` and a margin.
_EXIT_TIMEOUT_S = 2 * LINGER_S + 1.0

# Signals that the zygote and the proxies ignore. A terminal or a service manager may send them to all processes of the
# service; the daemon handles them and stops the zygote.
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_STDIN, _STDOUT, _STDERR = range(3)

_NEVER = float("inf")

# Maximum number of bytes in one read from the wakeup descriptor.
_WAKEUP_READ_BYTES = 4096

# Number of the control link's descriptor in a zygote that `launch` has started.
_CONTROL_FD = 3

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from weightd_daemon.zmq_proxy import zygote;"
    " zygote.main()"
)


class Zygote:
    """The daemon's handle of a zygote.

    Args:
        pid: the pid of the zygote, a child of this process.
        connection: the control link to the zygote.

    Attributes:
        stream: the control link; see `control` for its messages.
    """

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.stream = Stream(connection)

    def request_fork(self, frames: Sequence[bytes], descriptors: Sequence[int]) -> bool:
        """Request a proxy, with the frames of `ProxyConfig.to_frames`.

        Return whether the whole request was sent. If not, the caller has to call `stream.flush` when the stream is
        writable.

        Args:
            frames: the frames of the request.
            descriptors: the proxy's end of its control link, and its listening socket.

        Raises:
            OSError: the request cannot be sent.
        """
        return self.stream.send(frames, descriptors)

    def kill(self) -> None:
        """Kill the zygote; the kernel then kills its proxies. When `stream` has ended, the zygote has exited."""
        # The pid is not reused by another process before `stop` reaps the zygote.
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Stop the zygote, and wait until the zygote and its proxies have exited; after some seconds, kill the zygote.

        Before this call, close the control links of the proxies, so that the proxies exit.
        """
        # Shut down only the sending direction: the zygote reads the end of the stream and stops, and this end then
        # shows when the zygote has exited.
        with contextlib.suppress(OSError):  # the zygote has exited
            self.stream.connection.shutdown(socket.SHUT_WR)
        hangup_poll = select.poll()
        # With the event mask 0, the poll ignores unread messages and reports only a hangup.
        hangup_poll.register(self.stream, 0)
        if not event_loop.poll(hangup_poll, _EXIT_TIMEOUT_S + 1.0):
            self.kill()
        self.stream.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def fork() -> Zygote:
    """Fork a zygote from this process, which must have only one thread.

    Call this early: all modules that this process has imported stay in the memory of the zygote.
    """
    daemon_end, zygote_end = socket.socketpair()
    parent = os.getpid()
    # Freeze all objects: otherwise the garbage collector of a forked process would write to them, so that the kernel
    # copies the shared pages.
    gc.collect()
    gc.freeze()
    with sigint_blocked():
        pid = os.fork()
        if not pid:
            _become_process(lambda: _run_zygote(parent, zygote_end), zygote_end.fileno())
    zygote_end.close()
    return Zygote(pid, daemon_end)


def launch(spawn: Callable[[Sequence[str], Mapping[str, str], Sequence[int]], int]) -> Zygote:
    """Start a zygote with a new interpreter. This takes longer than `fork` and needs more memory.

    Args:
        spawn: starts a command, with the arguments of `process_spawner.spawn`, and returns its pid.
    """
    daemon_end, zygote_end = socket.socketpair()
    argv = [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps(sys.path), str(os.getpid())]
    with zygote_end:
        pid = spawn(argv, os.environ, [_STDIN, _STDOUT, _STDERR, zygote_end.fileno()])
    return Zygote(pid, daemon_end)


def main() -> None:
    """Run a zygote that `launch` has started, with the control link as descriptor 3.

    The command-line arguments are `sys.path` as JSON and the pid of the daemon.
    """
    gc.collect()
    gc.freeze()
    _become_process(lambda: _run_zygote(int(sys.argv[2]), socket.socket(fileno=_CONTROL_FD)), _CONTROL_FD)


def _become_process(body: Callable[[], None], *kept_fds: int) -> NoReturn:
    """Run `body` in a forked process, and exit when it returns or raises. This function does not return.

    All open descriptors are closed first, except stderr and `kept_fds`. Then stdin is /dev/null, and stdout is a copy
    of stderr.
    """
    status = 1
    environment.remove_unlisted(os.environ)
    try:
        # Unset the wakeup descriptor: it is closed below, and its number may be reused for another file.
        signal.set_wakeup_fd(-1)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor not in (_STDIN, _STDOUT, _STDERR, *kept_fds):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        dev_null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(dev_null, _STDIN)
        os.close(dev_null)
        # Close the daemon's stdout: otherwise a program that reads this stdout to its end would wait until this process
        # exits.
        os.dup2(_STDERR, _STDOUT)
        body()
        status = 0
    except BaseException as error:  # noqa: BLE001 - the code of the forking process must not continue here
        # Print the error as Python itself would. The module `traceback` is not imported, to save memory.
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(status)


def _run_zygote(parent: int, connection: socket.socket) -> None:
    die_with_parent(parent)
    set_process_name("weightd-zygote")
    # In a new session, the zygote does not get signals of the daemon's terminal. With / as its working directory, it
    # does not prevent the unmount of a file system.
    os.setsid()
    os.chdir("/")
    process_start.reset_signals(*_IGNORED_SIGNALS)
    _Proxies(control.new_control_stream(connection, accepts_descriptors=True)).run()


class _Proxies:
    """The running proxies of the zygote.

    Args:
        stream: the control link to the daemon.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        # By pid of a running proxy: the proxy's number from the request.
        self._number_by_pid: dict[int, int] = {}
        self._poll = select.poll()
        self._stops_at = _NEVER

    def run(self) -> None:
        """Fork proxies until the daemon closes the control link; then wait until all have exited, up to a time-out."""
        exits, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore_signal)
        self._poll.register(exits, select.POLLIN)
        self._poll.register(self._stream, select.POLLIN)
        while self._number_by_pid or self._stops_at == _NEVER:
            if self._stops_at == _NEVER:
                ready = self._poll.poll()
            else:
                ready = event_loop.poll(self._poll, self._stops_at - event_loop.now())
            if not ready:
                return
            for descriptor, _ in ready:
                if descriptor == self._stream.fileno():
                    self._on_control_readable()
                else:
                    os.read(exits, _WAKEUP_READ_BYTES)
                    self._reap()

    def _on_control_readable(self) -> None:
        try:
            for message in self._stream.receive():
                self._fork_proxy(*control.parse_fork_request(message.frames))
        except ConnectionError:
            self._poll.unregister(self._stream)
            self._stops_at = event_loop.now() + _EXIT_TIMEOUT_S

    def _fork_proxy(self, number: int, config: control.ProxyConfig) -> None:
        received_fds = self._stream.descriptors
        with (
            socket.socket(fileno=received_fds.popleft()) as its_link,
            socket.socket(fileno=received_fds.popleft()) as listener,
        ):
            parent = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:
                self._report(control.ProxyEvent(number, 0, error.errno or 0))
                return
            if not pid:
                _become_process(
                    lambda: _run_proxy(parent, its_link, listener, config), its_link.fileno(), listener.fileno()
                )
        self._number_by_pid[pid] = number
        self._report(control.ProxyEvent(number, pid, None))

    def _reap(self) -> None:
        """Reap and report every proxy that has exited: the kernel may send one signal for several exits."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                self._report(control.ProxyEvent(self._number_by_pid.pop(pid), pid, os.waitstatus_to_exitcode(status)))

    def _report(self, event: control.ProxyEvent) -> None:
        # If the daemon has exited, ignore the error: `run` reads the end of the link and stops.
        with contextlib.suppress(ConnectionError):
            self._stream.send([event.to_frame()])


def _ignore_signal(number: int, frame: object) -> None:
    """Do nothing: Python has written to the wakeup descriptor, which ends the poll."""


def _run_proxy(
    parent: int, control_socket: socket.socket, listener: socket.socket, config: control.ProxyConfig
) -> None:
    die_with_parent(parent)
    proxy.run(control_socket, listener, config)
