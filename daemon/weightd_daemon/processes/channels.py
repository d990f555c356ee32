"""The channels: a stream to each child, by which requests go there and answers come back, without libzmq."""

from __future__ import annotations

import functools
import logging
import select
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weightd_common.peer_credentials import peer_credentials
from weightd_common.stream import Stream, enlarge_send_buffer
from weightd_daemon.platform.acceptor import Acceptor
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.listen import bind_unix
from weightd_daemon.platform.zmq_sockets import PRIVATE_UMASK
from weightd_daemon.scheduling.tensor_location import SharedRegion
from weightd_protocol import limits
from weightd_protocol.codec import encode
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.framing import FrameReader
from weightd_protocol.messages.worker import MapRegion, UnmapRegion

# More than one connection may have, so what a request needs always fits.
MAX_REGIONS = 64


class WorkerRegions:
    """The regions that one worker has been given, by number. Those that were not used for longest give way.

    Orders are obeyed in the order in which they are given: a region may be taken away behind the last predict that
    names it, whether or not that has run.

    Attributes:
        latest_number: the one that was used last: as long as requests name that alone, there is nothing to say. None
            where there is none.
    """

    def __init__(self, max_regions: int = MAX_REGIONS) -> None:
        self.latest_number: int | None = None
        self._max_regions = max_regions
        # The one that was used last is the last.
        self._numbers: dict[int, None] = {}

    def mark_used(self, regions: Sequence[SharedRegion]) -> tuple[Sequence[int], Sequence[SharedRegion]]:
        """A request is given to the worker: return what has to be taken away before, and what has to be given."""
        missing = [memory for memory in regions if memory.number not in self._numbers]
        for memory in regions:
            self._numbers.pop(memory.number, None)
            self._numbers[memory.number] = None
            self.latest_number = memory.number
        surplus = [*self._numbers][: -self._max_regions]
        for number in surplus:
            del self._numbers[number]
        return surplus, missing

    def remove(self, number: int) -> bool:
        """A region is gone; return whether the worker had it."""
        if number == self.latest_number:
            self.latest_number = None
        return self._numbers.pop(number, 0) is None

    def clear(self) -> None:
        """It is another process, or has forgotten all."""
        self._numbers.clear()
        self.latest_number = None


# What a child has said at once is heard at once, but for this bound: others have their turn.
_MAX_READS = 8

_log = logging.getLogger("weightd")


class WorkerChannels:
    """Accepts the children's connections and reads from them; nothing here ever waits for a child.

    Args:
        path: where they connect: nobody else's user may.
        loop: calls when something can be read or written.
        name_of: gives the name of the child with a pid, None if there is none; who is no child is hung up.
        on_message: is given the name of a child and the frames of its next message.
        on_protocol_error: is given the name of a child and how it has broken the protocol: then its channel is closed.

    Attributes:
        on_message_burst: called before more than one message is heard that have come at once.
    """

    def __init__(
        self,
        path: Path,
        loop: EventLoop,
        name_of: Callable[[int], str | None],
        on_message: Callable[[str, Sequence[Any]], object],
        on_protocol_error: Callable[[str, RemoteProtocolError], object],
    ) -> None:
        self.on_message_burst: Callable[[], object] = lambda: None
        self._loop = loop
        self._name_of = name_of
        self._on_message = on_message
        self._on_protocol_error = on_protocol_error
        # None: it had one, which is closed. That it has ended, its pidfd will tell.
        self._channels: dict[str, Stream | None] = {}
        # What children are to have once they have connected.
        self._held_messages: dict[str, list[tuple[Sequence[Any], Sequence[SharedRegion]]]] = {}
        # What each has been given of the memory of clients.
        self._worker_regions: dict[str, WorkerRegions] = {}
        self._listener = bind_unix(path, str(path), PRIVATE_UMASK)
        self._listener.listen(socket.SOMAXCONN)
        self._listener.setblocking(False)
        # Whoever is heard by another way has connected before: all are let in.
        self._acceptor = Acceptor(self._listener, loop, self._on_connection, _log.error, max_accepted=socket.SOMAXCONN)

    def is_open(self, name: str) -> bool:
        """Whether the child has connected its channel, and that is not closed."""
        return self._channels.get(name) is not None

    def is_open_or_pending(self, name: str) -> bool:
        """Whether the child has a channel, or will have one for what waits: what comes after that has to go there."""
        return self.is_open(name) or name in self._held_messages

    def send(self, name: str, frames: Sequence[Any], regions: Sequence[SharedRegion] = ()) -> None:
        """Send a message to a child, now or when it reads, after the memory that it names; frames are not copied."""
        channel = self._channels.get(name)
        if channel is not None:
            try:
                if regions:
                    worker_regions = self._worker_regions[name]
                    if len(regions) > 1 or regions[0].number != worker_regions.latest_number:
                        self._map_regions(channel, worker_regions, regions)
                if not channel.send(frames):
                    self._loop.watch_writes(channel.fileno(), functools.partial(self._flush, channel))
            except ConnectionError:
                # What it has said before is still read.
                return
        elif name not in self._channels:
            self._held_messages.setdefault(name, []).append((frames, regions))

    def cork(self, name: str) -> None:
        """Keep small messages to a child back until the end of this turn: what comes belongs together."""
        channel = self._channels.get(name)
        if channel is not None:
            channel.cork()
            self._loop.call_soon(functools.partial(self._uncork, channel))

    def unmap(self, number: int) -> None:
        """Take memory away from whoever was given it: nothing will name it again."""
        for name, mapped in self._worker_regions.items():
            channel = self._channels[name]
            if mapped.remove(number) and channel is not None:
                self.send(name, encode(UnmapRegion(number)))

    def accept(self) -> None:
        """Take whoever has connected. A child that does so again has done with what came before."""
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
        for frames, memories in self._held_messages.pop(name, ()):
            self.send(name, frames, memories)

    def read_all(self, name: str) -> None:
        """Read all that the child has said until now."""
        channel = self._channels.get(name)
        if channel is not None:
            poller = select.poll()
            poller.register(channel, select.POLLIN)
            while self._channels.get(name) is channel and poller.poll(0):
                self._read(name, channel)

    def remove(self, name: str) -> None:
        """The child has exited."""
        self._close(name)
        for known in (self._channels, self._held_messages, self._worker_regions):
            known.pop(name, None)

    def close(self) -> None:
        """Close them all; the path stays."""
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
                # No descriptor is left: the worker says that it has none, and the next request tries again.
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
                    self.on_message_burst()
                for frames, lengths in messages:
                    if len(frames) < len(lengths):
                        raise RemoteProtocolError(f"header: longer than {limits.MAX_CHILD_HEADER_BYTES} bytes")
                    self._on_message(name, frames)
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
            # As for one message.
            return

    def _flush(self, channel: Stream) -> None:
        try:
            is_done = channel.flush()
        except ConnectionError:
            is_done = True
        if is_done:
            self._loop.unwatch_writes(channel.fileno())
