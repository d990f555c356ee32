"""The zygote: a process that forks proxies, and does nothing else.

A proxy is made of a process that has all modules loaded and one thread: it is there within milliseconds, and shares
most of its memory with the next one. The daemon is such a process for a moment only, at its very start: that is when it
forks the zygote. Proxies die with the zygote, and it with the daemon.
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

# What a proxy is given longer than it takes to end in order.
_EXIT_TIMEOUT_S = 2 * LINGER_S + 1.0

# A terminal, and who ends the processes of a service one by one, mean the daemon, which ends this one.
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_STDIN, _STDOUT, _STDERR = range(3)

_NEVER = float("inf")

# Bytes of the wakeup descriptor that are read at once.
_WAKEUP_READ_BYTES = 4096

# Another process gets it at this number, the next one.
_CONTROL_FD = 3

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from weightd_daemon.zmq_proxy import zygote;"
    " zygote.main()"
)


class Zygote:
    """The daemon's end of it.

    Args:
        pid: of the process, a child of this one.
        connection: its link.

    Attributes:
        stream: readable when it has news, see `link`.
    """

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.stream = Stream(connection)

    def request_fork(self, frames: Sequence[bytes], descriptors: Sequence[int]) -> bool:
        """Have a proxy made: see `ProxyConfig.to_frames`; it gets descriptors of its link and its listening socket.

        Return whether all was sent; what is left goes with the stream's `flush`.

        Raises:
            OSError: not now, or never.
        """
        return self.stream.send(frames, descriptors)

    def kill(self) -> None:
        """Have the kernel end it, and with it its proxies, whatever state it is in: its stream tells."""
        # Its pid is its own until `end` has waited for it.
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Let it end, once its proxies have: those whose links are closed do; after some seconds, kill it."""
        # It notices this, while the socket still shows when it has exited.
        with contextlib.suppress(OSError):  # it has gone
            self.stream.connection.shutdown(socket.SHUT_WR)
        hangup_poll = select.poll()
        # Not what it still has to say, only the hangup.
        hangup_poll.register(self.stream, 0)
        if not event_loop.poll(hangup_poll, _EXIT_TIMEOUT_S + 1.0):
            self.kill()
        self.stream.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def fork() -> Zygote:
    """Make a zygote of this process, which has one thread and as little else as possible."""
    daemon_end, zygote_end = socket.socketpair()
    parent = os.getpid()
    # What is there now is not looked at by the collector any more, which would have it copied.
    gc.collect()
    gc.freeze()
    with sigint_blocked():
        pid = os.fork()
        if not pid:
            _become_process(lambda: _run_zygote(parent, zygote_end), zygote_end.fileno())
    zygote_end.close()
    return Zygote(pid, daemon_end)


def launch(spawn: Callable[[Sequence[str], Mapping[str, str], Sequence[int]], int]) -> Zygote:
    """Make a zygote of an interpreter of its own, which takes longer, and some memory more.

    Args:
        spawn: starts it, with these descriptors as 0, 1 and so on; returns its pid.
    """
    daemon_end, zygote_end = socket.socketpair()
    argv = [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps(sys.path), str(os.getpid())]
    with zygote_end:
        pid = spawn(argv, os.environ, [_STDIN, _STDOUT, _STDERR, zygote_end.fileno()])
    return Zygote(pid, daemon_end)


def main() -> None:
    """Be the zygote: with the path of modules and the pid of the daemon as arguments, and the link at its number."""
    gc.collect()
    gc.freeze()
    _become_process(lambda: _run_zygote(int(sys.argv[2]), socket.socket(fileno=_CONTROL_FD)), _CONTROL_FD)


def _become_process(body: Callable[[], None], *kept_fds: int) -> NoReturn:
    """Be another process from here on, which has nothing of this one but its log and these descriptors."""
    status = 1
    environment.remove_unlisted(os.environ)
    try:
        # Its descriptor is closed here, and its number may go to another file.
        signal.set_wakeup_fd(-1)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor not in (_STDIN, _STDOUT, _STDERR, *kept_fds):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        dev_null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(dev_null, _STDIN)
        os.close(dev_null)
        # Whoever reads the daemon's output waits for its end.
        os.dup2(_STDERR, _STDOUT)
        body()
        status = 0
    except BaseException as error:  # noqa: BLE001 - nothing may go on as the process that this was
        # As Python would: `traceback` would cost memory.
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(status)


def _run_zygote(parent: int, connection: socket.socket) -> None:
    die_with_parent(parent)
    set_process_name("weightd-zygote")
    # A terminal's keys reach the daemon alone, and no directory is in use.
    os.setsid()
    os.chdir("/")
    process_start.reset_signals(*_IGNORED_SIGNALS)
    _Proxies(control.new_control_stream(connection, accepts_descriptors=True)).run()


class _Proxies:
    """The proxies.

    Args:
        stream: to the daemon.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        # The number of each, by its pid.
        self._number_by_pid: dict[int, int] = {}
        self._poll = select.poll()
        self._stops_at = _NEVER

    def run(self) -> None:
        """Make proxies until the daemon's end is closed; then wait until they have ended."""
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
        """Wait for every proxy that has exited: one signal may stand for several."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                self._report(control.ProxyEvent(self._number_by_pid.pop(pid), pid, os.waitstatus_to_exitcode(status)))

    def _report(self, event: control.ProxyEvent) -> None:
        # Where nobody is left to hear it, the link tells.
        with contextlib.suppress(ConnectionError):
            self._stream.send([event.to_frame()])


def _ignore_signal(number: int, frame: object) -> None:
    """The interpreter has written to the wakeup descriptor."""


def _run_proxy(
    parent: int, control_socket: socket.socket, listener: socket.socket, config: control.ProxyConfig
) -> None:
    die_with_parent(parent)
    proxy.run(control_socket, listener, config)
