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
def test_what_is_sent_is_received_as_one_message(pair: Pair, frames: List[bytes]) -> None:
    for _ in range(2):
        zmq_io.send(pair[0], frames)
    for _ in range(2):
        assert [frame.bytes for frame in zmq_io.receive(pair[1])] == frames


def test_other_programs_see_an_ordinary_multipart_message(pair: Pair) -> None:
    zmq_io.send(pair[0], [b"a", memoryview(b"b"), zmq.Frame(b"c")])
    assert pair[1].recv_multipart() == [b"a", b"b", b"c"]
    pair[1].send_multipart([b"a", b"b"])
    assert [frame.bytes for frame in zmq_io.receive(pair[0])] == [b"a", b"b"]


def test_small_frames_are_copied_and_large_ones_are_not(pair: Pair) -> None:
    small, large = bytearray(b"a" * (LARGE - 1)), bytearray(b"a" * LARGE)
    # libzmq hands a message of an inproc pair over as it is: a change after the send shows.
    zmq_io.send(pair[0], [memoryview(small), memoryview(large)])
    small[0] = large[0] = ord("b")
    frames = zmq_io.receive(pair[1])
    assert [frame.bytes[:1] for frame in frames] == [b"a", b"b"]
    assert type(zmq_io.frame_content(frames[0])) is bytes
    assert zmq_io.frame_content(frames[1]) is frames[1]


def test_what_has_too_many_frames_is_read_to_its_end_and_shows_that_it_has(pair: Pair) -> None:
    pair[0].send_multipart([b"x"] * 1000)
    pair[0].send_multipart([b"next"])
    # A peer's id, a header, the tensors, and at least one more.
    assert limits.MAX_TENSORS + 2 < len(zmq_io.receive(pair[1])) < 100
    assert zmq_io.receive(pair[1])[0].bytes == b"next"


def test_without_a_message_and_without_waiting_it_says_so(pair: Pair) -> None:
    with pytest.raises(zmq.Again):
        zmq_io.receive(pair[1], zmq_io.NOBLOCK)


def test_where_nobody_can_take_a_message_none_of_it_is_sent() -> None:
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
