"""Tests of message streams over real sockets: no message is lost, no call blocks, and no descriptor leaks."""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from pathlib import Path
from typing import Any, Iterator, List, Tuple, cast

import pytest

from weightd_common.stream import Stream
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.framing import FrameReader, Message, message_prefix

FRAMES = [b"envelope", b"", b"tensor" * 100]


@pytest.fixture
def ends() -> Iterator[Tuple[Stream, Stream]]:
    """Return two ends; the second one accepts descriptors."""
    first, second = socket.socketpair()
    made = Stream(first), Stream(second, accepts_descriptors=True)
    yield made
    for each in made:
        each.close()


def arrive(sender: Stream, receiver: Stream, count: int = 1) -> List[Message]:
    messages: List[Message] = []
    while len(messages) < count:
        sender.flush()
        messages += receiver.receive()
    return messages


class OutOfMemorySocket:
    """A socket for which the kernel has no memory."""

    def __init__(self, real: socket.socket, error: int) -> None:
        self.real = real
        self.error = error

    def refuse(self, *_: Any) -> int:
        raise OSError(self.error, os.strerror(self.error))

    send = sendmsg = refuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.ENOBUFS])
@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("waits", [False, True])
def test_connection_ends_if_kernel_has_no_memory(error: int, size: int, waits: bool) -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Stream(cast(socket.socket, OutOfMemorySocket(ours, error))), Stream(theirs)
    if waits:
        vars(sender)["_frame_writer"].put([b"x"])
    with ours, theirs:
        with pytest.raises(ConnectionError):
            _ = sender.flush() if waits else sender.send([bytes(size)])
        for end in (sender, receiver):
            with pytest.raises(ConnectionError):
                end.receive()


def test_raises_other_kernel_errors() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(OSError, match="Too many references") as raised:
        Stream(cast(socket.socket, OutOfMemorySocket(ours, errno.ETOOMANYREFS))).send([b"x"])
    assert not isinstance(raised.value, ConnectionError)


def read_on(receiver: Stream) -> None:
    while True:
        receiver.receive()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# --- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 600, 20_000, 100_000, 5_000_000])
