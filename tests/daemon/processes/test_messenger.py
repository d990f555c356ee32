"""Worker channels between this process, as the child, and the daemon's side."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from weightd_common import memfd
from weightd_common.stream import Stream
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_daemon.processes.worker_channels import WorkerChannels
from weightd_daemon.scheduling.tensor_location import SharedRegion
from weightd_protocol.codec import encode
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.framing import message_prefix
from weightd_protocol.messages.inference import ResponseDescription, TensorSpec
from weightd_protocol.messages.regions import MapRegion, UnmapRegion
from weightd_protocol.messages.worker import CancelPredict, ChildMessage, Pong, PredictCancelled, PredictResult

LARGE = bytes(3_000_000)

# Orders and their results.
FIRST, SECOND = CancelPredict(1), CancelPredict(2)
ONE, TWO = PredictCancelled(1), PredictCancelled(2)
ANSWER = PredictResult(3, ResponseDescription("m", (TensorSpec("y", "UINT8", (len(LARGE),)),)))
SMALL = PredictResult(4, ResponseDescription("m", (TensorSpec("y", "UINT8", (50_000,)),)))


class ChannelHarness:
    """Worker channels and the messages received over them; each connection belongs to the child `name`."""

    def __init__(self, directory: Path) -> None:
        self.name: str | None = "w1"
        self.messages: list[tuple[str, Any]] = []
        self.path = directory / "channel"
        self.loop = EventLoop()
        self.channels = WorkerChannels(
            self.path,
            self.loop,
            self._name_of,
            {"w1": self},
            self._on_message,
            self._on_error,
            on_message_burst=lambda: self.messages.append(("", "several")),
            on_direct_report=lambda name, message, frames: None,
        )
        self.children: list[Stream] = []

    def _name_of(self, pid: int) -> str | None:
        assert pid == os.getpid()
        return self.name

    def _on_message(self, name: str, message: ChildMessage) -> None:
        self.messages.append((name, message))

    def on_message(self, child: str, message: ChildMessage, frames: Sequence[Any], now: float) -> None:
        """Record the result of a request."""
        assert now == self.loop.now
        self.messages.append((child, (message, *map(bytes, frames)) if frames else message))

    def on_exit(self, child: str, exit_cause: ExitCause, now: float) -> None:
        raise NotImplementedError

    def _on_error(self, name: str, how: RemoteProtocolError) -> None:
        self.messages.append((name, str(how)))

    def connect(self) -> Stream:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self.path))
        self.children.append(Stream(connection, accepts_descriptors=True))
        return self.children[-1]

    def until(self, done: Callable[[], object]) -> None:
        while not done():
            self.loop.run_once(30)

    def received(self, child: Stream, count: int) -> list[list[bytes]]:
        """Return the next messages that the child receives."""
        messages: list[list[bytes]] = []
        while len(messages) < count:
            self.loop.run_once(0)
            messages += [list(map(bytes, message.frames)) for message in child.receive()]
        return messages

    def close(self) -> None:
        self.channels.close()
        for child in self.children:
            child.close()
        self.loop.close()


@pytest.fixture
def harness() -> Iterator[ChannelHarness]:
    with tempfile.TemporaryDirectory(prefix="wd-", dir="/tmp") as directory:
        made = ChannelHarness(Path(directory))
        yield made
        made.close()


def test_channel_is_open_while_connected(harness: ChannelHarness) -> None:
    assert not harness.channels.is_open("w1")
    child = harness.connect()
    harness.until(lambda: harness.channels.is_open("w1"))
    child.close()
    harness.until(lambda: not harness.channels.is_open("w1"))


def test_accepts_only_children_of_this_user(harness: ChannelHarness) -> None:
    assert stat.S_IMODE(harness.path.stat().st_mode) == 0o600
    harness.name = None
    stranger = harness.connect()
    harness.loop.run_once(30)
    with pytest.raises(ConnectionError):
        stranger.receive()


def test_queues_messages_until_the_child_connects(harness: ChannelHarness) -> None:
    assert not harness.channels.is_open_or_pending("w1")
    harness.channels.send("w1", FIRST)
    harness.channels.send("w2", FIRST)
    assert harness.channels.is_open_or_pending("w1")
    child = harness.connect()
    harness.loop.run_once(30)
    harness.channels.send("w1", SECOND)
    assert harness.received(child, 2) == [encode(FIRST), encode(SECOND)]
    harness.channels.remove("w1")
    harness.channels.remove("w2")
    assert not harness.channels.is_open_or_pending("w1")
    assert not harness.channels.is_open_or_pending("w2")


def test_corked_messages_are_sent_at_the_end_of_the_turn(harness: ChannelHarness) -> None:
    harness.channels.cork("w1")  # not connected yet: everything queued is sent together
    child = harness.connect()
    harness.loop.run_once(30)
    harness.channels.cork("w1")
    harness.channels.send("w1", FIRST)
    harness.channels.send("w1", SECOND)
    assert child.receive() == []
    assert harness.received(child, 2) == [encode(FIRST), encode(SECOND)]
    harness.channels.cork("w1")
    harness.channels.remove("w1")
    harness.loop.run_once(0)


def test_announces_a_burst_before_its_messages(harness: ChannelHarness) -> None:
    child = harness.connect()
    harness.loop.run_once(30)
    child.send(encode(ONE))
    harness.loop.run_once(30)
    child.cork()
    child.send(encode(TWO))
    child.send(encode(Pong()))
    child.uncork()
    harness.loop.run_once(30)
    assert harness.messages == [("w1", ONE), ("", "several"), ("w1", TWO), ("w1", Pong())]


def test_slow_reader_blocks_nobody_and_is_still_read(harness: ChannelHarness) -> None:
    child = harness.connect()
    harness.loop.run_once(30)
    for number in range(3):
        harness.channels.send("w1", CancelPredict(number), [b"", LARGE])
    assert not child.send([*encode(ANSWER), LARGE])
    harness.until(child.flush)
    harness.until(lambda: harness.messages)
    assert harness.messages == [("w1", (ANSWER, LARGE))]
    assert [frames[:1] for frames in harness.received(child, 3)] == [
        encode(CancelPredict(number)) for number in range(3)
    ]
    # No watch remains that would wake the loop.
    descriptors: list[Any] = list(vars(harness.loop)["_writers"])
    assert descriptors == []


def test_reads_everything_before_the_end_of_a_channel(harness: ChannelHarness) -> None:
    child = harness.connect()
    harness.loop.run_once(30)
    for _ in range(3):
        child.send([*encode(SMALL), bytes(50_000)])
    child.close()
    harness.channels.send("w1", FIRST)
    harness.channels.read_all("w1")
    assert len(harness.messages) == 3
    assert not harness.channels.is_open_or_pending("w1")
    harness.channels.send("w1", FIRST)
    assert not harness.channels.is_open_or_pending("w1")
    harness.channels.read_all("w1")


def test_partial_message_does_not_delay_read_all(harness: ChannelHarness) -> None:
    child = harness.connect()
    harness.loop.run_once(30)
    child.send(encode(ONE))
    child.connection.send(b"\1\0")
    harness.channels.read_all("w1")
    assert harness.messages == [("w1", ONE)]


def test_reconnected_child_gets_a_fresh_channel(harness: ChannelHarness) -> None:
    child = harness.connect()
    harness.loop.run_once(30)
    harness.channels.send("w1", FIRST, [b"", LARGE])
    child.send(encode(ONE))
    again = harness.connect()
    harness.channels.accept()
    assert harness.messages == [("w1", ONE)]
    harness.channels.send("w1", SECOND)
    assert harness.received(again, 1) == [encode(SECOND)]
    with pytest.raises(ConnectionError):
        harness.received(child, 1)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"\0\0\0\0", "frames: expected"),
        (b"", "header: longer than"),
        (message_prefix([b"no message"]) + b"no message", "envelope: expected"),
    ],
)
def test_closes_channel_after_a_protocol_error(harness: ChannelHarness, sent: bytes, error: str) -> None:
    child = harness.connect()
    harness.loop.run_once(30)
    if sent:
        child.connection.send(sent)
    else:
        child.send([LARGE])
        harness.until(child.flush)
    harness.until(lambda: harness.messages)
    ((name, error_text),) = harness.messages
    assert name == "w1"
    assert error_text.startswith(error)
    with pytest.raises(ConnectionError):
        child.receive()
    assert not harness.channels.is_open_or_pending("w1")


def test_passes_regions_once_and_unmaps_them(harness: ChannelHarness) -> None:
    one, other = (SharedRegion(number, memfd.create(100), 100, os.close) for number in (1, 2))
    os.pwrite(one.fileno(), b"one", 0)
    os.pwrite(other.fileno(), b"other", 0)
    # Queued before the child connects: the queue keeps the region alive.
    harness.channels.send("w1", CancelPredict(1), (), [one])
    child = harness.connect()
    harness.channels.accept()
    harness.channels.send("w1", CancelPredict(2), (), [other, one])
    harness.channels.unmap(1)
    harness.channels.unmap(3)
    harness.channels.send("w1", CancelPredict(3), (), [one])
    map_one = encode(MapRegion(1))
    expected = [
        map_one,
        encode(CancelPredict(1)),
        encode(MapRegion(2)),
        encode(CancelPredict(2)),
        encode(UnmapRegion(1)),
        map_one,
        encode(CancelPredict(3)),
    ]
    assert harness.received(child, len(expected)) == expected
    assert [os.pread(child.descriptors.popleft(), 5, 0).rstrip(b"\0") for _ in range(3)] == [b"one", b"other", b"one"]
    # A new connection has no mapped regions.
    again = harness.connect()
    harness.channels.accept()
    harness.channels.send("w1", CancelPredict(4), (), [one])
    assert harness.received(again, 2) == [map_one, encode(CancelPredict(4))]


def test_region_is_passed_in_order_with_messages(harness: ChannelHarness) -> None:
    child = harness.connect()
    harness.channels.accept()
    memory = SharedRegion(1, memfd.create(100), 100, os.close)
    harness.channels.send("w1", FIRST, [b"", LARGE])
    harness.channels.send("w1", CancelPredict(1), (), [memory])
    assert harness.received(child, 3)[1:] == [encode(MapRegion(1)), encode(CancelPredict(1))]
    assert os.fstat(child.descriptors[0]).st_size == 100


def test_retries_passing_a_region_after_emfile(harness: ChannelHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    child = harness.connect()
    harness.channels.accept()
    memory = SharedRegion(1, memfd.create(100), 100, os.close)

    def refuse(self: Stream, frames: Sequence[Any], descriptors: Sequence[int] = ()) -> bool:
        if descriptors:
            raise OSError(errno.EMFILE, "Too many open files")
        return send(self, frames)

    send = Stream.send
    with monkeypatch.context() as few:
        few.setattr(Stream, "send", refuse)
        harness.channels.send("w1", CancelPredict(1), (), [memory])
    harness.channels.send("w1", CancelPredict(2), (), [memory])
    assert harness.received(child, 3) == [encode(CancelPredict(1)), encode(MapRegion(1)), encode(CancelPredict(2))]
