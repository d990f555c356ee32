"""Connections over which the daemon and its children exchange orders and messages without ZeroMQ."""

from __future__ import annotations

import functools
import logging
import select
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightd_common.peer_credentials import peer_credentials
from weightd_common.stream import Stream, enlarge_send_buffer
from weightd_daemon.platform.acceptor import Acceptor
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.listen import bind_unix
from weightd_daemon.platform.zmq_sockets import PRIVATE_UMASK
from weightd_daemon.processes.events import ProcessEventHandler
from weightd_daemon.scheduling.tensor_location import SharedRegion, WorkerRegions
from weightd_protocol import limits
from weightd_protocol.codec import Decoder, encode
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.framing import FrameReader
from weightd_protocol.messages.channels import AnswerDropped, ChannelReleased, RequestHandedOver
from weightd_protocol.messages.ranks import PredictDone
from weightd_protocol.messages.regions import MapRegion, UnmapRegion
from weightd_protocol.messages.worker import (
    FROM_CHILD,
    ChildMessage,
    ChildOrder,
    PredictCancelled,
    PredictFailed,
    PredictResult,
)

# The slice of a message's frames that hold tensors, after the header frames.
_TENSOR_FRAMES = slice(limits.MAX_HEADER_FRAMES, None)

# Replies to requests.
_OUTCOMES = frozenset((PredictResult, PredictDone, PredictFailed, PredictCancelled))

# Messages about direct channels.
_DIRECT_REPORTS = frozenset((ChannelReleased, RequestHandedOver, AnswerDropped))

# Maximum number of reads from one channel in one turn of the event loop, so that other sockets are served, too.
_MAX_READS = 8

_log = logging.getLogger("weightd")

OnDirectReport = Callable[[str, ChildMessage, Sequence[Any]], object]
"""Called with the name of a child, a message about a direct channel, and the frames after its envelope."""


