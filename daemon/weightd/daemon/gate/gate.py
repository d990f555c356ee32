"""The gate's one loop: messages of clients to the daemon, each client's over its own stream, and answers to clients."""

from __future__ import annotations

import contextlib
import errno
import functools
import socket
from collections import deque
from typing import TYPE_CHECKING

import zmq

from weightd.daemon.gate import link
from weightd.daemon.gate.doorman import Doorman
from weightd.daemon.gate.lane import Lane, open_stream
from weightd.daemon.gate.link import ERROR, WARNING
from weightd.daemon.gate.memory import Memory
from weightd.daemon.gate.peers import Connection, Peers
from weightd.daemon.gate.reader import Reader
from weightd.daemon.gate.unread import Unread
from weightd.daemon.gate.upkeep import Upkeep
from weightd.daemon.host import clock
from weightd.daemon.host.loop import Loop
from weightd.daemon.host.timers import Timer
from weightd.shared import multipart

if TYPE_CHECKING:
    from weightd.daemon.gate.link import Terms
    from weightd.shared.stream import Stream

# What the daemon has not read: past this no more is read from anybody, until half of it has gone. It reads everybody
# all the time, so this is a burst, or the daemon is busy.
MAX_UNSENT_BYTES = 32 * 1024 * 1024

# A client of whom the daemon reads nothing for so long, while others wait for that, is hung up.
STUCK_S = 5.0

# Who has to read first is looked at so often, and so much more seldom while nobody reads: the library does not tell.
_RETRY_S = 0.005
_SELDOM = 20

# A client whom the daemon has closed gets what it was sent before in this time.
_FAREWELL_S = 0.1

# When the daemon ends: its last answers get so long to come here, and as long again to leave.
LINGER_S = 1.0

# A wake-up reads at most so many messages: there is more to do.
_BATCH = 64

_NEVER = float("inf")


