"""The channels of children that are this process: who is heard, what waits, and what is not lost."""

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
from weightd_daemon.processes.messenger import WorkerChannels
from weightd_daemon.scheduling.tensor_location import SharedRegion
from weightd_protocol.codec import encode
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.framing import message_prefix
from weightd_protocol.messages.inference import ResponseDescription, TensorSpec
from weightd_protocol.messages.worker import (
    CancelPredict,
    ChildMessage,
    MapRegion,
    Pong,
    PredictCancelled,
    PredictResult,
    UnmapRegion,
)

LARGE = bytes(3_000_000)

# Orders, and what comes of requests.
FIRST, SECOND = CancelPredict(1), CancelPredict(2)
ONE, TWO = PredictCancelled(1), PredictCancelled(2)
ANSWER = PredictResult(3, ResponseDescription("m", (TensorSpec("y", "UINT8", (len(LARGE),)),)))
SMALL = PredictResult(4, ResponseDescription("m", (TensorSpec("y", "UINT8", (50_000,)),)))


class Scene:
    """Channels, and what was heard by them. Whoever connects is the child `name`."""

    def __init__(self, directory: Path) -> None:
        self.name: str | None = "w1"
        self.heard: list[tuple[str, Any]] = []
        self.path = directory / "lane"
        self.loop = EventLoop()
        self.lanes = WorkerChannels(
            self.path,
            self.loop,
            self._name_of,
            {"w1": self},
            self._hear,
            self._break,
            on_message_burst=lambda: self.heard.append(("", "several")),
        )
        self.children: list[Stream] = []

    def _name_of(self, pid: int) -> str | None:
        assert pid == os.getpid()
        return self.name

    def _hear(self, name: str, said: ChildMessage) -> None:
        self.heard.append((name, said))

    def on_message(self, child: str, message: ChildMessage, frames: Sequence[Any], now: float) -> None:
        """Hear what has come of a request."""
        assert now == self.loop.now
        self.heard.append((child, (message, *map(bytes, frames)) if frames else message))

    def on_exit(self, child: str, exit_cause: ExitCause, now: float) -> None:
        raise NotImplementedError

    def _break(self, name: str, how: RemoteProtocolError) -> None:
        self.heard.append((name, str(how)))

    def connect(self) -> Stream:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self.path))
        self.children.append(Stream(connection, accepts_descriptors=True))
        return self.children[-1]

    def until(self, done: Callable[[], object]) -> None:
        while not done():
            self.loop.run_once(30)

    def received(self, child: Stream, count: int) -> list[list[bytes]]:
        """The next messages that the child has."""
        messages: list[list[bytes]] = []
        while len(messages) < count:
            self.loop.run_once(0)
            messages += [list(map(bytes, message.frames)) for message in child.receive()]
        return messages

    def close(self) -> None:
        self.lanes.close()
        for child in self.children:
            child.close()
        self.loop.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="wd-", dir="/tmp") as directory:
        made = Scene(Path(directory))
        yield made
        made.close()


def test_a_lane_is_open_from_when_it_is_connected_to_its_end(scene: Scene) -> None:
    assert not scene.lanes.is_open("w1")
    child = scene.connect()
    scene.until(lambda: scene.lanes.is_open("w1"))
    child.close()
    scene.until(lambda: not scene.lanes.is_open("w1"))


def test_only_this_user_and_only_children_are_let_in(scene: Scene) -> None:
    assert stat.S_IMODE(scene.path.stat().st_mode) == 0o600
    scene.name = None
    stranger = scene.connect()
    scene.loop.run_once(30)
    with pytest.raises(ConnectionError):
        stranger.receive()


def test_what_is_sent_before_a_child_connects_waits_for_it(scene: Scene) -> None:
    assert not scene.lanes.is_open_or_pending("w1")
    scene.lanes.send("w1", FIRST)
    scene.lanes.send("w2", FIRST)
    assert scene.lanes.is_open_or_pending("w1")
    child = scene.connect()
    scene.loop.run_once(30)
    scene.lanes.send("w1", SECOND)
    assert scene.received(child, 2) == [encode(FIRST), encode(SECOND)]
    scene.lanes.remove("w1")
    scene.lanes.remove("w2")
    assert not scene.lanes.is_open_or_pending("w1")
    assert not scene.lanes.is_open_or_pending("w2")


def test_what_belongs_together_comes_at_the_end_of_the_turn(scene: Scene) -> None:
    scene.lanes.cork("w1")  # it has not connected: all that waits for it comes together
    child = scene.connect()
    scene.loop.run_once(30)
    scene.lanes.cork("w1")
    scene.lanes.send("w1", FIRST)
    scene.lanes.send("w1", SECOND)
    assert child.receive() == []
    assert scene.received(child, 2) == [encode(FIRST), encode(SECOND)]
    scene.lanes.cork("w1")
    scene.lanes.remove("w1")
    scene.loop.run_once(0)


def test_that_several_messages_have_come_at_once_is_told_before_they_are_heard(scene: Scene) -> None:
    child = scene.connect()
    scene.loop.run_once(30)
    child.send(encode(ONE))
    scene.loop.run_once(30)
    child.cork()
    child.send(encode(TWO))
    child.send(encode(Pong()))
    child.uncork()
    scene.loop.run_once(30)
    assert scene.heard == [("w1", ONE), ("", "several"), ("w1", TWO), ("w1", Pong())]


