"""Starts real workers for a self-test, exchanges messages with them within a timeout for each step, and cleans up."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import shutil
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import zmq

from weightd_daemon.generations.actions import Role
from weightd_daemon.platform import event_loop, processes
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_daemon.platform.processes import ChildProcess
from weightd_daemon.platform.resource_limits import with_limit_hint
from weightd_daemon.platform.zmq_sockets import bind_router, peer_pid, receive_batch, send
from weightd_daemon.processes import spec
from weightd_daemon.processes.files import GenerationFiles
from weightd_daemon.processes.launcher import DirectLauncher
from weightd_daemon.processes.spec import WorkerProgram
from weightd_protocol import limits
from weightd_protocol.codec import decode, encode
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.messages.worker import (
    FROM_CHILD,
    AnnounceSelfTest,
    ChildMessage,
    ChildOrder,
    ContinueSelfTest,
    PredictFailed,
    ProcessFailed,
)

MessageT = TypeVar("MessageT", bound=ChildMessage)

_log = logging.getLogger("weightd.doctor")

# Seconds to wait for a child to exit after SIGKILL. A child that takes longer is blocked in the kernel.
_KILL_TIMEOUT_S = 10.0

# Milliseconds to wait, after a child's exit, for the child's last message.
_LAST_MESSAGE_TIMEOUT_MS = 200


class ChildError(Exception):
    """A child has failed in a step. The text names the child, the step and the reason.

    ChildError
    ├── ChildRejected        the child reported a failure
    ├── ChildExited          the child exited
    ├── ChildTimedOut        the child did nothing within the limit
    └── ProtocolViolation    the child sent an unexpected message
    """


class ChildRejected(ChildError):
    """The child reported a failure."""


class ChildExited(ChildError):
    """The child has exited, or could not be started.

    Args:
        text: names the child, the step and the reason.
        exit_cause: how the child ended.
    """

    def __init__(self, text: str, exit_cause: ExitCause | None = None) -> None:
        super().__init__(text)
        self.exit_cause = exit_cause or ExitCause(None)


class ChildTimedOut(ChildError):
    """The child did not answer within the limit."""


class ProtocolViolation(ChildError):
    """The child sent an invalid or unexpected message."""


class ChildReply(NamedTuple):
    """A child's message and the frames with its tensors."""

    message: ChildMessage
    frames: Sequence[Any]


