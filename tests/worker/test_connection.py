"""A connection to a daemon that goes away and comes back, over real sockets."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Generator, List, Optional, Sequence, Union

import pytest
import zmq

from weightd_common import zmq_io
from weightd_common.stream import Stream
from weightd_protocol.codec import decode, encode
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.messages.worker import FROM_CHILD, ChildMessage, Forked, Reconnected
from weightd_worker.connection import ChannelConnection, WorkerConnection

LIMIT_MS = 20_000


class Ends:
    """A worker, its connection, and the daemons that follow one another; the first one has no channel."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: Path) -> None:
        self._context = context
        self._address = f"ipc://{directory}/children"
        self._daemon: Optional[zmq.Socket[bytes]] = None
        self._connected: Optional[zmq.Socket[bytes]] = None
        self._listener: Optional[socket.socket] = None
        self._channel_path = directory / "children.channel"
        self.channel: Optional[Stream] = None
        self.worker = context.socket(zmq.DEALER)
        self.worker.setsockopt(zmq.ROUTING_ID, b"w1")
        self.connection = WorkerConnection(self.worker, self._address)

    def replace(self, *, has_channel: bool = False) -> None:
        """Put another daemon in the place of the one before; wait until the worker is connected to it."""
        self.end()
        if has_channel:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.setblocking(False)
            self._listener.bind(str(self._channel_path))
            self._listener.listen()
        self._daemon = self._context.socket(zmq.ROUTER)
        self._daemon.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._connected = self._daemon.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._daemon.bind(self._address)
        assert self._connected.poll(LIMIT_MS)
        zmq_io.receive_event(self._connected)

    def accept(self) -> Stream:
        """Hear that the worker is back; return the channel that it has connected before: the last one."""
        assert self.hear() == Reconnected()
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                if self.channel is not None:
                    self.channel.close()
                self.channel = Stream(connection)
        assert self.channel is not None
        return self.channel

    def asked(self) -> Stream:
        """Put a daemon with a channel there, which sends a request; return the channel."""
        with self.waiting(b"request"):
            self.replace(has_channel=True)
            channel = self.accept()
            channel.send([b"request"])
        return channel

    def hear(self) -> Union[ChildMessage, Forked]:
        """Return the worker's next message."""
        assert self._daemon is not None
        assert self._daemon.poll(LIMIT_MS)
        peer, *frames = self._daemon.recv_multipart()
        assert peer == b"w1"
        return decode(frames, FROM_CHILD)

    def tell(self, order: bytes) -> None:
        assert self._daemon is not None
        self._daemon.send_multipart([b"w1", order])

    @contextlib.contextmanager
    def waiting(self, *orders: bytes) -> Generator[None, None, None]:
        """The worker waits while the block runs, and has these messages in the end."""
        self._received: List[bytes] = []
        thread = threading.Thread(target=self._wait, args=(len(orders),), daemon=True)
        thread.start()
        yield
        thread.join(LIMIT_MS / 1000)
        assert not thread.is_alive()
        assert self._received == list(orders)

    def _wait(self, count: int) -> None:
        # Who waits in vain has the sockets closed under it at the end of the test.
        with contextlib.suppress(zmq.ZMQError):
            while len(self._received) < count:
                messages = self.connection.receive()
                if messages is None:
                    self.connection.send(encode(Reconnected()))
                else:
                    self._received += [bytes(frames[0]) for frames in messages]

    def silent(self) -> bool:
        """Whether all that the worker has said was heard."""
        self.connection.send([b"end"])
        assert self._daemon is not None
        return self._daemon.recv_multipart() == [b"w1", b"end"]

    def end(self) -> None:
        if self._daemon is not None and self._connected is not None:
            self._daemon.disable_monitor()
            self._connected.close(linger=0)
            self._daemon.close(linger=0)
        for each in (self.channel, self._listener):
            if each is not None:
                each.close()
        self.channel = self._listener = None
        with contextlib.suppress(FileNotFoundError):
            self._channel_path.unlink()


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
    channel: Optional[Stream] = vars(made.connection)["_channel"]
    if channel is not None:
        channel.close()
    context.destroy(linger=0)
    shutil.rmtree(str(directory))


# --- another daemon ---------------------------------------------------------------------------------------------------


def test_the_first_connection_is_no_return(ends: Ends) -> None:
    with ends.waiting(b"two"):
        ends.tell(b"two")
    assert ends.silent()


def test_it_hears_once_of_each_daemon_that_follows(ends: Ends) -> None:
    for number in (b"0", b"1", b"2"):
        with ends.waiting(number):
            ends.replace()
            assert ends.hear() == Reconnected()
            ends.tell(number)
        with ends.waiting(b"more"):
            ends.tell(b"more")
        assert ends.silent()


