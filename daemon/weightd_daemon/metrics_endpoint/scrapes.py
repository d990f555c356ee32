"""Answers scrapes: each connection has one request and one answer, a bound of bytes, and a few seconds."""

from __future__ import annotations

import functools
import logging
import socket
from collections.abc import Callable

from weightd_common.peers import Peers
from weightd_daemon.metrics_endpoint.http import HttpRequestHead, error_response, response_head
from weightd_daemon.metrics_endpoint.page import MetricsPage
from weightd_daemon.platform import clock
from weightd_daemon.platform.acceptor import Acceptor
from weightd_daemon.platform.connection_limit import ConnectionLimiter
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.fd_closer import DescriptorCloser, UnexpectedDescriptors, receive
from weightd_daemon.platform.log_setup import log_resource_error
from weightd_daemon.platform.timers import Timer

# Prometheus gives up after ten seconds; what takes longer here than that is no scrape.
TIMEOUT_S = 10.0

# At once: a monitoring system has two, and somebody looks with a browser. Beyond it one ends, see `ConnectionLimiter`.
MAX_CONNECTIONS = 32

# With one wake-up: who comes in crowds has the loop no longer than one who asks a model.
_MAX_ACCEPTED = 1

_READ_BYTES = 4096

_log = logging.getLogger("weightd")


class _Peer:
    """Somebody who has connected.

    Attributes:
        connection: does not block.
        user: the user or host at the other end, see `Peers`.
        connected_at: when it has connected.
        deadline: when it ends, whatever has become of it.
        head: of its request.
        is_request_complete: whether that is whole.
        unsent: what has not been sent of the answer.
    """

    def __init__(self, connection: socket.socket, user: str, since: float) -> None:
        self.connection = connection
        self.user = user
        self.connected_at = since
        self.deadline = since + TIMEOUT_S
        self.head = HttpRequestHead()
        self.is_request_complete = False
        self.unsent: list[memoryview] = []

    @property
    def has_sent_message(self) -> bool:
        """Whether its request is whole."""
        return self.is_request_complete

    @property
    def is_busy(self) -> bool:
        """Whether it is being answered."""
        return self.is_request_complete


class MetricsEndpoint:
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
        loop: EventLoop,
        page: MetricsPage,
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
        self._connection_limiter = ConnectionLimiter[_Peer]()
        self._peer_identifier = Peers()
        self._descriptor_closer = DescriptorCloser(log_resource_error)
        self.timer = Timer(self._on_timer)
        loop.add_timer(self.timer)
        Acceptor(listener, loop, self._on_connection, _log.error, max_accepted=_MAX_ACCEPTED)

    def __len__(self) -> int:
        return len(self._peers)

    def close(self) -> None:
        """Let all go."""
        for peer in list(self._peers.values()):
            self._disconnect(peer)
        self._peer_identifier.close()

    def _on_connection(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        user = self._peer_identifier.identify(connection)
        if not user.is_known:
            connection.close()
            return
        peer = _Peer(connection, user.key, self._clock())
        self._peers[connection.fileno()] = peer
        self._loop.add(connection.fileno(), functools.partial(self._on_readable, peer))
        self.timer.set_no_later_than(peer.deadline)
        self._connection_limiter.add(peer, peer.user)
        for each in self._connection_limiter.evict_excess(MAX_CONNECTIONS, "a constant"):
            self._disconnect(each.connection)

    def _on_readable(self, peer: _Peer) -> None:
        if peer.is_request_complete:
            # Nothing more is read: it has gone.
            self._disconnect(peer)
            return
        try:
            data = receive(peer.connection, _READ_BYTES)
        except BlockingIOError:
            return
        except (OSError, UnexpectedDescriptors):
            data = b""
        if not data:
            self._disconnect(peer)
        elif peer.head.feed(data):
            peer.is_request_complete = True
            self._loop.pause_reading(peer.connection.fileno())
            error = error_response(peer.head, is_loopback=self._is_loopback)
            if error:
                self._send(peer, error)
            else:
                self._page.request_text(functools.partial(self._send_text, peer))

    def _send_text(self, peer: _Peer, text: bytes) -> None:
        """The text is there; it is the same for all who want it now, and each has its own place in it."""
        if self._is_connected(peer):
            self._send(peer, response_head(200, len(text)), text)

    def _send(self, peer: _Peer, *parts: bytes) -> None:
        peer.unsent = [memoryview(part) for part in parts]
        self._flush(peer)
        if self._is_connected(peer):
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
        self._disconnect(peer)

    def _is_connected(self, peer: _Peer) -> bool:
        return self._peers.get(peer.connection.fileno()) is peer

    def _disconnect(self, peer: _Peer) -> None:
        self._loop.remove(peer.connection.fileno())
        del self._peers[peer.connection.fileno()]
        self._connection_limiter.remove(peer)
        if peer.connection.family == socket.AF_UNIX:
            self._descriptor_closer.close_socket(peer.user, peer.connection)
        else:
            peer.connection.close()

    def _on_timer(self, now: float) -> None:
        for peer in list(self._peers.values()):
            if peer.deadline > now:
                self.timer.set(peer.deadline)
                return
            self._disconnect(peer)
