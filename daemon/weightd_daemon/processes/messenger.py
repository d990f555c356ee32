"""Orders to child processes and messages from them.

Each child connects a channel, a stream of its own, for everything that has to stay in the order of its requests. Until
then, and for everything else, it uses the daemon's ZeroMQ socket.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from weightd_daemon.config.daemon import DaemonConfig
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.resource_limits import with_limit_hint
from weightd_daemon.platform.zmq_sockets import (
    RECEIVE_BATCH_SIZE,
    ReceivedMessage,
    bind_router,
    peer_pid,
    receive_batch,
    send,
    watch_socket,
)
from weightd_daemon.processes.channels import WorkerChannels
from weightd_daemon.processes.events import ProcessEventHandler
from weightd_daemon.processes.fork_coordinator import PendingForks
from weightd_daemon.processes.process_table import ProcessTable
from weightd_daemon.scheduling.tensor_location import SharedRegion
from weightd_protocol import limits
from weightd_protocol.codec import Decoder, clip, encode
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.messages.worker import (
    FROM_CHILD,
    BeginBatch,
    CancelPredict,
    ChildMessage,
    ChildOrder,
    Fork,
    Forked,
    Hello,
    Predict,
    ProcessFailed,
    Reconnected,
    Stop,
)

# Of the frames of a message.
_TENSOR_FRAMES = slice(limits.MAX_HEADER_FRAMES, None)

# A child receives these in the order in which they are sent, and answers in that order.
_CHANNEL_ORDERS = frozenset((Fork, BeginBatch, Predict, CancelPredict))

_log = logging.getLogger("weightd")


class ChildMessenger:
    """Sends orders to children, and calls the event handler of each child with its messages.

    Args:
        context: for the socket.
        config: where the sockets are.
        loop: calls when something is readable.
        process_table: the processes that run.
        pending_forks: which processes have been asked to fork.
        on_forked: called with the name of a process and its reply to Fork; raises RemoteProtocolError if that is
            invalid.

    Attributes:
        address: where children connect.
        handlers: the event handler of each child by name, from the moment in which the child is wanted.
        channels: the channels of the children.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: DaemonConfig,
        loop: EventLoop,
        process_table: ProcessTable,
        pending_forks: PendingForks,
        on_forked: Callable[[str, Forked], None],
    ) -> None:
        self.address = config.children_address
        self.handlers: dict[str, ProcessEventHandler] = {}
        self._paths = config.children_socket, config.channel_socket
        self._process_table = process_table
        self._pending_forks = pending_forks
        self._on_forked = on_forked
        self._decoder = Decoder(FROM_CHILD, max_bytes=limits.MAX_CHILD_HEADER_BYTES)
        # Children without a ZeroMQ connection: those that are forked, and those that others are forked from.
        self._channel_only: set[str] = set()
        # Orders to children of the previous daemon that have not connected yet.
        self._held_orders: dict[str, list[ChildOrder]] = {}
        # A child that finds the socket finds the channel, too: the channel is bound first.
        self.channels = WorkerChannels(
            config.channel_socket, loop, self._name_of, self._on_channel_message, self._on_channel_error
        )
        self._socket = bind_router(context, self.address)
        self._schedule_receive = watch_socket(loop, self._socket, self._on_messages)

    def missing_socket(self) -> str:
        """Return the path of a socket that somebody has removed, or ""; no child can connect there."""
        return next((str(path) for path in self._paths if not path.exists()), "")

    def set_channel_only(self, name: str, *, is_channel_only: bool = True) -> None:
        """Record whether a process connects only its channel."""
        if is_channel_only:
            self._channel_only.add(name)
        else:
            self._channel_only.discard(name)

    def hold_orders(self, name: str) -> None:
        """Keep orders to a child of the previous daemon until it has connected again."""
        self._held_orders[name] = []

    def send_order(
        self, name: str, order: ChildOrder, frames: Sequence[Any] = (), regions: Sequence[SharedRegion] = ()
    ) -> None:
        """Send an order to a child. A child that cannot be reached is dying; its pidfd will report that."""
        encoded = [*encode(order, max_bytes=limits.MAX_CHILD_HEADER_BYTES), *frames]
        kind = order.__class__
        if kind in _CHANNEL_ORDERS or name in self._channel_only:
            if kind is BeginBatch:
                self.channels.cork(name)
            self.channels.send(name, encoded, regions)
        elif name in self._held_orders:
            self._held_orders[name].append(order)
        elif kind is Stop and self.channels.is_open_or_pending(name):
            # The child stops after it has done what it was asked before.
            self.channels.send(name, encoded)
        else:
            send(self._socket, name.encode(), encoded)
            self._schedule_receive()

    def unmap(self, numbers: Iterable[int]) -> None:
        """Unmap these regions of clients' memory in all workers: no later request will name them."""
        for number in numbers:
            self.channels.unmap(number)

    def receive_all(self, name: str) -> None:
        """Handle every message that a child sent before it exited."""
        self.channels.read_all(name)
        while self._on_messages() == RECEIVE_BATCH_SIZE:
            pass
        self._schedule_receive()

    def remove(self, name: str) -> ProcessEventHandler | None:
        """Forget a process; return its event handler, which a fork server has not."""
        self.channels.remove(name)
        self._held_orders.pop(name, None)
        self._channel_only.discard(name)
        return self.handlers.pop(name, None)

    def _on_messages(self) -> int:
        """Handle a batch of messages from the socket; return how many there were."""
        now = event_loop.now()
        count = 0
        for received in receive_batch(self._socket):
            count += 1
            # No child's name contains the replacement for invalid bytes.
            name = received.peer.decode(errors="replace")
            handler = self.handlers.get(name)
            if handler is not None:
                message = self._parse_message(name, received)
                if isinstance(message, Reconnected):
                    # The child has connected its channel before it sent this.
                    self.channels.accept()
                for order in self._held_orders.pop(name, ()):
                    self.send_order(name, order)
                handler.on_message(name, message, received.frames[_TENSOR_FRAMES], now)
        return count

    def _parse_message(self, name: str, received: ReceivedMessage) -> ChildMessage:
        try:
            message: ChildMessage = self._decoder.decode(received.frames)
        except RemoteProtocolError as error:
            return _protocol_failure(error)
        if isinstance(message, Forked):
            return _protocol_failure(RemoteProtocolError("forked: expected it on the channel"))
        if isinstance(message, Hello):
            # The kernel knows the sender: it must be the process that was started under that name.
            process = self._process_table.processes.get(name)
            pid, expected = peer_pid(received.identity), None if process is None else process.pid
            if pid not in (None, expected):
                return _protocol_failure(RemoteProtocolError(f"hello: expected from pid {expected}, got it from {pid}"))
        return _with_limit_hint(message) if isinstance(message, ProcessFailed) else message

    def _name_of(self, pid: int) -> str | None:
        # The parent of a forked child has replied before the child could connect.
        for parent in self._pending_forks.parents():
            self.channels.read_all(parent)
        return self._process_table.find(pid)

    def _on_channel_message(self, name: str, frames: Sequence[Any]) -> None:
        try:
            message: ChildMessage = self._decoder.decode(frames)
            if isinstance(message, Forked):
                self._on_forked(name, message)
                return
        except RemoteProtocolError as error:
            self._on_channel_error(name, error)
            return
        if name in self.handlers:
            if isinstance(message, ProcessFailed):
                message = _with_limit_hint(message)
            self.handlers[name].on_message(name, message, frames[_TENSOR_FRAMES], event_loop.now())

    def _on_channel_error(self, name: str, error: RemoteProtocolError) -> None:
        if name in self.handlers:
            self.handlers[name].on_message(name, _protocol_failure(error), (), event_loop.now())
        else:
            _log.warning("%s: it broke the protocol: %s", name, error)
            self._process_table.kill(name)


def _with_limit_hint(message: ProcessFailed) -> ProcessFailed:
    return dataclasses.replace(message, reason=clip(with_limit_hint(message.reason)))


def _protocol_failure(error: RemoteProtocolError) -> ProcessFailed:
    return ProcessFailed(clip(f"it broke the protocol: {error}"))
