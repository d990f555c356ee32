"""A connection to a daemon that goes away and comes back, over real sockets."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Generator, Optional

import pytest
import zmq

from weightd.protocol.codec import decode, encode
from weightd.protocol.messages.children import FROM_CHILD, Back, ChildMessage
from weightd.shared import monitor
from weightd.worker.connection import Connection

LIMIT_MS = 20_000


class Ends:
    """A worker, its connection, and the daemons that follow one another."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: Path) -> None:
        self._context = context
        self._address = f"ipc://{directory}/children"
        self._daemon: Optional[zmq.Socket[bytes]] = None
        self._connected: Optional[zmq.Socket[bytes]] = None
        self.worker = context.socket(zmq.DEALER)
        self.worker.setsockopt(zmq.ROUTING_ID, b"w1")
        self._connection = Connection(self.worker)
        self.worker.connect(self._address)

    def replace(self) -> None:
        """Put another daemon in the place of the one before; wait until the worker is connected to it."""
        self.end()
        self._daemon = self._context.socket(zmq.ROUTER)
        self._daemon.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._connected = self._daemon.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._daemon.bind(self._address)
        assert self._connected.poll(LIMIT_MS)
        monitor.receive(self._connected)

    def hear(self) -> ChildMessage:
        """Return the worker's next message."""
        assert self._daemon is not None
        assert self._daemon.poll(LIMIT_MS)
        peer, *frames = self._daemon.recv_multipart()
        assert peer == b"w1"
        message: ChildMessage = decode(frames, FROM_CHILD)
        return message

    def tell(self, order: bytes) -> None:
        assert self._daemon is not None
        self._daemon.send_multipart([b"w1", order])

    @contextlib.contextmanager
    def waiting(self, order: bytes) -> Generator[None, None, None]:
        """The worker waits while the block runs, and has this message in the end."""
        thread = threading.Thread(target=self._wait, daemon=True)
        thread.start()
        yield
        thread.join(LIMIT_MS / 1000)
        assert not thread.is_alive()
        assert self.worker.recv(zmq.NOBLOCK) == order

    def _wait(self) -> None:
        while self._connection.wait():
            self.worker.send_multipart(encode(Back()))

    def silent(self) -> bool:
        """Whether all that the worker has said was heard."""
        self.worker.send(b"end")
        assert self._daemon is not None
        return self._daemon.recv_multipart() == [b"w1", b"end"]

    def end(self) -> None:
        if self._daemon is not None and self._connected is not None:
            self._daemon.disable_monitor()
            self._connected.close(linger=0)
            self._daemon.close(linger=0)


@pytest.fixture
def ends() -> Generator[Ends, None, None]:
    """A worker and its first daemon."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # The path of a socket has at most 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="weightd-", dir="/tmp"))
    made = Ends(context, directory)
    made.replace()
    with made.waiting(b"one"):
        made.tell(b"one")
    yield made
    made.end()
    context.destroy(linger=0)
    shutil.rmtree(str(directory))


def test_the_first_connection_is_no_return(ends: Ends) -> None:
    with ends.waiting(b"two"):
        ends.tell(b"two")
    assert ends.silent()


def test_it_hears_once_of_each_daemon_that_follows(ends: Ends) -> None:
    for number in (b"0", b"1", b"2"):
        with ends.waiting(number):
            ends.replace()
            assert ends.hear() == Back()
            ends.tell(number)
        with ends.waiting(b"more"):
            ends.tell(b"more")
        assert ends.silent()


def test_what_is_there_is_read_first(ends: Ends) -> None:
    # While it computes another daemon comes.
    ends.replace()
    ends.tell(b"two")
    assert ends.worker.poll(LIMIT_MS)
    with ends.waiting(b"two"):
        pass
    with ends.waiting(b"three"):
        assert ends.hear() == Back()
        ends.tell(b"three")


def test_daemons_that_came_and_went_while_it_computed_are_of_no_consequence(ends: Ends) -> None:
    ends.replace()
    ends.replace()
    with ends.waiting(b"two"):
        assert [ends.hear(), ends.hear()] == [Back(), Back()]
        ends.tell(b"two")
    assert ends.silent()
