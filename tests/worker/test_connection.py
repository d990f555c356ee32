"""Tests of a worker's connection to a daemon that exits and is replaced, over real sockets."""

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
from weightd_protocol import limits
from weightd_protocol.codec import decode, encode
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.messages.worker import FROM_CHILD, ChildMessage, Forked, Reconnected
from weightd_worker.connection import ChannelConnection, WorkerConnection, has_room

LIMIT_MS = 20_000


class Ends:
    """A worker's connection and a sequence of daemons; the first daemon has no channel."""

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
        """Replace the daemon and wait until the worker has connected to the new one."""
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
        """Receive the worker's RECONNECTED; return the last channel that it has connected."""
        assert self.receive() == Reconnected()
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
        """Replace the daemon by one with a channel, which sends a request; return the channel."""
        with self.waiting(b"request"):
            self.replace(has_channel=True)
            channel = self.accept()
            channel.send([b"request"])
        return channel

    def receive(self) -> Union[ChildMessage, Forked]:
        assert self._daemon is not None
        assert self._daemon.poll(LIMIT_MS)
        peer, *frames = self._daemon.recv_multipart()
        assert peer == b"w1"
        return decode(frames, FROM_CHILD)

    def send(self, order: bytes) -> None:
        assert self._daemon is not None
        self._daemon.send_multipart([b"w1", order])

    @contextlib.contextmanager
    def waiting(self, *orders: bytes) -> Generator[None, None, None]:
        """Let the worker wait while the block runs; check that it then has received these messages."""
        self._received: List[bytes] = []
        thread = threading.Thread(target=self._wait, args=(len(orders),), daemon=True)
        thread.start()
        yield
        thread.join(LIMIT_MS / 1000)
        assert not thread.is_alive()
        assert self._received == list(orders)

    def _wait(self, count: int) -> None:
        # If the worker never receives a message, the end of the test closes its sockets.
        with contextlib.suppress(zmq.ZMQError):
            while len(self._received) < count:
                messages = self.connection.receive()
                if messages is None:
                    self.connection.send(encode(Reconnected()))
                else:
                    self._received += [bytes(frames[0]) for frames in messages]

    def silent(self) -> bool:
        """Return whether all messages of the worker have been received."""
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
    """Return a worker connection and its first daemon."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # The path of a Unix socket has at most 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="weightd-", dir="/tmp"))
    made = Ends(context, directory)
    made.replace()
    with made.waiting(b"one"):
        made.send(b"one")
    yield made
    made.end()
    channel: Optional[Stream] = vars(made.connection)["_channel"]
    if channel is not None:
        channel.close()
    context.destroy(linger=0)
    shutil.rmtree(str(directory))


# --- reconnection -----------------------------------------------------------------------------------------------------


def test_first_connection_is_no_reconnection(ends: Ends) -> None:
    with ends.waiting(b"two"):
        ends.send(b"two")
    assert ends.silent()


def test_reports_each_new_daemon_once(ends: Ends) -> None:
    for number in (b"0", b"1", b"2"):
        with ends.waiting(number):
            ends.replace()
            assert ends.receive() == Reconnected()
            ends.send(number)
        with ends.waiting(b"more"):
            ends.send(b"more")
        assert ends.silent()


def test_reads_pending_messages_first(ends: Ends) -> None:
    # Another daemon connects while the worker computes.
    ends.replace()
    ends.send(b"two")
    with ends.waiting(b"two"):
        pass
    with ends.waiting(b"three"):
        assert ends.receive() == Reconnected()
        ends.send(b"three")


def test_tolerates_daemons_replaced_during_predict(ends: Ends) -> None:
    ends.replace()
    ends.replace()
    with ends.waiting(b"two"):
        assert [ends.receive(), ends.receive()] == [Reconnected(), Reconnected()]
        ends.send(b"two")
    assert ends.silent()


# --- the channel ------------------------------------------------------------------------------------------------------


def test_answers_requests_over_channel(ends: Ends) -> None:
    with ends.waiting(b"predict", b"ping"):
        ends.replace(has_channel=True)
        channel = ends.accept()
        channel.send([b"predict"])
        ends.send(b"ping")
    ends.connection.reply([b"result"])
    assert [message.frames for message in channel.receive()] == [[b"result"]]
    ends.connection.reply([b"another"], [b"and one"])
    assert [message.frames for message in channel.receive()] == [[b"another"], [b"and one"]]
    assert ends.silent()


def test_reads_channel_before_socket(ends: Ends) -> None:
    channel = ends.asked()
    channel.send([b"predict"])
    ends.send(b"stop")
    assert ends.worker.poll(LIMIT_MS)
    # A send reads pending messages without waiting.
    ends.connection.send(encode(Reconnected()))
    with ends.waiting(b"predict", b"stop"):
        pass
    assert ends.connection.receive(0) == ends.connection.receive(0.01) == []


def test_reads_message_behind_a_large_request(ends: Ends) -> None:
    channel = ends.asked()
    assert channel.send([b"predict", b"", bytes(150_000)])
    assert channel.send([b"skip"])
    assert [bytes(frames[0]) for frames in ends.connection.receive() or ()] == [b"predict", b"skip"]


def test_answers_over_socket_without_channel(ends: Ends) -> None:
    with ends.waiting(b"predict"):
        ends.send(b"predict")
    ends.connection.reply(encode(Reconnected()))
    assert ends.receive() == Reconnected()


def test_receives_after_wake_up(ends: Ends) -> None:
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
                ends.send(order)
    for descriptor in (end, other):
        os.close(descriptor)


def test_large_answer_waits_for_reader(ends: Ends) -> None:
    channel = ends.asked()
    frames = [b"result", b"", bytes(range(256)) * 20_000]
    thread = threading.Thread(target=ends.connection.reply, args=(frames,), daemon=True)
    thread.start()
    # A daemon that sends another request is not blocked by the answer.
    channel.send([b"predict", b"", bytes(5_000_000)])
    messages: List[Any] = []
    while not messages:
        messages = channel.receive()
    assert [bytes(frame) for frame in messages[0].frames] == frames
    thread.join(LIMIT_MS / 1000)
    assert not thread.is_alive()


def test_answer_for_old_daemon_is_dropped(ends: Ends) -> None:
    ends.asked()
    ends.replace(has_channel=True)
    ends.connection.reply([b"result"])
    with ends.waiting(b"next"):
        channel = ends.accept()
        channel.send([b"next"])
    assert channel.receive() == []
    assert ends.silent()


def test_uses_socket_after_channel_ends(ends: Ends) -> None:
    with ends.waiting(b"stop"):
        ends.replace(has_channel=True)
        channel = ends.accept()
        channel.close()
        ends.send(b"stop")
    ends.connection.reply([b"result"])
    assert ends.silent()


class Daemons:
    """A sequence of daemons at the same path; the current one has accepted the connection."""

    def __init__(self, directory: Path) -> None:
        self._path = str(directory / "children.channel")
        self._listener: Optional[socket.socket] = None
        self.channel: Optional[Stream] = None
        self.listen()
        self.connection = ChannelConnection(f"ipc://{directory}/children")
        self.let_in()

    def listen(self) -> None:
        """Start the next daemon."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(LIMIT_MS / 1000)
        self._listener.bind(self._path)
        self._listener.listen()

    def let_in(self) -> Stream:
        """Accept the worker's connection."""
        assert self._listener is not None
        self.channel = Stream(self._listener.accept()[0])
        return self.channel

    def end(self) -> None:
        """Stop the current daemon."""
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


