"""Fake daemon: a thread with a ROUTER socket or Unix sockets that sends the replies that a test chooses."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, cast

import pytest
import zmq

from weightd import Client
from weightd_common.endpoints import unix_path
from weightd_common.stream import Stream
from weightd_protocol.codec import decode, encode
from weightd_protocol.messages.channels import OpenChannel
from weightd_protocol.messages.control import (
    ModelMetadata,
    ModelMetadataResponse,
    ServerMetadata,
    ServerMetadataResponse,
)
from weightd_protocol.messages.inference import (
    Cancel,
    Error,
    Infer,
    InferResponse,
    ResponseDescription,
    TensorSignature,
)
from weightd_protocol.messages.metrics import Metrics, MetricsResponse, ReloadCounts
from weightd_protocol.messages.regions import Register
from weightd_protocol.messages.status import Status, StatusResponse
from weightd_protocol.messages.types import FROM_CLIENT, ClientMessage

# Limit of every wait; large enough for a busy machine.
LIMIT_S = 30.0

# Takes a message and its tensor frames; returns the replies, each a list of frames.
Handler = Callable[[ClientMessage, Sequence[bytes]], Iterable[List[Any]]]
Seen = Tuple[ClientMessage, Sequence[bytes]]


def echo(message: ClientMessage, tensors: Sequence[bytes]) -> Sequence[List[Any]]:  # noqa: PLR0911 - one for each kind
    """Reply at once, as a daemon where every model name is a model that returns its inputs."""
    if isinstance(message, Infer):
        return [
            [
                *encode(
                    InferResponse(
                        message.id, ResponseDescription(message.description.model_name, message.description.inputs)
                    )
                ),
                *tensors,
            ]
        ]
    if isinstance(message, Cancel):
        return []  # the reply has been sent already
    if isinstance(message, ModelMetadata):
        return [encode(ModelMetadataResponse(message.id, message.model_name, "echo", (), ()))]
    if isinstance(message, ServerMetadata):
        return [encode(ServerMetadataResponse(message.id, "fake", "9.9", ("echo",), ()))]
    if isinstance(message, Register):
        return [encode(Error(message.id, "INVALID_ARGUMENT", "all tensors come in frames"))]
    if isinstance(message, Metrics):
        return [encode(MetricsResponse(message.id, "9.9", "running", 1.0, (), (), (), (), 0, 0, 0, ReloadCounts(0, 0)))]
    assert isinstance(message, Status)
    return [encode(StatusResponse(message.id, "9.9", "running", 1, 1.0, 1, ()))]


def taking(**datatypes: str) -> Handler:
    """Return a handler like `echo` whose model has these inputs."""

    def handle(message: ClientMessage, tensors: Sequence[bytes]) -> Iterable[List[Any]]:
        if isinstance(message, ModelMetadata):
            inputs = tuple(TensorSignature(name, datatype, None) for name, datatype in datatypes.items())
            return [encode(ModelMetadataResponse(message.id, message.model_name, "echo", inputs, ()))]
        return echo(message, tensors)

    return handle


def silent(message: ClientMessage, tensors: Sequence[bytes]) -> Sequence[List[Any]]:
    """Send no reply."""
    return []


class _RouterEnd:
    """A ZeroMQ ROUTER socket that replies to the last peer."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Without this option ZeroMQ drops messages when a queue is full; with it, `send` blocks.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(address)
        self.address = cast(bytes, self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        self._peer = b""

    def receive(self, wake: int) -> Optional[List[bytes]]:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        if self._socket not in dict(poller.poll()):
            return None
        self._peer, *frames = self._socket.recv_multipart()
        return frames

    def send(self, frames: Sequence[Any]) -> None:
        try:
            self._socket.send_multipart([self._peer, *frames])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # the client has disconnected
                raise

    def close(self) -> None:
        self._context.destroy(linger=0)


class _UnixEnd:
    """A Unix socket that replies to the last peer."""

    def __init__(self, address: str) -> None:
        path = unix_path(f"ipc://{address[len('unix://') :]}")
        self.address = address
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(16)
        self._streams: Dict[int, Stream] = {}
        self._received: Deque[Tuple[Stream, List[Any]]] = deque()
        self._peer: Optional[Stream] = None

    def receive(self, wake: int) -> Optional[List[bytes]]:
        while not self._received:
            watched = [wake, self._listener.fileno(), *self._streams]
            writing = [number for number, stream in self._streams.items() if stream.unsent]
            readable, writable, _ = select.select(watched, writing, [])
            for number in writable:
                with contextlib.suppress(ConnectionError):
                    self._streams[number].flush()
            for number in readable:
                if number == wake:
                    return None
                if number == self._listener.fileno():
                    stream = Stream(self._listener.accept()[0], accepts_descriptors=True)
                    self._streams[stream.fileno()] = stream
                else:
                    self._read(number)
        self._peer, frames = self._received.popleft()
        return frames

    def _read(self, number: int) -> None:
        stream = self._streams[number]
        try:
            self._received += [(stream, [*message.frames]) for message in stream.receive()]
        except ConnectionError:
            self._streams.pop(number).close()

    def descriptor(self) -> int:
        assert self._peer is not None
        return self._peer.descriptors.popleft()

    def send(self, frames: Sequence[Any], descriptors: Sequence[int] = ()) -> None:
        assert self._peer is not None
        with contextlib.suppress(OSError):  # the client has disconnected
            self._peer.send(frames, descriptors)

    def close(self) -> None:
        self._listener.close()
        for stream in self._streams.values():
            stream.close()


class FakeDaemon:
    """A fake daemon that listens from its construction on. `stop` closes all connections, as if it were killed.

    Attributes:
        address: its address: ipc:// or tcp:// for ZeroMQ, unix:// for a Unix socket.
        seen: the received messages, in order.
        handle: the handler that makes the replies; tests may replace it at any time.
        grants_channels: whether `seen` and `handle` get the requests for direct channels. If not, they are refused.
    """

    def __init__(self, address: str, handle: Handler = echo) -> None:
        self.handle: Handler = handle
        self.grants_channels = False
        self.seen: queue.Queue[Seen] = queue.Queue()
        self._end = _UnixEnd(address) if address.startswith("unix://") else _RouterEnd(address)
        self.address = self._end.address
        # Messages to send; None stops the thread.
        self._orders: Deque[Optional[Sequence[bytes]]] = deque()
        self._inside, self._outside = socket.socketpair()
        self._thread: Optional[threading.Thread] = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def next(self) -> Seen:
        """Wait for the next message."""
        return self.seen.get(timeout=LIMIT_S)

    def descriptor(self) -> int:
        """Return the file descriptor that came with the last message; the caller owns it."""
        assert isinstance(self._end, _UnixEnd)
        return self._end.descriptor()

    def send_descriptor(self, frames: Sequence[Any], descriptor: int) -> None:
        """Send a message with a file descriptor, as `send`. Only a handler may call this."""
        assert isinstance(self._end, _UnixEnd)
        self._end.send(frames, [descriptor])

    def send(self, *frames: bytes) -> None:
        """Send a message to the peer of the last received message."""
        self._order(frames)

    def stop(self) -> None:
        """Stop listening and close all connections. Further calls do nothing."""
        if self._thread is not None:
            self._order(None)
            self._thread.join(LIMIT_S)
            self._thread = None
            self._end.close()
            self._inside.close()
            self._outside.close()

    def _order(self, order: Optional[Sequence[bytes]]) -> None:
        self._orders.append(order)
        self._outside.send(b"!")

    def _run(self) -> None:
        while True:
            frames = self._end.receive(self._inside.fileno())
            if frames is None:
                self._inside.recv(1)
                order = self._orders.popleft()
                if order is None:
                    return
                self._end.send(order)
            else:
                message = decode(frames, FROM_CLIENT)
                if isinstance(message, OpenChannel) and not self.grants_channels:
                    self._end.send(encode(Error(message.id, "UNAVAILABLE", "no direct channels")))
                    continue
                self.seen.put((message, frames[2:]))
                for answer in self.handle(message, frames[2:]):
                    self._end.send(answer)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory whose path is short enough for sockets; paths of pytest's `tmp_path` may be too long."""
    with tempfile.TemporaryDirectory(prefix="weightd-test-") as path:
        yield Path(path)


@pytest.fixture
def address(directory: Path) -> str:
    """An ipc:// address without a listener."""
    return f"ipc://{directory}/d.sock"


@pytest.fixture
def daemon(address: str) -> Iterator[FakeDaemon]:
    """A fake daemon that echoes until a test replaces its handler."""
    fake = FakeDaemon(address)
    yield fake
    fake.stop()


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[Client]:
    """A client of `daemon`."""
    with Client(daemon.address, timeout=LIMIT_S) as connected:
        yield connected