def test_what_is_there_is_read_first(ends: Ends) -> None:
    # While it computes another daemon comes.
    ends.replace()
    ends.tell(b"two")
    with ends.waiting(b"two"):
        pass
    with ends.waiting(b"three"):
        assert ends.hear() == Reconnected()
        ends.tell(b"three")


def test_daemons_that_came_and_went_while_it_computed_are_of_no_consequence(ends: Ends) -> None:
    ends.replace()
    ends.replace()
    with ends.waiting(b"two"):
        assert [ends.hear(), ends.hear()] == [Reconnected(), Reconnected()]
        ends.tell(b"two")
    assert ends.silent()


# --- the channel ------------------------------------------------------------------------------------------------------


def test_requests_come_by_the_channel_and_are_answered_there(ends: Ends) -> None:
    with ends.waiting(b"predict", b"ping"):
        ends.replace(has_channel=True)
        channel = ends.accept()
        channel.send([b"predict"])
        ends.tell(b"ping")
    ends.connection.reply([b"result"])
    assert [message.frames for message in channel.receive()] == [[b"result"]]
    ends.connection.reply([b"another"], [b"and one"])
    assert [message.frames for message in channel.receive()] == [[b"another"], [b"and one"]]
    assert ends.silent()


def test_what_has_come_by_the_channel_comes_first(ends: Ends) -> None:
    channel = ends.asked()
    channel.send([b"predict"])
    ends.tell(b"stop")
    assert ends.worker.poll(LIMIT_MS)
    # Whoever sends hears what has come, instead of who waits.
    ends.connection.send(encode(Reconnected()))
    with ends.waiting(b"predict", b"stop"):
        pass
    assert ends.connection.receive(0) == ends.connection.receive(0.01) == []


def test_what_lies_behind_a_large_request_is_read_with_it(ends: Ends) -> None:
    channel = ends.asked()
    assert channel.send([b"predict", b"", bytes(150_000)])
    assert channel.send([b"skip"])
    assert [bytes(frames[0]) for frames in ends.connection.receive() or ()] == [b"predict", b"skip"]


def test_who_has_no_channel_is_answered_over_the_socket(ends: Ends) -> None:
    with ends.waiting(b"predict"):
        ends.tell(b"predict")
    ends.connection.reply(encode(Reconnected()))
    assert ends.hear() == Reconnected()


def test_it_can_be_woken_and_goes_on_to_hear(ends: Ends) -> None:
    end, other = os.pipe()
    ends.connection.watch(end)
    channel = ends.asked()
    for order in (b"by the channel", b"by the socket"):
        os.write(other, b"\0")
        assert ends.connection.receive() == []
        os.read(end, 1)
        with ends.waiting(order):
            if order == b"by the channel":
                channel.send([order])
            else:
                ends.tell(order)
    for descriptor in (end, other):
        os.close(descriptor)


def test_a_large_answer_waits_until_it_is_read(ends: Ends) -> None:
    channel = ends.asked()
    frames = [b"result", b"", bytes(range(256)) * 20_000]
    thread = threading.Thread(target=ends.connection.reply, args=(frames,), daemon=True)
    thread.start()
    # A daemon that has more to ask does not wait for it.
    channel.send([b"predict", b"", bytes(5_000_000)])
    messages: List[Any] = []
    while not messages:
        messages = channel.receive()
    assert [bytes(frame) for frame in messages[0].frames] == frames
    thread.join(LIMIT_MS / 1000)
    assert not thread.is_alive()


def test_an_answer_for_a_daemon_that_has_gone_reaches_nobody(ends: Ends) -> None:
    ends.asked()
    ends.replace(has_channel=True)
    ends.connection.reply([b"result"])
    with ends.waiting(b"next"):
        channel = ends.accept()
        channel.send([b"next"])
    assert channel.receive() == []
    assert ends.silent()


def test_a_channel_that_ends_leaves_the_socket(ends: Ends) -> None:
    with ends.waiting(b"stop"):
        ends.replace(has_channel=True)
        channel = ends.accept()
        channel.close()
        ends.tell(b"stop")
    ends.connection.reply([b"result"])
    assert ends.silent()