class SelfTestProcesses:
    """The child processes of one self-test, by name. The end of the `with` block kills and reaps all children.

    Args:
        program: the worker program that each child runs.
        step_timeout_s: the timeout of each step in seconds.
        prefix: the prefix of the name of the directory for the socket.
        directory: the directory for the logs and, for a model on the CPU, the page store. Default: the socket's
            directory.

    Attributes:
        address: the address to which the children connect within the block.
        survivors: the pids of children that did not exit after SIGKILL; complete after the block.
    """

    def __init__(
        self,
        program: WorkerProgram,
        step_timeout_s: float,
        prefix: str = "weightd-doctor-",
        directory: Path | None = None,
    ) -> None:
        self._program = program
        self._files_directory = directory
        self._step_timeout_s = step_timeout_s
        self._prefix = prefix
        self._processes: dict[str, ChildProcess] = {}
        self._received: defaultdict[str, deque[ChildReply]] = defaultdict(deque)
        self.survivors: list[int] = []

    def __enter__(self) -> SelfTestProcesses:
        # TMPDIR is not used, because its path may be too long: the path of a socket may have at most 107 bytes.
        self._directory = Path(tempfile.mkdtemp(prefix=self._prefix, dir="/tmp"))
        self._files = GenerationFiles(self._files_directory or self._directory)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.address = f"ipc://{self._directory}/children.sock"
        self._socket = bind_router(self._context, self.address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            processes.kill(process)
        for name in list(self._processes):
            self._reap(name)
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    def start(self, name: str) -> None:
        """Start a child.

        Raises:
            ChildError: the child cannot be started.
        """
        process_spec = spec.child_spec(self._program, name, Role.WORKER, self.address, self._files)
        try:
            self._processes[name] = DirectLauncher().start(process_spec)
        except OSError as error:
            cause = with_limit_hint(f"cannot start {self._program.python}: {error.strerror}")
            raise ChildExited(f"{name}: {cause}") from None

    def send_order(self, name: str, message: ChildOrder, frames: Sequence[Any] = ()) -> None:
        """Send an order to a child. If the child has exited, the next `wait_for` raises an error."""
        send(self._socket, name.encode(), [*encode(message, max_bytes=limits.MAX_CHILD_HEADER_BYTES), *frames])

    def wait_for(
        self,
        name: str,
        message_type: type[MessageT],
        step: str,
        on_announce_selftest: Callable[[AnnounceSelfTest], None] | None = None,
    ) -> tuple[MessageT, Sequence[Any]]:
        """Wait for a child's next message, which must be a `message_type`. Let the self-tests run that it announces.

        Raises:
            ChildError: the child sent another message, or no message in time; the text names the child and the step.
        """
        _log.info("%s: %s", name, step)
        message, frames = self._next_message(name, step)
        while isinstance(message, AnnounceSelfTest):
            if on_announce_selftest is not None:
                on_announce_selftest(message)
            if message.cases:
                self.send_order(name, ContinueSelfTest())
            message, frames = self._next_message(name, step)
        if isinstance(message, message_type):
            return message, frames
        if isinstance(message, ProcessFailed):
            raise ChildRejected(f"{name}: {step}: {with_limit_hint(message.reason)}")
        if isinstance(message, PredictFailed):
            raise ChildRejected(f"{name}: {step}: {message.error}")
        raise ProtocolViolation(f"{name}: {step}: expected {message_type.__name__}, got {type(message).__name__}")

    def kill(self, name: str) -> None:
        """Kill a child, if it is running, and wait until the kernel has freed the child's resources."""
        if name in self._processes:
            processes.kill(self._processes[name])
            self._reap(name)

    def _next_message(self, name: str, step: str) -> ChildReply:
        process = self._processes.get(name)
        if process is None:
            raise ChildExited(f"{name}: {step}: the process has already exited")
        deadline = event_loop.now() + self._step_timeout_s
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(process.pidfd, zmq.POLLIN)
        while not self._received[name]:
            events = dict(poller.poll(math.ceil(event_loop.clamp_wait(deadline - event_loop.now()) * 1000)))
            if process.pidfd in events:
                # Wait for the child's last message, which may still be on its way through libzmq. The message has
                # precedence over the exit.
                self._socket.poll(_LAST_MESSAGE_TIMEOUT_MS)
            self._receive_messages(step)
            if not self._received[name] and process.pidfd in events:
                words = processes.log_tail(process)
                end = ExitCause(self._reap(name))
                raise ChildExited(
                    f"{name}: {step}: {end.description}" + (f"; its log ends: {words}" if words else ""), end
                )
            if not self._received[name] and event_loop.now() >= deadline:
                words = processes.log_tail(process)
                log = f"its log ends: {words}" if words else "its log is empty"
                raise ChildTimedOut(f"{name}: {step}: no answer within {self._step_timeout_s:g} s; {log}")
        return self._received[name].popleft()

    def _receive_messages(self, step: str) -> None:
        for received in receive_batch(self._socket):
            name = received.peer.decode("utf-8", "replace")
            process = self._processes.get(name)
            pid = peer_pid(received.identity)
            if process is None or pid not in (None, process.pid):
                continue  # the message is from another process, not from a child
            try:
                message: ChildMessage = decode(received.frames, FROM_CHILD, max_bytes=limits.MAX_CHILD_HEADER_BYTES)
            except RemoteProtocolError as error:
                raise ProtocolViolation(f"{name}: {step}: protocol error: {error}") from None
            self._received[name].append(ChildReply(message, received.frames[limits.MAX_HEADER_FRAMES :]))

    def _reap(self, name: str) -> int | None:
        process = self._processes.pop(name)
        exit_poll = select.poll()
        exit_poll.register(process.pidfd, select.POLLIN)
        if not event_loop.poll(exit_poll, _KILL_TIMEOUT_S):
            self.survivors.append(process.pid)
            with contextlib.suppress(OSError):
                os.close(process.pidfd)
            return 0
        return processes.reap(process)
