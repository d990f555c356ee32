"""Sends orders to child processes and receives their messages.

Each child connects a channel: a Unix stream socket, without ZeroMQ. Over the channel, the daemon and the child exchange
requests, and all messages whose order relative to the requests matters. All other messages, and the messages before the
channel is connected, go over the daemon's ZeroMQ socket. Forked children, and the processes that fork them, have no
ZeroMQ connection and only use the channel.
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
from weightd_daemon.processes.events import ProcessEventHandler
from weightd_daemon.processes.fork_coordinator import PendingForks
from weightd_daemon.processes.process_table import ProcessTable
from weightd_daemon.processes.worker_channels import OnDirectReport, WorkerChannels
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

# The slice of a message's frames that hold tensors, after the header frames.
_TENSOR_FRAMES = slice(limits.MAX_HEADER_FRAMES, None)

# Orders that always go over the channel: a child must receive and answer them in the order in which they are sent.
_CHANNEL_ORDERS = frozenset((Fork, BeginBatch, Predict, CancelPredict))

_log = logging.getLogger("weightd")


class ChildMessenger:
    """Sends orders to children, and passes the messages of each child to its event handler.

    Args:
        context: the ZeroMQ context of the socket for children.
        config: the configuration, with the paths of the sockets.
        loop: watches the sockets.
        process_table: the running processes.
        pending_forks: the fork requests without a reply.
        on_forked: called with the name of a process and its reply to `Fork`; raises RemoteProtocolError if the reply is
            invalid.
        on_message_burst: called before several messages from one child are handled in a row.
        on_direct_report: called with the name of a child, a message about a direct channel, and its frames.

    Attributes:
        address: the address of the ZeroMQ socket, to which children connect.
        handlers: the event handler of each child, by name. A child has a handler as soon as its start is requested.
        channels: the channels of the children.
    """

    def __init__(  # noqa: PLR0913
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: DaemonConfig,
        loop: EventLoop,
        process_table: ProcessTable,
        pending_forks: PendingForks,
        on_forked: Callable[[str, Forked], None],
        *,
        on_message_burst: Callable[[], object],
        on_direct_report: OnDirectReport,
    ) -> None:
        self.address = config.children_address
        self.handlers: dict[str, ProcessEventHandler] = {}
        self._paths = config.children_socket, config.channel_socket
        self._process_table = process_table
        self._pending_forks = pending_forks
        self._on_forked = on_forked
        self._decoder = Decoder(FROM_CHILD, max_bytes=limits.MAX_CHILD_HEADER_BYTES)
        # Names of the processes without a ZeroMQ connection: forked children, and the processes that fork them.
        self._channel_only: set[str] = set()
        # Orders to children of the previous daemon that have not reconnected yet, by the name of the child.
        self._held_orders: dict[str, list[ChildOrder]] = {}
        # The socket for channels is bound before the ZeroMQ socket, so that a child that can connect to the ZeroMQ
        # socket can also connect its channel.
        self.channels = WorkerChannels(
            config.channel_socket,
            loop,
            self._name_of,
            self.handlers,
            self._on_channel_message,
            self._on_channel_error,
            on_message_burst=on_message_burst,
            on_direct_report=on_direct_report,
        )
        self._socket = bind_router(context, self.address)
        self._schedule_receive = watch_socket(loop, self._socket, self._on_messages)

    def missing_socket(self) -> str:
        """Return the path of a socket for children that another program has removed; "" if no socket is missing."""
        return next((str(path) for path in self._paths if not path.exists()), "")

    def set_channel_only(self, name: str, *, is_channel_only: bool = True) -> None:
        """Record whether a process uses only its channel, without a ZeroMQ connection."""
        if is_channel_only:
            self._channel_only.add(name)
        else:
            self._channel_only.discard(name)

    def hold_orders(self, name: str) -> None:
        """Keep orders to a child of the previous daemon until the child has reconnected."""
        self._held_orders[name] = []

    def send_order(
        self, name: str, order: ChildOrder, frames: Sequence[Any] = (), regions: Sequence[SharedRegion] = ()
    ) -> None:
        """Send an order to a child. The order is lost if the child is exiting; the child's pidfd reports the exit."""
        kind = order.__class__
        if kind in _CHANNEL_ORDERS or name in self._channel_only:
            if kind is BeginBatch:
                self.channels.cork(name)
            self.channels.send(name, order, frames, regions)
        elif name in self._held_orders:
            self._held_orders[name].append(order)
        elif kind is Stop and self.channels.is_open_or_pending(name):
            # Send Stop over the channel, so that the child receives it after all orders that were sent over the channel
            # before.
            self.channels.send(name, order, frames)
        else:
            send(self._socket, name.encode(), [*encode(order, max_bytes=limits.MAX_CHILD_HEADER_BYTES), *frames])
            self._schedule_receive()

    def send_descriptors(self, name: str, order: ChildOrder, descriptors: Sequence[int]) -> bool:
        """Send an order with file descriptors over the channel of a child; return False if it has none."""
        return self.channels.send_descriptors(name, order, descriptors)

    def unmap(self, numbers: Iterable[int]) -> None:
        """Unmap regions of clients' shared memory in all workers. Later requests must not name these regions."""
        for number in numbers:
            self.channels.unmap(number)

    def receive_all(self, name: str) -> None:
        """Handle every message that a child sent before it exited."""
        self.channels.read_all(name)
        while self._on_messages() == RECEIVE_BATCH_SIZE:
            pass
        self._schedule_receive()

    def remove(self, name: str) -> ProcessEventHandler | None:
        """Forget a process. Return its event handler, or None for a fork server, which has no event handler."""
        self.channels.remove(name)
        self._held_orders.pop(name, None)
        self._channel_only.discard(name)
        return self.handlers.pop(name, None)

    def close(self) -> None:
        """Close all channels and their listening socket, whose path stays for the next daemon."""
        self.channels.close()

    def _on_messages(self) -> int:
        """Handle a batch of messages from the ZeroMQ socket; return the number of messages."""
        now = event_loop.now()
        count = 0
        for received in receive_batch(self._socket):
            count += 1
            # A peer name with invalid bytes matches no child, because names never contain the replacement character.
            name = received.peer.decode(errors="replace")
            handler = self.handlers.get(name)
            if handler is not None:
                message = self._parse_message(name, received)
                if isinstance(message, Reconnected):
                    # The child has connected its channel before it sent Reconnected. Accept the channel before
                    # Reconnected is handled.
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
            return _protocol_failure(RemoteProtocolError("forked: expected this message only on the channel"))
        if isinstance(message, Hello):
            # The kernel reports the sender's pid, which must be the pid of the process with this name.
            process = self._process_table.processes.get(name)
            pid, expected = peer_pid(received.identity), None if process is None else process.pid
            if pid not in (None, expected):
                return _protocol_failure(RemoteProtocolError(f"hello: expected from pid {expected}, got it from {pid}"))
        return _with_limit_hint(message) if isinstance(message, ProcessFailed) else message

    def _name_of(self, pid: int) -> str | None:
        # The pid of a forked child is known only after the reply to the fork request. The reply was sent before the
        # child could connect, so it can be read now.
        for parent in self._pending_forks.parents():
            self.channels.read_all(parent)
        return self._process_table.find(pid)

    def _on_channel_message(self, name: str, message: ChildMessage) -> None:
        if isinstance(message, Forked):
            self._on_forked(name, message)
        elif name in self.handlers:
            if isinstance(message, ProcessFailed):
                message = _with_limit_hint(message)
            self.handlers[name].on_message(name, message, (), event_loop.now())

    def _on_channel_error(self, name: str, error: RemoteProtocolError) -> None:
        if name in self.handlers:
            self.handlers[name].on_message(name, _protocol_failure(error), (), event_loop.now())
        else:
            _log.warning("%s: protocol error: %s", name, error)
            self._process_table.kill(name)


def _with_limit_hint(message: ProcessFailed) -> ProcessFailed:
    return dataclasses.replace(message, reason=clip(with_limit_hint(message.reason)))


def _protocol_failure(error: RemoteProtocolError) -> ProcessFailed:
    return ProcessFailed(clip(f"protocol error: {error}"))