class Daemons:
    """One after another, at the same path; there is one, and it has let the connection in."""

    def __init__(self, directory: Path) -> None:
        self._path = str(directory / "children.channel")
        self._listener: Optional[socket.socket] = None
        self.channel: Optional[Stream] = None
        self.listen()
        self.connection = ChannelConnection(f"ipc://{directory}/children")
        self.let_in()

    def listen(self) -> None:
        """Another one begins."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(LIMIT_MS / 1000)
        self._listener.bind(self._path)
        self._listener.listen()

    def let_in(self) -> Stream:
        """It accepts."""
        assert self._listener is not None
        self.channel = Stream(self._listener.accept()[0])
        return self.channel

    def end(self) -> None:
        """The one that is there ends."""
        for each in (self.channel, self._listener):
            if each is not None:
                each.close()
        Path(self._path).unlink()


@pytest.fixture
def daemons() -> Generator[Daemons, None, None]:
    directory = Path(tempfile.mkdtemp(prefix="weightd-", dir="/tmp"))
    made = Daemons(directory)
    yield made
    made.end()
    channel: Optional[Stream] = vars(made.connection)["_channel"]
    if channel is not None:
        channel.close()
    shutil.rmtree(str(directory))


def frames(messages: Optional[Sequence[Sequence[Any]]]) -> List[List[bytes]]:
    assert messages is not None
    return [list(map(bytes, each)) for each in messages]


def test_messages_go_both_ways(daemons: Daemons) -> None:
    assert daemons.channel is not None
    assert daemons.connection.receive(0) == daemons.connection.receive(0.01) == []
    daemons.channel.send([b"order", b"more"])
    assert frames(daemons.connection.receive()) == [[b"order", b"more"]]
    assert daemons.connection.send([b"done"])
    assert [each.frames for each in daemons.channel.receive()] == [[b"done"]]


def test_over_a_channel_it_hears_once_of_each_daemon_that_follows(daemons: Daemons) -> None:
    for _ in range(3):
        daemons.end()
        daemons.listen()
        assert daemons.connection.receive(LIMIT_MS / 1000) is None
        daemons.let_in().send([b"next"])
        assert frames(daemons.connection.receive()) == [[b"next"]]


def test_the_last_words_of_a_daemon_come_first(daemons: Daemons) -> None:
    assert daemons.channel is not None
    daemons.channel.send([b"last"])
    daemons.end()
    assert frames(daemons.connection.receive()) == [[b"last"]]
    daemons.listen()
    # Who only looks hears nothing of it.
    assert daemons.connection.receive(0) == []
    assert daemons.connection.receive() is None


def test_what_is_said_to_nobody_is_lost_and_the_next_daemon_does_not_hear_it(daemons: Daemons) -> None:
    daemons.end()
    # Whether the daemon is gone shows when it is sent, or when it is read.
    assert not daemons.connection.send([b"bad news"])
    assert daemons.connection.receive(0.05) == []
    assert not daemons.connection.send([b"bad news"])
    daemons.listen()
    assert daemons.connection.receive() is None
    assert daemons.let_in().receive() == []


def test_while_there_is_none_it_does_not_spin(daemons: Daemons) -> None:
    daemons.end()
    begin = time.process_time()
    assert daemons.connection.receive(0.5) == []
    assert time.process_time() - begin < 0.2
    daemons.listen()


def test_a_daemon_that_hangs_up_does_not_make_it_spin_either(daemons: Daemons) -> None:
    daemons.end()
    daemons.listen()
    begin, count = time.monotonic(), 5
    for _ in range(count):
        assert daemons.connection.receive() is None
        daemons.let_in().close()
    assert time.monotonic() - begin >= count * 0.02


def test_over_a_channel_it_can_be_woken_and_goes_on_to_hear(daemons: Daemons) -> None:
    connection, (end, other) = daemons.connection, os.pipe()
    connection.watch(end)
    for _ in range(2):
        os.write(other, b"\0")
        assert connection.receive() == []
        os.read(end, 1)
        assert daemons.channel is not None
        daemons.channel.send([b"order"])
        assert frames(connection.receive()) == [[b"order"]]
        # Another daemon is watched as well.
        daemons.end()
        daemons.listen()
        assert connection.receive() is None
        daemons.let_in()
    for descriptor in (end, other):
        os.close(descriptor)


def test_a_large_message_waits_until_it_is_read(daemons: Daemons) -> None:
    channel, large = daemons.channel, bytes(5_000_000)
    assert channel is not None
    thread = threading.Thread(target=daemons.connection.send, args=([large],), daemon=True)
    thread.start()
    messages: List[object] = []
    while not messages:
        messages += channel.receive()
    assert len(messages) == 1
    thread.join(LIMIT_MS / 1000)
    assert not thread.is_alive()


def test_memory_of_clients_is_not_taken(daemons: Daemons) -> None:
    with pytest.raises(RemoteProtocolError, match="descriptors"):
        daemons.connection.take_descriptor()
