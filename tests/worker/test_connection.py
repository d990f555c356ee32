"""A connection to a daemon that goes away and comes back, over real sockets."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Callable, Generator, List

import pytest
import zmq

from weightd.protocol.codec import decode, encode
from weightd.protocol.messages.children import FROM_CHILD, Back, ChildMessage, Pong
from weightd.shared import monitor
from weightd.worker.connection import Connection

LIMIT_MS = 20_000


class Daemon:
    """The daemon's end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._connected = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.socket.bind(address)

    def wait_for_worker(self) -> None:
        """Wait until the worker is connected, whether it knows it or not."""
        assert self._connected.poll(LIMIT_MS)
        monitor.receive(self._connected)

    def hear(self) -> ChildMessage:
        """Return the next message."""
        assert self.socket.poll(LIMIT_MS)
        peer, *frames = self.socket.recv_multipart()
        assert peer == b"w1"
        message: ChildMessage = decode(frames, FROM_CHILD)
        return message

    def tell(self, order: bytes) -> None:
        self.socket.send_multipart([b"w1", order])

    def end(self) -> None:
        self.socket.disable_monitor()
        self._connected.close(linger=0)
        self.socket.close(linger=0)


class Worker:
    """The worker's end: its socket, and the connection that waits for it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, b"w1")
        self._connection = Connection(self.socket)
        self.socket.connect(address)

    @contextlib.contextmanager
    def waits(self) -> Generator[None, None, None]:
        """The worker waits for a message; the block has to send one."""
        thread = threading.Thread(target=self._wait, daemon=True)
        thread.start()
        yield
        thread.join(LIMIT_MS / 1000)
        assert not thread.is_alive()

    def _wait(self) -> None:
        while self._connection.wait():
            self.socket.send(encode(Back()))

    def obey(self) -> bytes:
        """Return the message that is there."""
        return self.socket.recv(zmq.NOBLOCK)

    def answer(self) -> None:
        self.socket.send(encode(Pong()))


@pytest.fixture
def context() -> Generator[zmq.Context[zmq.Socket[bytes]], None, None]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def address() -> Generator[str, None, None]:
    # The path of a socket has at most 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="weightd-", dir="/tmp"))
    yield f"ipc://{directory}/children"
    shutil.rmtree(str(directory))


@pytest.fixture
def daemon(context: zmq.Context[zmq.Socket[bytes]], address: str) -> Generator[Callable[[], Daemon], None, None]:
    """Replace the daemon by the next one."""
    made: List[Daemon] = []

    def replace() -> Daemon:
        while made:
            made.pop().end()
        made.append(Daemon(context, address))
        return made[0]

    yield replace
    while made:
        made.pop().end()


@pytest.fixture
def worker(context: zmq.Context[zmq.Socket[bytes]], address: str) -> Generator[Worker, None, None]:
    made = Worker(context, address)
    yield made
    made.socket.close(linger=0)


def test_the_first_connection_is_no_return(daemon: Callable[[], Daemon], worker: Worker) -> None:
    first = daemon()
    with worker.waits():
        first.wait_for_worker()
        first.tell(b"one")
    assert worker.obey() == b"one"
    with worker.waits():
        first.tell(b"two")
    assert worker.obey() == b"two"
    worker.answer()
    assert first.hear() == Pong()


def test_it_hears_once_of_each_daemon_that_follows(daemon: Callable[[], Daemon], worker: Worker) -> None:
    with worker.waits():
        first = daemon()
        first.wait_for_worker()
        first.tell(b"one")
    assert worker.obey() == b"one"
    for number in range(3):
        with worker.waits():
            following = daemon()
            assert following.hear() == Back()
            following.tell(b"%d" % number)
        assert worker.obey() == b"%d" % number
        with worker.waits():
            following.tell(b"more")
        assert worker.obey() == b"more"
        worker.answer()
        assert following.hear() == Pong()


def test_what_is_there_is_read_first(daemon: Callable[[], Daemon], worker: Worker) -> None:
    with worker.waits():
        first = daemon()
        first.wait_for_worker()
        first.tell(b"one")
    assert worker.obey() == b"one"
    # While it computes another daemon comes.
    following = daemon()
    following.wait_for_worker()
    following.tell(b"two")
    assert worker.socket.poll(LIMIT_MS)
    with worker.waits():
        pass
    assert worker.obey() == b"two"
    with worker.waits():
        assert following.hear() == Back()
        following.tell(b"three")
    assert worker.obey() == b"three"


def test_daemons_that_came_and_went_while_it_computed_are_of_no_consequence(
    daemon: Callable[[], Daemon], worker: Worker
) -> None:
    with worker.waits():
        first = daemon()
        first.wait_for_worker()
        first.tell(b"one")
    assert worker.obey() == b"one"
    daemon().wait_for_worker()
    following = daemon()
    following.wait_for_worker()
    with worker.waits():
        assert [following.hear(), following.hear()] == [Back(), Back()]
        following.tell(b"two")
    assert worker.obey() == b"two"
    worker.answer()
    assert following.hear() == Pong()