def test_a_child_that_does_not_read_makes_nobody_wait_and_is_heard(scene: Scene) -> None:
    child = scene.connect()
    scene.loop.run_once(30)
    for number in range(3):
        scene.lanes.send("w1", CancelPredict(number), [b"", LARGE])
    assert not child.send([*encode(ANSWER), LARGE])
    scene.until(child.flush)
    scene.until(lambda: scene.heard)
    assert scene.heard == [("w1", (ANSWER, LARGE))]
    assert [frames[:1] for frames in scene.received(child, 3)] == [encode(CancelPredict(number)) for number in range(3)]
    # Nothing is left that would wake the loop.
    descriptors: list[Any] = list(vars(scene.loop)["_writers"])
    assert descriptors == []


def test_what_a_child_has_said_is_read_to_its_end(scene: Scene) -> None:
    child = scene.connect()
    scene.loop.run_once(30)
    for _ in range(3):
        child.send([*encode(SMALL), bytes(50_000)])
    child.close()
    scene.lanes.send("w1", FIRST)
    scene.lanes.read_all("w1")
    assert len(scene.heard) == 3
    assert not scene.lanes.is_open_or_pending("w1")
    scene.lanes.send("w1", FIRST)
    assert not scene.lanes.is_open_or_pending("w1")
    scene.lanes.read_all("w1")


def test_somebody_who_keeps_a_lane_open_does_not_hold_up_its_end(scene: Scene) -> None:
    child = scene.connect()
    scene.loop.run_once(30)
    child.send(encode(ONE))
    child.connection.send(b"\1\0")
    scene.lanes.read_all("w1")
    assert scene.heard == [("w1", ONE)]


def test_a_child_that_connects_again_has_the_new_lane_and_nothing_of_the_old_one(scene: Scene) -> None:
    child = scene.connect()
    scene.loop.run_once(30)
    scene.lanes.send("w1", FIRST, [b"", LARGE])
    child.send(encode(ONE))
    again = scene.connect()
    scene.lanes.accept()
    assert scene.heard == [("w1", ONE)]
    scene.lanes.send("w1", SECOND)
    assert scene.received(again, 1) == [encode(SECOND)]
    with pytest.raises(ConnectionError):
        scene.received(child, 1)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"\0\0\0\0", "frames: expected"),
        (b"", "header: longer than"),
        (message_prefix([b"no message"]) + b"no message", "envelope: expected"),
    ],
)
def test_a_lane_that_breaks_the_protocol_is_closed(scene: Scene, sent: bytes, error: str) -> None:
    child = scene.connect()
    scene.loop.run_once(30)
    if sent:
        child.connection.send(sent)
    else:
        child.send([LARGE])
        scene.until(child.flush)
    scene.until(lambda: scene.heard)
    ((name, told),) = scene.heard
    assert name == "w1"
    assert told.startswith(error)
    with pytest.raises(ConnectionError):
        child.receive()
    assert not scene.lanes.is_open_or_pending("w1")


def test_memory_is_given_once_before_what_names_it_and_taken_away_when_it_is_gone(scene: Scene) -> None:
    one, other = (SharedRegion(number, memfd.create(100), 100, os.close) for number in (1, 2))
    os.pwrite(one.fileno(), b"one", 0)
    os.pwrite(other.fileno(), b"other", 0)
    # Before it has connected: what waits keeps what it names.
    scene.lanes.send("w1", CancelPredict(1), (), [one])
    child = scene.connect()
    scene.lanes.accept()
    scene.lanes.send("w1", CancelPredict(2), (), [other, one])
    scene.lanes.unmap(1)
    scene.lanes.unmap(3)
    scene.lanes.send("w1", CancelPredict(3), (), [one])
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
    assert scene.received(child, len(expected)) == expected
    assert [os.pread(child.descriptors.popleft(), 5, 0).rstrip(b"\0") for _ in range(3)] == [b"one", b"other", b"one"]
    # Whoever connects again has forgotten all.
    again = scene.connect()
    scene.lanes.accept()
    scene.lanes.send("w1", CancelPredict(4), (), [one])
    assert scene.received(again, 2) == [map_one, encode(CancelPredict(4))]


def test_memory_waits_its_turn_behind_what_is_not_read(scene: Scene) -> None:
    child = scene.connect()
    scene.lanes.accept()
    memory = SharedRegion(1, memfd.create(100), 100, os.close)
    scene.lanes.send("w1", FIRST, [b"", LARGE])
    scene.lanes.send("w1", CancelPredict(1), (), [memory])
    assert scene.received(child, 3)[1:] == [encode(MapRegion(1)), encode(CancelPredict(1))]
    assert os.fstat(child.descriptors[0]).st_size == 100


def test_where_no_descriptor_is_left_the_next_request_tries_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = scene.connect()
    scene.lanes.accept()
    memory = SharedRegion(1, memfd.create(100), 100, os.close)

    def refuse(self: Stream, frames: Sequence[Any], descriptors: Sequence[int] = ()) -> bool:
        if descriptors:
            raise OSError(errno.EMFILE, "Too many open files")
        return send(self, frames)

    send = Stream.send
    with monkeypatch.context() as few:
        few.setattr(Stream, "send", refuse)
        scene.lanes.send("w1", CancelPredict(1), (), [memory])
    scene.lanes.send("w1", CancelPredict(2), (), [memory])
    assert scene.received(child, 3) == [encode(CancelPredict(1)), encode(MapRegion(1)), encode(CancelPredict(2))]
