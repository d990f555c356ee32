"""A connection that is a channel alone, to one daemon after another."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Generator, List, Optional, Sequence

import pytest

from weightd_common.stream import Stream
from weightd_protocol.errors import RemoteProtocolError
from weightd_worker.connection import ChannelConnection

LIMIT_S = 20


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
        self._listener.settimeout(LIMIT_S)
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


def test_it_hears_once_of_each_daemon_that_follows(daemons: Daemons) -> None:
    for _ in range(3):
        daemons.end()
        daemons.listen()
        assert daemons.connection.receive(LIMIT_S) is None
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


def test_it_can_be_woken_and_goes_on_to_hear(daemons: Daemons) -> None:
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
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_memory_of_clients_is_not_taken(daemons: Daemons) -> None:
    with pytest.raises(RemoteProtocolError, match="descriptors"):
        daemons.connection.take_descriptor()
