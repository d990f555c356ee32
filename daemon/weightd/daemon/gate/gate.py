"""The gate's one loop: messages of clients to the daemon, each client's over its own stream, and answers to clients.

Nothing that one user does is to be felt by another: each has its own limits of connections and of memory, and takes
turns with the others. A client whose messages the daemon does not read, or which does not read its answers, waits
alone: nothing more is read of what is for the other side.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weightd.daemon.gate import client as clients
from weightd.daemon.gate import link, memory, zmtp
from weightd.daemon.gate.client import Client, Side
from weightd.daemon.gate.link import ERROR, WARNING
from weightd.daemon.gate.turns import Turns
from weightd.daemon.host import clock
from weightd.daemon.host.accepting import Accepting
from weightd.daemon.host.admission import Admission, Limits
from weightd.daemon.host.crowding import EVERYONE, NO_TENANT, Crowd, for_clients
from weightd.daemon.host.loop import Loop
from weightd.daemon.host.membership import Members, Membership
from weightd.daemon.host.timers import Timer
from weightd.protocol.framing import Incoming
from weightd.protocol.limits import MAX_FRAME_BYTES
from weightd.shared.seldom import Seldom
from weightd.shared.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightd.daemon.gate.link import Terms
    from weightd.daemon.gate.separate import Separate
    from weightd.daemon.host.closing import Closing
    from weightd.shared.peers import Peers

# A client has to complete its handshake in this time, and a user may have so many that have not.
HANDSHAKE_S = 5.0
MAX_HANDSHAKES = 256

# When the daemon ends, and when it closes a stream: the last answers get so long to be read.
LINGER_S = 1.0

# A connection to which everything was sent is closed after this time: over TCP what the client has not read by then may
# be lost, if the client goes on sending.
_FAREWELL_S = 0.1

# In one turn of the loop so many reads are done at once; what is ready beyond that waits for its turn.
_READS = 2

# Reads of waiting clients go on for so long before the loop looks at everything else.
_SLICE_S = 2e-4

# Between two lines of the log about connections of one user that were hung up or refused.
_LINES_S = 10.0

# After more than this was kept, and nothing for some time, memory is given back to the kernel.
_LARGE_BYTES = 1024 * 1024
_QUIET_S = 1.0

# While the kernel lets this process send no descriptor, the gate tries again after so long.
_RETRY_S = 0.1

# Of a connection: its own, and this end of its pair.
_DESCRIPTORS = 2

_NEVER = float("inf")


def max_connections(bound: int = 0) -> int:
    """Return how many clients may be connected under the process's present limit, and this bound if it is none of 0."""
    most = max(1, for_clients() // _DESCRIPTORS)
    return min(most, bound) if bound else most


class User:
    """What one user has here.

    Attributes:
        clients: its connections.
        handshakes: those of them whose handshake is not complete, the oldest first.
        nbytes: that are kept for them.
    """

    def __init__(self) -> None:
        self.clients: set[Client] = set()
        self.handshakes: dict[Client, None] = {}
        self.nbytes = 0


class Gate:
    """Passes messages on.

    Args:
        listener: the listening socket; it does not block.
        link: to the daemon.
        terms: as the daemon has said.
        separate: makes calls that take long; None where clients have no keys, and nothing takes long.
        closing: closes descriptors that clients send; None where they can send none.
    """

    def __init__(
        self,
        listener: socket.socket,
        link: Stream,
        terms: Terms,
        separate: Separate | None = None,
        closing: Closing | None = None,
    ) -> None:
        self._closing = closing
        self._link = link
        self._terms = terms
        self._bounds = zmtp.Bounds(terms.max_frame_bytes, terms.max_memory_bytes)
        self._separate = separate
        self._keys = _known(terms.keys)
        self._mechanism = self._mechanisms()
        self._admission = Admission(Limits(terms.max_user_connections, terms.max_user_connection_rate))
        self._peers = _peers() if listener.family != socket.AF_UNIX else None
        self._membership = _membership(terms.tenants)
        self._crowd: Crowd[Client] = Crowd()
        self._users: dict[str, User] = {}
        self._kept = 0
        # Clients whom the daemon knows, and those that are leaving, with the time at which they have to be gone.
        self._met = 0
        self._leaving: dict[Client, float] = {}
        self._handshakes: dict[Client, None] = {}
        self._turns: Turns[Side] = Turns()
        self._reads = 0
        self._ends_at = _NEVER
        self._hang_ups = Seldom(_LINES_S)
        self._refusals = Seldom(_LINES_S)
        self._loop = Loop()
        self._handshake_timer = Timer(self._end_handshakes)
        self._leave_timer = Timer(self._end_leaving)
        self._trim_timer = Timer(lambda _: memory.trim())
        self._link_timer = Timer(self._retry_link)
        for timer in (self._handshake_timer, self._leave_timer, self._trim_timer, self._link_timer):
            self._loop.add_timer(timer)
        self._accepting = Accepting(listener, self._loop, self._let_in, lambda text: self._log(ERROR, text))
        self._loop.add(link.fileno(), self._on_link)
        if separate is not None:
            self._loop.add(separate.descriptor, separate.collect)

    def run(self) -> None:
        """Pass messages on until the daemon's end of the link is closed, and then what it has said last."""
        while self._ends_at == _NEVER:
            self._loop.wait()
        while (self._met or self._leaving) and clock.now() < self._ends_at:
            self._loop.wait(self._ends_at - clock.now())

    def close(self) -> None:
        """Close all connections."""
        for user in self._users.values():
            for each in user.clients:
                each.close()
        if self._peers is not None:
            self._peers.close()
        self._loop.close()

    # --- who connects -------------------------------------------------------------------------------------------

    def _let_in(self, connection: socket.socket) -> bool:
        """Begin with a new connection, or refuse it before anything else is done for it."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            try:
                name, is_operator = self._user_of(connection)
            except OSError:
                return True  # it has gone
            now = clock.now()
            refusal = None if is_operator else self._admission.refusal(name, now)
            if refusal is not None:
                self._tell(self._refusals, name, f"new connection of {name} refused: {refusal}")
                return False
            user = self._users.get(name) or User()
            client = Client(
                connection, name, zmtp.Connection(self._mechanism(), self._bounds), now, self._receive, self._closing
            )
            try:
                clients.prepare(connection, len(user.clients) + 1)
                client.send(client.protocol.replies)
            except OSError:
                return True  # likewise
            client.protocol.replies = []
            stack.pop_all()
        self._enter(client, user, now)
        return True

    def _enter(self, client: Client, user: User, now: float) -> None:
        self._users[client.user] = user
        user.clients.add(client)
        user.handshakes[client] = self._handshakes[client] = None
        self._admission.enters(client.user)
        self._crowd.add(client, client.user, self._account_of(client))
        self._loop.add(client.near.descriptor, functools.partial(self._on_ready, client.near))
        self._handshake_timer.due_by(now + HANDSHAKE_S)
        if len(user.handshakes) > MAX_HANDSHAKES:
            self._hang_up(next(iter(user.handshakes)), f"its user has more than {MAX_HANDSHAKES} handshakes under way")
        self._reduce()

    def _reduce(self) -> None:
        """Hang up the connections that are too many."""
        most = max_connections(self._terms.max_connections)
        key = "max_connections" if most == self._terms.max_connections else "LimitNOFILE"
        for each in self._crowd.reduce(most, key):
            self._hang_up(each.guest, each.why)

    def _user_of(self, connection: socket.socket) -> tuple[str, bool]:
        """Return the user of a new connection, and whether it is an operator.

        All users of a Unix socket that belong to no tenant are one user. Over TCP a key may still show the tenant.

        Raises:
            OSError: it has gone.
        """
        user, is_operator = clients.user_of(connection, self._peers)
        if self._membership is None or self._peers is not None or is_operator:
            return user, is_operator
        is_known = clients.tenant_of(connection, "", self._membership) not in (None, NO_TENANT)
        return user if is_known else NO_TENANT, False

    def _account_of(self, client: Client) -> str:
        if self._membership is None:
            return EVERYONE
        with contextlib.suppress(OSError):  # it has gone
            return clients.tenant_of(client.connection, client.protocol.mechanism.key, self._membership) or NO_TENANT
        return NO_TENANT

    def _renew_accounts(self) -> None:
        self._crowd = Crowd()
        everyone = [client for user in self._users.values() for client in user.clients]
        for each in sorted(everyone, key=lambda client: client.since):
            self._crowd.add(each, each.user, self._account_of(each))
        self._reduce()

    def _end_handshakes(self, now: float) -> None:
        while self._handshakes:
            first = next(iter(self._handshakes))
            if first.since + HANDSHAKE_S > now:
                self._handshake_timer.set(first.since + HANDSHAKE_S)
                return
            self._hang_up(first, f"its handshake is not complete after {HANDSHAKE_S:g} s")

    def _mechanisms(self) -> Callable[[], zmtp.Mechanism]:
        if not self._terms.secret:
            return zmtp.Null
        from weightd.daemon.gate.curve import Curve, secret_key  # noqa: PLC0415 - PyNaCl is there only if it is needed

        return functools.partial(Curve, secret_key(self._terms.secret), lambda key: key in self._keys)

    # --- what is ready ------------------------------------------------------------------------------------------

    def _on_ready(self, side: Side) -> None:
        """Something can be read, or the other end is closed."""
        if side.holds:
            if side.is_gone():
                self._on_gone(side)
            return
        if self._turns or self._reads >= _READS:
            self._wait(side)
            return
        if not self._reads:
            self._loop.soon(self._end_turn)
        self._reads += 1
        if not side.read(side.client) and side.is_open:
            self._wait(side)

    def _end_turn(self) -> None:
        self._reads = 0

    def _wait(self, side: Side) -> None:
        """Let a side have its turn."""
        self._hold(side, Side.TURN)
        self._turns.wait(side.client.user, side)
        self._loop.soon(self._serve)

    def _serve(self) -> None:
        """Read what waits, for a moment."""
        until = clock.now() + _SLICE_S
        while self._turns:
            side = self._turns.take()
            if side.holds != Side.TURN or side.read(side.client):
                self._release(side, Side.TURN)
            elif side.is_open:
                self._turns.wait(side.client.user, side)
            if clock.now() >= until:
                break
        if self._turns:
            self._loop.soon(self._serve)

    def _hold(self, side: Side, why: int) -> None:
        """Read nothing, for one more reason."""
        if side.is_open and not side.holds:
            self._loop.pause(side.descriptor)
        side.holds |= why

    def _release(self, side: Side, why: int) -> None:
        """Read again if there is no other reason not to."""
        if side.holds & why and side.is_open:
            side.holds &= ~why
            if not side.holds:
                self._loop.resume(side.descriptor)

    def _on_gone(self, side: Side) -> None:
        client = side.client
        if side is client.near:
            self._close(client)
        elif client not in self._leaving:
            # What the daemon has sent before is read if the client reads in time.
            self._leave(client)

    # --- clients to daemon --------------------------------------------------------------------------------------

    def _receive(self, client: Client) -> bool:
        """Read from a client; see `Side`."""
        try:
            messages = client.receive()
        except MemoryError:
            self._hang_up(client, "there is no memory for what it sends")
            return True
        except clients.DescriptorsError:
            self._hang_up(client, "it sends descriptors, which no message has")
            return True
        except OSError:
            self._close(client)
            return True
        return self._go_on(client, messages)

    def _go_on(self, client: Client, messages: list[zmtp.Message]) -> bool:
        """Pass messages on, and do what else has come of a read."""
        protocol = client.protocol
        if client in self._handshakes:
            replies, protocol.replies = protocol.replies, []
            if replies:
                self._answer(client, replies)
            if protocol.is_ready and not client.is_closed:
                self._end_handshake(client)
                self._show_key(client)
        if messages and not client.is_closed:
            client.requests += len(messages)
            self._pass_on(client, messages)
        if protocol.pong is not None and not client.is_closed:
            self._pong(client, protocol.pong)
        if protocol.error and not client.is_closed:
            self._refuse(client, protocol.error)
        if client.is_closed or protocol.error:
            return True
        if protocol.work is not None:
            self._hold(client.near, Side.WORK)
            self._do(client, protocol.work, functools.partial(self._worked, client))
        self._count(client)
        # What is behind, but may not be read now, is read by `_resume`.
        return bool(client.near.holds & ~Side.TURN) or not protocol.is_behind

    def _pass_on(self, client: Client, messages: list[zmtp.Message]) -> None:
        stream = client.stream or self._meet(client)
        if stream is None:
            return
        try:
            if len(messages) == 1:
                stream.send(messages[0])
            else:
                stream.hold()
                for frames in messages:
                    stream.send(frames)
                stream.let_go()
        except ConnectionError:
            return  # what the daemon has said before is read first
        if stream.unsent:
            self._hold(client.near, Side.OTHER_SIDE)
            self._loop.watch_writes(stream.fileno(), functools.partial(self._flush_stream, client, stream))

    def _flush_stream(self, client: Client, stream: Stream) -> None:
        """The daemon has read some of what a client has sent."""
        try:
            if not stream.flush():
                self._count(client)
                return
        except ConnectionError:
            pass  # as above
        self._loop.unwatch_writes(stream.fileno())
        self._resume(client.near, Side.OTHER_SIDE)
        self._count(client)

    def _resume(self, side: Side, why: int) -> None:
        """Read again if there is no other reason not to, and first of all what is here already."""
        if side.holds == why and side.is_behind and side.is_open:
            side.holds = 0
            self._loop.resume(side.descriptor)
            self._wait(side)
        else:
            self._release(side, why)

    def _worked(self, client: Client, result: Any) -> None:
        """A large frame was decrypted."""
        if client.is_closed:
            return
        if result is None:
            self._hang_up(client, "there is no memory for what it sends")
            return
        messages = client.protocol.worked(result)
        if client not in self._leaving:
            self._go_on(client, messages)
            if not client.is_closed:
                self._resume(client.near, Side.WORK)

    def _meet(self, client: Client) -> Stream | None:
        """A client speaks for the first time: the daemon gets one end of a pair of sockets for it."""
        try:
            identity = client.identity()
            ours, theirs = socket.socketpair()
        except OSError as error:
            self._hang_up(client, f"no stream to the daemon: {error.strerror}")
            return None
        count = len(self._users[client.user].clients)
        for each in (ours, theirs):
            clients.limit_buffers(each, count)
        incoming = Incoming(max_header_bytes=MAX_FRAME_BYTES, most=zmtp.MOST_MESSAGES)
        client.stream = Stream(ours, incoming)
        client.far = Side(client, ours.fileno(), self._fetch)
        client.has_spoken = True
        self._met += 1
        self._loop.add(ours.fileno(), functools.partial(self._on_ready, client.far))
        try:
            with theirs:
                self._say(link.met(self._met, identity), theirs.fileno())
        except OSError as error:
            # No descriptor is left for what the daemon has yet to read.
            self._hang_up(client, f"no stream to the daemon: {error.strerror}")
            return None
        return client.stream

    # --- daemon to clients --------------------------------------------------------------------------------------

    def _fetch(self, client: Client) -> bool:
        """Read from the daemon; see `Side`."""
        stream = client.stream
        if stream is None:
            return True
        try:
            incoming = stream.incoming
            messages = incoming.receive(b"") if incoming.is_behind else stream.receive()
        except ConnectionError:
            self._part(client)
            self._leave(client)
            return True
        except (MemoryError, OSError):
            self._hang_up(client, "there is no memory for its answer")
            return True
        client.requests = max(0, client.requests - len(messages))
        mechanism = client.protocol.mechanism
        sealed = mechanism.overhead and sum(sum(message.lengths) for message in messages)
        if sealed and sealed >= zmtp.SEPARATE_BYTES and client.far is not None:
            client.sealing = 2 * sealed
            self._hold(client.far, Side.WORK)
            frames = [message.frames for message in messages]
            self._do(client, lambda: _pieces(mechanism, frames), functools.partial(self._sealed, client))
        elif messages:
            self._answer(client, _pieces(mechanism, [message.frames for message in messages]))
        self._count(client)
        return bool(client.far is None or client.far.holds & ~Side.TURN or not incoming.is_behind)

    def _sealed(self, client: Client, pieces: list[Any] | None) -> None:
        """Large answers were encrypted."""
        if client.is_closed:
            return
        client.sealing = 0
        if pieces is None:
            self._hang_up(client, "there is no memory for its answer")
            return
        self._answer(client, pieces)
        if client.far is not None and not client.is_closed:
            self._resume(client.far, Side.WORK)
        self._settle(client)

    def _answer(self, client: Client, pieces: Sequence[Any]) -> None:
        """Send bytes to a client; while some are left, nothing more is fetched for it."""
        try:
            is_all = client.send(pieces)
        except OSError:
            self._close(client)
            return
        if not is_all:
            if client.far is not None:
                self._hold(client.far, Side.OTHER_SIDE)
            self._loop.watch_writes(client.near.descriptor, functools.partial(self._flush_client, client))

    def _flush_client(self, client: Client) -> None:
        """A client has read some of what it was sent."""
        try:
            is_all = client.flush()
        except OSError:
            self._close(client)
            return
        if is_all:
            self._loop.unwatch_writes(client.near.descriptor)
            if client.far is not None:
                self._resume(client.far, Side.OTHER_SIDE)
        self._count(client)
        self._settle(client)

    def _pong(self, client: Client, content: bytes) -> None:
        """Answer a PING, unless the client has yet to read what tells it as well that somebody is here."""
        client.protocol.pong = None
        if not client.outgoing.nbytes and not client.sealing:
            self._answer(client, [zmtp.pong(client.protocol.mechanism, content)])

    # --- who leaves ---------------------------------------------------------------------------------------------

    def _refuse(self, client: Client, text: str) -> None:
        """End a connection whose client does not follow the protocol, and tell it why."""
        self._tell_hang_up(client, text)
        # Nothing may be encrypted while a large answer is.
        if client.protocol.is_ready and not client.sealing:
            frame = link.error_frame(self._terms.error, f"{text}: this connection ends")
            self._answer(client, zmtp.message(client.protocol.mechanism, [frame]))
        if not client.is_closed:
            self._part(client)
            self._leave(client)

    def _leave(self, client: Client) -> None:
        """Take nothing more from a client, and close its connection once it has what was sent, or after a time."""
        self._hold(client.near, Side.LEAVING)
        until = self._leaving.setdefault(client, clock.now() + LINGER_S)
        self._leave_timer.due_by(until)
        self._settle(client)

    def _settle(self, client: Client) -> None:
        """Where all was sent to a client that leaves, tell it that this is the end."""
        if client in self._leaving and client.stream is None and not client.outgoing.nbytes and not client.sealing:
            with contextlib.suppress(OSError):
                client.connection.shutdown(socket.SHUT_WR)
            soon = clock.now() + _FAREWELL_S
            self._leaving[client] = min(self._leaving[client], soon)
            self._leave_timer.due_by(soon)

    def _end_leaving(self, now: float) -> None:
        for each in [each for each, until in self._leaving.items() if until <= now]:
            self._close(each)
        self._leave_timer.set(min(self._leaving.values(), default=_NEVER))

    def _part(self, client: Client) -> None:
        """Close a client's stream: what it has asked ends in the daemon."""
        if client.stream is not None and client.far is not None:
            self._turns.forget(client.user, client.far)
            self._loop.remove(client.far.descriptor)
            client.close_stream()
            self._met -= 1
            self._say(link.left(self._met))

    def _hang_up(self, client: Client, why: str) -> None:
        """End a connection at once."""
        self._tell_hang_up(client, why)
        self._close(client)

    def _close(self, client: Client) -> None:
        if client.is_closed:
            return
        self._part(client)
        self._end_handshake(client)
        self._turns.forget(client.user, client.near)
        self._loop.remove(client.near.descriptor)
        client.close()
        self._leaving.pop(client, None)
        self._crowd.remove(client)
        self._admission.leaves(client.user)
        user = self._users[client.user]
        user.clients.discard(client)
        user.nbytes -= client.nbytes
        self._kept -= client.nbytes
        if not user.clients:
            del self._users[client.user]

    def _end_handshake(self, client: Client) -> None:
        self._handshakes.pop(client, None)
        self._users[client.user].handshakes.pop(client, None)

    def _show_key(self, client: Client) -> None:
        """A client has shown its key: from now on it counts as its tenant's."""
        if client.protocol.mechanism.key and self._membership is not None:
            self._crowd.remove(client)
            self._crowd.add(client, client.user, self._account_of(client))
            self._reduce()

    # --- memory -------------------------------------------------------------------------------------------------

    def _count(self, client: Client) -> None:
        """See how much is kept for a client; where that is too much in all, hang up who has most."""
        if client.is_closed:
            return
        more = client.kept() - client.nbytes
        if not more:
            return
        client.nbytes += more
        self._users[client.user].nbytes += more
        self._kept += more
        if self._kept > _LARGE_BYTES:
            self._trim_timer.set(clock.now() + _QUIET_S)
        most = self._terms.max_memory_bytes
        while self._kept > most:
            user = max(self._users.values(), key=lambda each: each.nbytes)
            largest = max(user.clients, key=lambda each: each.nbytes)
            self._hang_up(
                largest,
                f"more than {most} bytes (max_memory_bytes) are kept for clients, and {user.nbytes} of them for this "
                "user",
            )

    def _do(self, client: Client, call: Callable[[], Any], done: Callable[[Any], object]) -> None:
        if self._separate is not None:
            self._separate.run(client.user, call, done)

    # --- the daemon ---------------------------------------------------------------------------------------------

    def _tell_hang_up(self, client: Client, why: str) -> None:
        self._tell(self._hang_ups, client.user, f"a connection of {client.user} is hung up: {why}")

    def _tell(self, seldom: Seldom, user: str, text: str) -> None:
        """Log what a user can bring about as often as it likes."""
        untold = seldom.tell(user, clock.now())
        if untold is not None:
            more = f" ({untold} more of {user} since the last such line)" if untold else ""
            self._log(WARNING, text + more)

    def _log(self, level: int, text: str) -> None:
        self._say(link.said(level, text))

    def _say(self, message: bytes, *descriptors: int) -> None:
        """Send a message to the daemon.

        Raises:
            OSError: no descriptor is left for those that cannot be sent at once; the message is not sent.
        """
        if self._ends_at != _NEVER:
            return  # the link is closed
        try:
            is_all = self._link.send([message], descriptors)
        except ConnectionError:
            return  # the daemon has gone: the link tells
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            self._link.queue([message], descriptors)
            is_all = False
        if not is_all:
            self._loop.watch_writes(self._link.fileno(), self._flush_link)

    def _flush_link(self) -> None:
        try:
            if not self._link.flush():
                return
        except ConnectionError:
            pass  # as above
        except OSError:
            # Processes of this user have more descriptors in flight than the kernel allows this process (unix(7),
            # ETOOMANYREFS). The link can be written to all the while.
            self._link_timer.set(clock.now() + _RETRY_S)
        self._loop.unwatch_writes(self._link.fileno())

    def _retry_link(self, _: float) -> None:
        if self._ends_at == _NEVER:
            self._loop.watch_writes(self._link.fileno(), self._flush_link)

    def _on_link(self) -> None:
        try:
            for message in self._link.receive():
                keys, tenants = link.of_gates_daemon(message.frames[0])
                self._keys, self._membership = _known(keys), _membership(tenants)
                self._renew_accounts()
        except ConnectionError:
            # What it has said last is still passed on; nothing new is taken.
            self._loop.remove(self._link.fileno())
            self._accepting.stop()
            for user in self._users.values():
                for each in user.clients:
                    self._hold(each.near, Side.LEAVING)
            self._ends_at = clock.now() + LINGER_S


def _peers() -> Peers:
    from weightd.shared.peers import Peers  # noqa: PLC0415 - a gate on a Unix socket does without

    return Peers()


class _Any:
    """All keys."""

    def __contains__(self, key: object) -> bool:
        return True


def _known(keys: Sequence[str] | None) -> frozenset[str] | _Any:
    return _Any() if keys is None else frozenset(keys)


def _membership(tenants: Sequence[Members] | None) -> Membership | None:
    return None if tenants is None else Membership(tenants)


def _pieces(mechanism: zmtp.Mechanism, messages: Sequence[Sequence[Any]]) -> list[Any]:
    return [piece for frames in messages for piece in zmtp.message(mechanism, frames)]
