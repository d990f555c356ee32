"""The zygote: a process that forks gates, and does nothing else.

A gate is made of a process that has all modules loaded and one thread: it is there within milliseconds, and shares most
of its memory with the next one. The daemon is such a process for a moment only, at its very start: that is when it
forks the zygote. Gates die with the zygote, and it with the daemon.
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

from weightd.daemon.gate import link, process
from weightd.daemon.gate.confinement import name_process
from weightd.daemon.gate.gate import LINGER_S
from weightd.daemon.host import clock, environment
from weightd.shared import signals
from weightd.shared.parent import die_with, without_interrupts
from weightd.shared.stream import Stream

# What a gate is given longer than it takes to end in order.
_PATIENCE_S = 2 * LINGER_S + 1.0

# A terminal, and who ends the processes of a service one by one, mean the daemon, which ends this one.
_IGNORES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_STDIN, _STDOUT, _STDERR = range(3)

_NEVER = float("inf")

# Bytes of the wakeup descriptor that are read at once.
_WAKEUPS = 4096

# Another process gets it at this number, the next one.
_LINK = 3

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from weightd.daemon.gate import zygote; zygote.main()"
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

    def ask(self, frames: Sequence[bytes], descriptors: Sequence[int]) -> bool:
        """Have a gate made: see `Terms.frames`; it gets these descriptors: of its link, and of its listening socket.

        Return whether all was sent; what is left goes with the stream's `flush`.

        Raises:
            OSError: not now, or never.
        """
        return self.stream.send(frames, descriptors)

    def kill(self) -> None:
        """Have the kernel end it, and with it its gates, whatever state it is in: its stream tells."""
        # Its pid is its own until `end` has waited for it.
        os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Let it end, once its gates have: those whose links are closed do; after some seconds, kill it."""
        # It notices this, while the socket still shows when it has exited.
        with contextlib.suppress(OSError):  # it has gone
            self.stream.connection.shutdown(socket.SHUT_WR)
        ended = select.poll()
        # Not what it still has to say, only the hangup.
        ended.register(self.stream, 0)
        if not clock.poll(ended, _PATIENCE_S + 1.0):
            self.kill()
        self.stream.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def fork() -> Zygote:
    """Make a zygote of this process, which has one thread and as little else as possible."""
    ours, its = socket.socketpair()
    parent = os.getpid()
    # What is there now is not looked at by the collector any more, which would have it copied.
    gc.collect()
    gc.freeze()
    with without_interrupts():
        pid = os.fork()
        if not pid:
            _become(lambda: _serve_for(parent, its), its.fileno())
    its.close()
    return Zygote(pid, ours)


def launch(spawn: Callable[[Sequence[str], Mapping[str, str], Sequence[int]], int]) -> Zygote:
    """Make a zygote of an interpreter of its own, which takes longer, and some memory more.

    Args:
        spawn: starts it, with these descriptors as 0, 1 and so on; returns its pid.
    """
    ours, its = socket.socketpair()
    argv = [sys.executable, "-I", "-S", "-c", _PROGRAM, json.dumps(sys.path), str(os.getpid())]
    with its:
        pid = spawn(argv, os.environ, [_STDIN, _STDOUT, _STDERR, its.fileno()])
    return Zygote(pid, ours)


def main() -> None:
    """Be the zygote: with the path of modules and the pid of the daemon as arguments, and the link at its number."""
    gc.collect()
    gc.freeze()
    _become(lambda: _serve_for(int(sys.argv[2]), socket.socket(fileno=_LINK)), _LINK)


def _become(body: Callable[[], None], *kept: int) -> NoReturn:
    """Be another process from here on, which has nothing of this one but its log and these descriptors."""
    status = 1
    environment.reduce(os.environ)
    try:
        # Its descriptor is closed here, and its number may go to another file.
        signal.set_wakeup_fd(-1)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor not in (_STDIN, _STDOUT, _STDERR, *kept):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, _STDIN)
        os.close(nothing)
        # Whoever reads the daemon's output waits for its end.
        os.dup2(_STDERR, _STDOUT)
        body()
        status = 0
    except BaseException as error:  # noqa: BLE001 - nothing may go on as the process that this was
        # As Python would: `traceback` would cost memory.
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(status)


def _serve_for(parent: int, connection: socket.socket) -> None:
    die_with(parent)
    name_process("weightd-zygote")
    # A terminal's keys reach the daemon alone, and no directory is in use.
    os.setsid()
    os.chdir("/")
    signals.reset(*_IGNORES)
    _Nursery(link.to_daemon(connection, takes_descriptors=True)).run()


class _Nursery:
    """The gates.

    Args:
        stream: to the daemon.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        # The number of each, by its pid.
        self._gates: dict[int, int] = {}
        self._poll = select.poll()
        self._ends_at = _NEVER

    def run(self) -> None:
        """Make gates until the daemon's end is closed; then wait until they have ended."""
        exits, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _only_wake)
        self._poll.register(exits, select.POLLIN)
        self._poll.register(self._stream, select.POLLIN)
        while self._gates or self._ends_at == _NEVER:
            if self._ends_at == _NEVER:
                ready = self._poll.poll()
            else:
                ready = clock.poll(self._poll, self._ends_at - clock.now())
            if not ready:
                return
            for descriptor, _ in ready:
                if descriptor == self._stream.fileno():
                    self._listen()
                else:
                    os.read(exits, _WAKEUPS)
                    self._reap()

    def _listen(self) -> None:
        try:
            for message in self._stream.receive():
                self._make(*link.of_daemon(message.frames))
        except ConnectionError:
            self._poll.unregister(self._stream)
            self._ends_at = clock.now() + _PATIENCE_S

    def _make(self, number: int, terms: link.Terms) -> None:
        taken = self._stream.descriptors
        with socket.socket(fileno=taken.popleft()) as its_link, socket.socket(fileno=taken.popleft()) as listener:
            parent = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:
                self._tell(link.News(number, 0, error.errno or 0))
                return
            if not pid:
                _become(lambda: _gate(parent, its_link, listener, terms), its_link.fileno(), listener.fileno())
        self._gates[pid] = number
        self._tell(link.News(number, pid, None))

    def _reap(self) -> None:
        """Wait for every gate that has exited: one signal may stand for several."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                self._tell(link.News(self._gates.pop(pid), pid, os.waitstatus_to_exitcode(status)))

    def _tell(self, news: link.News) -> None:
        # Where nobody is left to hear it, the link tells.
        with contextlib.suppress(ConnectionError):
            self._stream.send([news.frame()])


def _only_wake(number: int, frame: object) -> None:
    """The interpreter has written to the wakeup descriptor."""


def _gate(parent: int, its_link: socket.socket, listener: socket.socket, terms: link.Terms) -> None:
    die_with(parent)
    process.run(its_link, listener, terms)
