"""Answers scrapes: each connection has one request and one answer, a bound of bytes, and a few seconds."""

from __future__ import annotations

import functools
import logging
import socket
from collections.abc import Callable

from weightd.daemon.host import clock
from weightd.daemon.host.accepting import Accepting
from weightd.daemon.host.closing import Closing, DescriptorsError, receive
from weightd.daemon.host.crowding import Crowd
from weightd.daemon.host.logs import log_resource_error
from weightd.daemon.host.loop import Loop
from weightd.daemon.host.timers import Timer
from weightd.daemon.scrapes.http import Head, head_of, refusal
from weightd.daemon.scrapes.page import Page
from weightd.shared.peers import Peers

# Prometheus gives up after ten seconds; what takes longer here than that is no scrape.
MOST_S = 10.0

# At once: a monitoring system has two, and somebody looks with a browser. Beyond it one ends, see `Crowd`.
MOST_CONNECTIONS = 32

# With one wake-up: who comes in crowds has the loop no longer than one who asks a model.
_MOST_ACCEPTED = 1

_READ_BYTES = 4096

_log = logging.getLogger("weightd")


class _Peer:
    """Somebody who has connected.

    Attributes:
        connection: does not block.
        user: the user or host at the other end, see `Peers`.
        since: when it has connected.
        until: when it ends, whatever has become of it.
        head: of its request.
        is_heard: whether that is whole.
        unsent: what has not been sent of the answer.
    """

    def __init__(self, connection: socket.socket, user: str, since: float) -> None:
        self.connection = connection
        self.user = user
        self.since = since
        self.until = since + MOST_S
        self.head = Head()
        self.is_heard = False
        self.unsent: list[memoryview] = []

    @property
    def has_spoken(self) -> bool:
        """Whether its request is whole."""
        return self.is_heard

    @property
    def is_busy(self) -> bool:
        """Whether it is being answered."""
        return self.is_heard


class Scrapes:
    """Whoever connects to `listener` is answered.

    Args:
        listener: listens, and does not block.
        loop: calls when there is something to do.
        page: what is told.
        is_loopback: whether it listens on the loopback interface, see `refusal`.
        clock: monotonic seconds.

    Attributes:
        timer: call it when it is due.
    """

    def __init__(
        self,
        listener: socket.socket,
        loop: Loop,
        page: Page,
        *,
        is_loopback: bool,
        clock: Callable[[], float] = clock.now,
    ) -> None:
        self._loop = loop
        self._page = page
        self._is_loopback = is_loopback
        self._clock = clock
        # In the order in which they came.
        self._peers: dict[int, _Peer] = {}
        self._crowd = Crowd[_Peer]()
        self._users = Peers()
        self._closing = Closing(log_resource_error)
        self.timer = Timer(self._on_timer)
        loop.add_timer(self.timer)
        Accepting(listener, loop, self._let_in, _log.error, max_accepted=_MOST_ACCEPTED)

    def __len__(self) -> int:
        return len(self._peers)

    def close(self) -> None:
        """Let all go."""
        for peer in list(self._peers.values()):
            self._let_go(peer)
        self._users.close()

    def _let_in(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        user = self._users.identify(connection)
        if not user.is_known:
            connection.close()
            return
        peer = _Peer(connection, user.key, self._clock())
        self._peers[connection.fileno()] = peer
        self._loop.add(connection.fileno(), functools.partial(self._on_readable, peer))
        self.timer.set_no_later_than(peer.until)
        self._crowd.add(peer, peer.user)
        for each in self._crowd.evict_excess(MOST_CONNECTIONS, "a constant"):
            self._let_go(each.connection)

    def _on_readable(self, peer: _Peer) -> None:
        if peer.is_heard:
            # Nothing more is read: it has gone.
            self._let_go(peer)
            return
        try:
            data = receive(peer.connection, _READ_BYTES)
        except BlockingIOError:
            return
        except (OSError, DescriptorsError):
            data = b""
        if not data:
            self._let_go(peer)
        elif peer.head.feed(data):
            peer.is_heard = True
            self._loop.pause_reading(peer.connection.fileno())
            refused = refusal(peer.head, is_loopback=self._is_loopback)
            if refused:
                self._send(peer, refused)
            else:
                self._page.want(functools.partial(self._give, peer))

    def _give(self, peer: _Peer, text: bytes) -> None:
        """The text is there; it is the same for all who want it now, and each has its own place in it."""
        if self._is_there(peer):
            self._send(peer, head_of(200, len(text)), text)

    def _send(self, peer: _Peer, *parts: bytes) -> None:
        peer.unsent = [memoryview(part) for part in parts]
        self._flush(peer)
        if self._is_there(peer):
            self._loop.watch_writes(peer.connection.fileno(), functools.partial(self._flush, peer))

    def _flush(self, peer: _Peer) -> None:
        try:
            while peer.unsent:
                sent = peer.connection.send(peer.unsent[0])
                peer.unsent[:1] = [peer.unsent[0][sent:]] if sent < len(peer.unsent[0]) else []
        except BlockingIOError:
            return
        except OSError:
            peer.unsent = []
        self._let_go(peer)

    def _is_there(self, peer: _Peer) -> bool:
        return self._peers.get(peer.connection.fileno()) is peer

    def _let_go(self, peer: _Peer) -> None:
        self._loop.remove(peer.connection.fileno())
        del self._peers[peer.connection.fileno()]
        self._crowd.remove(peer)
        if peer.connection.family == socket.AF_UNIX:
            self._closing.close_socket(peer.user, peer.connection)
        else:
            peer.connection.close()

    def _on_timer(self, now: float) -> None:
        for peer in list(self._peers.values()):
            if peer.until > now:
                self.timer.set(peer.until)
                return
            self._let_go(peer)