def test_sends_messages_of_any_size(ends: Tuple[Stream, Stream], size: int) -> None:
    for sender, receiver in (ends, ends[::-1]):
        frames: List[Any] = [b"envelope", b"", memoryview(bytes(range(256)) * (size // 256)), b"end"]
        assert sender.send(frames) is (sender.unsent == 0)
        (message,) = arrive(sender, receiver)
        assert message.is_complete
        assert [bytes(each) for each in message.frames] == frames


def test_sends_small_message_with_one_call(ends: Tuple[Stream, Stream]) -> None:
    sender, receiver = ends
    assert receiver.receive() == []
    assert sender.send(FRAMES)
    assert sender.send(FRAMES[:1])
    assert [message.frames for message in receiver.receive()] == [FRAMES, FRAMES[:1]]
    assert receiver.receive() == []


def test_corked_messages_arrive_together(ends: Tuple[Stream, Stream]) -> None:
    sender, receiver = ends
    sender.cork()
    assert sender.send([b"1"])
    assert sender.send([b"2"])
    assert receiver.receive() == []
    sender.send([bytes(20_000)])
    sender.send([b"4"])
    assert [len(message.frames[0]) for message in receiver.receive()] == [1, 1, 20_000]
    assert sender.uncork()
    sender.send([b"5"])
    assert [message.frames for message in receiver.receive()] == [[b"4"], [b"5"]]
    # More than the kernel accepts in one call.
    sender.cork()
    for number in range(3000):
        sender.send([b"%d" % number])
    assert sender.uncork()
    assert [int(message.frames[0]) for message in receiver.receive()] == [*range(3000)]
    has_more = [receiver.has_more]
    # A new message waits behind unsent ones; callers that need to know when it is sent call `flush`.
    while sender.send([bytes(20_000)]):
        pass
    sender.cork()
    sender.send([b"last"])
    assert not sender.uncork()
    unsent = sender.unsent
    receiver.receive()
    assert [*has_more, receiver.has_more] == [False, True]
    while receiver.receive():
        pass
    sender.cork()
    sender.send([b"last"])
    assert not sender.uncork()
    assert sender.unsent > unsent


def test_slow_reader_does_not_block_sender(ends: Tuple[Stream, Stream]) -> None:
    sender, receiver = ends
    sent = [[b"%d" % number, bytes(300 * number)] for number in range(200)]
    outcomes = [sender.send(each) for each in sent]
    assert outcomes[0]
    assert not outcomes[-1]
    # Once a message waits, later ones wait until the flush, which keeps the order.
    assert outcomes == sorted(outcomes, reverse=True)
    assert sender.unsent
    assert [message.frames for message in arrive(sender, receiver, 200)] == sent
    assert sender.unsent == 0


@pytest.mark.parametrize(
    "begun",
    [b"", message_prefix(FRAMES)[:3], message_prefix(FRAMES) + b"env", message_prefix([bytes(10**6)]) + bytes(9)],
)
def test_reports_closed_end(ends: Tuple[Stream, Stream], begun: bytes) -> None:
    sender, receiver = ends
    sender.send([b"last"])
    sender.connection.send(begun)
    sender.close()
    assert [message.frames for message in receiver.receive()] == [[b"last"]]
    with pytest.raises(ConnectionError):
        read_on(receiver)
    with pytest.raises(ConnectionError):
        receiver.send(FRAMES)


def test_reports_broken_framing() -> None:
    first, second = socket.socketpair()
    with first, second:
        first.send(struct.pack("<2I", 1, 65))
        with pytest.raises(RemoteProtocolError, match="at most 64 bytes"):
            Stream(second, FrameReader(max_frame_bytes=64)).receive()


# --- descriptors ----------------------------------------------------------------------------------------------------


def same(descriptor: int, other: int) -> bool:
    return os.path.samestat(os.fstat(descriptor), os.fstat(other))


def test_descriptors_arrive_with_their_messages(ends: Tuple[Stream, Stream]) -> None:
    sender, receiver = ends
    pipes = os.pipe()
    before = open_descriptors()
    assert sender.send([b"first"], pipes[:1])
    while sender.send([b"no descriptor", bytes(50_000)]):
        pass
    sender.send([b"second"], pipes[1:])
    sender.send([b"none"])
    expected = {b"first": pipes[0], b"second": pipes[1]}
    seen: List[bytes] = []
    while seen[-1:] != [b"none"]:
        for message in receiver.receive():
            seen.append(message.frames[0])
            if seen[-1] in expected:
                received = receiver.descriptors.popleft()
                assert same(received, expected[seen[-1]])
                assert not os.get_inheritable(received)
                os.close(received)
        sender.flush()
    assert {*expected} <= {*seen}
    assert not receiver.descriptors
    assert open_descriptors() == before
    for pipe in pipes:
        os.close(pipe)


def test_flush_sends_queued_message_with_descriptor(ends: Tuple[Stream, Stream]) -> None:
    sender, receiver = ends
    sender.send([b"first"])
    sender.queue([b"second", b""], [0])
    assert not sender.send([b"third"])
    assert [message.frames for message in receiver.receive()] == [[b"first"]]
    assert sender.flush()
    messages = [*receiver.receive(), *receiver.receive()]
    assert [message.frames for message in messages] == [[b"second", b""], [b"third"]]
    received = receiver.descriptors.popleft()
    assert same(received, 0)
    os.close(received)


def test_closes_unused_descriptors(ends: Tuple[Stream, Stream]) -> None:
    sender, receiver = ends
    before = open_descriptors()
    sender.send([b"not taken"], [0, 1])
    receiver.receive()
    assert open_descriptors() == before + 2
    while sender.send([bytes(50_000)]):
        pass
    sender.send([b"never sent"], [0])
    assert open_descriptors() == before + 3
    sender.close()
    receiver.close()
    assert open_descriptors() == before - 2


def test_sends_no_descriptors_to_end_that_rejects_them(ends: Tuple[Stream, Stream]) -> None:
    receiver, sender = ends
    before = open_descriptors()
    sender.send(FRAMES, [0])
    assert [message.frames for message in receiver.receive()] == [FRAMES]
    assert (len(receiver.descriptors), open_descriptors()) == (0, before)


def test_limits_number_of_descriptors(ends: Tuple[Stream, Stream]) -> None:
    sender, receiver = ends
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]
    for position in range(6):
        sender.connection.sendmsg([message_prefix(FRAMES)[position : position + 1]], rights)
    with pytest.raises(RemoteProtocolError, match="descriptors"):
        read_on(receiver)


def test_receives_maximum_number_of_descriptors(
    ends: Tuple[Stream, Stream],
) -> None:
    sender, receiver = ends
    sender.connection.send(message_prefix([bytes(200_000)]) + b"a large frame begins")
    receiver.receive()
    for count in (1, 253):
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * count))]
        sender.connection.sendmsg([bytes(1000)], rights)
    receiver.receive()
    assert len(receiver.descriptors) == 1
    with pytest.raises(RemoteProtocolError, match="descriptors"):
        receiver.receive()
    assert len(receiver.descriptors) == 254
