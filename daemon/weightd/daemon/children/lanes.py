"""The lanes: a stream to each child, by which requests go there and answers come back, without libzmq."""

from __future__ import annotations

import functools
import logging
import select
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weightd.daemon.children.mapped import Mapped
from weightd.daemon.host.accepting import Accepting
from weightd.daemon.host.credentials import credentials
from weightd.daemon.host.listening import bound
from weightd.daemon.host.loop import Loop
from weightd.daemon.host.sockets import PRIVATE
from weightd.daemon.requests.regions import Memory
from weightd.protocol import limits
from weightd.protocol.codec import encode
from weightd.protocol.errors import RemoteProtocolError
from weightd.protocol.framing import Incoming
from weightd.protocol.messages.children import Map, Unmap
from weightd.shared.stream import Stream, keep_much

# What a child has said at once is heard at once, but for this bound: others have their turn.
_MOST_READS = 8

_log = logging.getLogger("weightd")


class Lanes:
    """Accepts the children's connections and reads from them; nothing here ever waits for a child.

    Args:
        path: where they connect: nobody else's user may.
        loop: calls when something can be read or written.
        name_of: gives the name of the child with a pid, None if there is none; who is no child is hung up.
        heard: is given the name of a child and the frames of its next message.
        broken: is given the name of a child and how it has broken the protocol: then its lane is closed.

    Attributes:
        several: called before more than one message is heard that have come at once.
    """

    def __init__(
        self,
        path: Path,
        loop: Loop,
        name_of: Callable[[int], str | None],
        heard: Callable[[str, Sequence[Any]], object],
        broken: Callable[[str, RemoteProtocolError], object],
    ) -> None:
        self.several: Callable[[], object] = lambda: None
        self._loop = loop
        self._name_of = name_of
        self._heard = heard
        self._broken = broken
        # None: it had one, which is closed. That it has ended, its pidfd will tell.
        self._lanes: dict[str, Stream | None] = {}
        # What children are to have once they have connected.
        self._held: dict[str, list[tuple[Sequence[Any], Sequence[Memory]]]] = {}
        # What each has been given of the memory of clients.
        self._mapped: dict[str, Mapped] = {}
        self._listener = bound(path, str(path), PRIVATE)
        self._listener.listen(socket.SOMAXCONN)
        self._listener.setblocking(False)
        # Whoever is heard by another way has connected before: all are let in.
        self._accepting = Accepting(self._listener, loop, self._let_in, _log.error, most=socket.SOMAXCONN)

    def is_open(self, name: str) -> bool:
        """Whether the child has connected its lane, and that is not closed."""
        return self._lanes.get(name) is not None

    def leads_to(self, name: str) -> bool:
        """Whether the child has a lane, or will have one for what waits: what is to come after that has to go there."""
        return self.is_open(name) or name in self._held

    def send(self, name: str, frames: Sequence[Any], memories: Sequence[Memory] = ()) -> None:
        """Send a message to a child, now or when it reads, after the memory that it names; frames are not copied."""
        lane = self._lanes.get(name)
        if lane is not None:
            try:
                if memories:
                    mapped = self._mapped[name]
                    if len(memories) > 1 or memories[0].number != mapped.latest:
                        self._give(lane, mapped, memories)
                if not lane.send(frames):
                    self._loop.watch_writes(lane.fileno(), functools.partial(self._flush, lane))
            except ConnectionError:
                # What it has said before is still read.
                return
        elif name not in self._lanes:
            self._held.setdefault(name, []).append((frames, memories))

    def hold(self, name: str) -> None:
        """Keep small messages to a child back until the end of this turn: what comes belongs together."""
        lane = self._lanes.get(name)
        if lane is not None:
            lane.hold()
            self._loop.soon(functools.partial(self._let_go, lane))

    def unmap(self, number: int) -> None:
        """Take memory away from whoever was given it: nothing will name it again."""
        for name, mapped in self._mapped.items():
            lane = self._lanes[name]
            if mapped.forget(number) and lane is not None:
                self.send(name, encode(Unmap(number)))

    def accept(self) -> None:
        """Take whoever has connected. A child that does so again has done with what came before."""
        self._accepting.accept()

    def _let_in(self, connection: socket.socket) -> None:
        name = self._name_of(credentials(connection).pid)
        if name is None:
            connection.close()
            return
        self.read_out(name)
        self._close(name)
        keep_much(connection)
        lane = self._lanes[name] = Stream(connection, Incoming(limits.MAX_CHILD_HEADER_BYTES))
        self._mapped[name] = Mapped()
        self._loop.add(lane.fileno(), functools.partial(self._read, name, lane))
        for frames, memories in self._held.pop(name, ()):
            self.send(name, frames, memories)

    def read_out(self, name: str) -> None:
        """Read all that the child has said until now."""
        lane = self._lanes.get(name)
        if lane is not None:
            readable = select.poll()
            readable.register(lane, select.POLLIN)
            while self._lanes.get(name) is lane and readable.poll(0):
                self._read(name, lane)

    def forget(self, name: str) -> None:
        """The child has exited."""
        self._close(name)
        for known in (self._lanes, self._held, self._mapped):
            known.pop(name, None)

    def close(self) -> None:
        """Close them all; the path stays."""
        for name in self._lanes:
            self._close(name)
        self._listener.close()

    def _give(self, lane: Stream, mapped: Mapped, memories: Sequence[Memory]) -> None:
        surplus, missing = mapped.use(memories)
        for number in surplus:
            lane.send(encode(Unmap(number)))
        for memory in missing:
            try:
                lane.send(encode(Map(memory.number)), (memory.fileno(),))
            except OSError:
                # No descriptor is left: the worker says that it has none, and the next request tries again.
                mapped.forget(memory.number)

    def _close(self, name: str) -> None:
        lane = self._lanes.get(name)
        if lane is not None:
            self._lanes[name] = None
            self._loop.remove(lane.fileno())
            lane.close()

    def _read(self, name: str, lane: Stream) -> None:
        try:
            for _ in range(_MOST_READS):
                messages = lane.receive()
                if len(messages) > 1:
                    self.several()
                for frames, lengths in messages:
                    if len(frames) < len(lengths):
                        raise RemoteProtocolError(f"header: longer than {limits.MAX_CHILD_HEADER_BYTES} bytes")
                    self._heard(name, frames)
                if not lane.has_more or self._lanes.get(name) is not lane:
                    break
        except ConnectionError:
            self._close(name)
        except RemoteProtocolError as error:
            self._close(name)
            self._broken(name, error)

    def _let_go(self, lane: Stream) -> None:
        try:
            if lane in self._lanes.values() and not lane.let_go():
                self._loop.watch_writes(lane.fileno(), functools.partial(self._flush, lane))
        except ConnectionError:
            # As for one message.
            return

    def _flush(self, lane: Stream) -> None:
        try:
            is_done = lane.flush()
        except ConnectionError:
            is_done = True
        if is_done:
            self._loop.unwatch_writes(lane.fileno())