def test_sends_and_receives(daemons: Daemons) -> None:
    assert daemons.channel is not None
    assert daemons.connection.receive(0) == daemons.connection.receive(0.01) == []
    daemons.channel.send([b"order", b"more"])
    assert frames(daemons.connection.receive()) == [[b"order", b"more"]]
    assert daemons.connection.send([b"done"])
    assert [each.frames for each in daemons.channel.receive()] == [[b"done"]]


def test_channel_reports_each_new_daemon_once(daemons: Daemons) -> None:
    for _ in range(3):
        daemons.end()
        daemons.listen()
        assert daemons.connection.receive(LIMIT_MS / 1000) is None
        daemons.let_in().send([b"next"])
        assert frames(daemons.connection.receive()) == [[b"next"]]


def test_reads_last_message_of_old_daemon_first(daemons: Daemons) -> None:
    assert daemons.channel is not None
    daemons.channel.send([b"last"])
    daemons.end()
    assert frames(daemons.connection.receive()) == [[b"last"]]
    daemons.listen()
    # A non-blocking receive does not report the end of the daemon.
    assert daemons.connection.receive(0) == []
    assert daemons.connection.receive() is None


def test_drops_messages_without_daemon(daemons: Daemons) -> None:
    daemons.end()
    # The end of the daemon shows in a send or in a receive.
    assert not daemons.connection.send([b"bad news"])
    assert daemons.connection.receive(0.05) == []
    assert not daemons.connection.send([b"bad news"])
    daemons.listen()
    assert daemons.connection.receive() is None
    assert daemons.let_in().receive() == []


def test_does_not_spin_without_daemon(daemons: Daemons) -> None:
    daemons.end()
    begin = time.process_time()
    assert daemons.connection.receive(0.5) == []
    assert time.process_time() - begin < 0.2
    daemons.listen()


def test_does_not_spin_if_daemon_hangs_up(daemons: Daemons) -> None:
    daemons.end()
    daemons.listen()
    begin, count = time.monotonic(), 5
    for _ in range(count):
        assert daemons.connection.receive() is None
        daemons.let_in().close()
    assert time.monotonic() - begin >= count * 0.02


def test_channel_receives_after_wake_up(daemons: Daemons) -> None:
    connection, (end, other) = daemons.connection, os.pipe()
    connection.watch(end)
    for _ in range(2):
        os.write(other, b"\0")
        assert connection.receive() == []
        os.read(end, 1)
        assert daemons.channel is not None
        daemons.channel.send([b"order"])
        assert frames(connection.receive()) == [[b"order"]]
        # The connection also watches the next daemon.
        daemons.end()
        daemons.listen()
        assert connection.receive() is None
        daemons.let_in()
    for descriptor in (end, other):
        os.close(descriptor)


def test_large_message_waits_for_reader(daemons: Daemons) -> None:
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


def test_rejects_client_memory(daemons: Daemons) -> None:
    with pytest.raises(RemoteProtocolError, match="descriptors"):
        daemons.connection.take_descriptor()


@pytest.mark.parametrize("buffer_bytes", [32 * 1024, 104 * 1024, 256 * 1024])
@pytest.mark.parametrize("nbytes", [1, 5_000, 40_000, 131_000])
def test_a_message_for_which_there_is_room_is_sent_as_a_whole(nbytes: int, buffer_bytes: int) -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    stream, frame = Stream(ours), bytes(nbytes)
    assert has_room(stream, 10**6)
    stream.send([b"x"])
    count = 0
    while has_room(stream, nbytes):
        assert stream.send([frame])
        count += 1
    assert count > 0 or nbytes > buffer_bytes
    if buffer_bytes == 256 * 1024:
        for _ in range(limits.MAX_CHANNELS - 1):
            assert stream.send([bytes(100)])
    stream.send([bytes(10**6)])
    theirs.recv(2**20)
    assert not has_room(stream, 1)
    stream.close()
    theirs.close()
