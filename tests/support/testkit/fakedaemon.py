"""A daemon of a few lines: a ROUTER socket in a thread, whose answers the test decides."""

from __future__ import annotations

import queue
import tempfile
import threading
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, List, Optional, Sequence, Tuple, cast

import pytest
import zmq

from weightd.client import Client
from weightd.protocol.codec import decode, encode
from weightd.protocol.messages.control import (
    ModelMetadata,
    ModelMetadataResponse,
    ServerMetadata,
    ServerMetadataResponse,
)
from weightd.protocol.messages.data import Infer, InferResponse, ResponseDescription
from weightd.protocol.messages.status import Status, StatusResponse
from weightd.protocol.messages.types import FROM_CLIENT, ClientMessage

# For everything that must happen: a machine that is busy with other work needs it.
LIMIT_S = 30.0

# What to answer to a message and its tensor frames: messages, each a list of frames.
Handler = Callable[[ClientMessage, Sequence[bytes]], Iterable[List[Any]]]
Seen = Tuple[ClientMessage, Sequence[bytes]]


def echo(message: ClientMessage, tensors: Sequence[bytes]) -> Sequence[List[Any]]:
    """Answer at once: a model that returns its inputs, whatever it is called."""
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
    if isinstance(message, ModelMetadata):
        return [encode(ModelMetadataResponse(message.id, message.model_name, "echo", (), ()))]
    if isinstance(message, ServerMetadata):
        return [encode(ServerMetadataResponse(message.id, "fake", "9.9", ("echo",), ()))]
    assert isinstance(message, Status)
    return [encode(StatusResponse(message.id, "9.9", "running", 1, 1.0, 1, ()))]


def silent(message: ClientMessage, tensors: Sequence[bytes]) -> Sequence[List[Any]]:
    """Never answer."""
    return []


class FakeDaemon:
    """Listens from its construction on; `stop` ends it as a killed process ends: all connections close.

    Attributes:
        seen: what has come, in order.
        handle: what to answer; may be exchanged at any time.
    """

    def __init__(self, address: str, handle: Handler = echo) -> None:
        self.handle: Handler = handle
        self.seen: queue.Queue[Seen] = queue.Queue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Nothing is dropped because a queue is full: then it waits.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(address)
        self.address = cast(bytes, self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        self._orders = self._context.socket(zmq.PAIR)
        self._orders.bind("inproc://orders")
        self._inside = self._context.socket(zmq.PAIR)
        self._inside.connect("inproc://orders")
        self._peer = b""
        self._thread: Optional[threading.Thread] = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def next(self) -> Seen:
        """Wait for the next message."""
        return self.seen.get(timeout=LIMIT_S)

    def send(self, *frames: bytes) -> None:
        """Send a message to the peer that was heard last."""
        self._orders.send_multipart(frames)

    def stop(self) -> None:
        """End; the second time does nothing."""
        if self._thread is not None:
            self._orders.send(b"")
            self._thread.join(LIMIT_S)
            self._thread = None
            self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._inside, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._inside in ready:
                order = self._inside.recv_multipart()
                if order == [b""]:
                    break
                self._answer(order)
            if self._socket in ready:
                self._peer, *frames = self._socket.recv_multipart()
                message = decode(frames, FROM_CLIENT)
                self.seen.put((message, frames[2:]))
                for answer in self.handle(message, frames[2:]):
                    self._answer(answer)
        self._socket.close(linger=0)
        self._inside.close(linger=0)

    def _answer(self, frames: Sequence[Any]) -> None:
        try:
            self._socket.send_multipart([self._peer, *frames])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # who asked is gone
                raise


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a path short enough for sockets, which pytest's own need not have."""
    with tempfile.TemporaryDirectory(prefix="weightd-test-") as path:
        yield Path(path)


@pytest.fixture
def address(directory: Path) -> str:
    """Where nobody listens yet."""
    return f"ipc://{directory}/d.sock"


@pytest.fixture
def daemon(address: str) -> Iterator[FakeDaemon]:
    """A daemon that echoes until it is told otherwise."""
    fake = FakeDaemon(address)
    yield fake
    fake.stop()


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[Client]:
    """A client of `daemon`."""
    with Client(daemon.address, timeout=LIMIT_S) as connected:
        yield connected
