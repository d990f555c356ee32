"""Messages of more frames than a message may have: what they cost others."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zmq

from weightd.daemon.clients.reader import Reader
from weightd.protocol import limits

LIMIT_MS = 20_000
FRAMES = 200_000

Socket = zmq.Socket[bytes]


@pytest.fixture
def pair() -> Iterator[tuple[Socket, Socket]]:
    """A ROUTER, and a client."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as client:
        router.bind("inproc://reader")
        client.connect("inproc://reader")
        yield router, client


def drain(reader: Reader) -> tuple[list[int], float]:
    """Read until nothing is left; return how many frames each message had, and the longest CPU time of one read."""
    counts: list[int] = []
    longest = 0.0
    while not counts or reader.has_rest or counts[-1] != 1:
        before = time.thread_time()
        counts += [len(received.frames) for received in reader.read()]
        longest = max(longest, time.thread_time() - before)
    return counts, longest


def test_frames_beyond_the_bound_are_dropped_in_portions(pair: tuple[Socket, Socket]) -> None:
    router, client = pair
    for _ in range(FRAMES - 1):
        client.send(b"", zmq.SNDMORE)
    client.send(b"")
    client.send(b"the next")
    begin = time.thread_time()
    counts, longest = drain(Reader(router))
    assert len(counts) == 2
    assert limits.MAX_TENSORS + 1 < counts[0] < limits.MAX_TENSORS + 10
    # The loop comes to its other work more than ten times meanwhile.
    assert 10 * longest < time.thread_time() - begin


@pytest.mark.parametrize("count", [1, 2, limits.MAX_TENSORS + 1, limits.MAX_TENSORS + 2, 5_000, 9_000])
def test_messages_of_any_length_are_told_apart(pair: tuple[Socket, Socket], count: int) -> None:
    router, client = pair
    for _ in range(3):
        client.send_multipart([b"%d" % each for each in range(count)])
    client.send(b"end")
    counts, _ = drain(Reader(router))
    assert counts[-1] == 1
    if count > 1:
        assert counts[:-1] == [min(count, limits.MAX_TENSORS + 2)] * 3