class WorkerChannels:
    """Accepts the channels of the children, sends orders and reads messages without blocking.

    Args:
        path: the path of the listening socket, accessible to the daemon's user only.
        loop: watches the channels and the listening socket.
        name_of: returns the name of the child with a pid; None if no child has this pid. The connection of such a
            process is closed.
        handlers: the event handlers, by the name of the child. They receive the replies to inference requests.
        on_message: called with the name of a child and a message that is not a reply to an inference request.
        on_protocol_error: called with the name of a child and the error after the child has violated the protocol. The
            channel of the child is closed before this call.
        on_message_burst: called before several messages from one child are handled in a row.
        on_direct_report: called with the name of a child, a message about a direct channel, and its frames.
    """

    def __init__(  # noqa: PLR0913
        self,
        path: Path,
        loop: EventLoop,
        name_of: Callable[[int], str | None],
        handlers: Mapping[str, ProcessEventHandler],
        on_message: Callable[[str, ChildMessage], object],
        on_protocol_error: Callable[[str, RemoteProtocolError], object],
        *,
        on_message_burst: Callable[[], object],
        on_direct_report: OnDirectReport,
    ) -> None:
        self._loop = loop
        self._on_direct_report = on_direct_report
        self._decoder = Decoder(FROM_CHILD, max_bytes=limits.MAX_CHILD_HEADER_BYTES)
        self._name_of = name_of
        self._handlers = handlers
        self._on_message = on_message
        self._on_protocol_error = on_protocol_error
        self._on_message_burst = on_message_burst
        # The channel of each child, by the name of the child; None if the channel was closed and the child has not been
        # reaped.
        self._channels: dict[str, Stream | None] = {}
        # Orders to children whose channels are not connected yet, by the name of the child.
        self._held_orders: dict[str, list[tuple[ChildOrder, Sequence[Any], Sequence[SharedRegion]]]] = {}
        # The regions of clients' shared memory that each worker has mapped, by the name of the worker.
        self._worker_regions: dict[str, WorkerRegions] = {}
        self._listener = bind_unix(path, str(path), PRIVATE_UMASK)
        self._listener.listen(socket.SOMAXCONN)
        self._listener.setblocking(False)
        # One call of `accept` must accept all pending channels: after a child has sent Reconnected, its channel must be
        # among the accepted ones.
        self._acceptor = Acceptor(self._listener, loop, self._on_connection, _log.error, max_accepted=socket.SOMAXCONN)

    def is_open(self, name: str) -> bool:
        """Return whether the channel of a child is connected."""
        return self._channels.get(name) is not None

    def is_open_or_pending(self, name: str) -> bool:
        """Return whether a child has an open channel, or orders are held until the child connects its channel."""
        return self.is_open(name) or name in self._held_orders

    def send(
        self, name: str, order: ChildOrder, frames: Sequence[Any] = (), regions: Sequence[SharedRegion] = ()
    ) -> None:
        """Map regions of clients' shared memory in a child, and send an order to the child.

        If the channel is not writable now, the order is sent later. The frames are not copied.
        """
        channel = self._channels.get(name)
        if channel is not None:
            try:
                if regions:
                    worker_regions = self._worker_regions[name]
                    if len(regions) > 1 or regions[0].number != worker_regions.latest_number:
                        self._map_regions(channel, worker_regions, regions)
                if not channel.send([*encode(order, limits.MAX_CHILD_HEADER_BYTES), *frames]):
                    self._loop.watch_writes(channel.fileno(), functools.partial(self._flush, channel))
            except ConnectionError:
                # The child has closed the channel, so the order is lost. `_read` still reads the messages that the
                # child sent before.
                return
        elif name not in self._channels:
            self._held_orders.setdefault(name, []).append((order, frames, regions))

    def send_descriptors(self, name: str, order: ChildOrder, descriptors: Sequence[int]) -> bool:
        """Send an order with file descriptors; return False if the child has no channel or no descriptor is left."""
        channel = self._channels.get(name)
        if channel is None:
            return False
        try:
            if not channel.send(encode(order), descriptors):
                self._loop.watch_writes(channel.fileno(), functools.partial(self._flush, channel))
        except OSError:
            return False
        return True

    def cork(self, name: str) -> None:
        """Delay small messages to a child until the end of this turn of the event loop, to send them together."""
        channel = self._channels.get(name)
        if channel is not None:
            channel.cork()
            self._loop.call_soon(functools.partial(self._uncork, channel))

    def unmap(self, number: int) -> None:
        """Unmap a region of clients' memory in all workers that mapped it. Later requests must not name the region."""
        for name, mapped in self._worker_regions.items():
            channel = self._channels[name]
            if mapped.remove(number) and channel is not None:
                self.send(name, UnmapRegion(number))

    def accept(self) -> None:
        """Accept the pending connections. A new channel replaces the previous channel of the same child."""
        self._acceptor.accept()

    def _on_connection(self, connection: socket.socket) -> None:
        name = self._name_of(peer_credentials(connection).pid)
        if name is None:
            connection.close()
            return
        self.read_all(name)
        self._close(name)
        enlarge_send_buffer(connection)
        channel = self._channels[name] = Stream(connection, FrameReader(limits.MAX_CHILD_HEADER_BYTES))
        self._worker_regions[name] = WorkerRegions()
        self._loop.add(channel.fileno(), functools.partial(self._read, name, channel))
        for order, frames, memories in self._held_orders.pop(name, ()):
            self.send(name, order, frames, memories)

    def read_all(self, name: str) -> None:
        """Read everything that a child has sent so far."""
        channel = self._channels.get(name)
        if channel is not None:
            poller = select.poll()
            poller.register(channel, select.POLLIN)
            while self._channels.get(name) is channel and poller.poll(0):
                self._read(name, channel)

    def remove(self, name: str) -> None:
        """Forget a child that has exited, and close its channel."""
        self._close(name)
        for known in (self._channels, self._held_orders, self._worker_regions):
            known.pop(name, None)

    def close(self) -> None:
        """Close all channels and the listening socket. The path of the socket is not removed."""
        for name in self._channels:
            self._close(name)
        self._listener.close()

    def _map_regions(self, channel: Stream, worker_regions: WorkerRegions, regions: Sequence[SharedRegion]) -> None:
        surplus, missing = worker_regions.mark_used(regions)
        for number in surplus:
            channel.send(encode(UnmapRegion(number)))
        for memory in missing:
            try:
                channel.send(encode(MapRegion(memory.number)), (memory.fileno(),))
            except OSError:
                # No free descriptor is left to send the region. The worker rejects this request, because it does not
                # know the region. The next request with this region sends the region again.
                worker_regions.remove(memory.number)

    def _close(self, name: str) -> None:
        channel = self._channels.get(name)
        if channel is not None:
            self._channels[name] = None
            self._loop.remove(channel.fileno())
            channel.close()

    def _read(self, name: str, channel: Stream) -> None:
        try:
            for _ in range(_MAX_READS):
                messages = channel.receive()
                if len(messages) > 1:
                    self._on_message_burst()
                for frames, lengths in messages:
                    if len(frames) < len(lengths):
                        raise RemoteProtocolError(f"header: longer than {limits.MAX_CHILD_HEADER_BYTES} bytes")
                    message: ChildMessage = self._decoder.decode(frames)
                    handler = self._handlers.get(name)
                    if handler is not None and message.__class__ in _OUTCOMES:
                        handler.on_message(name, message, frames[_TENSOR_FRAMES], self._loop.now)
                    elif message.__class__ in _DIRECT_REPORTS:
                        self._on_direct_report(name, message, frames[1:])
                    else:
                        self._on_message(name, message)
                if not channel.has_more or self._channels.get(name) is not channel:
                    break
        except ConnectionError:
            self._close(name)
        except RemoteProtocolError as error:
            self._close(name)
            self._on_protocol_error(name, error)

    def _uncork(self, channel: Stream) -> None:
        try:
            if channel in self._channels.values() and not channel.uncork():
                self._loop.watch_writes(channel.fileno(), functools.partial(self._flush, channel))
        except ConnectionError:
            # `_read` closes the channel.
            return

    def _flush(self, channel: Stream) -> None:
        try:
            is_done = channel.flush()
        except ConnectionError:
            is_done = True
        if is_done:
            self._loop.unwatch_writes(channel.fileno())