class Gate:
    """Passes messages on.

    Args:
        router: bound or about to be: the ROUTER socket of the clients.
        link: to the daemon.
        terms: as the daemon has said.
        memory: of this process.
    """

    def __init__(self, router: zmq.Socket[bytes], link: Stream, terms: Terms, memory: Memory) -> None:
        self._router = router
        self._link = link
        self._terms = terms
        self._peers = Peers(router, terms.keys)
        self._given = self._peers.given
        self._reader = Reader(router)
        self._doorman = Doorman(self._peers, terms.max_connections, terms.twin, self._log)
        self._upkeep = Upkeep(memory, self._peers, self._counted, terms.max_memory_bytes, self._log)
        self._lanes: dict[Connection, Lane] = {}
        # Those that the daemon has to read, and since when it has not; those whose client has to read.
        self._unsent: dict[Lane, float] = {}
        self._waiting: dict[Lane, None] = {}
        # Who is to be hung up when what was sent to him has left.
        self._leaving: deque[tuple[float, Connection]] = deque()
        self._ends_at = _NEVER
        self._paused = False
        self._loop = Loop()
        # The router's tells once that something has come, to whoever uses the router next: `_look` follows each use.
        self._descriptor = int(router.FD)
        self._loop.add(self._descriptor, self._on_clients)
        self._loop.soon(self._look)
        self._used = [self._loop.add_seldom(each, self._on_peers) for each in self._peers.sources]
        self._loop.add(link.fileno(), self._on_link)
        self._retry = Timer(self._try_again)
        self._retry_in = _RETRY_S
        self._farewell = Timer(self._hang_up_leaving)
        self._stuck = Timer(self._end_stuck)
        for timer in (self._doorman.timer, self._upkeep.timer, self._retry, self._farewell, self._stuck):
            self._loop.add_timer(timer)

    def run(self) -> None:
        """Pass messages on until the daemon's end of the link is closed, and then what it has said last."""
        while self._ends_at == _NEVER:
            self._loop.wait()
        while self._lanes and clock.now() < self._ends_at:
            self._loop.wait(self._ends_at - clock.now())

    def close(self) -> None:
        """Close what is not the caller's."""
        self._peers.close()
        self._loop.close()

    # --- clients to daemon --------------------------------------------------------------------------------------

    def _on_clients(self) -> None:
        """Clients have sent something, or the library has other news."""
        now = clock.now()
        for _ in range(_BATCH):
            received = self._reader.read()
            if received is None:
                break
            self._pass_on(*received, now)
            # To ask is cheaper than the exception of a read that finds nothing.
            if self._paused or not self._reader.is_ready:
                return
        self._loop.soon(self._look)

    def _look(self) -> None:
        """Whoever else has used the socket may have taken the news that there is something to read."""
        if not self._paused and self._reader.is_ready:
            self._on_clients()

    def _pass_on(self, route: bytes, frames: list[zmq.Frame], now: float) -> None:
        connection = self._given.get(route) or self._peers.sender(route, frames[0])
        if connection is None:
            return
        connection.heard = now
        lane = self._lanes.get(connection) or self._meet(connection)
        if lane is None:
            return
        if self._reader.has_rest:
            self._refuse(route, self._terms.too_long)
            self._close(lane, "a message of more frames than there may be")
            return
        try:
            if not lane.stream.send(frames):
                self._wait_for_daemon(lane, now)
        except ConnectionError:
            pass  # what the daemon has said before is read first

    def _wait_for_daemon(self, lane: Lane, now: float) -> None:
        if lane not in self._unsent:
            self._unsent[lane] = now
            self._loop.watch_writes(lane.stream.fileno(), functools.partial(self._flush, lane))
        if not self._paused and sum(each.unsent for each in self._unsent) > MAX_UNSENT_BYTES:
            self._pause()
            self._stuck.set(now + STUCK_S)

    def _pause(self) -> None:
        self._paused = True
        self._loop.pause(self._descriptor)

    def _flush(self, lane: Lane) -> None:
        """The daemon has read some of what a client has sent."""
        before = lane.unsent
        try:
            is_all = lane.stream.flush()
        except ConnectionError:
            is_all = True  # as above
        if is_all:
            self._unsent.pop(lane, None)
            self._loop.unwatch_writes(lane.stream.fileno())
        elif lane.unsent < before:
            self._unsent[lane] = clock.now()
        self._go_on()

    def _go_on(self) -> None:
        if (
            self._paused
            and self._ends_at == _NEVER
            and 2 * sum(each.unsent for each in self._unsent) <= MAX_UNSENT_BYTES
        ):
            self._paused = False
            self._loop.resume(self._descriptor)
            self._loop.soon(self._look)

    def _end_stuck(self, now: float) -> None:
        if not self._paused:
            return
        for lane, since in list(self._unsent.items()):
            if since + STUCK_S <= now:
                self._close(lane, f"the daemon has read none of {lane.unsent} bytes for {STUCK_S:g} s")
        self._stuck.set(now + STUCK_S)

    # --- daemon to clients --------------------------------------------------------------------------------------

    def _fetch(self, lane: Lane) -> None:
        """The daemon has something for a client."""
        self._loop.soon(self._look)
        if lane in self._waiting:
            # Not asked for: it has closed its end, and the client does not read.
            self._let_go(lane)
            return
        try:
            if not lane.pass_on():
                self._wait_for_client(lane)
        except ConnectionError:
            self._let_go(lane)
        except MemoryError:
            self._close(lane, "there is no memory for its answer")

    def _wait_for_client(self, lane: Lane) -> None:
        self._waiting[lane] = None
        self._loop.pause(lane.stream.fileno())
        self._retry_in = _RETRY_S
        self._retry.set(clock.now() + self._retry_in)
        while self._kept() > self._terms.max_memory_bytes:
            users: dict[str, int] = {}
            for each in self._waiting:
                users[each.connection.user] = users.get(each.connection.user, 0) + each.nbytes
            largest = max(self._waiting, key=lambda each: (users[each.connection.user], each.nbytes))
            self._close(largest, f"it has not read {largest.nbytes} bytes")

    def _try_again(self, now: float) -> None:
        self._loop.soon(self._look)
        before = self._kept()
        for lane in list(self._waiting):
            if lane.go_on():
                del self._waiting[lane]
                self._loop.resume(lane.stream.fileno())
        is_slow = self._kept() == before
        self._retry_in = min(2 * self._retry_in, _SELDOM * _RETRY_S) if is_slow else _RETRY_S
        if self._waiting:
            self._retry.set(now + self._retry_in)

    # --- who is there -------------------------------------------------------------------------------------------

    def _on_peers(self) -> None:
        for use in self._used:
            use()
        for connection in self._peers.ended():
            lane = self._lanes.get(connection)
            if lane is not None:
                self._forget(lane)
        self._upkeep.seen(clock.now())
        self._doorman.look()

    def _meet(self, connection: Connection) -> Lane | None:
        """Somebody speaks for the first time: the daemon gets one end of a pair of sockets for him."""
        if connection.leaving:
            return None
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            self._log(ERROR, f"a connection of {connection.user} is hung up: {error.strerror}")
            connection.hang_up()
            return None
        lane = Lane(connection, open_stream(ours), Unread(self._router, connection.route))
        self._lanes[connection] = lane
        self._loop.add(ours.fileno(), functools.partial(self._fetch, lane))
        with theirs:
            self._say(link.met(len(self._lanes), connection.identity), theirs.fileno())
        return lane

    def _refuse(self, route: bytes, message: bytes) -> None:
        self._loop.soon(self._look)
        try:
            multipart.send(self._router, [route, message], multipart.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise

    def _close(self, lane: Lane, why: str) -> None:
        """Hang a client up, and forget what it has asked."""
        self._log(WARNING, f"a connection of {lane.connection.user} is hung up: {why}")
        self._let_go(lane)

    def _let_go(self, lane: Lane) -> None:
        """Close a client's stream, and its connection when what it was told has left."""
        self._leaving.append((clock.now() + _FAREWELL_S, lane.connection))
        self._farewell.set(self._leaving[0][0])
        self._forget(lane)

    def _hang_up_leaving(self, now: float) -> None:
        while self._leaving and self._leaving[0][0] <= now:
            connection = self._leaving.popleft()[1]
            if self._peers.is_there(connection):
                connection.hang_up()
        if self._leaving:
            self._farewell.set(self._leaving[0][0])

    def _forget(self, lane: Lane) -> None:
        """Close a client's stream: what it has asked ends in the daemon."""
        lane.connection.leaving = True
        del self._lanes[lane.connection]
        self._unsent.pop(lane, None)
        self._waiting.pop(lane, None)
        self._loop.remove(lane.stream.fileno())
        lane.stream.close()
        self._go_on()
        self._say(link.left(len(self._lanes)))

    # --- within -------------------------------------------------------------------------------------------------

    def _log(self, level: int, text: str) -> None:
        self._say(link.said(level, text))

    def _say(self, message: bytes, *descriptors: int) -> None:
        with contextlib.suppress(ConnectionError):  # the daemon has gone: the link tells
            if not self._link.send([message], descriptors):
                self._loop.watch_writes(self._link.fileno(), self._flush_link)

    def _flush_link(self) -> None:
        with contextlib.suppress(ConnectionError):  # as above
            if not self._link.flush():
                return
        self._loop.unwatch_writes(self._link.fileno())

    def _on_link(self) -> None:
        try:
            for message in self._link.receive():
                self._peers.admit(link.of_gates_daemon(message.frames[0]))
        except ConnectionError:
            # What it has said last is still passed on; nothing new is taken.
            self._loop.remove(self._link.fileno())
            if not self._paused:
                self._pause()
            self._ends_at = clock.now() + LINGER_S

    def _kept(self) -> int:
        return sum(each.nbytes for each in self._waiting)

    def _counted(self) -> int:
        return self._kept() + sum(each.unsent for each in self._unsent)
