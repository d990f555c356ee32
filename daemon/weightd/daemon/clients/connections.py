"""All clients: who is let in, what comes from them and what goes to them, without ever waiting for one."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from weightd.daemon.clients.connection import Connection, Identity, unix_identity
from weightd.daemon.clients.crowd import Doorkeeper
from weightd.daemon.clients.departed import Departed
from weightd.daemon.clients.lanes import Lanes
from weightd.daemon.clients.room import Room
from weightd.daemon.host import clock
from weightd.daemon.host.accepting import Accepting
from weightd.daemon.host.admission import Admission
from weightd.daemon.host.clientlog import ClientLog
from weightd.daemon.host.closing import MAX_WAITING, Closing, brings_descriptors
from weightd.daemon.host.logs import warn_of_shortage
from weightd.daemon.host.loop import Loop
from weightd.protocol import limits
from weightd.protocol.codec import encode
from weightd.protocol.errors import InvalidArgument, RemoteProtocolError, RequestError, ResourceExhausted
from weightd.protocol.framing import Incoming, Message, head
from weightd.protocol.messages.data import Error
from weightd.shared import memfd
from weightd.shared.stream import Stream

# What may wait for one client: an answer of whatever size is let through if nothing else waits.
MAX_UNREAD_BYTES = 256 * 1024 * 1024

# Of one client, before others have their turn.
_MOST_HANDLED = 16

# Of one tenant, before that of another has its turn.
_SLICE_S = 1e-4

# So many clients may have sent a descriptor and not yet all of the message with which it goes.
_MOST_EXPECTANT = 64

# The last answers of a daemon that stops get this long to be read.
_LINGER_S = 1.0

# So many connections of a user have buffers of the size that the kernel gives them (net.core.wmem_default), and those
# beyond it have buffers for so many bytes: what a client does not read there is kept at the daemon's expense.
_MOST_ROOMY = 64
_SMALL_BYTES = 8192

# Of refused connections of a user whose client has not read why. Others are told nothing.
_MOST_REFUSED = 64

# Connections to the Unix socket that wait to be accepted. A user may fill this queue with connections that are refused:
# others wait behind them, for a fraction of a second with so many.
_BACKLOG = 128

# A read takes at most so many bytes, unless a large frame is under way.
_CHUNK_BYTES = 64 * 1024

_BEHIND = f"{MAX_WAITING} descriptors that this user has sent are not closed yet: its connections end"

_log = logging.getLogger("weightd.frontend")


@dataclass(frozen=True)
class Calls:
    """What connections call.

    Attributes:
        make_room: with a client and the bytes that it wants kept; returns whether there is room.
        owner: with who has come; returns whose limits hold for the connection.
        introduce: with who has come: says on whose account it goes, and returns why it is hung up at once.
        handle: with each message, also with those of which not everything was kept.
        dismiss: with who is hung up because of an error, before that.
        gone: with who has gone.
    """

    make_room: Callable[[bytes, int], bool]
    owner: Callable[[Identity], str]
    introduce: Callable[[Connection], RequestError | None]
    handle: Callable[[Connection, Message], object]
    dismiss: Callable[[Connection, RequestError], object]
    gone: Callable[[Connection], object]


class Connections:
    """The connections of clients.

    Args:
        loop: calls when something can be read, or written.
        room: counts what is kept for them.
        admission: limits the connections of each user of the Unix socket.
        calls: what is done with what they say.

    Attributes:
        closing: takes descriptors that nobody wants.
        dropped: messages that could not be sent: their client was gone, or did not read.
        log: of what clients do.
    """

    def __init__(
        self,
        loop: Loop,
        room: Room,
        admission: Admission,
        calls: Calls,
        log: ClientLog | None = None,
    ) -> None:
        self.log = log or ClientLog()
        self.closing = Closing(warn_of_shortage)
        # With another `Closing`: a close of a connection can always be interrupted.
        self._departed = Departed(loop, Closing(warn_of_shortage).close_socket)
        self.dropped = 0
        self._loop = loop
        self._room = room
        self._admission = admission
        self._calls = calls
        self._by_key: dict[bytes, Connection] = {}
        self._keys = itertools.count(1)
        self._doorkeeper = Doorkeeper(self.log)
        self._expectant: set[Connection] = set()
        self._behind: dict[Connection, None] = {}
        self._lanes = Lanes()
        # Those to whom something is kept back; None where nothing is.
        self._held: set[Connection] | None = None

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._by_key.values())

    def get(self, key: bytes) -> Connection | None:
        """Return a client by its key; None where it has gone."""
        return self._by_key.get(key)

    # --- who comes and goes ---------------------------------------------------------------------------------------

    def listen(self, listener: socket.socket) -> None:
        """Let in whoever connects to a unix socket that listens and does not block."""
        listener.listen(_BACKLOG)
        Accepting(listener, self._loop, self._let_in, _log.error)

    def _let_in(self, connection: socket.socket) -> bool:
        """Adopt a new connection to the Unix socket, or refuse it before anything else is done for it."""
        identity = unix_identity(connection)
        owner = self._calls.owner(identity)
        why = None if identity.proof.operates else self._admission.refusal(owner, clock.now())
        if why is None:
            self.adopt(connection, identity)
            return True
        if self._departed.of(owner) < _MOST_REFUSED:
            # The kernel keeps the text until the client reads it.
            with contextlib.suppress(OSError):
                connection.setblocking(False)
                connection.send(_refused(why))
        self._departed.end(owner, connection, lambda: None)
        self.log.log(_log, logging.WARNING, owner, "new connection of %s refused: %s", identity.origin.far, why)
        return False

    def adopt(self, connection: socket.socket, identity: Identity) -> None:
        """Let somebody in; the socket is this object's from now on."""
        key = next(self._keys).to_bytes(8, "big")
        longest = min(self._room.most, limits.MAX_FRAME_BYTES)
        incoming = Incoming(max_frame_bytes=longest, admit=functools.partial(self._admit, key), most=_MOST_HANDLED)
        stream = Stream(connection, incoming, takes_descriptors=identity.is_near)
        found = self._by_key[key] = Connection(key, stream, identity, clock.now(), self._calls.owner(identity))
        if identity.is_near and self._admission.enters(found.owner) > _MOST_ROOMY:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SMALL_BYTES)
        excess = self._calls.introduce(found)
        self._loop.add(stream.fileno(), functools.partial(self._receive, found))
        for each in self._doorkeeper.came(found, len(self._by_key)):
            self.hang_up(each.guest, each.why)
        if excess is not None and not found.leaving:
            self._calls.dismiss(found, excess)
            self.hang_up(found, str(excess))

    def introduce_again(self) -> None:
        """Who is who may have changed."""
        for each in self:
            self._calls.introduce(each)
        self._doorkeeper.renew(each for each in self if not each.leaving)

    def hang_up(self, connection: Connection, why: str) -> None:
        """End a connection; what its client has asked ends with it, in a moment."""
        if not connection.leaving:
            self._skip(connection)
            near = connection.origin.near
            self.log.log(_log, logging.WARNING, connection.user, "a connection of %s is hung up: %s", near, why)
            connection.hang_up()
            self._doorkeeper.leaves(connection)
            # It is told of its end, and of nothing that it has said.
            self._loop.remove(connection.stream.fileno())
            self._loop.add(connection.stream.fileno(), functools.partial(self._leave, connection))

    def refuse_descriptors(self, connection: Connection) -> None:
        """Have those closed that a client has sent, and nobody wants."""
        while connection.stream.descriptors:
            self.closing.close(connection.owner, connection.stream.descriptors.popleft())
        if self.closing.is_behind(connection.owner):
            self.hang_up(connection, _BEHIND)

    def close(self) -> None:
        """Let all go; those who are reading what was said to them last get a moment for that."""
        self._let_go()
        deadline = clock.now() + _LINGER_S
        while any(each.unread for each in self) and clock.now() < deadline:
            self._loop.wait(deadline - clock.now())
        for each in self:
            self._loop.remove(each.stream.fileno())
            self._close(each)
        self._by_key.clear()
        self._departed.close()

    def _skip(self, connection: Connection) -> None:
        """Nothing more is heard of it."""
        connection.backlog.clear()
        if connection.waits:
            connection.waits = False
            self._lanes.forget(connection)

    def _leave(self, connection: Connection) -> None:
        self._skip(connection)
        del self._by_key[connection.key]
        self._loop.remove(connection.stream.fileno())
        self._close(connection)
        self._room.forget(connection.key)
        self._doorkeeper.leaves(connection)
        self._doorkeeper.went(len(self._by_key))
        self._calls.gone(connection)

    def _close(self, connection: Connection) -> None:
        stream, owner = connection.stream, connection.owner
        if not connection.identity.is_near:
            stream.close()
            return
        while stream.descriptors:
            self.closing.close(owner, stream.descriptors.popleft())
        self._departed.end(owner, stream.connection, functools.partial(self._admission.leaves, owner))

    # --- from a client --------------------------------------------------------------------------------------------

    def _receive(self, connection: Connection) -> None:
        """Something has come, or the client has gone."""
        if self._lanes.are_needed(connection):
            if not connection.waits:
                connection.waits = True
                self._loop.pause(connection.stream.fileno())
                self._lanes.wait(connection)
            self._loop.soon(self._serve)
        elif not self._handle(connection):
            self._behind[connection] = None
            self._loop.soon(self._catch_up)

    def _catch_up(self) -> None:
        """Go on with those who have sent more at once than was handled, after all others had their turn."""
        behind, self._behind = self._behind, {}
        for connection in behind:
            if connection.key in self._by_key and not connection.leaving:
                self._receive(connection)

    def _serve(self) -> None:
        """Handle what one connection has sent, for a moment, where several users speak."""
        if not self._lanes:
            return
        begin = clock.now()
        tenant, connection = self._lanes.take()
        is_done = self._handle(connection, begin + _SLICE_S)
        if connection.waits:
            if is_done:
                connection.waits = False
                self._loop.resume(connection.stream.fileno())
            else:
                self._lanes.wait(connection)
        self._lanes.spent(tenant, clock.now() - begin)
        if self._lanes:
            self._loop.soon(self._serve)

    def _handle(self, connection: Connection, until: float = math.inf) -> bool:
        """Handle what was read, or read once, so that others have their turn; return whether that is all for now."""
        messages = connection.backlog or self._read(connection)
        while messages:
            connection.has_spoken = True
            self._calls.handle(connection, messages.popleft())
            if connection.leaving:
                # That was its last.
                messages.clear()
                return True
            if messages and until < math.inf and clock.now() >= until:
                connection.backlog = messages
                return False
        if connection.stream.descriptors:
            self._wait_for_message(connection)
        return not connection.stream.incoming.is_behind

    def _read(self, connection: Connection) -> deque[Message]:
        stream = connection.stream
        incoming = stream.incoming
        # Of a large frame so much is read at once that it cannot be looked at before.
        if (
            connection.identity.is_near
            and self.closing.is_behind(connection.owner)
            and (incoming.missing > _CHUNK_BYTES or brings_descriptors(stream.connection, _CHUNK_BYTES))
        ):
            self._expel(connection, _BEHIND)
            return deque()
        try:
            messages = incoming.receive(b"") if incoming.is_behind else stream.receive()
        except ConnectionError:
            self._leave(connection)
            return deque()
        except RemoteProtocolError as error:
            # Nobody can tell where its next message would begin.
            self._expel(connection, str(error))
            return deque()
        if stream.descriptors and not self._may_keep_descriptors(connection):
            return deque()
        if connection.arriving and not incoming.announced:
            self._room.give(connection.key, connection.arriving)
            connection.arriving = 0
        return deque(messages)

    def _wait_for_message(self, connection: Connection) -> None:
        """A client's descriptors are there: they are refused where no message is that they may go with."""
        if connection.stream.incoming.is_idle:
            self.refuse_descriptors(connection)
            return
        self._expectant = {each for each in self._expectant if each.stream.descriptors} | {connection}
        if len(self._expectant) > _MOST_EXPECTANT:
            users = Counter(each.user for each in self._expectant)
            largest = max(self._expectant, key=lambda each: (users[each.user], each.since))
            self._expectant.discard(largest)
            self.hang_up(largest, "its user has sent most descriptors without the messages that these go with")

    def _may_keep_descriptors(self, connection: Connection) -> bool:
        """Return whether the client has sent descriptors of memory alone; hang it up otherwise."""
        if all(map(memfd.is_memory, connection.stream.descriptors)):
            return True
        self._expel(connection, "descriptors: expected a memfd, got a descriptor of something else")
        return False

    def _expel(self, connection: Connection, why: str) -> None:
        """Tell a client that its connection ends because of what it has sent, and hang it up."""
        self._calls.dismiss(connection, InvalidArgument(why))
        self.hang_up(connection, why)

    def _admit(self, key: bytes, nbytes: int) -> bool:
        """A message begins that does not come at once: it takes room from now on."""
        connection = self._by_key[key]
        self._room.give(key, connection.arriving)
        connection.arriving = 0
        if connection.tenant is None:
            # It is refused, whatever it says.
            return False
        if nbytes > self._room.most or (not self._room.fits(nbytes) and not self._calls.make_room(key, nbytes)):
            return False
        self._room.take(key, nbytes)
        connection.arriving = nbytes
        return True

    # --- to a client ----------------------------------------------------------------------------------------------

    def send(self, key: bytes, frames: Sequence[Any]) -> bool:
        """Send a message, or drop it; return False if that is because the client has not read earlier ones."""
        connection = self._by_key.get(key)
        if connection is None or connection.leaving:
            self.dropped += 1
            return True
        if connection.unread and not self._may_wait(connection, sum(map(len, frames))):
            self.dropped += 1
            return False
        if self._held is not None and connection not in self._held:
            self._held.add(connection)
            connection.stream.hold()
        try:
            if connection.stream.send(frames):
                return True
        except ConnectionError:
            # It is told of its end as of any other's.
            self.dropped += 1
            return True
        self._send_later(connection)
        return True

    def hold(self) -> None:
        """Keep small messages back until the end of this turn, so that each client gets its own with one call."""
        if self._held is None:
            self._held = set()
            self._loop.soon(self._let_go)

    def _let_go(self) -> None:
        held, self._held = self._held or (), None
        for connection in held:
            if connection.key not in self._by_key:
                continue
            try:
                if not connection.stream.let_go():
                    self._send_later(connection)
            except ConnectionError:
                self.dropped += 1

    def _send_later(self, connection: Connection) -> None:
        if not connection.unread:
            self._loop.watch_writes(connection.stream.fileno(), functools.partial(self._flush, connection))
        self._count_unread(connection)

    def _may_wait(self, connection: Connection, nbytes: int) -> bool:
        if connection.unread + nbytes <= MAX_UNREAD_BYTES:
            return self._room.fits(nbytes) or self._calls.make_room(connection.key, nbytes)
        if not connection.drops:
            connection.drops = True
            text = "%s does not read: %d MiB wait for it, further answers are dropped"
            args = connection.origin.near, connection.unread // 2**20
            self.log.log(_log, logging.WARNING, connection.user, text, *args)
        return False

    def _flush(self, connection: Connection) -> None:
        try:
            if connection.stream.flush():
                self._loop.unwatch_writes(connection.stream.fileno())
        except ConnectionError:
            # Its end is told to who reads.
            self._loop.unwatch_writes(connection.stream.fileno())
            return
        self._count_unread(connection)

    def _count_unread(self, connection: Connection) -> None:
        unread = connection.stream.unsent
        more = unread - connection.unread
        connection.unread = unread
        if more > 0:
            self._room.take(connection.key, more)
        else:
            self._room.give(connection.key, -more)


@functools.lru_cache
def _refused(why: str) -> bytes:
    """Return the message to a client whose connection is refused."""
    frames = encode(Error("", ResourceExhausted.code, f"{why}: this connection ends"))
    return b"".join([head(frames), *frames])
