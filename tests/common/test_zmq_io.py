from __future__ import annotations

from typing import Any, Iterator, List, Tuple

import pytest
import zmq

from weightd_common import zmq_io
from weightd_protocol import limits

LARGE = 64 * 1024
LIMIT_MS = 10_000

Pair = Tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]


@pytest.fixture
def pair() -> Iterator[Pair]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for socket in (ours, theirs):
        socket.setsockopt(zmq.RCVTIMEO, LIMIT_MS)
        socket.setsockopt(zmq.SNDTIMEO, LIMIT_MS)
    ours.bind("inproc://pair")
    theirs.connect("inproc://pair")
    yield ours, theirs
    context.destroy(linger=0)


@pytest.mark.parametrize(
    "frames",
    [[b"header"], [b""], [b"header", b""], [b"", b"a", b"\0" * LARGE], [bytes([each]) for each in range(40)]],
)
def test_receives_sent_message(pair: Pair, frames: List[bytes]) -> None:
    for _ in range(2):
        zmq_io.send(pair[0], frames)
    for _ in range(2):
        assert [frame.bytes for frame in zmq_io.receive(pair[1])] == frames


def test_interoperates_with_multipart_messages(pair: Pair) -> None:
    zmq_io.send(pair[0], [b"a", memoryview(b"b"), zmq.Frame(b"c")])
    assert pair[1].recv_multipart() == [b"a", b"b", b"c"]
    pair[1].send_multipart([b"a", b"b"])
    assert [frame.bytes for frame in zmq_io.receive(pair[0])] == [b"a", b"b"]


def test_copies_only_small_frames(pair: Pair) -> None:
    small, large = bytearray(b"a" * (LARGE - 1)), bytearray(b"a" * LARGE)
    # libzmq passes messages of an inproc pair by reference, so a change after the send is visible.
    zmq_io.send(pair[0], [memoryview(small), memoryview(large)])
    small[0] = large[0] = ord("b")
    frames = zmq_io.receive(pair[1])
    assert [frame.bytes[:1] for frame in frames] == [b"a", b"b"]
    assert type(zmq_io.frame_content(frames[0])) is bytes
    assert zmq_io.frame_content(frames[1]) is frames[1]


def test_reads_message_with_too_many_frames_to_its_end(pair: Pair) -> None:
    pair[0].send_multipart([b"x"] * 1000)
    pair[0].send_multipart([b"next"])
    # A peer's id, a header, the tensors, and at least one more frame.
    assert limits.MAX_TENSORS + 2 < len(zmq_io.receive(pair[1])) < 100
    assert zmq_io.receive(pair[1])[0].bytes == b"next"


def test_non_blocking_receive_without_message(pair: Pair) -> None:
    with pytest.raises(zmq.Again):
        zmq_io.receive(pair[1], zmq_io.NOBLOCK)


def test_sends_no_part_of_unroutable_message() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        router: Any = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.bind("inproc://router")
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, b"there")
        dealer.setsockopt(zmq.RCVTIMEO, LIMIT_MS)
        dealer.connect("inproc://router")
        dealer.send(b"hello")
        assert [frame.bytes for frame in zmq_io.receive(router)] == [b"there", b"hello"]
        with pytest.raises(zmq.ZMQError) as caught:
            zmq_io.send(router, [b"nobody", b"header", b"tensor"], zmq_io.NOBLOCK)
        assert caught.value.errno == zmq.EHOSTUNREACH
        zmq_io.send(router, [b"there", b"header", b"tensor"], zmq_io.NOBLOCK)
        assert [frame.bytes for frame in zmq_io.receive(dealer)] == [b"header", b"tensor"]
    finally:
        context.destroy(linger=0)
