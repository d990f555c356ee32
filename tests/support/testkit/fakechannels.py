"""Direct channels of a fake daemon, whose workers are played by the test."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from typing import Any, Iterable, List, NamedTuple, Optional, Sequence

from testkit.fakedaemon import LIMIT_S, FakeDaemon, echo
from weightd import Client
from weightd_protocol import limits
from weightd_protocol.codec import decode, encode
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.framing import message_prefix
from weightd_protocol.messages.channels import (
    FROM_CHANNEL,
    ChannelEnded,
    ChannelExtended,
    ChannelOpened,
    OpenChannel,
    RequestAdopted,
    RequestLost,
)
from weightd_protocol.messages.inference import Error, Infer
from weightd_protocol.messages.types import ClientMessage
from weightd_protocol.packets import split_request

LIFETIME_S = 50.0


class TakenRequest(NamedTuple):
    """A request that a worker has read from a channel."""

    deadline_us: int
    message: Infer
    tensors: Sequence[bytes]

    @property
    def answer(self) -> List[Any]:
        """The frames of an answer with the inputs."""
        return echo(self.message, self.tensors)[0]


class FakeChannel:
    """The workers' end of a channel, and the daemon's messages about the channel.

    Attributes:
        id: the id of the channel.
        model: its model.
        end: the workers' end.
    """

    def __init__(self, daemon: FakeDaemon, request: OpenChannel) -> None:
        self._daemon = daemon
        self.id = request.id
        self.model = request.model_name
        self._thread: Optional[threading.Thread] = None
        self.end, self.client_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def take(self) -> TakenRequest:
        """Wait for the next request of the client."""
        self.end.settimeout(LIMIT_S)
        deadline_us, frames = split_request(self.end.recv(limits.MAX_PACKET_BYTES))
        return TakenRequest(deadline_us, decode(frames, FROM_CHANNEL), frames[2:])

    def has_request(self) -> bool:
        """Return whether the client has sent a request that no worker has read."""
        return bool(select.select([self.end], [], [], 0)[0])

    def answer(self, request: TakenRequest) -> None:
        """Answer a request with its inputs."""
        self.send(request.answer)

    def send(self, frames: Sequence[Any]) -> None:
        """Send a message to the client as one packet."""
        # With a timeout, Python waits until three quarters of the socket's buffer are free.
        self.end.settimeout(None)
        self.end.send(message_prefix(frames) + b"".join(frames))

    def adopt(self, request: TakenRequest) -> None:
        """Notify the client that the daemon has the request."""
        self._daemon.send(*encode(RequestAdopted(request.message.id, self.id)))

    def lose(self, request: TakenRequest) -> None:
        """Notify the client that the request gets no answer."""
        self._daemon.send(*encode(RequestLost(request.message.id, self.id)))

    def extend(self, max_requests: int, max_bytes: int = 2**40, lifetime_s: float = LIFETIME_S) -> None:
        """Give the channel other limits."""
        self._daemon.send(*encode(ChannelExtended(self.id, max_requests, max_bytes, expiry_us(lifetime_s))))

    def finish(self) -> None:
        """Notify the client that the channel has ended, then close the workers' end."""
        self.notify_end()
        self.close()

    def notify_end(self) -> None:
        """Notify the client that the channel has ended."""
        self._daemon.send(*encode(ChannelEnded(self.id)))

    def serve(self) -> None:
        """Answer all requests in a thread, until the client closes its end."""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError, RemoteProtocolError):
            while True:
                self.answer(self.take())

    def close(self) -> None:
        """Close the workers' end."""
        with contextlib.suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join(LIMIT_S)
        self.end.close()


def expiry_us(lifetime_s: float) -> int:
    """Return a time of CLOCK_MONOTONIC in microseconds."""
    return int((time.monotonic() + lifetime_s) * 1e6)


class FakeChannels:
    """Grants direct channels to the clients of a fake daemon.

    Attributes:
        granted: the channels, in the order of the requests.
        refused: the number of requests for channels that were refused.
        refuses: whether to refuse all requests.
        max_requests: the limit of new channels.
        max_bytes: the limit of new channels.
        lifetime_s: the seconds until new channels expire.
    """

    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon
        self.granted: List[FakeChannel] = []
        self.refused = 0
        self.refuses = False
        self.max_requests, self.max_bytes = 1_000_000, 2**40
        self.lifetime_s = LIFETIME_S
        self.relayed: List[Infer] = []
        daemon.grants_channels = True
        daemon.handle = self.handle

    def handle(self, message: ClientMessage, tensors: Sequence[bytes]) -> Iterable[List[Any]]:
        """Reply to a message of a client."""
        if isinstance(message, OpenChannel):
            return self._open(message)
        if isinstance(message, Infer):
            self.relayed.append(message)
        return echo(message, tensors)

    def _open(self, message: OpenChannel) -> Iterable[List[Any]]:
        if self.refuses:
            self.refused += 1
            return [encode(Error(message.id, "UNAVAILABLE", "no channels"))]
        channel = FakeChannel(self._daemon, message)
        self.granted.append(channel)
        opened = ChannelOpened(message.id, self.max_requests, self.max_bytes, expiry_us(self.lifetime_s))
        self._daemon.send_descriptor(encode(opened), channel.client_end.fileno())
        channel.client_end.close()
        return []

    def open(self, client: Client, inputs: Any, model: str = "m") -> FakeChannel:
        """Let a client use a model until it has a channel on which it may send these inputs."""
        count = len(self.granted)
        for _ in range(5):
            client.infer(model, inputs)
        assert len(self.granted) == count + 1
        self.relayed.clear()
        return self.granted[-1]

    def close(self) -> None:
        """Close the workers' ends."""
        for each in self.granted:
            each.close()


def settle(client: Client) -> None:
    """Let a client read all messages that the fake daemon has to send."""
    client.server()
